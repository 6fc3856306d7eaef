"""Plan one slice of one rank: the memory of every message, fold and copy of the schedule's steps.

A *run* is a list of chunks that travel as one message: they follow each other in the array, with
only empty chunks between them.  Long runs are sent in several *segments*.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from ringreduce.planning.operations import (
    BESIDE,
    INPUT,
    INSIDE,
    INSIDE_BYTES,
    OUTPUT,
    SCRATCH,
    ChunkOffsets,
    Copy,
    Fold,
    PlannedMessage,
    PlannedSlice,
    PlannedStep,
    Span,
)
from ringreduce.schedules.schedule import Chunks, Schedule, Step, chunk_of, source_of

SEGMENT_BYTES = 1 << 20
"""Longer runs are sent as several messages of about this size, in bytes."""
_MOST_SEGMENTS = 256
"""The most segments of one run; the segments of longer runs are longer."""


def plan_slice(
    schedule: Schedule,
    rank: int,
    steps: Sequence[Step],
    offsets: Sequence[ChunkOffsets],
    itemsize: int,
    segment_bytes: int,
) -> PlannedSlice:
    return _SlicePlanner(schedule, rank, steps, offsets, itemsize, segment_bytes).plan()


def cut_in_segments(count: int, segment: int) -> list[tuple[int, int]]:
    """Cut a run of `count` elements; return the (start, stop) of its segments, at least one."""
    length = max(segment, -(-count // _MOST_SEGMENTS))
    return [(at, min(at + length, count)) for at in range(0, max(count, 1), length)]


def place_of_signature(nbytes: int) -> str:
    return INSIDE if nbytes <= INSIDE_BYTES else BESIDE


class _Scratch:
    """A first-fit allocator of scratch, in elements."""

    def __init__(self) -> None:
        self.size = 0
        self._allocated: dict[int, int] = {}
        """Start -> length of each allocated range."""

    def allocate(self, count: int) -> int:
        """Return the start of `count` free elements; an empty range is not recorded."""
        start = 0
        for taken, length in sorted(self._allocated.items()):
            if taken - start >= count:
                break
            start = taken + length
        if count:
            self._allocated[start] = count
            self.size = max(self.size, start + count)
        return start

    def free(self, start: int) -> None:
        self._allocated.pop(start, None)


class _SlicePlanner:
    """Plans one rank's steps in order, tracking where the current value of each chunk is."""

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        steps: Sequence[Step],
        offsets: Sequence[ChunkOffsets],
        itemsize: int,
        segment_bytes: int,
    ) -> None:
        self.rank, self.steps, self.offsets, self.itemsize = rank, steps, offsets, itemsize
        self.segment = max(1, segment_bytes // itemsize)
        self.size = schedule.size
        self.result = frozenset(schedule.holds_after(rank))
        self.completes = schedule.completes and schedule.completes(rank)
        self.location: dict[int, Span] = {
            chunk: Span(INPUT, offsets[chunk].input, offsets[chunk].input + offsets[chunk].count)
            for chunk in schedule.holds_before(rank)
        }
        """Chunk, or name of a copy -> the memory of its current value."""
        self.scratch = _Scratch()
        self.allocations: list[tuple[int, Chunks]] = []
        """Ranges of scratch that may outlive their step: the start, and the chunks inside."""
        self.signed_to: set[int] = set()
        """Peers to which a message with the signature is already planned."""
        self.signed_from: set[int] = set()
        """Peers from which a message with the signature is already planned."""
        self.last_use: dict[int, int] = {}
        """Chunk or copy -> the last step that sends, receives or folds it."""
        self.last_write: dict[int, int] = {}
        """Chunk or copy -> the last step that changes it."""
        self.copies: dict[int, dict[int, int]] = {}
        """Chunk -> its received copies that are not folded yet: name -> rank."""
        for index, step in enumerate(steps):
            for send in step.sends:
                self.last_use.update(dict.fromkeys(map(self._canonical, send.chunks), index))
            for recv in step.recvs:
                self.last_use.update(dict.fromkeys(recv.chunks, index))
                self.last_write.update(dict.fromkeys(recv.chunks, index))
            copies = [name for name in self.last_use if chunk_of(name) in step.folds]
            self.last_use.update(dict.fromkeys((*step.folds, *copies), index))
            self.last_write.update(dict.fromkeys(step.folds, index))

    def plan(self) -> PlannedSlice:
        parts = [part for index in range(len(self.steps)) for part in self._step(index)]
        steps = tuple(part for part in parts if part.recvs or part.sends or part.folds)
        final_copies = tuple(
            Copy(self.location[chunk], self._output(chunk))
            for chunk in sorted(self.result)
            if self._count(chunk) and self.location[chunk] != self._output(chunk)
        )
        return PlannedSlice(steps, final_copies, self.scratch.size)

    def _step(self, index: int) -> Iterator[PlannedStep]:
        step = self.steps[index]
        packs: list[Copy] = []
        temporary: list[int] = []
        sends: list[PlannedMessage] = []
        for send in step.sends:
            for run in self._runs(send.chunks, send.peer, self.signed_to):
                span = self._send_span(run, packs, temporary)
                sends += self._messages(send.peer, span, self.signed_to)
        segments = self._segments_to_fold(step)
        if segments:
            yield from self._step_in_parts(index, step, segments, packs, sends)
        else:
            yield self._whole_step(index, step, packs, sends)
        self._release(index, temporary)

    def _whole_step(
        self, index: int, step: Step, packs: list[Copy], sends: list[PlannedMessage]
    ) -> PlannedStep:
        recvs: list[PlannedMessage] = []
        arrived: dict[int, list[tuple[int, Span]]] = {}
        overwritten: dict[int, Span] = {}
        for recv in step.recvs:
            overwritten.update((c, _NOTHING) for c in recv.chunks if not self._count(c))
            for run in self._runs(recv.chunks, recv.peer, self.signed_from):
                span = self._receive_span(run, recv.reduce)
                recvs += self._messages(recv.peer, span, self.signed_from)
                for chunk, piece in zip(run, self._pieces(run, span), strict=True):
                    if recv.reduce:
                        arrived.setdefault(chunk, []).append((recv.peer, piece))
                    else:
                        overwritten[chunk] = piece
        folds: list[Fold] = []
        for chunk, spans in arrived.items():
            into = self._output(chunk) if chunk in self.result else min(spans)[1]
            values = [*spans, (self.rank, self.location[chunk])]
            folds.append(self._fold(index, chunk, values, into))
            self.location[chunk] = into
        self.location.update(overwritten)
        for copy in overwritten:
            if (source := source_of(copy)) is not None:
                self.copies.setdefault(chunk_of(copy), {})[copy] = source
        folds += [self._fold_copies(index, chunk) for chunk in step.folds if self._count(chunk)]
        return PlannedStep(index, tuple(packs), tuple(recvs), tuple(sends), _merged(folds))

    # --- steps in parts ---

    def _segments_to_fold(self, step: Step) -> list[tuple[int, int]]:
        """Return the (start, stop) of the segments in which to fold a step; none for one part.

        A step is planned in parts if all its messages bring the same chunks, to be reduced: one run
        of several segments, all of it part of the result.  None of these chunks may be sent in the
        same step, since a value that is being sent must not change before the send is complete.
        """
        brought = {(recv.chunks, recv.reduce) for recv in step.recvs}
        if len(brought) != 1 or not step.recvs[0].reduce or step.folds:
            return []
        runs = list(self._runs(step.recvs[0].chunks, peer=-1, signed={-1}))
        sent = {self._canonical(chunk) for send in step.sends for chunk in send.chunks}
        if len(runs) != 1 or not sent.isdisjoint(runs[0]) or not self.result.issuperset(runs[0]):
            return []
        segments = self._segments(self._length(runs[0]))
        return segments if len(segments) > 1 else []

    def _step_in_parts(
        self,
        index: int,
        step: Step,
        segments: list[tuple[int, int]],
        packs: list[Copy],
        sends: list[PlannedMessage],
    ) -> Iterator[PlannedStep]:
        """Plan a step in parts, one for each segment; all segments share the same scratch."""
        (run,) = self._runs(step.recvs[0].chunks, peer=-1, signed={-1})
        longest = max(stop - start for start, stop in segments)
        bases = {recv.peer: self.scratch.allocate(longest) for recv in step.recvs}
        for number, (start, stop) in enumerate(segments):
            recvs = []
            folds: list[Fold] = []
            for peer, base in bases.items():
                span = Span(SCRATCH, base, base + stop - start)
                recvs.append(self._message(peer, span, self.signed_from))
            offset = -start
            for chunk in run:
                count = self._count(chunk)
                low, high = max(0, -offset), min(count, stop - start - offset)
                if low < high:
                    values = [(self.rank, _part(self.location[chunk], low, high))]
                    for peer, base in bases.items():
                        at = base + offset
                        values.append((peer, Span(SCRATCH, at + low, at + high)))
                    into = _part(self._output(chunk), low, high)
                    folds.append(self._fold(index, chunk, values, into))
                offset += count
            more = number < len(segments) - 1
            yield PlannedStep(
                index, tuple(packs), tuple(recvs), tuple(sends), _merged(folds), more_parts=more
            )
            packs, sends = [], []
        for base in bases.values():
            self.scratch.free(base)
        self.location.update({chunk: self._output(chunk) for chunk in run})

    # --- messages ---

    def _runs(self, chunks: Chunks, peer: int, signed: set[int]) -> Iterator[Chunks]:
        """Divide the chunks of one Send or Recv into runs, without the empty chunks.

        Copies have no place in the array: all adjacent ones form one run.  Sender and
        receiver form the same runs.  If nothing is left, an empty run for a peer not in
        `signed` carries the signature.
        """
        runs: list[list[int]] = []
        for chunk in chunks:
            if not self._count(chunk):
                continue
            if runs and self._follows(runs[-1][-1], chunk):
                runs[-1].append(chunk)
            else:
                runs.append([chunk])
        if not runs and peer not in signed:
            runs.append([])
        return map(tuple, runs)

    def _follows(self, chunk: int, following: int) -> bool:
        """Tell whether only empty chunks are between two chunks, or both are copies."""
        copies = [source_of(name) is not None for name in (chunk, following)]
        if any(copies):
            return all(copies)
        between = range(chunk + 1, following)
        return chunk < following and not any(self._count(c) for c in between)

    def _messages(self, peer: int, span: Span, signed: set[int]) -> Iterator[PlannedMessage]:
        """Yield the messages of one run, one a segment; sender and receiver cut alike."""
        for start, stop in self._segments(span.stop - span.start):
            yield self._message(peer, _part(span, start, stop), signed)

    def _segments(self, count: int) -> list[tuple[int, int]]:
        return cut_in_segments(count, self.segment)

    def _message(self, peer: int, span: Span, signed: set[int]) -> PlannedMessage:
        if peer in signed:
            return PlannedMessage(peer, span, None)
        signed.add(peer)
        return PlannedMessage(
            peer, span, place_of_signature((span.stop - span.start) * self.itemsize)
        )

    # --- memory of values ---

    def _output(self, chunk: int) -> Span:
        at = self.offsets[chunk]
        return Span(OUTPUT, at.output, at.output + at.count)

    def _length(self, run: Chunks) -> int:
        return sum(map(self._count, run))

    def _count(self, name: int) -> int:
        return self.offsets[chunk_of(name)].count

    def _canonical(self, name: int) -> int:
        return chunk_of(name) if source_of(name) == self.rank else name

    def _pieces(self, run: Chunks, span: Span) -> Iterator[Span]:
        start = span.start
        for chunk in run:
            yield Span(span.buffer, start, start + self._count(chunk))
            start += self._count(chunk)

    def _allocate(self, run: Chunks) -> Span:
        start = self.scratch.allocate(self._length(run))
        return Span(SCRATCH, start, start + self._length(run))

    def _send_span(self, run: Chunks, packs: list[Copy], temporary: list[int]) -> Span:
        """Return the span to send a run from: scratch that it is packed into, if not contiguous."""
        spans = [self.location[self._canonical(chunk)] for chunk in run]
        if all(a.buffer == b.buffer and a.stop == b.start for a, b in pairwise(spans)):
            return Span(spans[0].buffer, spans[0].start, spans[-1].stop) if run else _NOTHING
        span = self._allocate(run)
        temporary.append(span.start)
        packs.extend(map(Copy, spans, self._pieces(run, span)))
        return span

    def _receive_span(self, run: Chunks, reduce: bool) -> Span:
        """Return the span to receive a run into: in OUTPUT if the run belongs there as it is.

        Else in scratch: the run is reduced, not contiguous in OUTPUT, or only passed on.
        """
        spans = [self._output(chunk) for chunk in run if chunk in self.result]
        if not run:
            return _NOTHING
        if (
            not reduce
            and len(spans) == len(run)
            and all(a.stop == b.start for a, b in pairwise(spans))
        ):
            return Span(OUTPUT, spans[0].start, spans[-1].stop)
        span = self._allocate(run)
        self.allocations.append((span.start, run))
        return span

    def _fold(self, index: int, chunk: int, values: list[tuple[int, Span]], into: Span) -> Fold:
        if self.completes is None:
            ends = chunk in self.result and self.last_write[chunk] == index
            finishes = ends or len(values) == self.size
        else:
            finishes = (index, chunk) in self.completes
        return Fold(tuple(span for _, span in sorted(values)), into, finishes)

    def _fold_copies(self, index: int, chunk: int) -> Fold:
        copies = self.copies.pop(chunk)
        values = [(self.rank, self.location[chunk])]
        values += [(rank, self.location[copy]) for copy, rank in copies.items()]
        if chunk in self.result:
            into = self._output(chunk)
        else:
            into = self._allocate((chunk,))
            self.allocations.append((into.start, (chunk,)))
        self.location[chunk] = into
        return self._fold(index, chunk, values, into)

    def _release(self, index: int, temporary: list[int]) -> None:
        """Free the scratch whose values no later step, and no final copy, reads."""
        for start in temporary:
            self.scratch.free(start)
        kept = []
        for start, run in self.allocations:
            stop = start + self._length(run)
            live = any(
                self.location[chunk].buffer == SCRATCH
                and start <= self.location[chunk].start < stop
                and (self.last_use[chunk] > index or chunk in self.result)
                for chunk in run
                if self._count(chunk)
            )
            if live:
                kept.append((start, run))
            else:
                self.scratch.free(start)
        self.allocations = kept


_NOTHING = Span(SCRATCH, 0, 0)


def _part(span: Span, start: int, stop: int) -> Span:
    return Span(span.buffer, span.start + start, span.start + stop)


def _merged(folds: Sequence[Fold]) -> tuple[Fold, ...]:
    """Merge each fold with the one before it where all their spans are adjacent."""
    merged: list[Fold] = []
    for fold in folds:
        if merged and _adjacent(merged[-1], fold):
            head = merged.pop()
            pairs = zip(_spans(head), _spans(fold), strict=True)
            *sources, into = (Span(a.buffer, a.start, b.stop) for a, b in pairs)
            merged.append(Fold(tuple(sources), into, fold.finishes))
        else:
            merged.append(fold)
    return tuple(merged)


def _adjacent(head: Fold, tail: Fold) -> bool:
    pairs = list(zip(_spans(head), _spans(tail), strict=False))
    alike = head.finishes == tail.finishes and len(head.sources) == len(tail.sources)
    return alike and all(a.buffer == b.buffer and a.stop == b.start for a, b in pairs)


def _spans(fold: Fold) -> tuple[Span, ...]:
    return (*fold.sources, fold.into)
