"""Calls: checked and planned once, then cached for the next call with the same arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from math import prod
from typing import Any, TypeVar

import numpy as np

from ringreduce.algorithms import ALGORITHMS, build
from ringreduce.calls.arguments import (
    Matrix,
    array_text,
    as_counts,
    as_row_or_matrix,
    check_counts,
    check_matrix,
    check_root,
    check_row,
    check_selectors,
    check_wire,
)
from ringreduce.calls.call import Call, Fused, Shape
from ringreduce.calls.ops import check_movable, check_reduction, op_name
from ringreduce.calls.parts import ANNOUNCED
from ringreduce.config import Config
from ringreduce.control.signature import Signature
from ringreduce.devices.base import Device
from ringreduce.devices.cpu import OPS
from ringreduce.errors import did_you_mean, shown
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
from ringreduce.schedules.schedule import Schedule
from ringreduce.shm.pieces import piece_counts
from ringreduce.topology import Topology

PLANNED: dict[str, dict[str, Any]] = {
    "all_reduce": {"op": "sum", "algorithm": "auto", "wire": None},
    "reduce_scatter": {"op": "sum", "algorithm": "auto", "wire": None},
    "reduce": {"root": 0, "op": "sum", "algorithm": "auto", "wire": None},
    "broadcast": {"root": 0, "algorithm": "auto"},
    "all_gather": {"counts": None, "algorithm": "auto"},
    "gather": {"root": 0, "counts": None, "algorithm": "auto"},
    "scatter": {"root": 0, "counts": None, "algorithm": "auto"},
    "all_to_all": {"counts": None, "algorithm": "auto"},
}
"""The arguments of each collective that is one plan, with their defaults."""

_Kept = TypeVar("_Kept", Call, Fused)
_SPLIT_ROW = np.empty(2 + ANNOUNCED, np.int64)
_NO_ARGUMENTS = Signature("all_to_all", ())
"""The signature of an all-to-all whose arguments the ranks have compared in an exchange before."""


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
        self.memory_kind = () if shared is None else (("memory", "GPU"),)
        """Arguments of all signatures of arrays on a GPU, if arrays of the host are shared."""
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

    def _get(self, key: Any, make: Callable[..., _Kept], *arguments: Any) -> _Kept:
        call: _Kept | None = self._kept.get(key)
        if call is None:
            call = make(*arguments)
            while len(self._kept) >= self.config.kept_plans:
                dropped = self._kept.pop(
                    min(self._kept, key=lambda kept: self._kept[kept].last_use)
                )
                for each in [dropped] if isinstance(dropped, Call) else dropped.calls:
                    self._free(each)
            self._kept[key] = call
        self._uses += 1
        call.last_use = self._uses
        return call

    # --- reductions ---

    def all_reduce(self, array: np.ndarray, op: str, algorithm: str, wire: Any = None) -> Call:
        key = ("all_reduce", array.dtype, array.shape, op, algorithm, wire)
        return self._get(key, self._all_reduce, array, op, algorithm, wire)

    def _all_reduce(
        self, array: np.ndarray, op: str, algorithm: str, wire: Any, is_list: bool = False
    ) -> Call:
        check_reduction("all_reduce", array.dtype, op, OPS)
        dtype = check_wire("all_reduce", array.dtype, wire)
        plan = self._whole("all_reduce", algorithm, array.size, dtype, is_list=is_list)
        signature = _signature(
            "all_reduce", array_text(array), algorithm, op=repr(op), **_if_given(wire)
        )
        call = self._call(signature, plan, array, array.shape, dtype, op, in_place=True)
        if self._shared is not None:
            call.pieces = self._shared._pieces(algorithm, array.size, dtype)
        return call

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

    def all_reduce_list(
        self, arrays: Sequence[np.ndarray], op: str, algorithm: str, wire: Any = None
    ) -> Fused:
        layout = tuple((array.dtype, array.shape) for array in arrays)
        key = ("all_reduce of a list", layout, op, algorithm, wire)
        return self._get(key, self._all_reduce_list, arrays, op, algorithm, wire)

    def _all_reduce_list(
        self, arrays: Sequence[np.ndarray], op: str, algorithm: str, wire: Any
    ) -> Fused:
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
                groups.append((self._all_reduce(fused, op, algorithm, used_wire, True), part))
        text = ", ".join(array_text(array) for array in arrays)
        signature = _signature("all_reduce", f"[{text}]", algorithm, op=repr(op), **_if_given(wire))
        if not groups:
            groups.append((self.meeting("all_reduce", signature.arguments), []))
        return Fused(self._complete(signature), groups)

    def reduce_scatter(self, array: np.ndarray, op: str, algorithm: str, wire: Any = None) -> Call:
        key = ("reduce_scatter", array.dtype, array.shape, op, algorithm, wire)
        return self._get(key, self._reduce_scatter, array, op, algorithm, wire)

    def _reduce_scatter(self, array: np.ndarray, op: str, algorithm: str, wire: Any) -> Call:
        check_reduction("reduce_scatter", array.dtype, op, OPS)
        dtype = check_wire("reduce_scatter", array.dtype, wire)
        counts = shard_counts(array.size, self.size)
        plan = self._parts("reduce_scatter", algorithm, counts, dtype)
        signature = _signature(
            "reduce_scatter", array_text(array), algorithm, op=repr(op), **_if_given(wire)
        )
        begin = sum(counts[: self.rank])
        return self._call(signature, plan, array, (counts[self.rank],), dtype, op, part_begin=begin)

    def reduce(
        self, array: np.ndarray, root: int, op: str, algorithm: str, wire: Any = None
    ) -> Call:
        key = ("reduce", array.dtype, array.shape, root, type(root), op, algorithm, wire)
        return self._get(key, self._reduce, array, root, op, algorithm, wire)

    def _reduce(self, array: np.ndarray, root: int, op: str, algorithm: str, wire: Any) -> Call:
        check_reduction("reduce", array.dtype, op, OPS)
        check_root("reduce", root, self.size)
        dtype = check_wire("reduce", array.dtype, wire)
        plan = self._whole("reduce", algorithm, array.size, dtype, root)
        signature = _signature(
            "reduce", array_text(array), algorithm, root=str(root), op=repr(op), **_if_given(wire)
        )
        shape = array.shape if self.rank == root else None
        return self._call(signature, plan, array, shape, dtype, op, in_place=True)

    # --- moving data ---

    def broadcast(self, array: np.ndarray, root: int, algorithm: str) -> Call:
        key = ("broadcast", array.dtype, array.shape, root, type(root), algorithm)
        return self._get(key, self._broadcast, array, root, algorithm)

    def _broadcast(self, array: np.ndarray, root: int, algorithm: str) -> Call:
        check_movable("broadcast", array.dtype)
        check_root("broadcast", root, self.size)
        plan = self._whole("broadcast", algorithm, array.size, array.dtype, root)
        signature = _signature("broadcast", array_text(array), algorithm, root=str(root))
        return self._call(signature, plan, array, array.shape, array.dtype, in_place=True)

    def all_gather(self, array: np.ndarray, counts: Shape, algorithm: str) -> Call:
        """`counts` are the first dimensions of the arrays, by rank."""
        key = ("all_gather", array.dtype, array.shape, counts, algorithm)
        return self._get(key, self._all_gather, array, counts, algorithm)

    def _all_gather(self, array: np.ndarray, counts: Shape, algorithm: str) -> Call:
        check_movable("all_gather", array.dtype)
        check_counts("all_gather", array, counts, self.rank, self.size)
        elements = _elements(array, counts)
        plan = self._parts("all_gather", algorithm, elements, array.dtype)
        text = array_text(array, first=False)
        signature = _signature("all_gather", text, algorithm, counts=str(counts))
        shape, begin = (sum(counts), *array.shape[1:]), sum(elements[: self.rank])
        return self._call(signature, plan, array, shape, array.dtype, part_begin=begin)

    def gather(self, array: np.ndarray, root: int, counts: Shape, algorithm: str) -> Call:
        """`counts` are the first dimensions of the arrays, by rank."""
        key = ("gather", array.dtype, array.shape, root, type(root), counts, algorithm)
        return self._get(key, self._gather, array, root, counts, algorithm)

    def _gather(self, array: np.ndarray, root: int, counts: Shape, algorithm: str) -> Call:
        check_movable("gather", array.dtype)
        check_root("gather", root, self.size)
        check_counts("gather", array, counts, self.rank, self.size)
        elements = _elements(array, counts)
        plan = self._parts("gather", algorithm, elements, array.dtype, root)
        text = array_text(array, first=False)
        signature = _signature("gather", text, algorithm, root=str(root), counts=str(counts))
        shape = (sum(counts), *array.shape[1:]) if self.rank == root else None
        begin = sum(elements[: self.rank])
        return self._call(signature, plan, array, shape, array.dtype, part_begin=begin)

    def scatter(self, array: np.ndarray, root: int, counts: Shape, algorithm: str) -> Call:
        """`array` is the root's, or another rank's `out`.  `counts` are the rows of each rank."""
        key = ("scatter", array.dtype, array.shape, root, type(root), counts, algorithm)
        return self._get(key, self._scatter, array, root, counts, algorithm)

    def _scatter(self, array: np.ndarray, root: int, counts: Shape, algorithm: str) -> Call:
        check_movable("scatter", array.dtype)
        check_root("scatter", root, self.size)
        is_root = self.rank == root
        if is_root:
            check_row("scatter", array, counts, self.size)
        else:
            check_counts("scatter", array, counts, self.rank, self.size)
        elements = _elements(array, counts)
        plan = self._parts("scatter", algorithm, elements, array.dtype, root)
        text = array_text(array, first=False)
        signature = _signature("scatter", text, algorithm, root=str(root), counts=str(counts))
        source, shape = array if is_root else array[:0], (counts[self.rank], *array.shape[1:])
        begin = sum(elements[: self.rank]) if is_root else None
        call = self._call(signature, plan, source, shape, array.dtype, part_begin=begin)
        call.takes_out = not is_root
        return call

    def all_to_all(self, array: np.ndarray, counts: Matrix | None, algorithm: str) -> Call:
        """Row i of `counts` has the first dimensions of what rank i sends to each rank.

        None: equal pieces.
        """
        key = ("all_to_all", array.dtype, array.shape, counts, algorithm)
        return self._get(key, self._all_to_all, array, counts, algorithm)

    def _all_to_all(self, array: np.ndarray, counts: Matrix | None, algorithm: str) -> Call:
        check_movable("all_to_all", array.dtype)
        if counts is not None:
            return self._all_to_all_of_counts(array, counts, algorithm)
        if array.ndim == 0 or array.shape[0] % self.size:
            raise ValueError(
                f"all_to_all: the array has shape {array.shape}; "
                f"its first dimension must be a multiple of the {self.size} ranks"
            )
        piece = array.size // self.size
        plan = self._parts("all_to_all", algorithm, [piece] * self.size**2, array.dtype)
        signature = _signature("all_to_all", array_text(array), algorithm)
        return self._call(signature, plan, array, array.shape, array.dtype)

    def all_to_all_of_matrix(self, array: np.ndarray, counts: Matrix, algorithm: str) -> Call:
        """Return the all-to-all of counts that the ranks have exchanged.

        A program may have other counts in each call, so only the latest ones are cached, and "auto"
        is the algorithm that is planned fastest.
        """
        if algorithm == "auto" and self.size <= MOST_DIRECT:
            algorithm = "direct"
        key = ("all_to_all of a matrix", array.dtype, array.shape[1:], algorithm)
        latest: Call | None = self._kept.get(key)
        how = array, counts, algorithm, _NO_ARGUMENTS
        if latest is not None and latest.counts != counts:
            call = self._kept[key] = self._all_to_all_of_counts(*how)
            executable = latest.executable
            same = latest.schedule.algorithm == call.schedule.algorithm
            if same and executable is not None and executable.replan(call.plan):
                call.executable, latest.executable = executable, None
            else:
                self._free(latest)
        return self._get(key, self._all_to_all_of_counts, *how)

    def _all_to_all_of_counts(
        self,
        array: np.ndarray,
        counts: Matrix,
        algorithm: str,
        signature: Signature | None = None,
    ) -> Call:
        """Plan an all-to-all of counts.  None: with a signature of these counts."""
        if signature is None:
            check_matrix("all_to_all", array, counts, self.rank, self.size)
            text = array_text(array, first=False)
            signature = _signature("all_to_all", text, algorithm, counts=str(counts))
        row = prod(array.shape[1:])
        elements = [count * row for each in counts for count in each]
        plan = self._parts("all_to_all", algorithm, elements, array.dtype)
        shape = (sum(row[self.rank] for row in counts), *array.shape[1:])
        call = self._call(signature, plan, array, shape, array.dtype)
        call.counts = counts
        return call

    # --- first calls of a gather, scatter or split, and meetings ---

    def exchange_counts(
        self,
        collective: str,
        array: np.ndarray,
        algorithm: str,
        root: int | None = None,
        memory_kind: tuple[tuple[str, str], ...] = (),
    ) -> Call:
        """Return the all-gather before a gather or an all-to-all whose counts ranks do not know.

        Its signature is that of the collective.
        """
        kind = array.dtype, array.shape[1:]
        key = ("exchange counts", collective, *kind, algorithm, root, type(root), memory_kind)
        return self._get(
            key, self._exchange_counts, collective, array, algorithm, root, memory_kind
        )

    def _exchange_counts(
        self,
        collective: str,
        array: np.ndarray,
        algorithm: str,
        root: int | None,
        memory_kind: tuple[tuple[str, str], ...],
    ) -> Call:
        check_movable(collective, array.dtype)
        if root is not None:
            check_root(collective, root, self.size)
        resolve(collective, algorithm, self.nodes, array.nbytes, self.config)
        text = array_text(array, first=False)
        rooted = {} if root is None else {"root": str(root)}
        unknown = "a row" if collective == "all_to_all" else "None"
        signature = _signature(collective, text, algorithm, **rooted, counts=unknown)
        signature = Signature(collective, (*signature.arguments, *memory_kind))
        width = 2 * self.size + 1 if collective == "all_to_all" else 2
        return self._row_of_each(signature, np.empty(width, np.int64))

    def split(self) -> Call:
        """Return the all-gather of a split: some integers of every rank."""
        return self._get("split", self._row_of_each, Signature("split", ()), _SPLIT_ROW)

    def exchange(self, name: str, arguments: tuple[tuple[str, str], ...], nbytes: int) -> Call:
        """Return an all-gather of `nbytes` of every rank, which compare its `arguments`."""
        row = np.empty(nbytes, np.uint8)
        key = ("exchange", name, arguments, nbytes)
        return self._get(key, self._row_of_each, Signature(name, arguments), row)

    def _row_of_each(self, signature: Signature, row: np.ndarray) -> Call:
        """Return an all-gather of a short array like `row` of every rank, with this signature."""
        plan = self._parts("all_gather", "auto", [row.size] * self.size, row.dtype, slices=1)
        return self._call(signature, plan, row, (self.size, row.size), row.dtype)

    def announcement(self, root: int, nbytes: int, algorithm: str) -> Call:
        """Return the broadcast of `nbytes` before a scatter: the root's dtype and shape."""
        key = ("announcement", root, type(root), nbytes, algorithm)
        return self._get(key, self._announcement, root, nbytes, algorithm)

    def _announcement(self, root: int, nbytes: int, algorithm: str) -> Call:
        check_root("scatter", root, self.size)
        resolve("scatter", algorithm, self.nodes, nbytes, self.config)
        text = np.empty(nbytes, np.uint8)
        plan = self._whole("broadcast", "auto", text.size, text.dtype, root)
        arguments = {"root": str(root), "counts": "None"}
        signature = _signature("scatter", "an array", algorithm, **arguments)
        return self._call(signature, plan, text, text.shape, text.dtype, in_place=True)

    def meeting(self, name: str, arguments: tuple[tuple[str, str], ...]) -> Call:
        """Return a barrier with a name of its own; ranks compare its `arguments`."""
        return self._get(("meeting", name, arguments), self._meeting, name, arguments)

    def _meeting(self, name: str, arguments: tuple[tuple[str, str], ...]) -> Call:
        nothing = np.empty(0, np.uint8)
        plan = self._whole("barrier", "auto", 0, nothing.dtype)
        return self._call(Signature(name, arguments), plan, nothing, (0,), nothing.dtype)

    # --- by name ---

    def planned(self, collective: str, array: np.ndarray, arguments: dict[str, Any]) -> Call:
        """Return a new call of `collective`, which is not cached: its caller owns it.

        Raises ValueError for a collective that needs several plans, TypeError for arguments that
        the collective does not have.
        """
        check_selectors("plan", collective=collective)
        defaults = PLANNED.get(collective)
        if defaults is None:
            meant = "" if collective in ALGORITHMS else did_you_mean(collective, PLANNED)
            raise ValueError(
                f"plan: cannot plan {shown(collective)}; "
                f"choose one of {', '.join(map(repr, PLANNED))}{meant}"
            )
        for name in arguments:
            if name not in defaults:
                takes = ", ".join((*defaults, "out", "timeout_s"))
                raise TypeError(
                    f"plan: {collective} has no argument {name!r} here; it takes {takes}"
                )
        given = {**defaults, **arguments}
        if "counts" in given:
            given["counts"] = _planned_counts(collective, given["counts"])
        if "op" in given:
            given["op"] = op_name(collective, (array,), given["op"])
        check_selectors(collective, **{name: given[name] for name in given if name != "counts"})
        if given.get("counts") is not None:
            array = array.reshape(1) if array.ndim == 0 else array
        call: Call = getattr(self, f"_{collective}")(array, **given)
        return call

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
            shares=self.config.memory is not None,
        )


def _signature(collective: str, array: str, algorithm: str, **arguments: str) -> Signature:
    given = {"array": array} | arguments
    return Signature(collective, (*given.items(), ("algorithm", repr(algorithm))))


def _planned_counts(collective: str, counts: Any) -> Any:
    """Return the counts of a planned call as ints.  Raises TypeError if they are not all known."""
    if collective == "all_to_all" and counts is None:
        return None
    if counts is None:
        raise TypeError(
            f"plan: {collective} without counts; "
            "pass counts=, a list of the first dimension of each rank's array"
        )
    if collective != "all_to_all":
        return as_counts(collective, counts)
    _, matrix = as_row_or_matrix(collective, counts)
    if matrix is None:
        raise TypeError(
            "plan: all_to_all with the counts of one rank; pass counts=, one such list of each rank"
        )
    return matrix


def _if_given(wire: Any) -> dict[str, str]:
    return {} if wire is None else {"wire": repr(wire)}


def _elements(array: np.ndarray, counts: Shape) -> list[int]:
    row = int(np.prod(array.shape[1:], dtype=np.int64))
    return [count * row for count in counts]


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
