"""A slice of a plan as rows for shared memory: put, wait, copy, fold.

The schedule stays the only place that knows the algorithm.  From the plans of all ranks follows
who puts what where, so a row says where in a peer's memory its data lie, and nothing about that
travels.

Data go one of two ways.  Staged, a rank copies what it sends in a step to its slot, and may go on
when it has what it needs.  Pulled, peers read it from where it lies; before it is written to, and
before the call ends, they have to have done so.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from ringreduce.planned import INPUT, OUTPUT, SCRATCH, Fold, PlannedSlice, PlannedStep, Span

ALIGNMENT = 32
SLOT = 3
"""A place besides INPUT, OUTPUT and SCRATCH: what is put in the exchange under way."""


class Place(NamedTuple):
    """Bytes from `offset` on: of a rank's INPUT, OUTPUT, SCRATCH, or of its SLOT."""

    rank: int
    buffer: int
    offset: int


class MakeRoom(NamedTuple):
    """Wait until the slot of this exchange may be written."""

    exchange: int


class Put(NamedTuple):
    """Say that what there is to say in this exchange is there."""

    exchange: int


class Await(NamedTuple):
    """Wait until a peer has put this exchange.

    If it is for what the peer says there, the header is compared.  If it is to know that the peer
    has done with the one before, it may have gone on since.
    """

    peer: int
    exchange: int
    listens: bool


class CopyBytes(NamedTuple):
    """``into = source``"""

    into: Place
    source: Place
    nbytes: int


class Reduce(NamedTuple):
    """``into`` = the sources, folded from left to right, and divided if that `finishes` a mean."""

    into: Place
    sources: tuple[Place, ...]
    nbytes: int
    finishes: bool


Row = MakeRoom | Put | Await | CopyBytes | Reduce


class Rows(NamedTuple):
    """One rank's part of a slice."""

    rows: tuple[Row, ...]
    exchanges: int
    """The same on all ranks."""
    slot_bytes: int
    """The most that any rank puts into its slot."""
    scratch: int
    """Elements."""
    pulls: bool
    notes: tuple[tuple[int, str, int, int], ...]
    """(step, "send" or "recv", peer, bytes of data): for the message log."""


def rows_of(
    plans: Sequence[PlannedSlice], rank: int, itemsize: int, pulls: bool, in_place: bool
) -> Rows | None:
    """The rows of `rank`, given the plans of all ranks, whose messages are not cut in segments.

    `in_place` says that on some ranks OUTPUT may be INPUT.  None where there are no such rows, on
    all ranks: a message is received in another step than it is sent in, or would be pulled from
    memory that is written to in that step.
    """
    exchanges = max((step.index + 1 for plan in plans for step in plan.steps), default=0)
    table = _Table(plans, itemsize)
    if not exchanges or not table.in_step():
        return None
    if pulls and not all(_can_pull(plan, in_place) for plan in plans):
        return None
    rows = tuple(_Writer(table, rank, exchanges, pulls, in_place).rows())
    scratch = plans[rank].scratch if any(map(_touches_scratch, rows)) else 0
    slot = 0 if pulls else max(table.slot_bytes.values(), default=0)
    return Rows(rows, exchanges + pulls, slot, scratch, pulls, tuple(_notes(table, rank)))


class _Table:
    """All messages: where in its sender's memory each lies."""

    def __init__(self, plans: Sequence[PlannedSlice], itemsize: int) -> None:
        self.plans, self.itemsize = plans, itemsize
        self.steps: list[dict[int, PlannedStep]] = [
            {step.index: step for step in plan.steps} for plan in plans
        ]
        self.slot_bytes: dict[tuple[int, int], int] = {}
        """By rank and step."""
        self._in_slot: dict[tuple[int, int], dict[Span, int]] = {}
        for rank, steps in enumerate(self.steps):
            for index, step in steps.items():
                self._lay_out(rank, index, step)

    def _lay_out(self, rank: int, index: int, step: PlannedStep) -> None:
        offsets: dict[Span, int] = {}
        end = 0
        for span in self.sent(rank, index):
            offsets[span] = end
            end += -(-self.nbytes(span) // ALIGNMENT) * ALIGNMENT
        self._in_slot[rank, index], self.slot_bytes[rank, index] = offsets, end

    def sent(self, rank: int, index: int) -> list[Span]:
        """What a rank sends in a step, everything once."""
        step = self.steps[rank].get(index)
        sends = () if step is None else step.sends
        return list(dict.fromkeys(m.span for m in sends if m.span.start < m.span.stop))

    def in_step(self) -> bool:
        """Whether every message is received in the step in which it is sent, and fits."""
        for rank, steps in enumerate(self.steps):
            for index, step in steps.items():
                for peer in {m.peer for m in (*step.sends, *step.recvs)}:
                    there = self.steps[peer].get(index)
                    out = [self.nbytes(m.span) for m in step.sends if m.peer == peer]
                    come = [] if there is None else there.recvs
                    if out != [self.nbytes(m.span) for m in come if m.peer == rank]:
                        return False
        return True

    def received(self, rank: int, index: int) -> Iterator[tuple[int, Span, Span]]:
        """(peer, the span that it sends, the span that this rank receives it in)"""
        taken: dict[int, int] = defaultdict(int)
        for message in self.steps[rank][index].recvs:
            peer = message.peer
            sends = [m for m in self.steps[peer][index].sends if m.peer == rank]
            yield peer, sends[taken[peer]].span, message.span
            taken[peer] += 1

    def in_slot(self, rank: int, index: int, span: Span) -> Place:
        return Place(rank, SLOT, self._in_slot[rank, index].get(span, 0))

    def place(self, rank: int, span: Span) -> Place:
        return Place(rank, span.buffer, span.start * self.itemsize)

    def nbytes(self, span: Span) -> int:
        return (span.stop - span.start) * self.itemsize


class _Writer:
    """Writes the rows of one rank."""

    def __init__(
        self, table: _Table, rank: int, exchanges: int, pulls: bool, in_place: bool
    ) -> None:
        self._table, self._rank, self._exchanges = table, rank, exchanges
        self._pulls, self._in_place = pulls, in_place
        self._heard: dict[int, int] = defaultdict(int)
        """Peer -> the latest exchange in which it was listened to."""
        self._awaited: dict[int, int] = defaultdict(int)
        self._lent: list[tuple[Span, int, int]] = []
        """What peers may read: the span, the peer, in which exchange."""

    def rows(self) -> Iterator[Row]:
        table, rank = self._table, self._rank
        for index in range(self._exchanges):
            exchange = index + 1
            step = table.steps[rank].get(index)
            if step is not None:
                for copy in step.packs:
                    yield from self._copy(copy.into, table.place(rank, copy.source))
            yield MakeRoom(exchange)
            if step is not None and not self._pulls:
                for span in table.sent(rank, index):
                    into = table.in_slot(rank, index, span)
                    yield CopyBytes(into, table.place(rank, span), table.nbytes(span))
            yield Put(exchange)
            if step is not None:
                if self._pulls:
                    self._lent += [(m.span, m.peer, exchange) for m in step.sends]
                yield from self._receive(step, exchange)
        for settle in table.plans[rank].settles:
            yield from self._copy(settle.into, table.place(rank, settle.source))
        if self._pulls:
            yield MakeRoom(self._exchanges + 1)
            yield Put(self._exchanges + 1)
            yield from self._until_read(lambda _: True)

    def _receive(self, step: PlannedStep, exchange: int) -> Iterator[Row]:
        table, rank = self._table, self._rank
        operands: dict[Span, Place] = {}
        for peer, sent, received in table.received(rank, step.index):
            if self._heard[peer] < exchange:
                self._heard[peer] = self._awaited[peer] = exchange
                yield Await(peer, exchange, listens=True)
            if self._pulls:
                source = table.place(peer, sent)
            else:
                source = table.in_slot(peer, step.index, sent)
            if self._only_folded(received, step):
                operands[received] = source
            else:
                yield from self._copy(received, source)
        for fold in step.folds:
            yield from self._fold(fold, operands)

    def _fold(self, fold: Fold, operands: dict[Span, Place]) -> Iterator[Row]:
        if fold.into.start < fold.into.stop:
            yield from self._until_read(lambda span: self._overlap(span, fold.into))
            sources = [operands.get(s) or self._table.place(self._rank, s) for s in fold.sources]
            into = self._table.place(self._rank, fold.into)
            yield Reduce(into, tuple(sources), self._table.nbytes(fold.into), fold.finishes)

    def _copy(self, into: Span, source: Place) -> Iterator[Row]:
        if into.start < into.stop:
            yield from self._until_read(lambda span: self._overlap(span, into))
            yield CopyBytes(self._table.place(self._rank, into), source, self._table.nbytes(into))

    def _until_read(self, concerns: Callable[[Span], bool]) -> Iterator[Row]:
        """Wait until peers have read, as far as that `concerns` anybody, what they may read."""
        for span, peer, exchange in self._lent:
            if concerns(span) and self._awaited[peer] <= exchange:
                self._awaited[peer] = exchange + 1
                yield Await(peer, exchange + 1, listens=False)

    def _only_folded(self, span: Span, step: PlannedStep) -> bool:
        """Whether what comes for a span is folded in this step, whole, and not needed after."""
        if span.buffer != SCRATCH or span.start == span.stop:
            return False
        folded = [source for fold in step.folds for source in fold.sources]
        if {source for source in folded if _meet(source, span)} != {span}:
            return False
        later = [s for s in self._table.plans[self._rank].steps if s.index > step.index]
        read = [m.span for s in later for m in s.sends]
        read += [source for s in later for fold in s.folds for source in fold.sources]
        read += [copy.source for s in later for copy in s.packs]
        read += [copy.source for copy in self._table.plans[self._rank].settles]
        return not any(_meet(each, span) for each in read)

    def _overlap(self, a: Span, b: Span) -> bool:
        return _may_meet(a, b, self._in_place)


def _touches_scratch(row: Row) -> bool:
    places: tuple[Place, ...] = ()
    if isinstance(row, CopyBytes):
        places = (row.into, row.source)
    elif isinstance(row, Reduce):
        places = (row.into, *row.sources)
    return any(place.buffer == SCRATCH for place in places)


def _notes(table: _Table, rank: int) -> Iterator[tuple[int, str, int, int]]:
    for step in table.plans[rank].steps:
        for way, messages in (("recv", step.recvs), ("send", step.sends)):
            for message in messages:
                yield step.index, way, message.peer, table.nbytes(message.span)


def _can_pull(plan: PlannedSlice, in_place: bool) -> bool:
    """Whether nothing is sent from scratch, or from memory that its step writes to."""
    for step in plan.steps:
        sent = [m.span for m in step.sends if m.span.start < m.span.stop]
        written = [m.span for m in step.recvs] + [fold.into for fold in step.folds]
        if any(span.buffer == SCRATCH for span in sent):
            return False
        if any(_may_meet(a, b, in_place) for a in sent for b in written):
            return False
    return True


def _meet(a: Span, b: Span) -> bool:
    return a.buffer == b.buffer and a.start < b.stop and b.start < a.stop


def _may_meet(a: Span, b: Span, in_place: bool) -> bool:
    both = {a.buffer, b.buffer}
    same = a.buffer == b.buffer or (in_place and both == {INPUT, OUTPUT})
    return same and a.start < b.stop and b.start < a.stop
