"""Plan schedules of one step that only move chunks, without following where each value is.

The direct all-to-all is such a schedule.  A program that sends other counts in each call plans it
anew each time, so planning must take no longer than a call.  `slices` and `shm_instructions` plan
any schedule, and here come the same messages and instructions: tests compare them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from ringreduce.planning.instructions import (
    SLOT,
    CopyBytes,
    FreeSlot,
    Instruction,
    Instructions,
    Operand,
    Post,
    Wait,
    pushed_bytes,
)
from ringreduce.planning.operations import (
    INPUT,
    OUTPUT,
    SCRATCH,
    Copy,
    PlannedMessage,
    PlannedSlice,
    PlannedStep,
    Span,
)
from ringreduce.planning.shm_instructions import ALIGNMENT, IN_SLOT_BYTES
from ringreduce.planning.slices import cut_in_segments, place_of_signature
from ringreduce.schedules.schedule import Schedule, Step

_MOST_RANKS = 64
"""The most ranks for which the messages of all ranks are listed."""
_NOTHING = Span(SCRATCH, 0, 0)


@dataclass(frozen=True, eq=False)
class OneStep:
    """The messages of all ranks in a schedule of one step: each moves one chunk."""

    held: Sequence[Sequence[int]]
    """Rank -> the chunks that it holds before, in order.  Every chunk is there once."""
    results: Sequence[Sequence[int]]
    """Rank -> the chunks that it holds after, in order."""
    sends: Sequence[Sequence[tuple[int, int]]]
    """Rank -> (peer, chunk) of each message that it sends, in order."""
    recvs: Sequence[Sequence[tuple[int, int, int]]]
    """Rank -> (peer, chunk, the place in the peer's sends) of each message that it receives."""
    kept: Sequence[Sequence[int]]
    """Rank -> the chunks that it holds before and after."""


def one_step(schedule: Schedule) -> OneStep | None:
    """Return the messages of a schedule; None unless it is one step that only moves chunks.

    Each chunk is held by one rank.  Each rank sends one message to each peer, each of another
    chunk that it holds.  It receives the chunks of the result that it does not hold.
    """
    ranks = range(schedule.size)
    if not 1 < len(ranks) <= _MOST_RANKS:
        return None
    held = [schedule.holds_before(rank) for rank in ranks]
    results = [schedule.holds_after(rank) for rank in ranks]
    steps = [tuple(schedule.steps(rank)) for rank in ranks]
    if any(len(each) != 1 or not _only_moves(each[0]) for each in steps):
        return None
    sends = [[(send.peer, send.chunks[0]) for send in step.sends] for (step,) in steps]
    recvs = [[(recv.peer, recv.chunks[0]) for recv in step.recvs] for (step,) in steps]
    place = {(r, *message): i for r in ranks for i, message in enumerate(sends[r])}
    received = {(peer, r, chunk) for r in ranks for peer, chunk in recvs[r]}
    moves_all = all(
        {chunk for _, chunk in sends[r]} <= {*held[r]}
        and sorted(chunk for _, chunk in recvs[r]) == sorted({*results[r]} - {*held[r]})
        and sorted(peer for peer, _ in sends[r]) == [peer for peer in ranks if peer != r]
        and len({chunk for _, chunk in sends[r]}) == len(sends[r])
        for r in ranks
    )
    chunks = sorted(chunk for row in held for chunk in row)
    once = chunks == [*range(len(schedule.weights))]
    if not (moves_all and once and received == place.keys()):
        return None
    placed = [[(peer, chunk, place[peer, r, chunk]) for peer, chunk in recvs[r]] for r in ranks]
    kept = [sorted({*held[r]} & {*results[r]}) for r in ranks]
    return OneStep(held, results, sends, placed, kept)


def _only_moves(step: Step) -> bool:
    lists = [send.chunks for send in step.sends] + [recv.chunks for recv in step.recvs]
    single = all(len(chunks) == 1 for chunks in lists)
    return single and not step.folds and not any(recv.reduce for recv in step.recvs)


class Copies(NamedTuple):
    """The copies of a rank through shared memory, in the order of its instructions."""

    numbers: Sequence[tuple[int, int, int]]
    """(offset of the target, offset of the source, bytes) of each.

    First to the slot, unless the data are single-copy; then of the chunks that the rank keeps; then
    from the peers; then to the peers, if data are pushed."""
    staged_bytes: Sequence[int]


class Moves:
    def __init__(
        self, one_step: OneStep, rank: int, counts: Sequence[int], itemsize: int, slices: int
    ) -> None:
        self._step, self._rank, self._itemsize, self._slices = one_step, rank, itemsize, slices
        self._counts = counts
        self._inputs = offsets_of(one_step.held[rank], counts)
        """Chunk -> its offset in INPUT, in elements."""
        self._outputs = offsets_of(one_step.results[rank], counts)
        """Chunk -> its offset in OUTPUT, in elements."""

    def _cut(self, index: int) -> tuple[Sequence[int], Sequence[int]]:
        if self._slices == 1:
            return [0] * len(self._counts), self._counts
        parts = [divmod(count, self._slices) for count in self._counts]
        begin = [index * each + min(index, longer) for each, longer in parts]
        return begin, [each + (index < longer) for each, longer in parts]

    # --- messages ---

    def planned(self, index: int, segment_bytes: int) -> PlannedSlice:
        step, rank = self._step, self._rank
        begin, counts = self._cut(index)

        def span(buffer: int, chunk: int) -> Span:
            if not counts[chunk]:
                return _NOTHING
            offsets = self._inputs if buffer == INPUT else self._outputs
            start = offsets[chunk] + begin[chunk]
            return Span(buffer, start, start + counts[chunk])

        recvs: list[PlannedMessage] = []
        for peer, chunk, _ in step.recvs[rank]:
            recvs += self._messages(peer, span(OUTPUT, chunk), segment_bytes)
        sends: list[PlannedMessage] = []
        for peer, chunk in step.sends[rank]:
            sends += self._messages(peer, span(INPUT, chunk), segment_bytes)
        kept = [chunk for chunk in step.kept[rank] if counts[chunk]]
        copies = tuple(Copy(span(INPUT, chunk), span(OUTPUT, chunk)) for chunk in kept)
        return PlannedSlice((PlannedStep(0, (), tuple(recvs), tuple(sends), ()),), copies, 0)

    def _messages(self, peer: int, span: Span, segment_bytes: int) -> Iterator[PlannedMessage]:
        buffer, begin, end = span
        segment = max(1, segment_bytes // self._itemsize)
        for start, stop in cut_in_segments(end - begin, segment):
            signature = None if start else place_of_signature((stop - start) * self._itemsize)
            yield PlannedMessage(peer, Span(buffer, begin + start, begin + stop), signature)

    # --- shared memory ---

    def copies(self, index: int, single_copy: bool, pushed: float = 0.0) -> Copies:
        """Return this rank's copies in slice `index`; `pushed` is the part that senders push."""
        step, rank, size = self._step, self._rank, self._itemsize
        begin, counts = self._cut(index)
        inputs, outputs = self._inputs, self._outputs

        def numbers(chunk: int, into: int, source: int) -> tuple[int, int, int]:
            return into, source, counts[chunk] * size

        def source(chunk: int, inputs: Mapping[int, int]) -> int:
            return (inputs[chunk] + begin[chunk]) * size

        def target(chunk: int) -> int:
            return (outputs[chunk] + begin[chunk]) * size

        kept = [numbers(chunk, target(chunk), source(chunk, inputs)) for chunk in step.kept[rank]]
        if single_copy:
            others = {
                peer: offsets_of(step.held[peer], self._counts) for peer, _ in step.sends[rank]
            }
            both_ends = []
            for peer, chunk, _ in step.recvs[rank]:
                into, start, nbytes = numbers(chunk, target(chunk), source(chunk, others[peer]))
                done = pushed_bytes(nbytes, pushed)
                both_ends.append((into + done, start + done, nbytes - done))
            for peer, chunk in step.sends[rank] if pushed else ():
                results = offsets_of(step.results[peer], self._counts)
                nbytes = pushed_bytes(counts[chunk] * size, pushed)
                both_ends.append((source(chunk, results), source(chunk, inputs), nbytes))
            return Copies([*kept, *both_ends], [0] * len(step.held))
        rooms = [
            [(counts[chunk] * size + ALIGNMENT - 1) & -ALIGNMENT for _, chunk in row]
            for row in step.sends
        ]
        ends = [[0, *accumulate(row)] for row in rooms]
        staged = [
            numbers(chunk, slot, source(chunk, inputs))
            for (_, chunk), slot in zip(step.sends[rank], ends[rank], strict=False)
        ]
        read = [
            numbers(chunk, target(chunk), ends[peer][place])
            for peer, chunk, place in step.recvs[rank]
        ]
        return Copies([*staged, *kept, *read], [row[-1] for row in ends])

    def instructions(self, index: int, single_copy: bool, pushed: float = 0.0) -> Instructions:
        """Return the instructions of slice `index`, as `shm_instructions.instructions_of` does.

        Copies without bytes are instructions too, so those of other counts differ in numbers alone.
        """
        step, rank, found = self._step, self._rank, self.copies(index, single_copy, pushed)
        numbers = iter(found.numbers)

        def copy(into: int, owner: int, source: int, target_rank: int = rank) -> CopyBytes:
            target_offset, source_offset, nbytes = next(numbers)
            target = Operand(target_rank, into, target_offset)
            return CopyBytes(target, Operand(owner, source, source_offset), nbytes)

        made: list[Instruction] = [FreeSlot(1, found.staged_bytes[rank])]
        if not single_copy:
            made += [copy(SLOT, rank, INPUT) for _ in step.sends[rank]]
        made.append(Post(1))
        made += [copy(OUTPUT, rank, INPUT) for _ in step.kept[rank]]
        for peer, _, _ in step.recvs[rank]:
            made.append(Wait(peer, 1, reads=True))
            made.append(copy(OUTPUT, peer, INPUT if single_copy else SLOT))
        if single_copy:
            made.append(FreeSlot(2))
            if pushed:
                made += [copy(OUTPUT, rank, INPUT, peer) for peer, _ in step.sends[rank]]
            made.append(Post(2))
            awaited = [each[0] for each in (step.recvs[rank] if pushed else step.sends[rank])]
            made += [Wait(peer, 2, reads=False) for peer in awaited]
        most = max(found.staged_bytes)
        return Instructions(
            tuple(made),
            rounds=(1 + single_copy,),
            slot_bytes=most,
            scratch=0,
            single_copy=single_copy,
            waits_for_readers=single_copy,
            publishes=most > IN_SLOT_BYTES,
            notes=(tuple(self.notes(index)),),
        )

    def notes(self, index: int) -> Iterator[tuple[int, str, int, int]]:
        """Yield (step, "send" or "recv", peer, bytes) of each message of slice `index`."""
        _, counts = self._cut(index)
        for peer, chunk, _ in self._step.recvs[self._rank]:
            yield 0, "recv", peer, counts[chunk] * self._itemsize
        for peer, chunk in self._step.sends[self._rank]:
            yield 0, "send", peer, counts[chunk] * self._itemsize


def offsets_of(chunks: Sequence[int], counts: Sequence[int]) -> dict[int, int]:
    starts = accumulate((counts[chunk] for chunk in chunks), initial=0)
    return dict(zip(chunks, starts, strict=False))
