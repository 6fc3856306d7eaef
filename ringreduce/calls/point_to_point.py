"""Messages between two ranks, as users call them: each checks its arguments before it begins."""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np

from ringreduce.calls.arguments import check_out, shown
from ringreduce.calls.arrays import as_array, as_writable, from_host, to_host
from ringreduce.calls.engine import Engine
from ringreduce.calls.ops import check_movable
from ringreduce.calls.runner import Runner
from ringreduce.calls.work import Work
from ringreduce.config import as_seconds
from ringreduce.point_to_point.endpoint import Endpoint, no_message_error
from ringreduce.point_to_point.operations import ANY, Operation
from ringreduce.point_to_point.road import DtypeAndShape
from ringreduce.system.place import tell_survived
from ringreduce.trace.recorder import RECORDERS, waiting

_COMPILED = ("send", "recv", "probe")
"""The methods that may have a compiled entry."""
_HIGHEST_TAG = (1 << 63) - 1
T = TypeVar("T")


class MessageWork(Work[T]):
    """Asynchronous messages: over when all of them are."""

    def __init__(self, endpoint: Endpoint, operations: list[Operation], deliver: Callable[[], T]):
        super().__init__(endpoint)
        self._operations, self._deliver = operations, deliver
        self._left = len(operations)
        self._delivered = False
        self.began_s = time.perf_counter()
        for operation in operations:
            operation.at_end = self._on_end
        if not operations:
            self.finish()
            self.take_callbacks()

    def _on_end(self, operation: Operation) -> None:
        self._left -= 1
        if self._left == 0:
            errors = [each.error for each in self._operations if each.error is not None]
            self.finish(error=errors[0] if errors else None)
            for callback in self.take_callbacks():
                callback()

    @property
    def peer(self) -> int:
        """The other rank of a message; -1: a receive from any rank that has taken none yet.

        :meta private:
        """
        return self._operations[0].peer

    def wait(self, timeout_s: float | None = None) -> T:
        super().wait(timeout_s)
        if not self._delivered:
            self._result, self._delivered = self._deliver(), True
        result: T = self._result
        return result


class PointToPoint:
    """The messages of a `Communicator` between two ranks."""

    __module__ = "ringreduce"

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def send(
        self,
        x: Any,
        peer: int,
        tag: int = 0,
        *,
        async_op: bool = False,
        timeout_s: float | None = None,
    ) -> Any:
        """Send an array to one rank, which receives it with `recv`.

        Returns when the receiver has copied the data.  Messages of one pair of ranks and one tag
        arrive in the order of their sends.  Messages and collectives do not affect each other.

        Args:
            x: an array of any shape, or a number.
            peer: the rank that receives it, not this one.
            tag: a number of at least 0; the receiver passes the same.
            async_op: return a `Work` at once.  Do not change `x` before its `Work.wait` returns.
            timeout_s: seconds until the call raises PeerTimeoutError; None: those of `init`.

        Returns:
            None, or with `async_op` a `Work` of None.

        Raises:
            TypeError, ValueError: a wrong argument.  Nothing is sent.
            MismatchError: the receiver wants another dtype or shape.  Both ranks raise the same
                text.  The message is gone, and the next one is not affected.
            PeerLostError: `peer` died, left or closed.  Messages with other ranks are not affected.
            PeerTimeoutError: `peer` has not received the message in time.  There can be no more
                messages with `peer`.

        Example:
            >>> def program(comm):
            ...     if comm.rank == 0:
            ...         comm.send(np.arange(3.0), peer=1)
            ...     else:
            ...         return comm.recv(np.empty(3), peer=0)
            >>> rr.spawn(program, 2)[1]
            array([0., 1., 2.])
        """
        engine = self._runner.engine
        sent = _sending(engine.endpoint, "send", x, peer, tag, timeout_s)
        result = _carry(engine, [sent], lambda: None, async_op)
        engine.endpoint.road.admit("send", sent.peer, x, sent.kind)
        return result

    def recv(
        self,
        out: Any,
        peer: int | None,
        tag: int = 0,
        *,
        async_op: bool = False,
        timeout_s: float | None = None,
    ) -> Any:
        """Receive an array from one rank, which sends it with `send`.

        Args:
            out: the array to write to, of the dtype and shape of the array that is sent.
            peer: the rank that sends, not this one.  None: any rank.  `probe` tells which rank has
                sent a message.
            tag: a number of at least 0; the sender passes the same.
            async_op: return a `Work` at once.  Do not use `out` before its `Work.wait` returns.
            timeout_s: seconds until the call raises PeerTimeoutError; None: those of `init`.

        Returns:
            `out`, or with `async_op` a `Work` of it.

        Raises:
            TypeError, ValueError: a wrong argument, or an `out` that another receive writes to.
            MismatchError: the sender sends another dtype or shape.  Both ranks raise the same text.
            PeerLostError: `peer` died, left or closed.
            PeerTimeoutError: `peer` has not sent a message with this tag in time.

        Example:
            >>> def program(comm):
            ...     right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
            ...     sent = comm.send(comm.rank, right, async_op=True)
            ...     received = comm.recv(np.empty((), int), left)
            ...     sent.wait()
            ...     return received.item()
            >>> rr.spawn(program, 3)
            [2, 0, 1]
        """
        engine = self._runner.engine
        received, deliver = _receiving(engine.endpoint, "recv", out, peer, tag, timeout_s)
        result = _carry(engine, [received], lambda: deliver() or out, async_op)
        if received.peer != ANY:
            engine.endpoint.road.admit("recv", received.peer, out, received.kind)
        return result

    def probe(self, tag: int = 0, *, timeout_s: float | None = None) -> int:
        """Wait until a message with `tag` has arrived from any rank; return that rank.

        A `recv` from this rank with this tag gets the message.

        Args:
            tag: a number of at least 0.
            timeout_s: seconds until the call raises PeerTimeoutError; None: those of `init`.

        Returns:
            The lowest rank whose message waits.

        Raises:
            ValueError: a wrong argument, or a communicator of one rank.
            PeerLostError: no rank can send a message any more.
            PeerTimeoutError: no message with this tag has come in time.

        Example:
            >>> def program(comm):
            ...     if comm.rank:
            ...         return comm.send(comm.rank, peer=0)
            ...     return sorted(comm.recv(np.empty((), int), comm.probe()).item() for _ in "12")
            >>> rr.spawn(program, 3)[0]
            [1, 2]
        """
        number, engine = _checked_tag("probe", tag), self._runner.engine
        endpoint = engine.endpoint
        _check_others(endpoint, "probe")
        engine.check_open()
        timeout_s = as_seconds("probe", timeout_s) or endpoint.timeout_s
        found: list[int] = []

        def look() -> bool:
            peer = endpoint.find_arrival(number)
            found.extend([] if peer is None else [peer])
            return bool(found)

        with waiting("probe"):
            endpoint.wait_until(look, time.monotonic() + timeout_s)
        if not found:
            raise no_message_error("probe", number, timeout_s)
        return found[0]

    def exchange(
        self,
        sends: Mapping[int, Any],
        recvs: Mapping[int, Any],
        tag: int = 0,
        *,
        async_op: bool = False,
        timeout_s: float | None = None,
    ) -> Any:
        """Send arrays to some ranks and receive arrays from some ranks, all at once.

        Posts all receives, then all sends, and then waits for all of them.  So two ranks can
        exchange arrays without a deadlock.

        Args:
            sends: peer -> the array to send, as for `send`.
            recvs: peer -> the array to write to, as for `recv`.
            tag: of all these messages.
            async_op: return a `Work` at once.
            timeout_s: seconds until the call raises PeerTimeoutError; None: those of `init`.

        Returns:
            `recvs`, or with `async_op` a `Work` of it.

        Raises:
            TypeError, ValueError: a wrong argument, or arrays of `recvs` that share memory with
                each other or with an array of `sends`.  Nothing is sent.
            MismatchError, PeerLostError, PeerTimeoutError: as for `send` and `recv`.  The other
                messages of the call are over, too.

        Example:
            >>> def program(comm):
            ...     peer = 1 - comm.rank
            ...     out = np.empty(2)
            ...     comm.exchange({peer: np.full(2, float(comm.rank))}, {peer: out})
            ...     return out
            >>> rr.spawn(program, 2)[0]
            array([1., 1.])
        """
        for name, given in (("sends", sends), ("recvs", recvs)):
            if not isinstance(given, Mapping):
                raise TypeError(f"exchange: {name} is {shown(given)}; pass a dict, peer -> array")
        engine = self._runner.engine
        begin = engine.endpoint, "exchange"
        pairs = [_receiving(*begin, out, peer, tag, timeout_s) for peer, out in recvs.items()]
        sent = [_sending(*begin, x, peer, tag, timeout_s) for peer, x in sends.items()]

        def deliver() -> Mapping[int, Any]:
            for _, each in pairs:
                each()
            return recvs

        operations = [*(received for received, _ in pairs), *sent]
        return _carry(engine, operations, deliver, async_op)

    def lost_peers(self, *, closed: bool = False) -> set[int]:
        """Return the ranks that are lost.

        With `closed`, also those that have closed the communicator in good order.

        :meta private:
        """
        return self._runner.engine.endpoint.lost_peers(closed)

    def survive_losses(self, is_survived: bool) -> None:
        """Close the communicator in good order although ranks are lost, from now on.

        From now on `probe` raises PeerLostError once for each rank that is gone.  Tells the
        launcher whether the other ranks survive the loss of this one.

        :meta private:
        """
        self._runner.engine.endpoint.survives_losses = True
        tell_survived(is_survived)


def compiled_entries(runner: Runner, kind: type) -> dict[str, Callable[..., Any]]:
    """Return compiled functions for the methods that `kind` has from `PointToPoint`, by name.

    They keep the runner alive, and not the communicator that has them.
    """
    endpoint, general, made = runner.engine.endpoint, PointToPoint(runner), {}

    def adopt(x: Any, peer: int, tag: int = 0) -> None:
        endpoint.adopt(_sending(endpoint, "send", x, peer, tag, None))

    for name in () if RECORDERS else _COMPILED:
        if getattr(kind, name) is getattr(PointToPoint, name):
            made[name] = endpoint.road.entry(name, getattr(general, name), adopt)
    return made


def _sending(
    endpoint: Endpoint, where: str, x: Any, peer: int, tag: int, timeout_s: float | None
) -> Operation:
    array = as_array(where, x)
    check_movable(where, array.dtype)
    kind = DtypeAndShape.of(array.dtype, array.shape)
    data = np.ascontiguousarray(to_host(where, array))
    return _operation(endpoint, where, True, peer, tag, kind, data, data, timeout_s)


def _receiving(
    endpoint: Endpoint, where: str, out: Any, peer: int | None, tag: int, timeout_s: float | None
) -> tuple[Operation, Callable[[], None]]:
    """Return the operation, and a function that copies its data to `out` where needed."""
    view = as_writable(where, out)
    check_movable(where, view.dtype)
    check_out(where, view, view.shape, view.dtype)
    kind = DtypeAndShape.of(view.dtype, view.shape)
    direct = isinstance(view, np.ndarray) and view.flags.c_contiguous
    data = view if direct else np.empty(view.shape, view.dtype)
    memory = view if isinstance(view, np.ndarray) else data
    received = _operation(endpoint, where, False, peer, tag, kind, data, memory, timeout_s)

    def deliver() -> None:
        if not direct:
            from_host(where, data, view)

    return received, deliver


def _operation(
    endpoint: Endpoint,
    where: str,
    sends: bool,
    peer: int | None,
    tag: int,
    kind: DtypeAndShape,
    data: np.ndarray,
    memory: np.ndarray,
    timeout_s: float | None,
) -> Operation:
    known = ANY
    if peer is None and where == "recv":
        _check_others(endpoint, where)
    else:
        known = _checked_peer(endpoint, where, peer)
    number = _checked_tag(where, tag)
    timeout_s = as_seconds(where, timeout_s) or endpoint.timeout_s
    return Operation(where, sends, known, number, kind, data, memory, timeout_s)


def _carry(
    engine: Engine, operations: list[Operation], deliver: Callable[[], T], async_op: bool
) -> Any:
    """Make the operations; return what `deliver` returns, or a Work of it."""
    engine.check_open()
    endpoint = engine.endpoint
    if async_op:
        work = MessageWork(endpoint, operations, deliver)
        endpoint.start(operations, work)
        return work
    endpoint.run(operations)
    return deliver()


def _check_others(endpoint: Endpoint, where: str) -> None:
    if endpoint.size == 1:
        raise ValueError(f"{where}: there is no other rank that could send a message")


def _checked_peer(endpoint: Endpoint, where: str, peer: Any) -> int:
    """Return the rank of a peer as an int.  Raises TypeError or ValueError."""
    number = _number(peer)
    if number is None:
        raise TypeError(f"{where}: peer is {shown(peer)}; pass a rank, a whole number")
    if number == endpoint.rank:
        raise ValueError(f"{where}: peer is {number}, this rank itself; pass another rank")
    if not 0 <= number < endpoint.size:
        raise ValueError(f"{where}: peer is {number}; ranks are 0 to {endpoint.size - 1}")
    return number


def _checked_tag(where: str, tag: Any) -> int:
    """Return a tag as an int.  Raises ValueError."""
    number = _number(tag)
    if number is None or not 0 <= number <= _HIGHEST_TAG:
        raise ValueError(f"{where}: tag is {shown(tag)}; pass an int of at least 0")
    return number


def _number(value: Any) -> int | None:
    """Return a whole number as an int; None if `value` is none."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None
