"""A plan as instructions for shared memory: free a slot, post, wait, copy, reduce.

Only the schedule knows the algorithm.  Each rank plans for all ranks, so an instruction names the
place of data in a peer's memory, and no message has to carry that place.

Data go one of two ways:

- *Staged* (copy-in, copy-out): a rank copies the data it sends in a step to its slot.  It continues
  as soon as it has the data that it reads itself.
- *Single-copy*: peers read the data in place.  The rank waits for these reads before it overwrites
  the data, and before the slice ends.  A result that is written directly needs no such round.
  In a single step that only moves data, both ends of a message may copy: the sender *pushes* the
  first part of it to the receiver's OUTPUT, and the receiver reads the rest.

Data in shared memory need not be staged if the plans show that peers read them in time.  A rank
*exposes* its array in any round of a slice but the last: peers read the array, not the slot.  A
rank *writes* a result *directly* to OUTPUT of its peers: then the peers need not read it.  Each
rank publishes whether its arrays are shared memory; the instructions of its peers do not depend on
that.

The ranks of one of several hosts share memory among themselves.  Their messages to and from other
hosts are those of the plan, as `messages.binding` sends them: the same, in the same order.  Such a
program has a round for each step in which ranks of this host send data to each other, and stages
these data.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import replace

from ringreduce.planning.instructions import (
    MESSAGE,
    SLOT,
    Complete,
    CopyBytes,
    FreeSlot,
    HostMessage,
    Instruction,
    Instructions,
    Operand,
    Post,
    Reduce,
    Start,
    Wait,
    pushed_bytes,
)
from ringreduce.planning.operations import (
    BESIDE,
    INPUT,
    INSIDE,
    INSIDE_BYTES,
    OUTPUT,
    SCRATCH,
    Copy,
    Fold,
    PlannedMessage,
    PlannedSlice,
    PlannedStep,
    Span,
)
from ringreduce.planning.slices import SEGMENT_BYTES, cut_in_segments, place_of_signature

ALIGNMENT = 32
IN_SLOT_BYTES = 512
"""The most bytes that are staged in the slot itself; more are staged in the ring."""
DIRECT_BYTES = 4 << 10
"""The fewest bytes that are worth exposing or writing directly."""


def instructions_of(
    plans: Sequence[PlannedSlice] | Mapping[int, PlannedSlice],
    rank: int,
    itemsize: int,
    single_copy: bool,
    in_place: bool,
    writes: bool = False,
    pushed: float = 0.0,
    segment_bytes: int = SEGMENT_BYTES,
) -> Instructions | None:
    """Return the instructions of `rank`, given the plans of all ranks, or of those of its host.

    Messages of the plans are not cut in segments; those to other hosts are cut here, in segments of
    `segment_bytes`.  `in_place`: OUTPUT may be INPUT on some ranks.  `writes`: single-copy results
    may be written to private arrays of peers.  `pushed`: the part of a single-copy message that its
    sender pushes, if it can.  The answer is None, on all ranks of
    the host, if a message is received in another step than it is sent in, if data that should be
    single-copy are written in the same step, or if data for other hosts should be single-copy.
    """
    if not isinstance(plans, Mapping):
        plans = dict(enumerate(plans))
    table = _Table(plans, itemsize, in_place, single_copy, writes and single_copy)
    table.pushed = pushed if single_copy and table.can_push() else 0.0
    if not table.is_in_step() or (len(plans) > 1 and not (table.rounds or table.is_between_hosts)):
        return None
    table.lay_out()
    if single_copy and (table.is_between_hosts or not table.can_be_single_copy()):
        return None
    writer = _Writer(table, rank, max(1, segment_bytes // itemsize))
    instructions = tuple(writer.instructions())
    in_scratch = any(message.place.buffer == SCRATCH for message in writer.messages)
    in_scratch = in_scratch or any(map(_touches_scratch, instructions))
    scratch = plans[rank].scratch if in_scratch else 0
    return Instructions(
        instructions,
        (table.rounds + table.waits_for_readers,),
        table.most_in_slot,
        scratch,
        single_copy,
        table.waits_for_readers,
        table.publishes,
        (tuple(_notes(plans[rank], itemsize)),),
        tuple(writer.messages),
        writer.message_bytes,
        tuple(table.round_of) if table.is_between_hosts else (),
    )


class _Table:
    """The messages of a host's ranks: where each is in its sender's memory, and how it is read."""

    def __init__(
        self,
        plans: Mapping[int, PlannedSlice],
        itemsize: int,
        in_place: bool,
        single_copy: bool,
        writes: bool,
    ) -> None:
        self.plans, self.itemsize = plans, itemsize
        self.in_place, self.single_copy, self.writes = in_place, single_copy, writes
        self.steps: dict[int, dict[int, PlannedStep]] = {
            rank: {step.index: self._inside(step) for step in plan.steps}
            for rank, plan in plans.items()
        }
        """Rank -> its steps, with the messages of this host alone."""
        self.is_between_hosts = any(
            message.peer not in plans
            for plan in plans.values()
            for step in plan.steps
            for message in (*step.recvs, *step.sends)
        )
        end = max((index + 1 for steps in self.steps.values() for index in steps), default=0)
        indices: Sequence[int] = range(end)
        if self.is_between_hosts:
            moving = {i for s in self.steps.values() for i in s if s[i].recvs or s[i].sends}
            indices = sorted(moving)
        self.step_count = end
        self.round_of = {index: number for number, index in enumerate(indices, 1)}
        """Step -> its round, from 1."""
        self.rounds = len(indices)
        self.slot_bytes: dict[tuple[int, int], int] = {}
        """(rank, step) -> the bytes that the rank stages in the step."""
        self.exposed: dict[tuple[int, int], Span] = {}
        """(rank, step) -> the span that the rank exposes in the step: it covers all it sends."""
        self.direct: dict[tuple[int, int, Span], dict[int, Span]] = {}
        """(rank, step, span just reduced and now sent) -> {peer: span of its OUTPUT to write}."""
        self.pushed = 0.0
        self._in_slot: dict[tuple[int, int], dict[Span, int]] = {}
        self._received: dict[tuple[int, int], list[tuple[int, Span, Span]]] = {}

    def _inside(self, step: PlannedStep) -> PlannedStep:
        recvs, sends = (
            tuple(m for m in messages if m.peer in self.plans)
            for messages in (step.recvs, step.sends)
        )
        return replace(step, recvs=recvs, sends=sends)

    @property
    def publishes(self) -> bool:
        return bool(self.exposed or any(self.direct.values())) or self.most_in_slot > IN_SLOT_BYTES

    @property
    def most_in_slot(self) -> int:
        return max(self.slot_bytes.values(), default=0)

    @property
    def waits_for_readers(self) -> bool:
        """Whether peers read single-copy data of the last step, so that a round follows it."""
        last = self.rounds - 1
        return self.single_copy and any(
            not self.is_written(rank, last, m.span, m.peer)
            for rank, steps in self.steps.items()
            if last in steps
            for m in steps[last].sends
        )

    def is_written(self, rank: int, index: int, span: Span, peer: int) -> bool:
        """Whether a rank writes a result even to a private OUTPUT of a peer, which reads none."""
        return self.writes and peer in self.direct.get((rank, index, span), {})

    def lay_out(self) -> None:
        for rank, steps in () if self.is_between_hosts else self.steps.items():
            for index in steps:
                covering = None if self.single_copy else self._exposable(rank, index)
                if covering is not None:
                    self.exposed[rank, index] = covering
                for span in self._just_reduced(rank, index):
                    self.direct[rank, index, span] = {}
        for rank, index, span in self.direct:
            self.direct[rank, index, span] = dict(self._direct_writes(rank, index, span))
        for rank, steps in () if self.single_copy else self.steps.items():
            for index in steps:
                self._lay_out(rank, index)

    def _lay_out(self, rank: int, index: int) -> None:
        covering = self.exposed.get((rank, index))
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

    def _exposable(self, rank: int, index: int) -> Span | None:
        sent = self.sent(rank, index)
        if index + 1 == self.rounds or not self.stays_unchanged(rank, index):
            return None
        if len({span.buffer for span in sent}) != 1 or not self._worth_it(sent):
            return None
        start, stop = min(span.start for span in sent), max(span.stop for span in sent)
        covering = Span(sent[0].buffer, start, stop)
        # If the buffer is not shared memory after all, the slot has the same gaps.
        dense = self.nbytes(covering) <= 2 * sum(map(self.nbytes, sent))
        return covering if dense else None

    def _just_reduced(self, rank: int, index: int) -> Iterator[Span]:
        """Yield spans that a rank reduces in step `index` - 1, and sends unexposed in `index`."""
        before = self.steps[rank].get(index - 1)
        if before is None or (rank, index) in self.exposed:
            return
        changed = [copy.into for copy in self.steps[rank][index].packs]
        folded = [fold.into for fold in before.folds]
        for span in self.sent(rank, index):
            meeting = [each for each in (*folded, *changed) if _meet(each, span)]
            if meeting == [span] and span in folded and self._worth_it([span]):
                yield span

    def _direct_writes(self, rank: int, index: int, span: Span) -> Iterator[tuple[int, Span]]:
        """The peers in whose OUTPUT a span can be written as soon as it is reduced, and where."""
        read_from = {m.peer for m in self.steps[rank][index - 1].recvs}
        for peer in {m.peer for m in self.steps[rank][index].sends if m.span == span} & read_from:
            places = [r for p, s, r in self.received(peer, index) if (p, s) == (rank, span)]
            if len(places) == 1 and self._is_free(peer, index, places[0], rank):
                yield peer, places[0]

    def _is_free(self, rank: int, index: int, into: Span, writer: int) -> bool:
        """Whether `writer` may write `into` while the rank is still in the step before."""
        before, now = self.steps[rank].get(index - 1), self.steps[rank][index]
        if into.buffer != OUTPUT or before is None:
            return False
        used = [m.span for m in (*before.recvs, *now.sends)]
        for fold in before.folds:
            used += [fold.into, *fold.sources]
        for copy in now.packs:
            used += [copy.into, copy.source]
        for message in (
            before.sends if self.single_copy or (rank, index - 1) in self.exposed else ()
        ):
            if message.peer != writer or message.span[1:] != into[1:]:
                used.append(message.span)
        return not any(_may_meet(each, into, self.in_place) for each in used)

    def _worth_it(self, spans: Sequence[Span]) -> bool:
        return sum(map(self.nbytes, spans)) >= DIRECT_BYTES

    def sent(self, rank: int, index: int) -> list[Span]:
        step = self.steps[rank].get(index)
        sends = () if step is None else step.sends
        return list(dict.fromkeys(m.span for m in sends if m.span.start < m.span.stop))

    def readers(self, rank: int, index: int, span: Span) -> int:
        return len({m.peer for m in self.steps[rank][index].sends if m.span == span})

    def can_be_single_copy(self) -> bool:
        steps = self.steps.items()
        return all(self.stays_unchanged(rank, index) for rank, own in steps for index in own)

    def can_push(self) -> bool:
        """Whether all messages are sent in one step, which only moves them to OUTPUT."""
        steps = [step for steps in self.steps.values() for step in steps.values()]
        received = [m.span for step in steps for m in step.recvs if m.span.start < m.span.stop]
        moves = all(span.buffer == OUTPUT for span in received)
        return self.rounds == 1 and moves and not any(step.folds for step in steps)

    def stays_unchanged(self, rank: int, index: int) -> bool:
        """Whether the spans that a rank sends in a step stay as they are until the next step.

        Then the rank waits for its readers only after it has posted the next step itself.
        """
        step, after = self.steps[rank][index], self.steps[rank].get(index + 1)
        sent = [
            m.span
            for m in step.sends
            if m.span.start < m.span.stop and not self.is_written(rank, index, m.span, m.peer)
        ]
        written = [m.span for m in step.recvs] + [fold.into for fold in step.folds]
        written += [copy.into for copy in after.packs] if after is not None else []
        if any(span.buffer == SCRATCH for span in sent):
            return False
        return not any(_may_meet(a, b, self.in_place) for a in sent for b in written)

    def is_in_step(self) -> bool:
        """Whether every message is received in the step in which it is sent, with its size."""
        for rank, steps in self.steps.items():
            for index, step in steps.items():
                for peer in {m.peer for m in (*step.sends, *step.recvs)}:
                    there = self.steps[peer].get(index)
                    out = [self.nbytes(m.span) for m in step.sends if m.peer == peer]
                    come = [] if there is None else there.recvs
                    if out != [self.nbytes(m.span) for m in come if m.peer == rank]:
                        return False
        return True

    def received(self, rank: int, index: int) -> list[tuple[int, Span, Span]]:
        """(peer, the span that the peer sends, the span that the rank receives it in)"""
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

    def in_slot(self, rank: int, index: int, span: Span) -> Operand:
        return Operand(rank, SLOT, self._in_slot[rank, index].get(span, 0))

    def place(self, rank: int, span: Span) -> Operand:
        return Operand(rank, span.buffer, span.start * self.itemsize)

    def nbytes(self, span: Span) -> int:
        return (span.stop - span.start) * self.itemsize


class _Writer:
    def __init__(self, table: _Table, rank: int, segment: int) -> None:
        self.table, self.rank, self._single_copy = table, rank, table.single_copy
        self.segment = segment
        """Elements of a segment of a message to another host."""
        self.messages: list[HostMessage] = []
        self.message_bytes = 0
        self._read_in: dict[int, int] = defaultdict(int)
        """Peer -> the latest round whose data the rank has waited for."""
        self._waited_for: dict[int, int] = defaultdict(int)
        """Peer -> the latest round that the rank has waited for."""
        self._exposed: list[tuple[Span, int, int]] = []
        """(span, peer, round): what peers read where it is, and when."""

    def instructions(self) -> Iterator[Instruction]:
        table, rank, rounds = self.table, self.rank, self.table.rounds
        copies = table.plans[rank].final_copies
        early = [copy for copy in copies if rounds and self._is_independent(copy)]
        whole = {step.index: step for step in table.plans[rank].steps}
        for index in range(table.step_count):
            number = table.round_of.get(index)
            step = table.steps[rank].get(index)
            if step is not None:
                for copy in step.packs:
                    yield from self.copy(copy.into, table.place(rank, copy.source))
                far = _Far(self, whole[index])
                yield from far.start()
            if number is not None:
                if not self._writes_directly(index):
                    yield self._free_slot(index)
                if step is not None:
                    yield from self._send(step, number)
                else:
                    yield Post(number)
            if index == 0:
                for copy in early:
                    yield from self.copy(copy.into, table.place(rank, copy.source))
            if step is not None:
                operands: dict[Span, Operand] = {}
                yield from self._receive(step, number or 0, operands)
                yield from far.complete(operands)
                if self._writes_directly(step.index + 1):
                    yield self._free_slot(step.index + 1)
                for fold in step.folds:
                    yield from self._reduce(step.index, fold, operands)
        if table.waits_for_readers:
            yield FreeSlot(rounds + 1)
            if table.pushed:
                yield from self._push()
            yield Post(rounds + 1)
            if table.pushed:
                for peer, _, _ in table.received(rank, 0) if 0 in table.steps[rank] else ():
                    yield from self._await(peer, rounds + 1)
        for copy in copies:
            if copy not in early:
                yield from self.copy(copy.into, table.place(rank, copy.source))
        yield from self._until_read(lambda _: True)

    def _is_independent(self, copy: Copy) -> bool:
        """Whether a final copy may come before the steps, while the rank waits for peers."""
        plan = self.table.plans[self.rank]
        others = [each for each in plan.final_copies if each is not copy]
        read = [span for step in plan.steps for span in step.reads]
        written = [span for step in plan.steps for span in step.writes]
        read += [each.source for each in others]
        written += [each.into for each in others]
        return not (
            any(self._overlap(copy.into, span) for span in (*read, *written))
            or any(self._overlap(copy.source, span) for span in written)
        )

    def _writes_directly(self, index: int) -> bool:
        return any((self.rank, index, s) in self.table.direct for s in self._sent(index))

    def _free_slot(self, index: int) -> FreeSlot:
        nbytes = self.table.slot_bytes.get((self.rank, index), 0)
        covering = self.table.exposed.get((self.rank, index))
        return FreeSlot(
            self.table.round_of[index], nbytes, None if covering is None else covering.buffer
        )

    def _sent(self, index: int) -> list[Span]:
        return self.table.sent(self.rank, index)

    def _send(self, step: PlannedStep, number: int) -> Iterator[Instruction]:
        table, rank, index = self.table, self.rank, step.index
        covering = table.exposed.get((rank, index))
        exposes = None
        if not self._single_copy:
            for span in self._sent(index):
                if (rank, index, span) not in table.direct:
                    into, source = table.in_slot(rank, index, span), table.place(rank, span)
                    unless_shared = covering and covering.buffer
                    yield CopyBytes(into, source, table.nbytes(span), unless_shared)
        if covering is not None:
            exposes = table.place(rank, covering)
        yield Post(number, exposes)
        if (self._single_copy and table.pushed < 1) or covering is not None:
            self._exposed += [
                (m.span, m.peer, number)
                for m in step.sends
                if not table.is_written(rank, index, m.span, m.peer)
            ]

    def _receive(
        self, step: PlannedStep, number: int, operands: dict[Span, Operand]
    ) -> Iterator[Instruction]:
        table, rank = self.table, self.rank
        for peer, sent, received in table.received(rank, step.index):
            if self._read_in[peer] < number:
                self._read_in[peer] = self._waited_for[peer] = number
                yield Wait(peer, number, reads=True)
            if self._single_copy:
                source = table.place(peer, sent)
            else:
                source = table.in_slot(peer, step.index, sent)
            if self.is_only_reduced(received, step):
                operands[received] = source
            elif not table.is_written(peer, step.index, sent, rank):
                direct = table.direct.get((peer, step.index, sent), {})
                begin = pushed_bytes(table.nbytes(sent), table.pushed) if table.pushed else 0
                unless_shared = OUTPUT if rank in direct else None
                yield from self.copy(received, source, unless_shared, begin)

    def _push(self) -> Iterator[Instruction]:
        table, rank = self.table, self.rank
        step = table.steps[rank].get(0)
        for peer in dict.fromkeys(m.peer for m in step.sends) if step is not None else ():
            if self._read_in[peer] < 1:
                self._read_in[peer] = self._waited_for[peer] = 1
                yield Wait(peer, 1, reads=True)
            for sender, sent, received in table.received(peer, 0):
                nbytes = pushed_bytes(table.nbytes(sent), table.pushed)
                if sender == rank and nbytes:
                    yield CopyBytes(table.place(peer, received), table.place(rank, sent), nbytes)

    def _reduce(
        self, index: int, fold: Fold, operands: dict[Span, Operand]
    ) -> Iterator[Instruction]:
        table, rank = self.table, self.rank
        if fold.into.start < fold.into.stop:
            yield from self._until_read(lambda span: self._overlap(span, fold.into))
            sources = [operands.get(s) or table.place(rank, s) for s in fold.sources]
            into, nbytes = table.place(rank, fold.into), table.nbytes(fold.into)
            direct = table.direct.get((rank, index + 1, fold.into))
            instruction = Reduce(into, tuple(sources), nbytes, fold.finishes)
            if direct is not None:
                places = tuple(table.place(peer, span) for peer, span in direct.items())
                instruction = instruction._replace(direct=places, writes_private=table.writes)
                if not self._single_copy:
                    staged = table.in_slot(rank, index + 1, fold.into)
                    readers = table.readers(rank, index + 1, fold.into)
                    instruction = instruction._replace(staged=staged, readers=readers)
            yield instruction

    def copy(
        self, into: Span, source: Operand, unless_shared: int | None = None, begin: int = 0
    ) -> Iterator[Instruction]:
        """Copy to a span, but for its first `begin` bytes."""
        nbytes = self.table.nbytes(into) - begin
        if nbytes:
            yield from self._until_read(lambda span: self._overlap(span, into))
            place = self.table.place(self.rank, into)
            place, source = place.after(begin), source.after(begin)
            yield CopyBytes(place, source, nbytes, unless_shared)

    def _until_read(self, concerns: Callable[[Span], bool]) -> Iterator[Instruction]:
        """Wait until peers have read the exposed spans for which `concerns` is true."""
        for span, peer, number in self._exposed:
            if concerns(span):
                yield from self._await(peer, number + 1)

    def _await(self, peer: int, number: int) -> Iterator[Instruction]:
        if self._waited_for[peer] < number:
            self._waited_for[peer] = number
            yield Wait(peer, number, reads=False)

    def is_only_reduced(self, span: Span, step: PlannedStep) -> bool:
        """Whether received data are only reduced: whole, in this step, and never read again."""
        if span.buffer != SCRATCH or span.start == span.stop:
            return False
        folded = [source for fold in step.folds for source in fold.sources]
        if {source for source in folded if _meet(source, span)} != {span}:
            return False
        plan = self.table.plans[self.rank]
        read = [each for later in plan.steps if later.index > step.index for each in later.reads]
        read += [copy.source for copy in plan.final_copies]
        return not any(_meet(each, span) for each in read)

    def _overlap(self, a: Span, b: Span) -> bool:
        return _may_meet(a, b, self.table.in_place)


class _Far:
    """The messages of a step of `writer` to and from other hosts, as `messages.binding` has them.

    Data behind a signature are received after its comparison, so that they always fit.
    """

    def __init__(self, writer: _Writer, step: PlannedStep) -> None:
        self._writer, self._step = writer, step
        self._recvs, self._sends = (
            [part for m in messages if m.peer not in writer.table.plans for part in self._cut(m)]
            for messages in (step.recvs, step.sends)
        )
        self._landed: list[tuple[Span, Operand]] = []
        """(span, where in MESSAGE its data are received)"""
        self._under_way: list[int] = []
        self._sent: list[int] = []

    def _cut(self, message: PlannedMessage) -> Iterator[PlannedMessage]:
        (peer, (buffer, begin, end), signature), size = message, self._writer.table.itemsize
        for start, stop in cut_in_segments(end - begin, self._writer.segment):
            if signature is not None:
                signature = None if start else place_of_signature((stop - start) * size)
            yield PlannedMessage(peer, Span(buffer, begin + start, begin + stop), signature)

    def start(self) -> Iterator[Instruction]:
        """Start the receives, then the sends."""
        signed = {m.peer for m in self._recvs if m.signature is not None}
        self._waits = any(
            m.signature == BESIDE or (m.signature is None and m.peer in signed) for m in self._recvs
        )
        for message in self._recvs:
            if message.signature is not None:
                inside = message.signature == INSIDE
                data_bytes = self._writer.table.nbytes(message.span) if inside else None
                most = max(data_bytes or 0, INSIDE_BYTES)
                place = yield from self._signed(message.peer, True, most, data_bytes)
                if inside:
                    self._landed.append((message.span, place))
            elif not self._waits:
                yield from self._data(message, True)
        for message in self._sends:
            inside = message.signature == INSIDE
            if message.signature is not None:
                data_bytes = self._writer.table.nbytes(message.span) if inside else None
                how = data_bytes or 0, data_bytes, message.span
                yield from self._signed(message.peer, False, *how)
            if not inside:
                yield from self._data(message, False)

    def complete(self, operands: dict[Span, Operand]) -> Iterator[Instruction]:
        """Wait for all messages; `operands` gets the places of data that are only reduced."""
        writer = self._writer
        yield from self._wait()
        for message in self._recvs:
            if self._waits and message.signature != INSIDE:
                yield from self._data(message, True)
        yield from self._wait()
        yield from map(Complete, self._sent)
        for span, place in self._landed:
            if writer.is_only_reduced(span, self._step):
                operands[span] = place
            else:
                yield from writer.copy(span, place)

    def _wait(self) -> Iterator[Instruction]:
        yield from map(Complete, self._under_way)
        self._under_way.clear()

    def _signed(
        self,
        peer: int,
        receives: bool,
        nbytes: int,
        data_bytes: int | None,
        span: Span | None = None,
    ) -> Generator[Instruction, None, Operand]:
        """Start a message that begins with the header, in MESSAGE; `span` is copied there first."""
        writer = self._writer
        place = Operand(writer.rank, MESSAGE, writer.message_bytes + ALIGNMENT)
        writer.message_bytes += ALIGNMENT + -(-nbytes // ALIGNMENT) * ALIGNMENT
        if span is not None and nbytes:
            yield CopyBytes(place, writer.table.place(writer.rank, span), nbytes)
        yield self._start(peer, receives, place, nbytes, True, data_bytes)
        return place

    def _data(self, message: PlannedMessage, receives: bool) -> Iterator[Instruction]:
        table = self._writer.table
        place, nbytes = table.place(self._writer.rank, message.span), table.nbytes(message.span)
        yield self._start(message.peer, receives, place, nbytes, False, nbytes)

    def _start(
        self,
        peer: int,
        receives: bool,
        place: Operand,
        nbytes: int,
        signed: bool,
        data_bytes: int | None,
    ) -> Start:
        messages, how = self._writer.messages, (nbytes, signed, data_bytes)
        messages.append(HostMessage(self._step.index, peer, receives, place, *how))
        (self._under_way if receives else self._sent).append(len(messages) - 1)
        return Start(len(messages) - 1)


def _touches_scratch(instruction: Instruction) -> bool:
    places: tuple[Operand, ...] = ()
    if isinstance(instruction, CopyBytes):
        places = (instruction.into, instruction.source)
    elif isinstance(instruction, Reduce):
        places = (instruction.into, *instruction.sources)
    return any(place.buffer == SCRATCH for place in places)


def _notes(plan: PlannedSlice, itemsize: int) -> Iterator[tuple[int, str, int, int]]:
    for step in plan.steps:
        for way, messages in (("recv", step.recvs), ("send", step.sends)):
            for message in messages:
                nbytes = (message.span.stop - message.span.start) * itemsize
                yield step.index, way, message.peer, nbytes


def _meet(a: Span, b: Span) -> bool:
    return a.buffer == b.buffer and a.start < b.stop and b.start < a.stop


def _may_meet(a: Span, b: Span, in_place: bool) -> bool:
    both = {a.buffer, b.buffer}
    same = a.buffer == b.buffer or (in_place and both == {INPUT, OUTPUT})
    return same and a.start < b.stop and b.start < a.stop
