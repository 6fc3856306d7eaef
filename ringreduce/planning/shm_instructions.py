"""A slice of a plan as rows for shared memory: put, wait, copy, fold.

The schedule stays the only place that knows the algorithm.  From the plans of all ranks follows
who puts what where, so a row says where in a peer's memory its data lie, and nothing about that
travels.

Data go one of two ways.  Staged, a rank copies what it sends in a step to its slot, and may go on
when it has what it needs.  Pulled, peers read it from where it lies; before it is written to, and
before the call ends, they have to have done so.

What lies in shared memory need not be staged where that is known to be over in time: a rank lends
it in any exchange but the last, and what it has just folded it writes to where peers want it, who
then need not pull it either.  Whether it lies there, and there, each rank tells: nobody else's rows
depend on it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from ringreduce.planning.operations import (
    INPUT,
    OUTPUT,
    SCRATCH,
    Fold,
    PlannedSlice,
    PlannedStep,
    Span,
)

ALIGNMENT = 32
BESIDE_BYTES = 512
"""More than these do not stand beside the number and the header: ranks tell where they lie."""
DIRECT_BYTES = 4 << 10
"""Fewer than these it is no use to lend, or to write to where peers want them."""
SLOT = 3
"""A place besides INPUT, OUTPUT and SCRATCH: what is put in the exchange under way."""


class Place(NamedTuple):
    """Bytes from `offset` on: of a rank's INPUT, OUTPUT, SCRATCH, or of its SLOT."""

    rank: int
    buffer: int
    offset: int


class MakeRoom(NamedTuple):
    """Wait until the slot of this exchange may be written, and take memory for what it holds.

    None is needed if the buffer `unless` of this rank is shared memory.
    """

    exchange: int
    nbytes: int = 0
    unless: int | None = None


class Put(NamedTuple):
    """Say that what there is to say in this exchange is there."""

    exchange: int
    lends: Place | None = None
    """From where on peers read it, as if that were the slot, if that buffer is shared memory."""


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
    unless: int | None = None
    """There is nothing to copy if this buffer of the rank's own, INPUT or OUTPUT, is shared."""


class Reduce(NamedTuple):
    """``into`` = the sources, folded from left to right, and divided if that `finishes` a mean."""

    into: Place
    sources: tuple[Place, ...]
    nbytes: int
    finishes: bool
    wanted: tuple[Place, ...] = ()
    """Where peers want the result: it is written there, if that is shared memory."""
    staged: Place | None = None
    """Where in the slot it is put, unless it was written so to all the ranks that read it."""
    readers: int = 0
    """How many ranks read it, there or where they want it; 0 if it is pulled."""


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
    tells: bool
    """Whether ranks tell where what there is to read lies, and their OUTPUT."""
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
    table = _Table(plans, itemsize, in_place, pulls)
    if not table.exchanges or not table.in_step():
        return None
    if pulls and not table.can_pull():
        return None
    table.lay_out()
    rows = tuple(_Writer(table, rank).rows())
    scratch = plans[rank].scratch if any(map(_touches_scratch, rows)) else 0
    notes, most = tuple(_notes(table, rank)), table.most_in_slot
    return Rows(rows, table.exchanges + pulls, most, scratch, pulls, table.tells, notes)


class _Table:
    """All messages: where in its sender's memory each lies, and where it may go from there."""

    def __init__(
        self, plans: Sequence[PlannedSlice], itemsize: int, in_place: bool, pulls: bool
    ) -> None:
        self.plans, self.itemsize, self.in_place, self.pulls = plans, itemsize, in_place, pulls
        self.steps: list[dict[int, PlannedStep]] = [
            {step.index: step for step in plan.steps} for plan in plans
        ]
        self.exchanges = max((index + 1 for steps in self.steps for index in steps), default=0)
        self.slot_bytes: dict[tuple[int, int], int] = {}
        """By rank and step."""
        self.lent: dict[tuple[int, int], Span] = {}
        """What covers all that a rank sends in a step, if it lends that."""
        self.pushed: dict[tuple[int, int, Span], dict[int, Span]] = {}
        """What a rank has just folded and sends in a step: who takes it where, of its OUTPUT."""
        self._in_slot: dict[tuple[int, int], dict[Span, int]] = {}
        self._received: dict[tuple[int, int], list[tuple[int, Span, Span]]] = {}

    @property
    def tells(self) -> bool:
        return bool(self.lent or any(self.pushed.values())) or self.most_in_slot > BESIDE_BYTES

    @property
    def most_in_slot(self) -> int:
        return max(self.slot_bytes.values(), default=0)

    def lay_out(self) -> None:
        """Decide where in the slots data are staged, and where they need not be."""
        for rank, steps in enumerate(self.steps):
            for index in steps:
                covering = None if self.pulls else self._lendable(rank, index)
                if covering is not None:
                    self.lent[rank, index] = covering
                for span in self._just_folded(rank, index):
                    self.pushed[rank, index, span] = {}
        for rank, index, span in self.pushed:
            self.pushed[rank, index, span] = dict(self._pushable(rank, index, span))
        for rank, steps in enumerate([] if self.pulls else self.steps):
            for index in steps:
                self._lay_out(rank, index)

    def _lay_out(self, rank: int, index: int) -> None:
        covering = self.lent.get((rank, index))
        offsets: dict[Span, int] = {}
        end = 0
        for span in self.sent(rank, index):
            if covering is None:
                offsets[span] = end
                end += -(-self.nbytes(span) // ALIGNMENT) * ALIGNMENT
            else:
                offsets[span] = (span.start - covering.start) * self.itemsize
                end = max(end, offsets[span] + self.nbytes(span))
        self._in_slot[rank, index], self.slot_bytes[rank, index] = offsets, end

    def _lendable(self, rank: int, index: int) -> Span | None:
        sent = self.sent(rank, index)
        if index + 1 == self.exchanges or not self.may_stay(rank, index):
            return None
        if len({span.buffer for span in sent}) != 1 or not self._worth_it(sent):
            return None
        start, stop = min(span.start for span in sent), max(span.stop for span in sent)
        covering = Span(sent[0].buffer, start, stop)
        # Where it is not shared memory after all, the slot has the same gaps.
        dense = self.nbytes(covering) <= 2 * sum(map(self.nbytes, sent))
        return covering if dense else None

    def _just_folded(self, rank: int, index: int) -> Iterator[Span]:
        """What a rank sends in a step, not lent, as it was folded in the step before."""
        before = self.steps[rank].get(index - 1)
        if before is None or (rank, index) in self.lent:
            return
        changed = [copy.into for copy in self.steps[rank][index].packs]
        folded = [fold.into for fold in before.folds]
        for span in self.sent(rank, index):
            meeting = [each for each in (*folded, *changed) if _meet(each, span)]
            if meeting == [span] and span in folded and self._worth_it([span]):
                yield span

    def _pushable(self, rank: int, index: int, span: Span) -> Iterator[tuple[int, Span]]:
        """Who can have it written to the one place where it belongs, as soon as it is folded."""
        heard = {m.peer for m in self.steps[rank][index - 1].recvs}
        for peer in {m.peer for m in self.steps[rank][index].sends if m.span == span} & heard:
            places = [r for p, s, r in self.received(peer, index) if (p, s) == (rank, span)]
            if len(places) == 1 and self._is_free(peer, index, places[0], rank):
                yield peer, places[0]

    def _is_free(self, rank: int, index: int, into: Span, writer: int) -> bool:
        """Whether `into` may be written to by `writer` while the rank is still a step behind."""
        before, now = self.steps[rank].get(index - 1), self.steps[rank][index]
        if into.buffer != OUTPUT or before is None:
            return False
        used = [m.span for m in (*before.recvs, *now.sends)]
        for fold in before.folds:
            used += [fold.into, *fold.sources]
        for copy in now.packs:
            used += [copy.into, copy.source]
        for message in before.sends if self.pulls or (rank, index - 1) in self.lent else ():
            if message.peer != writer or message.span[1:] != into[1:]:
                used.append(message.span)
        return not any(_may_meet(each, into, self.in_place) for each in used)

    def _worth_it(self, spans: Sequence[Span]) -> bool:
        return sum(map(self.nbytes, spans)) >= DIRECT_BYTES

    def sent(self, rank: int, index: int) -> list[Span]:
        """What a rank sends in a step, everything once."""
        step = self.steps[rank].get(index)
        sends = () if step is None else step.sends
        return list(dict.fromkeys(m.span for m in sends if m.span.start < m.span.stop))

    def readers(self, rank: int, index: int, span: Span) -> int:
        return len({m.peer for m in self.steps[rank][index].sends if m.span == span})

    def can_pull(self) -> bool:
        return all(self.may_stay(r, s) for r, steps in enumerate(self.steps) for s in steps)

    def may_stay(self, rank: int, index: int) -> bool:
        """Whether what a rank sends in a step, none of it from scratch, stays as it is for a while.

        Until all have come to the next step: so nobody waits for that before he has come there.
        """
        step, after = self.steps[rank][index], self.steps[rank].get(index + 1)
        sent = [m.span for m in step.sends if m.span.start < m.span.stop]
        written = [m.span for m in step.recvs] + [fold.into for fold in step.folds]
        written += [copy.into for copy in after.packs] if after is not None else []
        if any(span.buffer == SCRATCH for span in sent):
            return False
        return not any(_may_meet(a, b, self.in_place) for a in sent for b in written)

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

    def received(self, rank: int, index: int) -> list[tuple[int, Span, Span]]:
        """(peer, the span that it sends, the span that this rank receives it in)"""
        if (rank, index) not in self._received:
            self._received[rank, index] = list(self._receive(rank, index))
        return self._received[rank, index]

    def _receive(self, rank: int, index: int) -> Iterator[tuple[int, Span, Span]]:
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

    def __init__(self, table: _Table, rank: int) -> None:
        self._table, self._rank, self._pulls = table, rank, table.pulls
        self._heard: dict[int, int] = defaultdict(int)
        """Peer -> the latest exchange in which it was listened to."""
        self._awaited: dict[int, int] = defaultdict(int)
        self._lent: list[tuple[Span, int, int]] = []
        """What peers may read: the span, the peer, in which exchange."""

    def rows(self) -> Iterator[Row]:
        table, rank, exchanges = self._table, self._rank, self._table.exchanges
        for index in range(exchanges):
            exchange = index + 1
            step = table.steps[rank].get(index)
            if step is not None:
                for copy in step.packs:
                    yield from self._copy(copy.into, table.place(rank, copy.source))
            if not self._pushes(index):
                yield self._make_room(index)
            if step is not None:
                yield from self._send(step)
            else:
                yield Put(exchange)
            if step is not None:
                yield from self._receive(step, exchange)
        if self._pulls:
            yield MakeRoom(exchanges + 1)
            yield Put(exchanges + 1)
        for copy in table.plans[rank].final_copies:
            yield from self._copy(copy.into, table.place(rank, copy.source))
        yield from self._until_read(lambda _: True)

    def _pushes(self, index: int) -> bool:
        """Whether what is sent in a step is on its way before the step begins."""
        return any((self._rank, index, s) in self._table.pushed for s in self._sent(index))

    def _make_room(self, index: int) -> MakeRoom:
        nbytes = self._table.slot_bytes.get((self._rank, index), 0)
        covering = self._table.lent.get((self._rank, index))
        return MakeRoom(index + 1, nbytes, None if covering is None else covering.buffer)

    def _sent(self, index: int) -> list[Span]:
        return self._table.sent(self._rank, index)

    def _send(self, step: PlannedStep) -> Iterator[Row]:
        table, rank, index = self._table, self._rank, step.index
        covering = table.lent.get((rank, index))
        lends = None
        if not self._pulls:
            for span in self._sent(index):
                if (rank, index, span) not in table.pushed:
                    into, source = table.in_slot(rank, index, span), table.place(rank, span)
                    unless = covering and covering.buffer
                    yield CopyBytes(into, source, table.nbytes(span), unless)
        if covering is not None:
            lends = table.place(rank, covering)
        yield Put(index + 1, lends)
        if self._pulls or covering is not None:
            self._lent += [(m.span, m.peer, index + 1) for m in step.sends]

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
                pushed = table.pushed.get((peer, step.index, sent), {})
                yield from self._copy(received, source, OUTPUT if rank in pushed else None)
        if self._pushes(step.index + 1):
            yield self._make_room(step.index + 1)
        for fold in step.folds:
            yield from self._fold(step.index, fold, operands)

    def _fold(self, index: int, fold: Fold, operands: dict[Span, Place]) -> Iterator[Row]:
        table, rank = self._table, self._rank
        if fold.into.start < fold.into.stop:
            yield from self._until_read(lambda span: self._overlap(span, fold.into))
            sources = [operands.get(s) or table.place(rank, s) for s in fold.sources]
            into, nbytes = table.place(rank, fold.into), table.nbytes(fold.into)
            pushed = table.pushed.get((rank, index + 1, fold.into))
            row = Reduce(into, tuple(sources), nbytes, fold.finishes)
            if pushed is not None:
                wanted = tuple(table.place(peer, span) for peer, span in pushed.items())
                row = row._replace(wanted=wanted)
                if not self._pulls:
                    staged = table.in_slot(rank, index + 1, fold.into)
                    readers = table.readers(rank, index + 1, fold.into)
                    row = row._replace(staged=staged, readers=readers)
            yield row

    def _copy(self, into: Span, source: Place, unless: int | None = None) -> Iterator[Row]:
        if into.start < into.stop:
            yield from self._until_read(lambda span: self._overlap(span, into))
            place, nbytes = self._table.place(self._rank, into), self._table.nbytes(into)
            yield CopyBytes(place, source, nbytes, unless)

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
        read += [copy.source for copy in self._table.plans[self._rank].final_copies]
        return not any(_meet(each, span) for each in read)

    def _overlap(self, a: Span, b: Span) -> bool:
        return _may_meet(a, b, self._table.in_place)


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


def _meet(a: Span, b: Span) -> bool:
    return a.buffer == b.buffer and a.start < b.stop and b.start < a.stop


def _may_meet(a: Span, b: Span, in_place: bool) -> bool:
    both = {a.buffer, b.buffer}
    same = a.buffer == b.buffer or (in_place and both == {INPUT, OUTPUT})
    return same and a.start < b.stop and b.start < a.stop
