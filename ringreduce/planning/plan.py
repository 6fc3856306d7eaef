"""Schedule x counts x rank -> offsets and scratch: what this rank moves, where from and where to.

A plan cuts the data into slices.  Every slice goes through the same schedule on its own, so a plan
is a list of step lists, one a slice; it moves nothing itself.  It is a pure function of its
arguments, so all ranks draw the borders of messages alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from ringreduce.planning.operations import Placed, PlannedSlice
from ringreduce.planning.slices import SEGMENT_BYTES, plan_slice
from ringreduce.schedules.schedule import Chunks, Schedule, Step

_UNCUT = 1 << 62
"""Bytes of a segment."""


@dataclass
class Plan:
    """The plan of one rank for one call.  Slices are planned when first asked for, and kept."""

    schedule: Schedule
    rank: int
    itemsize: int
    """Bytes an element."""
    count: int
    """Elements of all chunks."""
    slices: int
    placed: Callable[[int], Sequence[Placed]]
    """Slice -> where each chunk of it lies: worked out when asked for, as there may be many."""
    input_count: int
    """Elements of INPUT, on this rank."""
    output_count: int
    """Elements of OUTPUT, on this rank."""
    segment_bytes: int
    of: Callable[[int], Plan]
    """The plan of another rank, or this one's again, with messages that are not cut."""
    in_place: bool
    """Whether OUTPUT may be INPUT."""
    _slices: dict[int, PlannedSlice] = field(default_factory=dict)
    _steps: tuple[Step, ...] | None = None

    def slice(self, index: int) -> PlannedSlice:
        """The steps of slice `index`."""
        if index not in self._slices:
            if self._steps is None:
                self._steps = tuple(self.schedule.steps(self.rank))
            self._slices[index] = plan_slice(
                self.schedule,
                self.rank,
                self._steps,
                self.placed(index),
                self.itemsize,
                self.segment_bytes,
            )
        return self._slices[index]


def plan_whole(
    schedule: Schedule,
    rank: int,
    count: int,
    itemsize: int,
    slices: int,
    segment_bytes: int = SEGMENT_BYTES,
) -> Plan:
    """A plan for a collective whose INPUT is the whole array of `count` elements, and OUTPUT too.

    A rank that holds nothing after has no OUTPUT.

    Slices are contiguous; inside a slice the chunks lie in order, by weight.
    """
    total = sum(schedule.weights)
    shares = [0, *accumulate(schedule.weights)]

    def placed(index: int) -> list[Placed]:
        low, high = _cut(count, slices, index)
        borders = [low + (high - low) * share // total for share in shares] if total else []
        return [Placed(a, a, b - a) for a, b in pairwise(borders)]

    output_count = count if schedule.holds_after(rank) or not schedule.weights else 0

    def of(peer: int) -> Plan:
        return plan_whole(schedule, peer, count, itemsize, slices, _UNCUT)

    return Plan(
        schedule,
        rank,
        itemsize,
        count,
        slices,
        placed,
        count,
        output_count,
        segment_bytes,
        of,
        in_place=True,
    )


def plan_parts(
    schedule: Schedule,
    rank: int,
    counts: Sequence[int],
    itemsize: int,
    slices: int,
    segment_bytes: int = SEGMENT_BYTES,
) -> Plan:
    """A plan for a collective in which chunk i has ``counts[i]`` elements and a rank may hold some.

    INPUT and OUTPUT are the chunks that the rank holds before and after, one behind the other.  A
    slice is a piece of every chunk.
    """
    before = _offsets(schedule.holds_before(rank), counts)
    after = _offsets(schedule.holds_after(rank), counts)

    def placed(index: int) -> list[Placed]:
        cuts = [_cut(count, slices, index) for count in counts]
        return [
            Placed(before.get(chunk, 0) + low, after.get(chunk, 0) + low, high - low)
            for chunk, (low, high) in enumerate(cuts)
        ]

    def of(peer: int) -> Plan:
        return plan_parts(schedule, peer, counts, itemsize, slices, _UNCUT)

    return Plan(
        schedule,
        rank,
        itemsize,
        sum(counts),
        slices,
        placed,
        sum(counts[chunk] for chunk in before),
        sum(counts[chunk] for chunk in after),
        segment_bytes,
        of,
        in_place=False,
    )


def shard_counts(count: int, parts: int) -> list[int]:
    """The lengths that ``np.array_split`` gives: the first ``count % parts`` are one longer."""
    return [stop - start for start, stop in (_cut(count, parts, part) for part in range(parts))]


def _cut(count: int, parts: int, part: int) -> tuple[int, int]:
    return _border(count, parts, part), _border(count, parts, part + 1)


def _border(count: int, parts: int, part: int) -> int:
    each, longer = divmod(count, parts)
    return part * each + min(part, longer)


def _offsets(chunks: Chunks, counts: Sequence[int]) -> dict[int, int]:
    starts = accumulate((counts[chunk] for chunk in chunks), initial=0)
    return dict(zip(chunks, starts, strict=False))
