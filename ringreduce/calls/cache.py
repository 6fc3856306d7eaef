"""Calls: checked and planned once, then cached for the next call with the same arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import wraps
from itertools import pairwise
from math import prod
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np

from ringreduce.algorithms import build
from ringreduce.calls.arguments import (
    Matrix,
    array_text,
    check_counts,
    check_matrix,
    check_root,
    check_row,
    check_wire,
    shape_text,
)
from ringreduce.calls.call import Call, Fused, Shape
from ringreduce.calls.ops import check_movable, check_reduction
from ringreduce.config import Config
from ringreduce.control.signature import Signature
from ringreduce.devices.base import Device
from ringreduce.devices.cpu import OPS
from ringreduce.planning.one_step import OneStep, one_step
from ringreduce.planning.plan import Plan, plan_parts, plan_whole, shard_counts
from ringreduce.planning.select import (
    MOST_DIRECT,
    STAGED_BYTES,
    is_single_copy,
    priced_bytes,
    resolve,
    segment_bytes,
    slice_count,
    slices_in_flight,
    staged_bytes,
)
from ringreduce.schedules.collectives import COLLECTIVES, IN_PARTS
from ringreduce.schedules.schedule import Schedule
from ringreduce.shm.gpu_staging import piece_counts
from ringreduce.system.topology import Topology

_Kept = TypeVar("_Kept", Call, Fused)
_P = ParamSpec("_P")
OF_GPUS = (("memory", "GPU"),)
_NO_ARGUMENTS = Signature("all_to_all", ())
"""The signature of an all-to-all whose arguments the ranks have compared in an exchange before."""


def _cached(make: Callable[Concatenate[Calls, _P], Call]) -> Callable[Concatenate[Calls, _P], Call]:
    """Keep the calls that a method of `Calls` makes, by its arguments."""

    @wraps(make)
    def get(calls: Calls, /, *arguments: _P.args, **named: _P.kwargs) -> Call:
        key = (make, *arguments, *named.items())
        return calls._find(key) or calls._keep(key, make(calls, *arguments, **named))

    return get


class Calls:
    """A cache of one communicator's calls, by their arguments; the least recently used goes first.

    Each method returns the call with its arguments, and makes it if needed.  It raises TypeError or
    ValueError for wrong arguments, before this rank sends a message.
    """

    def __init__(
        self,
        topology: Topology,
        device: Device,
        config: Config,
        free: Callable[[Call], None],
        shared: Calls | None = None,
    ) -> None:
        """Cache calls on arrays of `device`.

        `shared`: the calls on arrays in memory that the ranks share, for a `device` that is a GPU.
        """
        self._free = free
        """Called with each call that the cache drops."""
        self._shared = shared
        self.memory_kind = () if shared is None else OF_GPUS
        """Arguments of all signatures of arrays on a GPU, if host arrays take another way."""
        self.nodes, self.rank = topology.nodes, topology.rank
        self.size = sum(map(len, topology.nodes))
        self.config, self.device = config, device
        self._chosen: dict[tuple[str, int], str] = {}
        """Collective, and bytes rounded up to a power of two -> the algorithm of "auto"."""
        self._all_to_alls: dict[str, tuple[Schedule, OneStep | None]] = {}
        """Algorithm of the library -> its all-to-all, and the messages if they are one step."""
        self._kept: dict[Any, Any] = {}
        self._uses = 0

    def __len__(self) -> int:
        return len(self._kept)

    def _find(self, key: Any) -> Any:
        """Return the cached call with this key; None if there is none."""
        call = self._kept.get(key)
        if call is not None:
            self._uses += 1
            call.last_use = self._uses
        return call

    def _keep(self, key: Any, call: _Kept) -> _Kept:
        while len(self._kept) >= self.config.kept_plans:
            dropped = self._kept.pop(min(self._kept, key=lambda kept: self._kept[kept].last_use))
            for each in [dropped] if isinstance(dropped, Call) else dropped.calls:
                self._free(each)
        self._kept[key] = call
        self._uses += 1
        call.last_use = self._uses
        return call

    # --- collectives that are one plan ---

    def get(self, collective: str, array: np.ndarray, given: Mapping[str, Any]) -> Call:
        """Return the call of `collective` on an array like `array`; `given` as for `make`."""
        key = (collective, array.dtype, array.shape, *given.values())
        return self._find(key) or self._keep(key, self.make(collective, array, given))

    def make(
        self, collective: str, array: np.ndarray, given: Mapping[str, Any], is_list: bool = False
    ) -> Call:
        """Return a new call of `collective`: its caller owns it.

        `given` has the value of each argument that the collective has in `collectives.ARGUMENTS`,
        in this order.  `counts` of a gather or scatter are the rows of each rank.  In a scatter
        `array` is the root's, or another rank's `out`.
        """
        (before, after), algorithm = COLLECTIVES[collective], given["algorithm"]
        op, root, counts = given.get("op"), given.get("root"), given.get("counts")
        if "op" in given:
            check_reduction(collective, array.dtype, given["op"], OPS)
        else:
            check_movable(collective, array.dtype)
        if root is not None:
            check_root(collective, root, self.size)
        dtype = check_wire(collective, array.dtype, given.get("wire"))
        is_root, in_place = root == self.rank, collective not in IN_PARTS
        shape: Shape | None
        if in_place:
            shape, begin = array.shape, None
            plan = self._whole(collective, algorithm, array.size, dtype, root or 0, is_list)
        else:
            elements, shape, begin = self._parts_of(collective, array, counts, is_root)
            plan = self._parts(collective, algorithm, elements, dtype, root or 0)
        if after == "the root" and not is_root:
            shape = None
        signature = _signature(collective, array_text(array, first=counts is None), given)
        takes_out = before == "the root" and not (in_place or is_root)
        source = array[:0] if takes_out else array
        call = self._call(signature, plan, source, shape, dtype, op, in_place, begin)
        call.takes_out = takes_out
        if collective == "all_reduce" and self._shared is not None:
            call.pieces = self._shared._pieces(algorithm, array.size, dtype)
        return call

    def _parts_of(
        self, collective: str, array: np.ndarray, counts: Any, is_root: bool
    ) -> tuple[list[int], Shape, int | None]:
        """Return the elements of each chunk, the shape of the result, and `Call.part_begin`.

        Raises ValueError for wrong `counts`.
        """
        before, after = COLLECTIVES[collective]
        if before == "its sender":
            if counts is not None:
                check_matrix(collective, array, counts, self.rank, self.size)
                return *self._exchanged(array, counts), None
            if array.ndim == 0 or array.shape[0] % self.size:
                raise ValueError(
                    f"{collective}: the array has shape {array.shape}; "
                    f"its first dimension must be a multiple of the {self.size} ranks"
                )
            return [array.size // self.size] * self.size**2, array.shape, None
        if counts is None:
            shards = shard_counts(array.size, self.size)
            return shards, (shards[self.rank],), sum(shards[: self.rank])
        sends_all = before == "the root" and is_root
        if sends_all:
            check_row(collective, array, counts, self.size)
        else:
            check_counts(collective, array, counts, self.rank, self.size)
        row = prod(array.shape[1:])
        elements = [count * row for count in counts]
        rows = counts[self.rank] if after == "its rank" else sum(counts)
        has_all = sends_all or after != "its rank"
        begin = sum(elements[: self.rank]) if has_all else None
        return elements, (rows, *array.shape[1:]), begin

    def _exchanged(self, array: np.ndarray, counts: Matrix) -> tuple[list[int], Shape]:
        """Return the elements of each chunk, and the shape of the result, of an all-to-all.

        Row i of `counts` has the first dimensions of what rank i sends to each rank.
        """
        row = prod(array.shape[1:])
        elements = [count * row for each in counts for count in each]
        return elements, (sum(each[self.rank] for each in counts), *array.shape[1:])

    def _pieces(
        self, algorithm: str, count: int, dtype: np.dtype[Any]
    ) -> tuple[tuple[Plan, int], ...]:
        """Plan the pieces of an all-reduce of `count` elements, as `Call.pieces` has them.

        Empty for several pieces of another algorithm than "auto": the order of some reductions
        depends on where an element is in the array, and `shards` describes the whole array.
        """
        pieces = piece_counts(count, dtype.itemsize)
        if algorithm != "auto" and sum(pieces.values()) > 1:
            return ()
        schedule = self._schedule("all_reduce", algorithm, max(pieces) * dtype.itemsize, root=0)
        return tuple((self._planned(schedule, n, dtype), times) for n, times in pieces.items())

    def all_reduce_list(self, arrays: Sequence[np.ndarray], given: Mapping[str, Any]) -> Fused:
        layout = tuple((array.dtype, array.shape) for array in arrays)
        key = ("all_reduce of a list", layout, *given.values())
        return self._find(key) or self._keep(key, self._all_reduce_list(arrays, given))

    def _all_reduce_list(self, arrays: Sequence[np.ndarray], given: Mapping[str, Any]) -> Fused:
        algorithm, wire = given["algorithm"], given["wire"]
        members: dict[np.dtype[Any], list[int]] = {}
        for index, array in enumerate(arrays):
            members.setdefault(array.dtype, []).append(index)
        groups = []
        for dtype, indices in members.items():
            used_wire = wire if dtype.kind == "f" or len(members) == 1 else None
            sizes = [arrays[index].nbytes for index in indices]
            # Lists are cut so that a batch is copied in and out: then its arrays may be anywhere.
            # An array that is too long is a batch by itself.  Other algorithms than "auto" are not
            # cut: the order of some reductions depends on where an element is in the
            # concatenated array.
            batches = [(0, len(sizes))]
            if self.config.memory is not None and algorithm == "auto":
                most = self.config.slice_bytes or STAGED_BYTES
                least = self.config.single_copy_from
                batches = _cut(sizes, most if least is None else min(most, least - 1))
            for begin, end in batches:
                part = indices[begin:end]
                fused = np.empty(sum(arrays[index].size for index in part), dtype)
                how = {**given, "wire": used_wire}
                groups.append((self.make("all_reduce", fused, how, is_list=True), part))
        text = ", ".join(array_text(array) for array in arrays)
        signature = _signature("all_reduce", f"[{text}]", given)
        if not groups:
            groups.append((self.meeting("all_reduce", signature.arguments), []))
        return Fused(self._complete(signature), groups)

    def all_to_all_of_matrix(self, array: np.ndarray, counts: Matrix, algorithm: str) -> Call:
        """Return the all-to-all of counts that the ranks have exchanged.

        A program may have other counts in each call, so only the latest ones are cached, and "auto"
        is the algorithm that is planned fastest.
        """
        if algorithm == "auto" and self.size <= MOST_DIRECT:
            algorithm = "direct"
        key = ("all_to_all of a matrix", array.dtype, array.shape[1:], algorithm)
        latest: Call | None = self._kept.get(key)
        how = array, counts, algorithm
        if latest is not None and latest.counts != counts:
            call = self._kept[key] = self._all_to_all_of_matrix(*how)
            executable = latest.executable
            same = latest.schedule.algorithm == call.schedule.algorithm
            if same and executable is not None and executable.replan(call.plan):
                call.executable, latest.executable = executable, None
            else:
                self._free(latest)
        return self._find(key) or self._keep(key, self._all_to_all_of_matrix(*how))

    def _all_to_all_of_matrix(self, array: np.ndarray, counts: Matrix, algorithm: str) -> Call:
        elements, shape = self._exchanged(array, counts)
        plan = self._parts("all_to_all", algorithm, elements, array.dtype)
        call = self._call(_NO_ARGUMENTS, plan, array, shape, array.dtype)
        call.counts = counts
        return call

    # --- first calls of a gather or scatter, exchanges and meetings ---

    @_cached
    def exchange_counts(
        self,
        collective: str,
        dtype: np.dtype[Any],
        inner: Shape,
        algorithm: str,
        root: int | None,
        memory_kind: tuple[tuple[str, str], ...],
    ) -> Call:
        """Return the all-gather before a gather or an all-to-all whose counts ranks do not know.

        Its signature is that of the collective.  `inner` is the shape of the arrays behind their
        first dimension.
        """
        check_movable(collective, dtype)
        if root is not None:
            check_root(collective, root, self.size)
        resolve(collective, algorithm, self.nodes, 0, self.config)  # checks the name
        unknown = "a row" if collective == "all_to_all" else "None"
        given = {"root": root, "counts": unknown, "algorithm": algorithm}
        signature = _signature(collective, shape_text((":", *inner), dtype), given)
        signature = Signature(collective, (*signature.arguments, *memory_kind))
        width = 2 * self.size + 1 if collective == "all_to_all" else 2
        return self._row_of_each(signature, np.empty(width, np.int64))

    @_cached
    def exchange(self, name: str, arguments: tuple[tuple[str, str], ...], nbytes: int) -> Call:
        """Return an all-gather of `nbytes` of every rank, which compare its `arguments`."""
        return self._row_of_each(Signature(name, arguments), np.empty(nbytes, np.uint8))

    def _row_of_each(self, signature: Signature, row: np.ndarray) -> Call:
        """Return an all-gather of a short array like `row` of every rank, with this signature."""
        plan = self._parts("all_gather", "auto", [row.size] * self.size, row.dtype, slices=1)
        return self._call(signature, plan, row, (self.size, row.size), row.dtype)

    @_cached
    def announcement(self, root: int, nbytes: int, algorithm: str) -> Call:
        """Return the broadcast of `nbytes` before a scatter: the root's dtype and shape."""
        check_root("scatter", root, self.size)
        resolve("scatter", algorithm, self.nodes, nbytes, self.config)
        text = np.empty(nbytes, np.uint8)
        plan = self._whole("broadcast", "auto", text.size, text.dtype, root)
        given = {"root": root, "counts": "None", "algorithm": algorithm}
        signature = _signature("scatter", "an array", given)
        return self._call(signature, plan, text, text.shape, text.dtype, in_place=True)

    @_cached
    def meeting(self, name: str, arguments: tuple[tuple[str, str], ...]) -> Call:
        """Return a barrier with a name of its own; ranks compare its `arguments`."""
        nothing = np.empty(0, np.uint8)
        plan = self._whole("barrier", "auto", 0, nothing.dtype)
        return self._call(Signature(name, arguments), plan, nothing, (0,), nothing.dtype)

    # --- plans ---

    def shards(self, array: np.ndarray) -> list[list[slice]]:
        """Return, by rank, the elements whose final value a ring all-reduce forms on that rank."""
        plan = self._whole("all_reduce", "ring", array.size, array.dtype)
        ring = [rank for node in self.nodes for rank in node]
        found: list[list[slice]] = [[] for _ in ring]
        for index in range(plan.slices):
            for rank, chunk in zip(ring, plan.chunk_offsets(index), strict=True):
                found[rank].append(slice(chunk.input, chunk.input + chunk.count))
        return found

    def _whole(
        self,
        collective: str,
        algorithm: str,
        count: int,
        dtype: np.dtype[Any],
        root: int = 0,
        is_list: bool = False,
    ) -> Plan:
        """Plan a call on a whole array of `count` elements, which are sent as `dtype`."""
        schedule = self._schedule(collective, algorithm, count * dtype.itemsize, root)
        return self._planned(schedule, count, dtype, is_list)

    def _planned(
        self, schedule: Schedule, count: int, dtype: np.dtype[Any], is_list: bool = False
    ) -> Plan:
        """Plan a call on a whole array, or on a list of arrays laid end to end, by a schedule."""
        config, nbytes = self.config, count * dtype.itemsize
        if is_list and config.memory is not None:  # the arrays of a batch may be anywhere
            config = replace(config, memory=replace(config.memory, quick=False))
        slices = slice_count(schedule, nbytes, self.nodes, config)
        if is_list and config.memory is not None and nbytes <= STAGED_BYTES:
            slices = 1
        segment = segment_bytes(self.nodes, config)
        plan = plan_whole(schedule, self.rank, count, dtype.itemsize, slices, segment)
        return replace(plan, single_copy=is_single_copy(schedule, nbytes, config))

    def _parts(
        self,
        collective: str,
        algorithm: str,
        counts: Sequence[int],
        dtype: np.dtype[Any],
        root: int = 0,
        slices: int | None = None,
    ) -> Plan:
        """Plan a call on chunks of `counts` elements."""
        nbytes = sum(counts) * dtype.itemsize
        schedule = self._schedule(collective, algorithm, nbytes, root)
        slices = slices or slice_count(schedule, nbytes, self.nodes, self.config)
        segment = segment_bytes(self.nodes, self.config)
        one_step = None
        if collective == "all_to_all" and not schedule.digest:
            _, one_step = self._all_to_alls[schedule.algorithm]
        how = dtype.itemsize, slices, segment, one_step
        plan = plan_parts(schedule, self.rank, counts, *how)
        return replace(plan, single_copy=is_single_copy(schedule, nbytes, self.config))

    def _schedule(self, collective: str, algorithm: str, nbytes: int, root: int) -> Schedule:
        chosen = collective, priced_bytes(nbytes)
        if algorithm != "auto":
            name = algorithm
        elif chosen in self._chosen:
            name = self._chosen[chosen]
        else:
            name = resolve(collective, algorithm, self.nodes, nbytes, self.config)
            self._chosen[chosen] = name
        if collective == "all_to_all" and name in self._all_to_alls:
            return self._all_to_alls[name][0]
        schedule = build(collective, name, self.nodes, root)
        if collective == "all_to_all" and not schedule.digest:
            self._all_to_alls[name] = schedule, one_step(schedule)
        return schedule

    def _complete(self, signature: Signature, digest: str = "") -> Signature:
        """Add the arguments that all signatures have: a registered schedule, the kind of memory."""
        added = [("schedule", digest)] * bool(digest) + list(self.memory_kind)
        if not added:
            return signature
        return Signature(signature.collective, (*signature.arguments, *added))

    def _call(
        self,
        signature: Signature,
        plan: Plan,
        array: np.ndarray,
        shape: Shape | None,
        dtype: np.dtype[Any],
        op: str | None = None,
        in_place: bool = False,
        part_begin: int | None = None,
    ) -> Call:
        """Make a call of a plan on arrays like `array`, whose elements are sent as `dtype`."""
        return Call(
            self._complete(signature, plan.schedule.digest),
            plan,
            self.device,
            shapes=(array.shape, (0,) if shape is None else shape),
            shape=shape,
            dtype=array.dtype,
            wire_dtype=dtype,
            op=op,
            in_place=in_place,
            part_begin=part_begin,
            in_flight=slices_in_flight(self.nodes, self.config),
            staged_bytes=staged_bytes(self.nodes, self.config),
            shares=self.config.memory is not None
            or (self.config.node_memory is not None and plan.slices == 1),
        )


def _signature(collective: str, array: str, given: Mapping[str, Any]) -> Signature:
    """Return the signature of a call on `array` with these arguments; the algorithm is the last."""
    texts = {
        name: repr(value) if name in ("op", "wire") else str(value)
        for name, value in given.items()
        if value is not None and name != "algorithm"
    }
    algorithm = repr(given["algorithm"])
    return Signature(collective, (("array", array), *texts.items(), ("algorithm", algorithm)))


def _cut(sizes: Sequence[int], most: int) -> list[tuple[int, int]]:
    """Cut a list into parts of at most `most` bytes; return the (begin, end) indices of each part.

    `sizes` are the bytes of the members.  A part is larger only if a single member is.
    Only an empty list has an empty part.
    """
    bounds, held = [0], 0
    for place, size in enumerate(sizes):
        if held and size and held + size > most:
            bounds.append(place)
            held = 0
        held += size
    return [*pairwise([*bounds, len(sizes)])]
