"""One slice's way through a schedule, with its memory: which elements go out and come in, where."""

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
    Copy,
    Fold,
    Message,
    Placed,
    PlannedSlice,
    PlannedStep,
    Span,
)
from ringreduce.schedules.schedule import Chunks, Schedule, Step, chunk_of, source_of

SEGMENT_BYTES = 1 << 20
"""Longer runs of chunks travel as several messages of about this size."""
_MOST_SEGMENTS = 256


def plan_slice(
    schedule: Schedule,
    rank: int,
    steps: Sequence[Step],
    placed: Sequence[Placed],
    itemsize: int,
    segment_bytes: int,
) -> PlannedSlice:
    """Plan the slice whose chunks are `placed`; `steps` are the rank's own of the schedule."""
    return _SlicePlanner(schedule, rank, steps, placed, itemsize, segment_bytes).plan()


class _Scratch:
    """Lends ranges of scratch, first fit, and remembers how much was ever out at once."""

    def __init__(self) -> None:
        self.size = 0
        self._lent: dict[int, int] = {}

    def lend(self, count: int) -> int:
        start = 0
        for taken, length in sorted(self._lent.items()):
            if taken - start >= count:
                break
            start = taken + length
        if count:
            self._lent[start] = count
            self.size = max(self.size, start + count)
        return start

    def give_back(self, start: int) -> None:
        self._lent.pop(start, None)


class _SlicePlanner:
    """Walks one rank's steps once, tracking where the current value of each chunk lives."""

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        steps: Sequence[Step],
        placed: Sequence[Placed],
        itemsize: int,
        segment_bytes: int,
    ) -> None:
        self.rank, self.steps, self.placed, self.itemsize = rank, steps, placed, itemsize
        self.segment = max(1, segment_bytes // itemsize)
        self.result = frozenset(schedule.holds_after(rank))
        self.completes = schedule.completes and schedule.completes(rank)
        self.home: dict[int, Span] = {
            chunk: Span(INPUT, placed[chunk].before, placed[chunk].before + placed[chunk].count)
            for chunk in schedule.holds_before(rank)
        }
        self.scratch = _Scratch()
        self.loans: list[tuple[int, Chunks]] = []
        self.signed_to: set[int] = set()
        self.signed_from: set[int] = set()
        self.last_use: dict[int, int] = {}
        self.last_write: dict[int, int] = {}
        self.copies: dict[int, dict[int, int]] = {}
        """Chunk -> the copies of it that have come, each with its rank."""
        for index, step in enumerate(steps):
            for send in step.sends:
                self.last_use.update(dict.fromkeys(map(self._mine, send.chunks), index))
            for recv in step.recvs:
                self.last_use.update(dict.fromkeys(recv.chunks, index))
                self.last_write.update(dict.fromkeys(recv.chunks, index))
            copies = [name for name in self.last_use if chunk_of(name) in step.folds]
            self.last_use.update(dict.fromkeys((*step.folds, *copies), index))
            self.last_write.update(dict.fromkeys(step.folds, index))

    def plan(self) -> PlannedSlice:
        parts = [part for index in range(len(self.steps)) for part in self._step(index)]
        steps = tuple(part for part in parts if part.recvs or part.sends or part.folds)
        settles = tuple(
            Copy(self.home[chunk], self._output(chunk))
            for chunk in sorted(self.result)
            if self._count(chunk) and self.home[chunk] != self._output(chunk)
        )
        return PlannedSlice(steps, settles, self.scratch.size)

    def _step(self, index: int) -> Iterator[PlannedStep]:
        step = self.steps[index]
        packs: list[Copy] = []
        temporary: list[int] = []
        sends: list[Message] = []
        for send in step.sends:
            for run in self._runs(send.chunks, send.peer, self.signed_to):
                span = self._gather(run, packs, temporary)
                sends += self._messages(send.peer, span, self.signed_to)
        segments = self._segments_to_fold(step)
        if segments:
            yield from self._in_parts(index, step, segments, packs, sends)
        else:
            yield self._at_once(index, step, packs, sends)
        self._release(index, temporary)

    def _at_once(
        self, index: int, step: Step, packs: list[Copy], sends: list[Message]
    ) -> PlannedStep:
        """A step that folds when everything has come and everything has left."""
        recvs: list[Message] = []
        arrived: dict[int, list[tuple[int, Span]]] = {}
        overwritten: dict[int, Span] = {}
        for recv in step.recvs:
            overwritten.update((c, _NOTHING) for c in recv.chunks if not self._count(c))
            for run in self._runs(recv.chunks, recv.peer, self.signed_from):
                span = self._landing(run, recv.reduce)
                recvs += self._messages(recv.peer, span, self.signed_from)
                for chunk, piece in zip(run, self._pieces(run, span), strict=True):
                    if recv.reduce:
                        arrived.setdefault(chunk, []).append((recv.peer, piece))
                    else:
                        overwritten[chunk] = piece
        folds: list[Fold] = []
        for chunk, spans in arrived.items():
            into = self._output(chunk) if chunk in self.result else min(spans)[1]
            folds.append(self._fold(index, chunk, [*spans, (self.rank, self.home[chunk])], into))
            self.home[chunk] = into
        self.home.update(overwritten)
        for copy in overwritten:
            if (source := source_of(copy)) is not None:
                self.copies.setdefault(chunk_of(copy), {})[copy] = source
        folds += [self._fold_copies(index, chunk) for chunk in step.folds if self._count(chunk)]
        return PlannedStep(index, tuple(packs), tuple(recvs), tuple(sends), _joined(folds))

    # --- steps in parts ---

    def _segments_to_fold(self, step: Step) -> list[tuple[int, int]]:
        """The (start, stop) of the parts in which the step's folded chunks are to come, if any.

        They come in parts if every message of the step brings the same long run of chunks that end
        up in the result, and none of it is sent in this step: until a send is complete its value
        must stay.
        """
        brought = {(recv.chunks, recv.reduce) for recv in step.recvs}
        if len(brought) != 1 or not step.recvs[0].reduce or step.folds:
            return []
        runs = list(self._runs(step.recvs[0].chunks, peer=-1, signed={-1}))
        sent = {self._mine(chunk) for send in step.sends for chunk in send.chunks}
        if len(runs) != 1 or not sent.isdisjoint(runs[0]) or not self.result.issuperset(runs[0]):
            return []
        segments = self._segments(self._length(runs[0]))
        return segments if len(segments) > 1 else []

    def _in_parts(
        self,
        index: int,
        step: Step,
        segments: list[tuple[int, int]],
        packs: list[Copy],
        sends: list[Message],
    ) -> Iterator[PlannedStep]:
        """A step that folds each segment when it has come, in scratch that all segments share."""
        (run,) = self._runs(step.recvs[0].chunks, peer=-1, signed={-1})
        longest = max(stop - start for start, stop in segments)
        landings = {recv.peer: self.scratch.lend(longest) for recv in step.recvs}
        for number, (start, stop) in enumerate(segments):
            recvs = []
            folds: list[Fold] = []
            for peer, landing in landings.items():
                span = Span(SCRATCH, landing, landing + stop - start)
                recvs.append(self._message(peer, span, self.signed_from))
            offset = -start
            for chunk in run:
                count = self._count(chunk)
                low, high = max(0, -offset), min(count, stop - start - offset)
                if low < high:
                    values = [(self.rank, _part(self.home[chunk], low, high))]
                    for peer, landing in landings.items():
                        at = landing + offset
                        values.append((peer, Span(SCRATCH, at + low, at + high)))
                    into = _part(self._output(chunk), low, high)
                    folds.append(self._fold(index, chunk, values, into))
                offset += count
            more = number < len(segments) - 1
            yield PlannedStep(
                index, tuple(packs), tuple(recvs), tuple(sends), _joined(folds), goes_on=more
            )
            packs, sends = [], []
        for landing in landings.values():
            self.scratch.give_back(landing)
        self.home.update({chunk: self._output(chunk) for chunk in run})

    # --- messages ---

    def _runs(self, chunks: Chunks, peer: int, signed: set[int]) -> Iterator[Chunks]:
        """The messages of one Send or Recv: runs of chunks that follow each other in the array.

        Copies lie nowhere in it, and so go together.
        Sender and receiver see the same chunks, so they cut alike.  Empty runs are left out, but
        for the one that must carry a signature.
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
        """Whether only empty chunks lie between these two, or both are copies."""
        copies = [source_of(name) is not None for name in (chunk, following)]
        if any(copies):
            return all(copies)
        between = range(chunk + 1, following)
        return chunk < following and not any(self._count(c) for c in between)

    def _messages(self, peer: int, span: Span, signed: set[int]) -> Iterator[Message]:
        """The messages of one run, segment by segment: sender and receiver cut alike."""
        for start, stop in self._segments(span.stop - span.start):
            yield self._message(peer, _part(span, start, stop), signed)

    def _segments(self, count: int) -> list[tuple[int, int]]:
        length = max(self.segment, -(-count // _MOST_SEGMENTS))
        return [(at, min(at + length, count)) for at in range(0, max(count, 1), length)]

    def _message(self, peer: int, span: Span, signed: set[int]) -> Message:
        if peer in signed:
            return Message(peer, span, None)
        signed.add(peer)
        inside = (span.stop - span.start) * self.itemsize <= INSIDE_BYTES
        return Message(peer, span, INSIDE if inside else BESIDE)

    # --- where values live ---

    def _output(self, chunk: int) -> Span:
        placed = self.placed[chunk]
        return Span(OUTPUT, placed.after, placed.after + placed.count)

    def _length(self, run: Chunks) -> int:
        return sum(map(self._count, run))

    def _count(self, name: int) -> int:
        return self.placed[chunk_of(name)].count

    def _mine(self, name: int) -> int:
        """This rank's own copy of a chunk is the chunk."""
        return chunk_of(name) if source_of(name) == self.rank else name

    def _pieces(self, run: Chunks, span: Span) -> Iterator[Span]:
        start = span.start
        for chunk in run:
            yield Span(span.buffer, start, start + self._count(chunk))
            start += self._count(chunk)

    def _borrow(self, run: Chunks) -> Span:
        start = self.scratch.lend(self._length(run))
        return Span(SCRATCH, start, start + self._length(run))

    def _gather(self, run: Chunks, packs: list[Copy], temporary: list[int]) -> Span:
        """The run's values as one span: where they are, or packed together if they are apart."""
        homes = [self.home[self._mine(chunk)] for chunk in run]
        if all(a.buffer == b.buffer and a.stop == b.start for a, b in pairwise(homes)):
            return Span(homes[0].buffer, homes[0].start, homes[-1].stop) if run else _NOTHING
        span = self._borrow(run)
        temporary.append(span.start)
        packs.extend(map(Copy, homes, self._pieces(run, span)))
        return span

    def _landing(self, run: Chunks, reduce: bool) -> Span:
        """Where a received run lands: in its place in OUTPUT, or in scratch to be folded."""
        spans = [self._output(chunk) for chunk in run if chunk in self.result]
        if not run:
            return _NOTHING
        if (
            not reduce
            and len(spans) == len(run)
            and all(a.stop == b.start for a, b in pairwise(spans))
        ):
            return Span(OUTPUT, spans[0].start, spans[-1].stop)
        span = self._borrow(run)
        self.loans.append((span.start, run))
        return span

    def _fold(self, index: int, chunk: int, values: list[tuple[int, Span]], into: Span) -> Fold:
        """Fold the (rank, value) of a chunk, the local one among them, in ascending rank order."""
        if self.completes is None:
            finishes = chunk in self.result and self.last_write[chunk] == index
        else:
            finishes = (index, chunk) in self.completes
        return Fold(tuple(span for _, span in sorted(values)), into, finishes)

    def _fold_copies(self, index: int, chunk: int) -> Fold:
        copies = self.copies.pop(chunk)
        values = [(self.rank, self.home[chunk])]
        values += [(rank, self.home[copy]) for copy, rank in copies.items()]
        if chunk in self.result:
            into = self._output(chunk)
        else:
            into = self._borrow((chunk,))
            self.loans.append((into.start, (chunk,)))
        self.home[chunk] = into
        return self._fold(index, chunk, values, into)

    def _release(self, index: int, temporary: list[int]) -> None:
        """Give back the scratch that no later step reads."""
        for start in temporary:
            self.scratch.give_back(start)
        kept = []
        for start, run in self.loans:
            stop = start + self._length(run)
            live = any(
                self.home[chunk].buffer == SCRATCH
                and start <= self.home[chunk].start < stop
                and (self.last_use[chunk] > index or chunk in self.result)
                for chunk in run
                if self._count(chunk)
            )
            if live:
                kept.append((start, run))
            else:
                self.scratch.give_back(start)
        self.loans = kept


_NOTHING = Span(SCRATCH, 0, 0)


def _part(span: Span, start: int, stop: int) -> Span:
    return Span(span.buffer, span.start + start, span.start + stop)


def _joined(folds: Sequence[Fold]) -> tuple[Fold, ...]:
    """Folds of neighbouring chunks as one, where all of their spans follow each other."""
    joined: list[Fold] = []
    for fold in folds:
        if joined and _adjacent(joined[-1], fold):
            head = joined.pop()
            pairs = zip(_spans(head), _spans(fold), strict=True)
            *sources, into = (Span(a.buffer, a.start, b.stop) for a, b in pairs)
            joined.append(Fold(tuple(sources), into, fold.finishes))
        else:
            joined.append(fold)
    return tuple(joined)


def _adjacent(head: Fold, tail: Fold) -> bool:
    pairs = list(zip(_spans(head), _spans(tail), strict=False))
    alike = head.finishes == tail.finishes and len(head.sources) == len(tail.sources)
    return alike and all(a.buffer == b.buffer and a.stop == b.start for a, b in pairs)


def _spans(fold: Fold) -> tuple[Span, ...]:
    return (*fold.sources, fold.into)
