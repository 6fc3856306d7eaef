"""How a call is run: find its cached call and its arrays, hand them to the engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np

from ringreduce.calls.arguments import (
    at_least_1d,
    check_apart,
    check_out,
    check_root,
    check_selectors,
    shape_text,
    shown,
)
from ringreduce.calls.arrays import (
    as_array,
    as_out,
    as_writable,
    check_together,
    gpu_of,
    is_input,
    is_part,
    open_gpu,
)
from ringreduce.calls.cache import OF_GPUS, Calls
from ringreduce.calls.call import Call, Fused
from ringreduce.calls.engine import NOTHING, Engine
from ringreduce.calls.ops import check_movable
from ringreduce.calls.work import Polled
from ringreduce.config import Config, Memory, as_seconds
from ringreduce.devices.base import Device
from ringreduce.shm.blocks import Blocks, share_blocks
from ringreduce.shm.segments import Segments
from ringreduce.system.topology import Topology
from ringreduce.transports.base import Transport


class Runner:
    """Runs the calls of one communicator: its engine, and its caches of calls."""

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
        self.given, self.timeout_s = config, timeout_s
        if segments is not None and len(topology.nodes) > 1:
            config = replace(config, node_memory=Memory(False, segments.crowded))
        elif segments is not None:
            memory = Memory(
                segments.single_copy,
                segments.crowded,
                writes=segments.writes,
                quick=segments.quick,
            )
            config = replace(config, memory=memory)
        self.config, self._topology = config, topology
        self.engine = Engine(transport, device, config, timeout_s, segments)
        self.calls = Calls(topology, device, config, self.engine.discard)
        """Calls on arrays in host memory."""
        self.by_messages = Calls(topology, device, self.given, self.engine.discard)
        """Calls on host arrays that are run by messages even if the ranks share memory."""
        self._on_gpus: dict[int, Calls] = {}
        """Calls on arrays on a GPU, by the number of the GPU."""

    def make(
        self,
        name: str,
        array: np.ndarray,
        given: Mapping[str, Any],
        out: Any,
        timeout_s: float | None,
        async_op: bool,
    ) -> Any:
        """Make a call of the collective `name` on one array; `given` as for `Calls.make`."""
        engine = self.engine
        with engine.queue.lock:
            engine.check_usable()
            calls = self.calls if type(array) is np.ndarray else self.calls_on(array)
            call = calls.get(name, array, given)
            result = self.run(call, array, out, timeout_s, async_op)
            if engine.fast_path is not None and not (async_op or engine.queue.busy):
                engine.executables.admit(engine.fast_path, name, call, array, given)
            return result

    def run(self, call: Call, array: Any, out: Any, timeout_s: float | None, async_op: bool) -> Any:
        """Run a call that is one plan, and return its result or its Work."""
        result: Any
        target: Any
        if out is None and call.shape is not None and call.stream is None:
            result = target = np.empty(call.shape, call.dtype)
        else:
            array, target = self.placed(call, array, out)
            result = None if call.shape is None else target if out is None else out
        if timeout_s is not None:
            timeout_s = as_seconds(_name(call), timeout_s)
        if async_op or call.converts or call.stream is not None or self.engine.queue.busy:

            def body(header: bytes) -> Polled:
                yield from move(self.engine, call, array, target, header)
                return result

            return self.engine.run(call, body, timeout_s, async_op, call.stream)
        self.engine.run_now(call, array, target, timeout_s)
        return result

    def calls_on(self, array: Any) -> Calls:
        """Return the calls on arrays in the same place: host memory, or a GPU."""
        gpu = None if type(array) is np.ndarray else gpu_of(array)
        return self.calls if gpu is None else self.calls_on_gpu(gpu)

    def calls_on_gpu(self, gpu: int) -> Calls:
        calls = self._on_gpus.get(gpu)
        if calls is None:
            shared = None if self.config.memory is None else self.calls
            device, free = open_gpu(gpu), self.engine.discard
            calls = Calls(self._topology, device, self.given, free, shared)
            if self.config.node_memory is not None:  # calls on host arrays are programs
                calls.memory_kind = OF_GPUS
            self._on_gpus[gpu] = calls
        return calls

    def placed(self, call: Call, array: Any, out: Any) -> tuple[Any, Any]:
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

    def all_reduce_list(
        self,
        members: Sequence[Any],
        given: Mapping[str, Any],
        out: Any,
        timeout_s: float | None,
        async_op: bool,
    ) -> Any:
        engine = self.engine
        with engine.queue.lock:
            arrays = members_of(members)
            check_together("all_reduce", arrays)
            calls = self.calls_on(arrays[0] if arrays else NOTHING)
            engine.check_usable()
            fused = calls.all_reduce_list(arrays, given)
            targets = _list_targets(calls.device, arrays, out)
            timeout_s = as_seconds("all_reduce", timeout_s)
            results = targets if out is None else out

            def body(header: bytes) -> Polled:
                yield from reduce_list(engine, fused, arrays, targets, header)
                return results

            done = engine.run(fused, body, timeout_s, async_op, calls.device.stream)
            path = engine.fast_path if calls is self.calls else None
            if path is not None and not (async_op or engine.queue.busy):
                engine.executables.admit_list(path, fused, arrays, given)
            return done

    def share(self, shape: tuple[int, ...], dtype: np.dtype[Any], owner: int) -> Blocks:
        """Make the blocks of a shared array.  Collective; ranks compare the arguments."""
        arguments = ("array", shape_text(shape, dtype)), ("owner", str(owner))

        def collect(mine: bytes) -> bytes:
            call = self.calls.exchange("shared", arguments, len(mine))
            rows = self.run(call, np.frombuffer(mine, np.uint8), None, None, False)
            everybody: bytes = rows.tobytes()
            return everybody

        nbytes = prod(shape) * dtype.itemsize
        transport = self.engine.transport
        how = transport.yielding.crowded, self.timeout_s, transport.job_ranks
        with self.engine.queue.lock:
            self.engine.check_usable()
            return share_blocks(nbytes, dtype, owner, self.rank, collect, *how)

    def counted_to_scatter(self, x: Any, root: int, out: Any) -> np.ndarray:
        """Return the root's array on the root, `out` as an array on other ranks."""
        check_selectors("scatter", root=root)
        check_root("scatter", root, self.size)
        array = self.to_scatter(x, root)
        if array is not None:
            return array
        if out is None:
            raise ValueError(
                f"scatter: rank {self.rank} passes no out; with counts, all ranks but the root, "
                f"rank {root}, pass an array for their rows"
            )
        view: np.ndarray = at_least_1d(as_writable("scatter", out))
        return view

    def to_scatter(self, x: Any, root: int) -> np.ndarray | None:
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

    def meet(
        self,
        name: str,
        arguments: tuple[tuple[str, str], ...],
        timeout_s: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Make a barrier with a name of its own, and compare `arguments` between all ranks."""
        engine = self.engine
        with engine.queue.lock:
            engine.check_usable()
            call = self.calls.meeting(name, arguments)
            if not async_op:
                self.run(call, NOTHING, None, timeout_s, False)
                return None
            timeout_s = as_seconds(name, timeout_s)

            def body(header: bytes) -> Polled:
                yield from move(engine, call, NOTHING, NOTHING, header)

            return engine.run(call, body, timeout_s, async_op=True)


def move(
    engine: Engine, call: Call, source: np.ndarray, target: np.ndarray, header: bytes
) -> Polled:
    """Run one plan; on converted copies if messages have another dtype than the arrays."""
    if not call.converts:
        yield from engine.advance(call, source, target, header)
        return
    device, dtype = call.device, call.wire_dtype
    sent = device.empty(source.size, dtype)
    device.convert(device.flat(source), sent)
    received = sent if target.size == source.size else device.empty(target.size, dtype)
    source_shape, target_shape = call.shapes
    wired = sent.reshape(source_shape), received.reshape(target_shape)
    yield from engine.advance(call, *wired, header)
    flat = device.flat(target)
    device.convert(received, flat)
    if not device.overlap(flat, target):
        target[...] = flat.reshape(target.shape)


def reduce_list(
    engine: Engine,
    fused: Fused,
    arrays: Sequence[np.ndarray],
    targets: Sequence[np.ndarray],
    header: bytes,
) -> Polled:
    """Concatenate the arrays of each dtype, reduce them in place, and copy them to `targets`.

    Every array is read before any target is written, so a target may be any of the arrays.
    """
    concatenated = []
    for call, members in fused.groups:
        whole = call.device.empty(call.shape or 0, call.dtype)
        at = 0
        for index in members:
            array = arrays[index]
            whole[at : at + array.size].reshape(array.shape)[...] = array
            at += array.size
        concatenated.append(whole)
    for (call, members), whole in zip(fused.groups, concatenated, strict=True):
        yield from move(engine, call, whole, whole, header)
        at = 0
        for index in members:
            target = targets[index]
            target[...] = whole[at : at + target.size].reshape(target.shape)
            at += target.size


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


def _name(call: Call) -> str:
    return call.signature.collective
