"""Turn schedule, counts and rank into the offsets of every message, and the size of scratch.

A plan divides the data into slices.  Every slice goes through the schedule on its own, so a plan is
one list of steps for each slice.  A plan is a pure function of its arguments: all ranks compute the
same borders between messages.  It moves no data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from ringreduce.planning.one_step import Moves, OneStep, offsets_of
from ringreduce.planning.operations import ChunkOffsets, PlannedSlice
from ringreduce.planning.slices import SEGMENT_BYTES, plan_slice
from ringreduce.schedules.schedule import Schedule, Step

_UNCUT = 1 << 62
"""Bytes of a segment that no message exceeds."""


@dataclass
class Plan:
    """The plan of one rank for one call.  A slice is planned when first asked for, and kept."""

    schedule: Schedule
    rank: int
    itemsize: int
    count: int
    slices: int
    chunk_offsets: Callable[[int], Sequence[ChunkOffsets]]
    """Slice -> the offsets of its chunks.  Computed on demand: there may be many slices."""
    input_count: int
    output_count: int
    segment_bytes: int
    """Longer messages are sent in segments of about this size."""
    of: Callable[[int], Plan]
    """Rank -> that rank's plan (any rank's, this one's too), with messages not cut in segments."""
    in_place: bool
    """Whether OUTPUT may be the same memory as INPUT."""
    moves: Moves | None = None
    """The messages of a schedule of one step; None: plan it as any other schedule."""
    single_copy: bool = False
    """Whether peers read the arrays directly, where shared memory runs the plan and can do so."""
    _slices: dict[int, PlannedSlice] = field(default_factory=dict)
    _steps: tuple[Step, ...] | None = None

    def slice(self, index: int) -> PlannedSlice:
        if index not in self._slices and self.moves is not None:
            self._slices[index] = self.moves.planned(index, self.segment_bytes)
        if index not in self._slices:
            if self._steps is None:
                self._steps = tuple(self.schedule.steps(self.rank))
            self._slices[index] = plan_slice(
                self.schedule,
                self.rank,
                self._steps,
                self.chunk_offsets(index),
                self.itemsize,
                self.segment_bytes,
            )
        return self._slices[index]

    @property
    def sent_bytes(self) -> int:
        slices = map(self.slice, range(self.slices))
        spans = [m.span for s in slices for step in s.steps for m in step.sends]
        return self.itemsize * sum(span.stop - span.start for span in spans)


def plan_whole(
    schedule: Schedule,
    rank: int,
    count: int,
    itemsize: int,
    slices: int,
    segment_bytes: int = SEGMENT_BYTES,
) -> Plan:
    """Plan a collective whose INPUT, and OUTPUT, is the whole array of `count` elements.

    The OUTPUT of a rank that holds no chunk after the collective is empty.  A slice is a
    contiguous part of the array, divided into the chunks in proportion to the schedule's
    weights.
    """
    total = sum(schedule.weights)
    shares = [0, *accumulate(schedule.weights)]

    def chunk_offsets(index: int) -> list[ChunkOffsets]:
        low, high = _cut(count, slices, index)
        borders = [low + (high - low) * share // total for share in shares] if total else []
        return [ChunkOffsets(a, a, b - a) for a, b in pairwise(borders)]

    output_count = count if schedule.holds_after(rank) or not schedule.weights else 0

    def of(peer: int) -> Plan:
        return plan_whole(schedule, peer, count, itemsize, slices, _UNCUT)

    return Plan(
        schedule,
        rank,
        itemsize,
        count,
        slices,
        chunk_offsets,
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
    one_step: OneStep | None = None,
) -> Plan:
    """Plan a collective in which chunk i has ``counts[i]`` elements and a rank may hold only some.

    INPUT and OUTPUT are the chunks that the rank holds before and after, concatenated; a slice
    is a part of every chunk.  `one_step`: the messages of a schedule of one step that only
    moves chunks.
    """
    held, result = schedule.holds_before(rank), schedule.holds_after(rank)

    def chunk_offsets(index: int) -> list[ChunkOffsets]:
        before, after = offsets_of(held, counts), offsets_of(result, counts)
        cuts = [_cut(count, slices, index) for count in counts]
        return [
            ChunkOffsets(before.get(chunk, 0) + low, after.get(chunk, 0) + low, high - low)
            for chunk, (low, high) in enumerate(cuts)
        ]

    moves = None
    if one_step is not None:
        moves = Moves(one_step, rank, counts, itemsize, slices)

    def of(peer: int) -> Plan:
        return plan_parts(schedule, peer, counts, itemsize, slices, _UNCUT, one_step)

    return Plan(
        schedule,
        rank,
        itemsize,
        sum(counts),
        slices,
        chunk_offsets,
        sum(counts[chunk] for chunk in held),
        sum(counts[chunk] for chunk in result),
        segment_bytes,
        of,
        in_place=False,
        moves=moves,
    )


def shard_counts(count: int, parts: int) -> list[int]:
    """Return the lengths that ``np.array_split`` makes: the first ``count % parts`` are one longer.

    >>> shard_counts(count=7, parts=3)
    [3, 2, 2]
    """
    return [stop - start for start, stop in (_cut(count, parts, part) for part in range(parts))]


def _cut(count: int, parts: int, part: int) -> tuple[int, int]:
    return _border(count, parts, part), _border(count, parts, part + 1)


def _border(count: int, parts: int, part: int) -> int:
    each, longer = divmod(count, parts)
    return part * each + min(part, longer)
