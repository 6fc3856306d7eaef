"""Plan schedules of one step that only move chunks, without following where each value is.

The direct all-to-all is such a schedule.  A program that sends other counts in each call plans it
anew each time, so planning must take no longer than a call.  `slices` and `shm_instructions` plan
any schedule, and here come the same messages and instructions: tests compare them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from ringreduce.planning.instructions import (
    SLOT,
    CopyBytes,
    FreeSlot,
    Instruction,
    Instructions,
    Place,
    Post,
    Wait,
)
from ringreduce.planning.operations import (
    INPUT,
    OUTPUT,
    SCRATCH,
    Copy,
    Message,
    PlannedSlice,
    PlannedStep,
    Span,
)
from ringreduce.planning.shm_instructions import ALIGNMENT, IN_SLOT_BYTES
from ringreduce.planning.slices import cut_in_segments, place_of_signature
from ringreduce.schedules.schedule import Chunks, Schedule, Step

_MOST_RANKS = 64
"""The most ranks for which the messages of all ranks are listed."""
_NOTHING = Span(SCRATCH, 0, 0)
"""The span of an empty message."""


@dataclass(frozen=True, eq=False)
class OneStep:
    """The messages of all ranks in a schedule of one step: each moves one chunk."""

    held: np.ndarray
    """Row r has the chunks that rank r holds before, in order.  Every chunk is there once."""
    sent: np.ndarray
    """Row r has the chunks that rank r sends, in order."""
    peers: Sequence[Sequence[int]]
    """Rank -> the receivers of these chunks."""
    sources: Sequence[Sequence[tuple[int, int, int]]]
    """Rank -> (peer, chunk, its place in the peer's row of `sent`) of each receive, in order."""
    kept: Sequence[Sequence[int]]
    """Rank -> the chunks that it holds before and after."""


def one_step(schedule: Schedule) -> OneStep | None:
    """Return the messages of a schedule; None unless it is one step that only moves chunks.

    Each chunk is held by one rank, and all ranks hold as many.  Each rank sends as many messages,
    at most one to each peer, each of another chunk that it holds.  It receives the chunks of the
    result that it does not hold.
    """
    ranks = range(schedule.size)
    if not 1 < len(ranks) <= _MOST_RANKS:
        return None
    held = [schedule.holds_before(rank) for rank in ranks]
    result = [schedule.holds_after(rank) for rank in ranks]
    steps = [tuple(schedule.steps(rank)) for rank in ranks]
    if any(len(each) != 1 or not _only_moves(each[0]) for each in steps):
        return None
    sends = [[(send.peer, send.chunks[0]) for send in step.sends] for (step,) in steps]
    recvs = [[(recv.peer, recv.chunks[0]) for recv in step.recvs] for (step,) in steps]
    place = {(r, *message): i for r in ranks for i, message in enumerate(sends[r])}
    received = {(peer, r, chunk) for r in ranks for peer, chunk in recvs[r]}
    moves_all = all(
        {chunk for _, chunk in sends[r]} <= {*held[r]}
        and sorted(chunk for _, chunk in recvs[r]) == sorted({*result[r]} - {*held[r]})
        and len({peer for peer, _ in sends[r]}) == len(sends[r]) == len(sends[0])
        and len({chunk for _, chunk in sends[r]}) == len(sends[r])
        for r in ranks
    )
    chunks = sorted(chunk for row in held for chunk in row)
    alike = chunks == [*range(len(schedule.weights))] and len({*map(len, held)}) == 1
    if not (moves_all and alike and received == place.keys()):
        return None
    return OneStep(
        np.array(held, np.int64),
        np.array([[chunk for _, chunk in row] for row in sends], np.int64),
        [[peer for peer, _ in row] for row in sends],
        [[(peer, chunk, place[peer, r, chunk]) for peer, chunk in recvs[r]] for r in ranks],
        [sorted({*held[r]} & {*result[r]}) for r in ranks],
    )


def _only_moves(step: Step) -> bool:
    lists = [send.chunks for send in step.sends] + [recv.chunks for recv in step.recvs]
    single = all(len(chunks) == 1 for chunks in lists)
    return single and not step.folds and not any(recv.reduce for recv in step.recvs)


class Moves:
    """The messages of one rank in a schedule of one step, for chunks of `counts` elements.

    `results` are the chunks that the rank holds after.
    """

    def __init__(
        self,
        one_step: OneStep,
        rank: int,
        counts: Sequence[int],
        itemsize: int,
        slices: int,
        results: Chunks,
    ) -> None:
        self._step, self._rank, self._itemsize, self._slices = one_step, rank, itemsize, slices
        self._counts = np.array(counts, np.int64)
        held = self._counts[one_step.held]
        offsets = np.empty_like(self._counts)
        offsets[one_step.held] = held.cumsum(axis=1) - held
        self._inputs: list[int] = offsets.tolist()
        """Chunk -> its offset in INPUT of the rank that holds it, in elements."""
        starts = accumulate((counts[chunk] for chunk in results), initial=0)
        self._outputs = dict(zip(results, starts, strict=False))
        """Chunk of the result -> its offset in OUTPUT, in elements."""

    def _cut(self, index: int) -> tuple[list[int], list[int]]:
        """Return the first element of each chunk in slice `index`, and its elements there."""
        each, longer = np.divmod(self._counts, self._slices)
        begin = index * each + np.minimum(index, longer)
        return begin.tolist(), (each + (index < longer)).tolist()

    # --- messages ---

    def planned(self, index: int, segment_bytes: int) -> PlannedSlice:
        """Return the step of slice `index`, as `slices.plan_slice` plans it."""
        step, rank = self._step, self._rank
        begin, counts = self._cut(index)

        def span(buffer: int, chunk: int) -> Span:
            if not counts[chunk]:
                return _NOTHING
            offsets = self._inputs if buffer == INPUT else self._outputs
            start = offsets[chunk] + begin[chunk]
            return Span(buffer, start, start + counts[chunk])

        recvs: list[Message] = []
        for peer, chunk, _ in step.sources[rank]:
            recvs += self._messages(peer, span(OUTPUT, chunk), segment_bytes)
        sends: list[Message] = []
        for peer, chunk in zip(step.peers[rank], step.sent[rank].tolist(), strict=True):
            sends += self._messages(peer, span(INPUT, chunk), segment_bytes)
        kept = [chunk for chunk in step.kept[rank] if counts[chunk]]
        copies = tuple(Copy(span(INPUT, chunk), span(OUTPUT, chunk)) for chunk in kept)
        return PlannedSlice((PlannedStep(0, (), tuple(recvs), tuple(sends), ()),), copies, 0)

    def _messages(self, peer: int, span: Span, segment_bytes: int) -> Iterator[Message]:
        buffer, begin, end = span
        segment = max(1, segment_bytes // self._itemsize)
        for start, stop in cut_in_segments(end - begin, segment):
            signature = None if start else place_of_signature((stop - start) * self._itemsize)
            yield Message(peer, Span(buffer, begin + start, begin + stop), signature)

    # --- shared memory ---

    def instructions(self, index: int, single_copy: bool) -> Instructions:
        """Return the instructions of slice `index`, as `shm_instructions.instructions_of` does."""
        step, rank, size = self._step, self._rank, self._itemsize
        begin, counts = self._cut(index)
        nbytes = [count * size for count in counts]
        in_slot, staged = self._staged(nbytes, single_copy)

        def source(owner: int, chunk: int) -> Place:
            return Place(owner, INPUT, (self._inputs[chunk] + begin[chunk]) * size)

        def target(chunk: int) -> Place:
            return Place(rank, OUTPUT, (self._outputs[chunk] + begin[chunk]) * size)

        sent = step.sent[rank].tolist()
        made: list[Instruction] = [FreeSlot(1, staged[rank])]
        if not single_copy:
            made += [
                CopyBytes(Place(rank, SLOT, slot), source(rank, chunk), nbytes[chunk])
                for chunk, slot in zip(sent, in_slot[rank], strict=True)
                if nbytes[chunk]
            ]
        made.append(Post(1))
        made += [
            CopyBytes(target(chunk), source(rank, chunk), nbytes[chunk])
            for chunk in step.kept[rank]
            if nbytes[chunk]
        ]
        for peer, chunk, place in step.sources[rank]:
            made.append(Wait(peer, 1, reads=True))
            if nbytes[chunk]:
                slot = Place(peer, SLOT, in_slot[peer][place])
                there = source(peer, chunk) if single_copy else slot
                made.append(CopyBytes(target(chunk), there, nbytes[chunk]))
        if single_copy:
            made += [FreeSlot(2), Post(2)]
            made += [Wait(peer, 2, reads=False) for peer in step.peers[rank]]
        return Instructions(
            tuple(made),
            rounds=(1 + single_copy,),
            slot_bytes=max(staged),
            scratch=0,
            single_copy=single_copy,
            publishes=max(staged) > IN_SLOT_BYTES,
            notes=(tuple(self._notes(nbytes)),),
        )

    def _staged(
        self, nbytes: Sequence[int], single_copy: bool
    ) -> tuple[list[list[int]], list[int]]:
        """Return where each rank stages each chunk that it sends, and the bytes that it stages."""
        sent = np.array(nbytes, np.int64)[self._step.sent] * (not single_copy)
        room = -(-sent // ALIGNMENT) * ALIGNMENT
        ends = room.cumsum(axis=1)
        return (ends - room).tolist(), ends[:, -1].tolist()

    def _notes(self, nbytes: Sequence[int]) -> Iterator[tuple[int, str, int, int]]:
        step, rank = self._step, self._rank
        for peer, chunk, _ in step.sources[rank]:
            yield 0, "recv", peer, nbytes[chunk]
        for peer, chunk in zip(step.peers[rank], step.sent[rank].tolist(), strict=True):
            yield 0, "send", peer, nbytes[chunk]
