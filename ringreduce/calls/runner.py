"""How a call is run: find its cached call and its arrays, hand them to the engine."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from math import prod
from typing import Any

import numpy as np

from ringreduce.calls.arguments import (
    check_apart,
    check_out,
    check_root,
    check_row,
    check_selectors,
    shape_text,
    shown,
)
from ringreduce.calls.arrays import (
    as_array,
    as_out,
    as_writable,
    check_together,
    from_host,
    gpu_of,
    is_input,
    is_part,
    open_gpu,
)
from ringreduce.calls.cache import Calls
from ringreduce.calls.call import Call
from ringreduce.calls.compound import (
    ANNOUNCED_BYTES,
    Table,
    announce,
    exchange_counts,
    move,
    reduce_list,
)
from ringreduce.calls.engine import NOTHING, Engine
from ringreduce.calls.ops import check_movable
from ringreduce.calls.refusals import refuse_copy
from ringreduce.config import Config, Memory, as_seconds
from ringreduce.devices.base import Device
from ringreduce.errors import MismatchError, counted
from ringreduce.planning.plan import shard_counts
from ringreduce.shm.blocks import Blocks, share_blocks
from ringreduce.shm.segments import Segments
from ringreduce.system.topology import Topology
from ringreduce.transports.base import Transport

Body = Generator[bool, None, Any]
_UNKNOWN = -1
"""In place of an expected count: the rank accepts any count."""


class Runner:
    """Runs the calls of one communicator: its engine, its caches of calls and its memory."""

    __module__ = "ringreduce"

    __reduce__ = refuse_copy

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
        self._given, self._job_ranks = config, transport.job_ranks
        if len(topology.nodes) > 1:
            segments = None
        if segments is not None:
            memory = Memory(
                segments.single_copy,
                transport.yielding.crowded,
                writes=segments.writes,
                quick=segments.quick,
            )
            config = replace(config, memory=memory)
        self.config = config
        self._topology, self._device = topology, device
        self._timeout_s, self._crowded = timeout_s, transport.yielding.crowded
        self._engine = Engine(transport, device, config, timeout_s, segments)
        self._queue = self._engine.queue
        self._calls = Calls(topology, device, config, self._engine.discard)
        self._engine.last_call = self._calls.meeting("close", ())
        self._messages = Calls(topology, device, self._given, self._engine.discard)
        """Calls on host arrays that are run by messages even if the ranks share memory."""
        self._on_gpus: dict[int, Calls] = {}
        """Calls on arrays on a GPU, by the number of the GPU."""

    def _make(
        self,
        name: str,
        array: np.ndarray,
        given: Mapping[str, Any],
        out: Any,
        timeout_s: float | None,
        async_op: bool,
    ) -> Any:
        """Make a call of the collective `name` on one array; `given` as for `Calls.make`."""
        with self._queue.lock:
            self._engine.check_usable()
            call = self._calls_on(array).get(name, array, given)
            result = self._run(call, array, out, timeout_s, async_op)
            if self._engine.fast_path is not None and not async_op:
                self._engine.admit(name, call, array, given)
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
            timeout_s = as_seconds(_name(call), timeout_s)
        if async_op or call.converts or call.stream is not None or self._queue.busy:

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
            shared = None if self.config.memory is None else self._calls
            device, free = open_gpu(gpu), self._engine.discard
            calls = Calls(self._topology, device, self._given, free, shared)
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
        if call.takes_out:
            return out[:0], out
        if call.stream is None and not np.may_share_memory(array, out):
            return array, out
        if call.part_begin is not None and is_part(device, array, out, call.part_begin):
            # A gather writes the same values to this part of `out`.  A reduction may write `out`
            # before it has read all of `array`.
            return (array if call.op is None else array.copy()), out
        return (out, out) if is_input(name, device, array, out, call.in_place) else (array, out)

    def _all_reduce_list(
        self,
        members: Sequence[Any],
        given: Mapping[str, Any],
        out: Any,
        timeout_s: float | None,
        async_op: bool,
    ) -> Any:
        with self._queue.lock:
            arrays = members_of(members)
            check_together("all_reduce", arrays)
            calls = self._calls_on(arrays[0] if arrays else NOTHING)
            self._engine.check_usable()
            fused = calls.all_reduce_list(arrays, given)
            targets = _list_targets(calls.device, arrays, out)
            timeout_s = as_seconds("all_reduce", timeout_s)
            results = targets if out is None else out

            def body(header: bytes) -> Body:
                yield from reduce_list(self._engine, fused, arrays, targets, header)
                return results

            done = self._engine.run(fused, body, timeout_s, async_op, calls.device.stream)
            if calls is self._calls and not async_op:
                self._engine.admit_list(fused, arrays, given)
            return done

    def _share(self, shape: tuple[int, ...], dtype: np.dtype[Any], owner: int) -> Blocks:
        """Make the blocks of a shared array.  Collective; ranks compare the arguments."""
        arguments = ("array", shape_text(shape, dtype)), ("owner", str(owner))

        def collect(mine: bytes) -> bytes:
            call = self._calls.exchange("shared", arguments, len(mine))
            rows = self._run(call, np.frombuffer(mine, np.uint8), None, None, False)
            everybody: bytes = rows.tobytes()
            return everybody

        nbytes = prod(shape) * dtype.itemsize
        how = self._crowded, self._timeout_s, self._job_ranks
        with self._queue.lock:
            self._engine.check_usable()
            return share_blocks(nbytes, dtype, owner, self.rank, collect, *how)

    def _gather_unknown(
        self,
        name: str,
        array: np.ndarray,
        root: int | None,
        algorithm: str,
        out: Any,
        timeout_s: float | None,
        async_op: bool,
    ) -> Any:
        """Exchange first dimensions, then gather.  `root` is None for an all-gather."""

        def lengths(table: Table) -> list[int]:
            return [sum(count for (count,) in table)] * self.size

        def call_for(calls: Calls, table: Table) -> Call:
            counts = tuple(count for (count,) in table)
            rooted = {} if root is None else {"root": root}
            given = {**rooted, "counts": counts, "algorithm": algorithm}
            return calls.get(name, array, given)

        how = lengths, call_for, out, timeout_s, async_op
        return self._exchange_counts(name, array, root, algorithm, array.shape[:1], *how)

    def _all_to_all_unknown(
        self,
        array: np.ndarray,
        counts: tuple[int, ...],
        algorithm: str,
        out: Any,
        timeout_s: float | None,
        async_op: bool,
        expected: Sequence[int] | None = None,
    ) -> Any:
        """Exchange the counts that each rank sends to each rank, then the pieces.

        If a rank sends another count than its receiver has `expected`, all ranks raise
        MismatchError.
        """
        check_row("all_to_all", array, counts, self.size)
        row = (*counts, *([_UNKNOWN] * self.size if expected is None else expected))

        def lengths(table: Table) -> list[int]:
            _check_expected(table)
            return [sum(column) for column in islice(zip(*table, strict=True), self.size)]

        def call_for(calls: Calls, table: Table) -> Call:
            matrix = tuple(row[: self.size] for row in table)
            return calls.all_to_all_of_matrix(array, matrix, algorithm)

        how = lengths, call_for, out, timeout_s, async_op
        return self._exchange_counts("all_to_all", array, None, algorithm, row, *how)

    def _exchange_counts(
        self,
        name: str,
        array: np.ndarray,
        root: int | None,
        algorithm: str,
        counts: tuple[int, ...],
        lengths: Callable[[Table], list[int]],
        call_for: Callable[[Calls, Table], Call],
        out: Any,
        timeout_s: float | None,
        async_op: bool,
    ) -> Any:
        """Exchange `counts`, then make the call that `call_for` returns for those of all ranks.

        A wrong `out` on one rank raises on all.
        """
        with self._queue.lock:
            self._engine.check_usable()
            calls = self._calls_on(array)
            first = self._calls.exchange_counts(name, array, algorithm, root, calls.memory_kind)
            timeout_s = as_seconds(name, timeout_s)
            empty = _maker_of_results(calls.device)
            view = None if out is None else _gathered(name, calls.device, array, out)

            def body(header: bytes) -> Body:
                then = lengths, partial(call_for, calls)
                result = yield from exchange_counts(
                    self._engine, first, counts, *then, array, view, empty, header
                )
                return out if result is view and out is not None else result

            return self._engine.run(first, body, timeout_s, async_op, calls.device.stream)

    def _scatter_unknown(
        self, x: Any, root: int, out: Any, algorithm: str, timeout_s: float | None, async_op: bool
    ) -> Any:
        """Announce the root's shape and dtype, then scatter."""
        with self._queue.lock:
            self._engine.check_usable()
            first = self._calls.announcement(root, ANNOUNCED_BYTES, algorithm)
            array = self._to_scatter(x, root)
            view = None if out is None else as_out("scatter", out, out if array is None else array)
            if view is not None:
                check_out("scatter", view, view.shape, view.dtype)
            calls = self._calls_on(next((a for a in (array, view) if a is not None), NOTHING))
            how = calls, array, view, _maker_of_results(calls.device), root, algorithm
            timeout_s = as_seconds("scatter", timeout_s)

            def body(header: bytes) -> Body:
                part = yield from self._announce_and_scatter(header, first, *how)
                return out if part is view and out is not None else part

            return self._engine.run(first, body, timeout_s, async_op, calls.device.stream)

    def _announce_and_scatter(
        self,
        header: bytes,
        first: Call,
        calls: Calls,
        array: np.ndarray | None,
        out: np.ndarray | None,
        empty: Callable[[int | tuple[int, ...], Any], Any],
        root: int,
        algorithm: str,
    ) -> Body:
        """Run a scatter of unknown shape; return this rank's part.

        The root's array decides how the data travel.  If it is in host memory, the part for an
        `out` on a GPU goes through host memory, too.
        """
        on_gpu = calls is not self._calls
        shape, dtype, of_gpu = yield from announce(self._engine, first, array, on_gpu, header)
        counts = tuple(shard_counts(shape[0], self.size))
        part = counts[self.rank], *shape[1:]
        fits = out is not None and (out.shape, out.dtype) == (part, dtype)
        through_host = on_gpu and not of_gpu
        if of_gpu and not on_gpu:
            calls = self._messages
        elif through_host:
            calls, empty = self._calls, np.empty
        target = out if out is not None and fits and not through_host else empty(part, dtype)
        given = {"root": root, "counts": counts, "algorithm": algorithm}
        call = calls.get("scatter", target if array is None else array, given)
        source = target[:0] if array is None else array
        yield from self._engine.advance(call, source, target, header)
        if out is None or target is out:
            return target
        if not fits:
            return ValueError(
                f"scatter: out is {out.dtype}{list(out.shape)}, "
                f"this rank's part is {dtype}{list(part)}"
            )
        from_host("scatter", target, out)
        return out

    def _counted_to_scatter(self, x: Any, root: int, out: Any) -> np.ndarray:
        """Return the root's array on the root, `out` as an array on other ranks."""
        check_selectors("scatter", root=root)
        check_root("scatter", root, self.size)
        array = self._to_scatter(x, root)
        if array is not None:
            return array
        if out is None:
            raise ValueError(
                f"scatter: rank {self.rank} passes no out; with counts, all ranks but the root, "
                f"rank {root}, pass an array for their rows"
            )
        view: np.ndarray = as_writable("scatter", out)
        return view.reshape(1) if view.ndim == 0 else view

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

    def _meet(
        self,
        name: str,
        arguments: tuple[tuple[str, str], ...],
        timeout_s: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Make a barrier with a name of its own, and compare `arguments` between all ranks."""
        with self._queue.lock:
            self._engine.check_usable()
            call = self._calls.meeting(name, arguments)
            if not async_op:
                self._run(call, NOTHING, None, timeout_s, False)
                return None
            timeout_s = as_seconds(name, timeout_s)

            def body(header: bytes) -> Body:
                yield from move(self._engine, call, NOTHING, NOTHING, header)

            return self._engine.run(call, body, timeout_s, async_op=True)


def _check_expected(table: Table) -> None:
    """Check that the ranks send what the others expect.  Raises MismatchError.

    A row of the table has the counts that a rank sends to each rank, and then the counts that it
    expects from each rank, or `_UNKNOWN`.
    """
    size = len(table)
    for receiver, row in enumerate(table):
        for sender, expected in enumerate([] if row[-1] == _UNKNOWN else row[size:]):
            if expected != table[sender][receiver]:
                sent = counted(table[sender][receiver], "element")
                raise MismatchError(
                    f"all_to_all: rank {sender} sends {sent} to rank {receiver}, which expects "
                    f"{expected}"
                )


def _maker_of_results(device: Device) -> Callable[[int | tuple[int, ...], Any], Any]:
    """Return a function that makes arrays for the caller while a call is running."""
    return device.empty if device.stream is None else device.stream.callers_empty()


def members_of(x: Sequence[Any]) -> list[Any]:
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
    if device.stream is None:
        check_apart("all_reduce", arrays, targets)
    return targets


def _gathered(name: str, device: Device, array: np.ndarray, out: Any) -> Any:
    """View `out` as an array for a gather whose first dimension is not known yet."""
    view = as_out(name, out, array)
    if view.ndim == 0:
        raise ValueError(f"{name}: out is 0-d; the result has at least one dimension")
    check_out(name, view, (*view.shape[:1], *array.shape[1:]), array.dtype)
    is_input(name, device, array, view, allowed=False)
    return view


def _name(call: Call) -> str:
    return call.signature.collective
