"""The collectives: checked at the door, agreed on by all ranks, carried out by the executor."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import numpy as np

from ringreduce.agreement import Agreement, Interrupt
from ringreduce.arguments import (
    as_array,
    check_out,
    check_overlap,
    check_timeout,
    same_memory,
)
from ringreduce.calls import Call, Calls
from ringreduce.config import Config
from ringreduce.devices.base import Device
from ringreduce.errors import MismatchError, PeerLostError, RingReduceError
from ringreduce.executor import Executor, LoggedMessage
from ringreduce.schedule import Schedule
from ringreduce.select import Choice, choose
from ringreduce.topology import Topology
from ringreduce.transports.base import Transport


class Communicator:
    """A group of ranks that compute together.  Every rank makes the same calls in the same order.

    Made by `ringreduce.init` or `ringreduce.spawn`.  A context manager: leaving it closes it.

    Attributes: `rank` and `size`; `local_rank` and `local_size` among the ranks of this node;
    `cross_rank` and `cross_size` among the ranks with this `local_rank` on all nodes.
    """

    def __init__(
        self,
        transport: Transport,
        topology: Topology,
        device: Device,
        config: Config,
        timeout_s: float,
    ) -> None:
        self.rank, self.size = transport.rank, transport.size
        self.local_rank, self.local_size = topology.local_rank, topology.local_size
        self.cross_rank, self.cross_size = topology.cross_rank, topology.cross_size
        self.nodes = topology.nodes
        self.config = config
        self._transport, self._device = transport, device
        self._agreement = Agreement(transport, timeout_s)
        self._executor = Executor(transport, device, config, self._agreement)
        self._calls = Calls(topology, device, config, self._executor)
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._ended: Exception | None = None
        """Why no further call can be made; None while the communicator is usable."""
        self._meet("init", (("nodes", repr(self.nodes)), ("config", config.plan_text())))

    # --- collectives ---

    def all_reduce(
        self,
        x: Any,
        op: str = "sum",
        *,
        out: np.ndarray | None = None,
        algorithm: str = "auto",
        timeout_s: float | None = None,
    ) -> np.ndarray:
        """Combine the arrays of all ranks elementwise; every rank gets the result.

        Args:
            x: array of the same shape and dtype on every rank; integers, float32 or float64.
            op: ``"sum"``, ``"mean"``, ``"min"``, ``"max"`` or ``"prod"``.  Integers wrap; min and
                max propagate NaN; mean is for floats.
            out: where to put the result: an array of x's shape and dtype, or `x` itself (in
                place).  None makes a new array and leaves `x` as it is.
            algorithm: ``"ring"``, ``"hierarchical"``, or ``"auto"``: the one predicted cheapest.
            timeout_s: seconds without any progress until PeerTimeoutError.

        Returns:
            `out`, or a new C-ordered array.  It is bitwise the same on every rank.

        Raises:
            TypeError, ValueError: misuse that this rank can see; nothing was sent.
            MismatchError: ranks passed different arguments or made different calls.
            PeerTimeoutError, PeerLostError: a rank stopped answering, or left.

        >>> comm.all_reduce(np.array([1.0, 2.0]) * (comm.rank + 1))  # on 2 ranks
        array([3., 6.])
        """
        array = x if type(x) is np.ndarray else as_array("all_reduce", x)
        with self._lock:
            self._check_usable()
            call = self._calls.all_reduce(array, op, algorithm)
            return self._run(call, array, out, timeout_s)

    def reduce_scatter(
        self,
        x: Any,
        op: str = "sum",
        *,
        out: np.ndarray | None = None,
        algorithm: str = "auto",
        timeout_s: float | None = None,
    ) -> np.ndarray:
        """Combine the arrays of all ranks elementwise; each rank gets its part of the flat result.

        The first half of a ring all-reduce, also called scatter-reduce.  Returns the equivalent of
        ``np.array_split(result.reshape(-1), size)[rank]``: one-dimensional, possibly empty.
        Arguments and errors: `all_reduce`; `out` has the part's shape and does not overlap `x`.
        """
        array = x if type(x) is np.ndarray else as_array("reduce_scatter", x)
        with self._lock:
            self._check_usable()
            call = self._calls.reduce_scatter(array, op, algorithm)
            return self._run(call, array, out, timeout_s)

    def all_gather(
        self,
        x: Any,
        *,
        out: np.ndarray | None = None,
        counts: Sequence[int] | None = None,
        algorithm: str = "auto",
        timeout_s: float | None = None,
    ) -> np.ndarray:
        """Concatenate the arrays of all ranks along the first axis, in rank order, on every rank.

        Args:
            x: array; dtype and all dimensions but the first are the same on every rank.  A 0-d
                array counts as one of shape (1,).
            out: where to put the result; it does not overlap `x`.
            counts: the first dimension of each rank's array; the same on every rank.  None lets
                the ranks tell each other, which costs one more small all-gather.
            algorithm, timeout_s: as for `all_reduce`.

        Errors: those of `all_reduce`.
        """
        array = x if type(x) is np.ndarray else as_array("all_gather", x)
        array = array.reshape(1) if array.ndim == 0 else array
        with self._lock:
            self._check_usable()
            if counts is None:
                return self._all_gather_unknown(array, out, algorithm, timeout_s)
            call = self._calls.all_gather(array, tuple(counts), algorithm)
            return self._run(call, array, out, timeout_s)

    def broadcast(
        self,
        x: Any,
        root: int = 0,
        *,
        out: np.ndarray | None = None,
        algorithm: str = "auto",
        timeout_s: float | None = None,
    ) -> np.ndarray:
        """Give every rank the array of rank `root`.

        Every rank passes an array of the same shape and dtype; only the root's values count.
        ``out=x`` overwrites it in place; otherwise the result is a new array, or `out`.
        Errors: those of `all_reduce`.
        """
        array = x if type(x) is np.ndarray else as_array("broadcast", x)
        with self._lock:
            self._check_usable()
            call = self._calls.broadcast(array, root, algorithm)
            return self._run(call, array, out, timeout_s)

    def barrier(self, *, timeout_s: float | None = None) -> None:
        """Return once every rank has called it.  Errors: those of `all_reduce`."""
        self._meet("barrier", (), timeout_s)

    # --- what this communicator would do, and has done ---

    def explain(
        self, nbytes: int, dtype: Any = "float32", collective: str = "all_reduce"
    ) -> Choice:
        """What ``algorithm="auto"`` chooses for `nbytes`, with every candidate's predicted time."""
        itemsize = np.dtype(dtype).itemsize
        return choose(collective, self.nodes, nbytes // itemsize * itemsize, self.config)

    @property
    def message_log(self) -> list[LoggedMessage]:
        """Every message that this rank has started; kept with ``Config(log_messages=True)``."""
        return self._executor.log or []

    # --- the end ---

    def close(self) -> None:
        """End the communicator.  Collective: all ranks close, or all raise MismatchError.

        A broken communicator closes at once and waits for nobody; so does one already closed.
        """
        if self._ended is None:
            self._meet("close", (), parting=True)
            self._calls.clear()
            self._executor.close()
            self._transport.close(broken=False)
            self._ended = ValueError("the communicator is closed")

    def leave(self, reason: str) -> None:
        """Give up without the others: they raise PeerLostError with `reason` in the next call."""
        if self._ended is None and os.getpid() == self._pid:
            self._break(PeerLostError(f"this rank has left the communicator: {reason}"), reason)

    def farewell(self, seconds: float) -> None:
        """Let the other living ranks of a broken communicator get this far, for so long at most."""
        self._agreement.farewell(seconds)

    @property
    def broken(self) -> bool:
        """Whether a rank was lost, so that no call can be made any more."""
        return isinstance(self._ended, RingReduceError)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            self.leave(f"{type(error).__name__}: {error}")
        self.close()

    # --- running ---

    def _run(
        self, call: Call, array: np.ndarray, out: np.ndarray | None, timeout_s: float | None
    ) -> np.ndarray:
        target = self._target(call, array, out)
        if timeout_s is not None:
            check_timeout(call.signature.collective, timeout_s)
        try:
            header = self._agreement.begin(call.signature, timeout_s)
            self._executor.run(call.prepared, array, target, header)
            self._agreement.end()
        except BaseException as error:
            raise self._broken_off(error, call.schedule) from None
        return target if out is None else out

    def _target(self, call: Call, array: np.ndarray, out: np.ndarray | None) -> np.ndarray:
        """Where the result goes: a new array, `out`, or the input itself if `out` is that."""
        if out is None:
            return np.empty(call.shape, call.dtype)
        where = call.signature.collective
        check_out(where, out, call.shape, call.dtype)
        if np.may_share_memory(array, out):
            if call.in_place and same_memory(array, out):
                return array
            check_overlap(where, array, out)
        return out

    def _all_gather_unknown(
        self, array: np.ndarray, out: np.ndarray | None, algorithm: str, timeout_s: float | None
    ) -> np.ndarray:
        """Exchange first dimensions, then gather.  A wrong `out` on one rank is an error on all."""
        if timeout_s is not None:
            check_timeout("all_gather", timeout_s)
        if out is not None:
            check_out("all_gather", out, (*out.shape[:1], *array.shape[1:]), array.dtype)
            check_overlap("all_gather", array, out)
        rows = np.array([array.shape[0], -1 if out is None else out.shape[0]], np.int64)
        exchange = self._calls.exchange(array, algorithm)
        table = np.empty((self.size, 2), np.int64)
        try:
            header = self._agreement.begin(exchange.signature, timeout_s)
            self._executor.run(exchange.prepared, rows, table, header)
            counts = tuple(table[:, 0].tolist())
            call = self._calls.all_gather(array, counts, algorithm)
            wrong = [r for r in range(self.size) if table[r, 1] not in (-1, sum(counts))]
            if not wrong:
                target = np.empty(call.shape, call.dtype) if out is None else out
                self._executor.run(call.prepared, array, target, header)
            self._agreement.end()
        except BaseException as error:
            raise self._broken_off(error, exchange.schedule) from None
        if wrong:
            raise ValueError(
                f"all_gather: out on rank {wrong[0]} has first dimension {table[wrong[0], 1]}, "
                f"the result has {sum(counts)}"
            )
        return target

    def _meet(
        self,
        name: str,
        arguments: tuple[tuple[str, str], ...],
        timeout_s: float | None = None,
        parting: bool = False,
    ) -> None:
        """A barrier under a name of its own: what all ranks agree on besides array calls."""
        with self._lock:
            self._check_usable()
            call = self._calls.meeting(name, arguments)
            self._run(call, _NOTHING, None, timeout_s)
            if parting:
                try:
                    self._agreement.part()
                except BaseException as error:
                    raise self._broken_off(error, call.schedule) from None

    # --- errors ---

    def _check_usable(self) -> None:
        if os.getpid() != self._pid:
            raise ValueError(
                "this process was forked from the one that made the communicator; "
                "make calls in that one, or start ranks with 'ringreduce run'"
            )
        if self._ended is not None:
            raise self._ended.with_traceback(None)

    def _broken_off(self, error: BaseException, schedule: Schedule) -> BaseException:
        """What to raise in place of `error`, which broke a call off."""
        if isinstance(error, Interrupt):
            try:
                settled = self._agreement.settle(error, self._executor, schedule)
            except BaseException as worse:
                error = worse
            else:
                if not isinstance(settled, MismatchError):
                    self._ended = settled
                return settled
        if isinstance(error, Exception):
            error = self._transport.translate(error)
        reason = f"{type(error).__name__}: {error}"
        self._break(error if isinstance(error, RingReduceError) else PeerLostError(reason), reason)
        return error

    def _break(self, error: Exception, reason: str) -> None:
        self._ended = error
        self._agreement.leave(reason)


_NOTHING = np.empty(0, np.uint8)
"""What a meeting moves besides its signature."""
