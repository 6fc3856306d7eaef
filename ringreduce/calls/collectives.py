"""The collectives: each checks its arguments, finds or makes its call, and runs it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ringreduce.calls.arguments import (
    as_counts,
    check_out,
    check_selectors,
    check_timeout,
    reduction,
    shown,
)
from ringreduce.calls.arrays import as_array, as_out, check_together, gpu_of, is_input, open_gpu
from ringreduce.calls.cache import PLANNED, Calls
from ringreduce.calls.call import Call
from ringreduce.calls.compound import ANNOUNCED_BYTES, gather_unknown, move, reduce_list, scatter
from ringreduce.calls.engine import Engine
from ringreduce.calls.ops import check_movable
from ringreduce.config import Config, Memory
from ringreduce.devices.base import Device
from ringreduce.shm.allocator import Arena
from ringreduce.shm.fast_path import COLLECTIVES
from ringreduce.shm.segments import Segments
from ringreduce.topology import Topology
from ringreduce.transports.base import Transport

Body = Generator[bool, None, Any]


class Collectives:
    """The collectives of a `Communicator`."""

    __module__ = "ringreduce"

    def __init__(
        self,
        transport: Transport,
        topology: Topology,
        device: Device,
        config: Config,
        timeout_s: float,
        segments: Segments | None = None,
    ) -> None:
        self.rank, self.size = transport.rank, transport.size
        self._given = config
        if len(topology.nodes) > 1:
            segments = None
        if segments is not None:
            memory = Memory(segments.single_copy, crowded=transport.spins == 0)
            config = replace(config, memory=memory)
        self.config = config
        self._topology, self._device = topology, device
        self._engine = Engine(transport, config, timeout_s, segments)
        self._queue = self._engine.queue
        self._calls = Calls(topology, device, config, self._engine.discard)
        self._messages = Calls(topology, device, self._given, self._engine.discard)
        """Calls on host arrays that are run by messages even if the ranks share memory."""
        self._on_gpus: dict[int, Calls] = {}
        """Calls on arrays on a GPU, by the number of the GPU."""
        path = self._engine.fast_path
        for name in COLLECTIVES:
            if path is not None and getattr(type(self), name) is getattr(Collectives, name):
                self.__dict__[name] = path.entry(name, getattr(self, name))
        self._arena = None if segments is None else Arena(segments.arena)

    # --- reductions ---

    def all_reduce(
        self,
        x: Any,
        op: str = "sum",
        *,
        out: Any = None,
        algorithm: str = "auto",
        wire: str | None = None,
        async_op: bool = False,
        timeout_s: float | None = None,
    ) -> Any:
        """Combine the arrays of all ranks elementwise; every rank gets the result.

        Args:
            x: array of any shape, the same shape and dtype on every rank; or a list of arrays: all
                of one dtype are reduced in one call.  A number counts as a 0-d array, in a list
                too.
            op: ``"sum"``, ``"mean"``, ``"min"``, ``"max"``, ``"prod"``, or on integers and bools
                ``"and"``, ``"or"``, ``"xor"``.  Integers wrap; min and max propagate NaN; mean is
                for floats.  Ops of mpi4py with the same meaning, such as ``MPI.SUM``, are accepted;
                logical ops, such as ``MPI.LAND``, are for bools.
            out: array for the result: x's shape and dtype, or `x` itself (in place); for a list, a
                list of these.  None: a new array.
            algorithm: name, or ``"auto"``: the first algorithm whose predicted time is within 2 %
                of the lowest.
            wire: round float32 and float64 to ``"bfloat16"`` or ``"float16"`` for each message:
                half or a quarter of the bytes.
            async_op: return a `Work` instead of the result.
            timeout_s: seconds without any progress until PeerTimeoutError; None: the
                communicator's.

        Returns:
            `out`, or a new C-ordered array of x's shape and dtype; for a list, a list of these.  It
            is bitwise the same on every rank.

        Raises:
            TypeError, ValueError: wrong arguments, found on this rank before it sends a message.
            MismatchError: ranks passed different arguments or made different calls.
            PeerTimeoutError, PeerLostError: a rank stopped answering, or left.

        Example:
            >>> x = np.array([1.0, 2.0])
            >>> rr.spawn(lambda comm: comm.all_reduce(x * (comm.rank + 1)), 2)[0]
            array([3., 6.])
        """
        if isinstance(x, (list, tuple)):
            members = x if type(op) is str else _members(x)
            op, algorithm, wire = reduction("all_reduce", members, op, algorithm, wire)
            return self._all_reduce_list(members, op, out, algorithm, wire, async_op, timeout_s)
        array = x if type(x) is np.ndarray else as_array("all_reduce", x)
        how = reduction("all_reduce", (array,), op, algorithm, wire)
        return self._make(Calls.all_reduce, array, how, out, timeout_s, async_op)

    def reduce_scatter(
        self,
        x: Any,
        op: str = "sum",
        *,
        out: Any = None,
        algorithm: str = "auto",
        wire: str | None = None,
        async_op: bool = False,
        timeout_s: float | None = None,
    ) -> Any:
        """Combine the arrays of all ranks; each rank gets its part of the flattened result.

        The first half of a ring all-reduce, also called scatter-reduce.

        Args:
            x: array of any shape, the same shape and dtype on every rank.
            out: array for the part: its shape and x's dtype; it does not overlap `x`.  None: a new
                array.
            op, algorithm, wire, async_op, timeout_s: as for `all_reduce`.

        Returns:
            `out`, or a new array: ``np.array_split(result.reshape(-1), size)[rank]``, where
            `result` is what `all_reduce` returns.  It is one-dimensional, and possibly empty.

        Raises:
            TypeError, ValueError, MismatchError, PeerTimeoutError, PeerLostError: as for
                `all_reduce`.

        Example:
            >>> rr.spawn(lambda comm: comm.reduce_scatter(np.arange(4) + 10 * comm.rank), 2)
            [array([10, 12]), array([14, 16])]
        """
        array = x if type(x) is np.ndarray else as_array("reduce_scatter", x)
        how = reduction("reduce_scatter", (array,), op, algorithm, wire)
        return self._make(Calls.reduce_scatter, array, how, out, timeout_s, async_op)

    def reduce(
        self,
        x: Any,
        root: int = 0,
        op: str = "sum",
        *,
        out: Any = None,
        algorithm: str = "auto",
        wire: str | None = None,
        async_op: bool = False,
        timeout_s: float | None = None,
    ) -> Any:
        """Combine the arrays of all ranks elementwise; rank `root` gets the result, others None.

        Args:
            x: array of any shape, the same shape and dtype on every rank.
            root: the rank that gets the result; the same on every rank.
            out: array for the result, of x's shape and dtype, or `x` itself.  Only the root may
                pass it.
            op, algorithm, wire, async_op, timeout_s: as for `all_reduce`.

        Returns:
            On the root `out`, or a new C-ordered array of x's shape and dtype.  None on other
            ranks.

        Raises:
            TypeError, ValueError, MismatchError, PeerTimeoutError, PeerLostError: as for
                `all_reduce`.

        Example:
            >>> rr.spawn(lambda comm: comm.reduce(np.array([3, 5]) * comm.rank, op="max"), 3)
            [array([ 6, 10]), None, None]
        """
        array = x if type(x) is np.ndarray else as_array("reduce", x)
        if type(root) is not int:
            check_selectors("reduce", root=root)
        how = root, *reduction("reduce", (array,), op, algorithm, wire)
        return self._make(Calls.reduce, array, how, out, timeout_s, async_op)

    # --- moving data ---

    def broadcast(
        self,
        x: Any,
        root: int = 0,
        *,
        out: Any = None,
        algorithm: str = "auto",
        async_op: bool = False,
        timeout_s: float | None = None,
    ) -> Any:
        """Copy the array of rank `root` to every rank.

        Args:
            x: array of any shape, the same shape and dtype on every rank.  Only the root's values
                are read.
            root: the rank whose array is copied; the same on every rank.
            out: array for the result, of x's shape and dtype.  ``out=x`` overwrites `x`.  None: a
                new array.
            algorithm, async_op, timeout_s: as for `all_reduce`.

        Returns:
            `out`, or a new C-ordered array of x's shape and dtype, with the root's values.

        Raises:
            TypeError, ValueError, MismatchError, PeerTimeoutError, PeerLostError: as for
                `all_reduce`.

        Example:
            >>> rr.spawn(lambda comm: comm.broadcast(np.full(2, comm.rank), root=1), 3)
            [array([1, 1]), array([1, 1]), array([1, 1])]
        """
        array = x if type(x) is np.ndarray else as_array("broadcast", x)
        if type(root) is not int or type(algorithm) is not str:
            check_selectors("broadcast", root=root, algorithm=algorithm)
        return self._make(Calls.broadcast, array, (root, algorithm), out, timeout_s, async_op)

    def all_gather(
        self,
        x: Any,
        *,
        out: Any = None,
        counts: Sequence[int] | None = None,
        algorithm: str = "auto",
        async_op: bool = False,
        timeout_s: float | None = None,
    ) -> Any:
        """Concatenate the arrays of all ranks along the first axis, in rank order, on every rank.

        Args:
            x: array; dtype and all dimensions but the first are the same on every rank.  A 0-d
                array counts as an array of shape (1,).
            out: array for the result; it does not overlap `x`.  None: a new array.
            counts: the first dimension of each rank's array; the same on every rank.  None: ranks
                exchange them first, by one small all-gather.
            algorithm, async_op, timeout_s: as for `all_reduce`.

        Returns:
            `out`, or a new array of shape ``(sum(counts), *x.shape[1:])`` and x's dtype.

        Raises:
            TypeError, ValueError, MismatchError, PeerTimeoutError, PeerLostError: as for
                `all_reduce`.

        Example:
            >>> rr.spawn(lambda comm: comm.all_gather(np.full(comm.rank + 1, comm.rank)), 3)[0]
            array([0, 1, 1, 2, 2, 2])
        """
        array = _at_least_1d(x if type(x) is np.ndarray else as_array("all_gather", x))
        if type(algorithm) is not str:
            check_selectors("all_gather", algorithm=algorithm)
        if counts is not None:
            how = as_counts("all_gather", counts), algorithm
            return self._make(Calls.all_gather, array, how, out, timeout_s, async_op)
        with self._queue.lock:
            self._engine.check_usable()
            kind = self._calls_on(array).memory_kind
            first = self._calls.exchange_counts("all_gather", array, algorithm, memory_kind=kind)

            def known(counts: tuple[int, ...]) -> Call:
                return self._calls_on(array).all_gather(array, counts, algorithm)

            return self._gather_unknown(first, known, array, out, timeout_s, async_op)

    def gather(
        self,
        x: Any,
        root: int = 0,
        *,
        out: Any = None,
        counts: Sequence[int] | None = None,
        algorithm: str = "auto",
        async_op: bool = False,
        timeout_s: float | None = None,
    ) -> Any:
        """Concatenate the arrays of all ranks along the first axis on rank `root`; others get None.

        Args:
            x: array; dtype and all dimensions but the first are the same on every rank.  A 0-d
                array counts as an array of shape (1,).
            root: the rank that gets the result; the same on every rank.
            out: array for the result; it does not overlap `x`.  Only the root may pass it.
            counts, algorithm, async_op, timeout_s: as for `all_gather`.

        Returns:
            On the root `out`, or a new array of shape ``(sum(counts), *x.shape[1:])`` and x's
            dtype, in rank order.  None on other ranks.

        Raises:
            TypeError, ValueError, MismatchError, PeerTimeoutError, PeerLostError: as for
                `all_reduce`.

        Example:
            >>> rr.spawn(lambda comm: comm.gather(np.array([comm.rank, 7]), root=1), 2)
            [None, array([0, 7, 1, 7])]
        """
        array = _at_least_1d(x if type(x) is np.ndarray else as_array("gather", x))
        if type(root) is not int or type(algorithm) is not str:
            check_selectors("gather", root=root, algorithm=algorithm)
        if counts is not None:
            how = root, as_counts("gather", counts), algorithm
            return self._make(Calls.gather, array, how, out, timeout_s, async_op)
        with self._queue.lock:
            self._engine.check_usable()
            kind = self._calls_on(array).memory_kind
            first = self._calls.exchange_counts("gather", array, algorithm, root, kind)

            def known(counts: tuple[int, ...]) -> Call:
                return self._calls_on(array).gather(array, root, counts, algorithm)

            return self._gather_unknown(first, known, array, out, timeout_s, async_op)

    def scatter(
        self,
        x: Any,
        root: int = 0,
        *,
        out: Any = None,
        algorithm: str = "auto",
        async_op: bool = False,
        timeout_s: float | None = None,
    ) -> Any:
        """Split the array of rank `root` along the first axis; each rank gets its part.

        Args:
            x: on the root, an array of at least one dimension.  The other ranks pass None.
            root: the rank whose array is split; the same on every rank.
            out: array for this rank's part.  If its shape or dtype is wrong, this rank raises
                ValueError after the call.  None: a new array.
            algorithm, async_op, timeout_s: as for `all_reduce`.

        Returns:
            `out`, or a new array: ``np.array_split(x, size)[rank]``, where `x` is the root's.

        Raises:
            TypeError, ValueError, MismatchError, PeerTimeoutError, PeerLostError: as for
                `all_reduce`.

        Example:
            >>> rr.spawn(lambda comm: comm.scatter(np.arange(5) if comm.rank == 0 else None), 2)
            [array([0, 1, 2]), array([3, 4])]
        """
        check_selectors("scatter", root=root, algorithm=algorithm)
        with self._queue.lock:
            self._engine.check_usable()
            first = self._calls.announcement(root, ANNOUNCED_BYTES, algorithm)
            array = self._to_scatter(x, root)
            view = None if out is None else as_out("scatter", out, out if array is None else array)
            here = next((a for a in (array, view) if a is not None), NOTHING)
            calls = self._calls_on(here)
            if calls is self._calls:
                calls = self._messages  # the root's array may be on a GPU: other ranks cannot know
            empty = _maker_of_results(calls.device)
            if timeout_s is not None:
                check_timeout("scatter", timeout_s)

            def known(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Call:
                return calls.scatter(shape, dtype, root, algorithm)

            def body(header: bytes) -> Body:
                engine = self._engine
                part = yield from scatter(engine, first, known, array, view, empty, header)
                return out if part is view and out is not None else part

            return self._engine.run(first, body, timeout_s, async_op, calls.device.stream)

    def all_to_all(
        self,
        x: Any,
        *,
        out: Any = None,
        algorithm: str = "auto",
        async_op: bool = False,
        timeout_s: float | None = None,
    ) -> Any:
        """Send the j-th piece of the first axis to rank j; piece i of the result is from rank i.

        Args:
            x: array whose first dimension is a multiple of the number of ranks; the same shape and
                dtype on every rank.
            out: array for the result, of x's shape and dtype; it does not overlap `x`.  None: a new
                array.
            algorithm, async_op, timeout_s: as for `all_reduce`.

        Returns:
            `out`, or a new C-ordered array of x's shape and dtype.

        Raises:
            TypeError, ValueError, MismatchError, PeerTimeoutError, PeerLostError: as for
                `all_reduce`.

        Example:
            >>> rr.spawn(lambda comm: comm.all_to_all(np.arange(4) + 10 * comm.rank), 2)
            [array([ 0,  1, 10, 11]), array([ 2,  3, 12, 13])]
        """
        array = x if type(x) is np.ndarray else as_array("all_to_all", x)
        if type(algorithm) is not str:
            check_selectors("all_to_all", algorithm=algorithm)
        return self._make(Calls.all_to_all, array, (algorithm,), out, timeout_s, async_op)

    def barrier(self, *, timeout_s: float | None = None) -> None:
        """Wait until every rank has called `barrier`.

        Args:
            timeout_s: seconds without any progress until PeerTimeoutError; None: the
                communicator's.

        Raises:
            ValueError: `timeout_s` is not above 0.
            MismatchError: ranks made different calls.
            PeerTimeoutError, PeerLostError: a rank stopped answering, or left.

        Example:
            >>> rr.spawn(lambda comm: comm.barrier(), 2)
            [None, None]
        """
        with self._queue.lock:
            self._meet("barrier", (), timeout_s)
            self._engine.admit_barrier(self._calls.meeting("barrier", ()))

    # --- how calls are run ---

    def _make(
        self,
        method: Callable[..., Call],
        array: np.ndarray,
        how: tuple[Any, ...],
        out: Any,
        timeout_s: float | None,
        async_op: bool,
    ) -> Any:
        """Make a call on one array; `method` of `Calls` plans it, with the arguments `how`."""
        with self._queue.lock:
            self._engine.check_usable()
            call = method(self._calls_on(array), array, *how)
            result = self._run(call, array, out, timeout_s, async_op)
            if self._engine.fast_path is not None and not async_op:
                name = method.__name__
                self._engine.admit(name, call, array, dict(zip(PLANNED[name], how, strict=True)))
            return result

    def _run(
        self, call: Call, array: Any, out: Any, timeout_s: float | None, async_op: bool
    ) -> Any:
        """Run a call that is one plan, and return its result or its Work."""
        result: Any
        target: Any
        if out is None and call.shape is not None and call.stream is None:
            result = target = np.empty(call.shape, call.dtype)
        else:
            array, target = self._placed(call, array, out)
            result = None if call.shape is None else target if out is None else out
        if timeout_s is not None:
            check_timeout(_name(call), timeout_s)
        if async_op or call.converts or call.stream is not None or self._queue.works:

            def body(header: bytes) -> Body:
                yield from move(self._engine, call, array, target, header)
                return result

            return self._engine.run(call, body, timeout_s, async_op, call.stream)
        self._engine.run_now(call, array, target, timeout_s)
        return result

    def _calls_on(self, array: Any) -> Calls:
        """Return the calls on arrays in the same place: host memory, or a GPU."""
        gpu = None if type(array) is np.ndarray else gpu_of(array)
        return self._calls if gpu is None else self._calls_on_gpu(gpu)

    def _calls_on_gpu(self, gpu: int) -> Calls:
        calls = self._on_gpus.get(gpu)
        if calls is None:
            memory_kind = () if self.config.memory is None else (("memory", "GPU"),)
            device, free = open_gpu(gpu), self._engine.discard
            calls = Calls(self._topology, device, self._given, free, memory_kind)
            self._on_gpus[gpu] = calls
        return calls

    def _placed(self, call: Call, array: Any, out: Any) -> tuple[Any, Any]:
        """Return the arrays to read and to write: the same one twice for a call in place."""
        device = call.device
        if call.shape is None or out is None:
            if out is not None:
                raise ValueError(
                    f"{_name(call)}: rank {self.rank} passes out; only the root gets a result"
                )
            shape = 0 if call.shape is None else call.shape
            return array, device.empty(shape, call.dtype)
        name = _name(call)
        if type(out) is not np.ndarray or call.stream is not None:
            out = as_out(name, out, array)
        check_out(name, out, call.shape, call.dtype)
        if call.stream is None and not np.may_share_memory(array, out):
            return array, out
        return (out, out) if is_input(name, device, array, out, call.in_place) else (array, out)

    def _all_reduce_list(
        self,
        members: Sequence[Any],
        op: str,
        out: Any,
        algorithm: str,
        wire: str | None,
        async_op: bool,
        timeout_s: float | None,
    ) -> Any:
        with self._queue.lock:
            arrays = _members(members)
            check_together("all_reduce", arrays)
            calls = self._calls_on(arrays[0] if arrays else NOTHING)
            self._engine.check_usable()
            fused = calls.all_reduce_list(arrays, op, algorithm, wire)
            targets = _list_targets(calls.device, arrays, out)
            if timeout_s is not None:
                check_timeout("all_reduce", timeout_s)
            results = targets if out is None else out

            def body(header: bytes) -> Body:
                yield from reduce_list(self._engine, fused, arrays, targets, header)
                return results

            done = self._engine.run(fused, body, timeout_s, async_op, calls.device.stream)
            if calls is self._calls and not async_op:
                how = {"op": op, "algorithm": algorithm, "wire": wire}
                self._engine.admit_list(fused, arrays, how)
            return done

    def _reachable(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
        """Return an array in this rank's segment, or a private array without space there."""
        array = None
        # A lost rank that was stopped may continue, and write to the memory of its peers.
        if self._arena is not None and not self._engine.broken:
            self._engine.free_discarded()
            array = self._arena.empty(shape, dtype)
        return np.empty(shape, dtype) if array is None else array

    def _gather_unknown(
        self,
        first: Call,
        known: Callable[[tuple[int, ...]], Call],
        array: np.ndarray,
        out: Any,
        timeout_s: float | None,
        async_op: bool,
    ) -> Any:
        """Exchange first dimensions, then gather.  A wrong `out` on one rank raises on all."""
        name = _name(first)
        if timeout_s is not None:
            check_timeout(name, timeout_s)
        device = self._calls_on(array).device
        empty = _maker_of_results(device)
        view = None if out is None else as_out(name, out, array)
        if view is not None:
            if view.ndim == 0:
                raise ValueError(f"{name}: out is 0-d; the result has at least one dimension")
            check_out(name, view, (*view.shape[:1], *array.shape[1:]), array.dtype)
            is_input(name, device, array, view, allowed=False)

        def body(header: bytes) -> Body:
            engine = self._engine
            result = yield from gather_unknown(engine, first, known, array, view, empty, header)
            return out if result is view and out is not None else result

        return self._engine.run(first, body, timeout_s, async_op, device.stream)

    def _to_scatter(self, x: Any, root: int) -> np.ndarray | None:
        """Return the root's array on the root, None on other ranks."""
        if self.rank != root:
            if x is not None:
                raise ValueError(
                    f"scatter: rank {self.rank} passes an array; only the root, rank {root}, does, "
                    "the others pass None"
                )
            return None
        if x is None:
            raise ValueError(
                f"scatter: rank {root} passes None and is the root; pass the array to be split"
            )
        array: np.ndarray = as_array("scatter", x)
        check_movable("scatter", array.dtype)
        if array.ndim == 0:
            raise ValueError("scatter: got a 0-d array; it has no first axis to split along")
        return array

    def _forget(self) -> None:
        """Drop everything that is kept for later calls: the communicator is closed."""
        if self._engine.fast_path is not None:
            self._engine.fast_path.forget()
        for name in COLLECTIVES:
            self.__dict__.pop(name, None)

    def _meet(
        self,
        name: str,
        arguments: tuple[tuple[str, str], ...],
        timeout_s: float | None = None,
    ) -> None:
        """Make a barrier with a name of its own, and compare `arguments` between all ranks."""
        with self._queue.lock:
            self._engine.check_usable()
            self._run(self._calls.meeting(name, arguments), NOTHING, None, timeout_s, False)


def _maker_of_results(device: Device) -> Callable[[int | tuple[int, ...], Any], Any]:
    """Return a function that makes arrays for the caller while a call is running."""
    return device.empty if device.stream is None else device.stream.callers_empty()


def _members(x: Sequence[Any]) -> list[Any]:
    """View the members of a list as arrays.  Raises TypeError, which names the member."""
    return [
        member if type(member) is np.ndarray else as_array(f"all_reduce: member {index}", member)
        for index, member in enumerate(x)
    ]


def _list_targets(device: Device, arrays: Sequence[np.ndarray], out: Any) -> list[np.ndarray]:
    if out is None:
        return [device.empty(array.shape, array.dtype) for array in arrays]
    if not isinstance(out, (list, tuple)) or len(out) != len(arrays):
        came = f"a list of {len(out)}" if isinstance(out, (list, tuple)) else shown(out)
        raise ValueError(
            f"all_reduce: x is a list of {len(arrays)}, out is {came}; "
            "pass one array in out for each array in x"
        )
    targets = []
    for array, member in zip(arrays, out, strict=True):
        target = as_out("all_reduce", member, array)
        check_out("all_reduce", target, array.shape, array.dtype)
        is_input("all_reduce", device, array, target, allowed=True)
        targets.append(target)
    return targets


def _name(call: Call) -> str:
    return call.signature.collective


def _at_least_1d(array: np.ndarray) -> np.ndarray:
    return array.reshape(1) if array.ndim == 0 else array


NOTHING = np.empty(0, np.uint8)
"""The data of a meeting: it has a signature only."""
