"""Run schedules and plans on symbols, all ranks in one loop, without transport or device.

The value of a chunk is the tree of how it came about: a rank's own contribution is the rank, a fold
is the tuple of its terms, and what a plan calls finished is ``(DIVIDED, tree)``.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Generator, Sequence
from itertools import combinations
from operator import itemgetter
from typing import Any

from ringreduce.planning.operations import INPUT, SCRATCH, PlannedStep, Span
from ringreduce.planning.plan import Plan
from ringreduce.schedules.schedule import Schedule, chunk_of, source_of

DIVIDED = "divided"
Tree = Any
Program = Generator[tuple[list[tuple[int, Any]], list[int], bool], list[Any] | None, None]
"""One rank: yields its sends (peer, message), whom it receives from, and whether the sends may go
on through its next step; is sent what came."""


def in_lockstep(programs: Sequence[Program]) -> None:
    """Run all ranks; a step ends once each of its sends has met a receive, and the reverse.

    Raises AssertionError when nobody can go on, or a message is left over.
    """
    sent: dict[tuple[int, int], list[Any]] = defaultdict(list)
    receives: Counter[tuple[int, int]] = Counter()
    unmet: dict[int, list[tuple[int, int, int]]] = {}
    needs: dict[int, tuple[list[tuple[int, int, int]], list[tuple[int, int, int]]]] = {}

    def enter_next_step(rank: int, came: list[Any] | None) -> None:
        needs.pop(rank, None)
        try:
            sends, peers, goes_on = programs[rank].send(came)
        except StopIteration:
            return
        outgoing, incoming = unmet.pop(rank, []), []
        for peer, message in sends:
            outgoing.append((rank, peer, len(sent[rank, peer])))
            sent[rank, peer].append(message)
        for peer in peers:
            incoming.append((peer, rank, receives[peer, rank]))
            receives[peer, rank] += 1
        if goes_on:
            unmet[rank], outgoing = outgoing, []
        needs[rank] = outgoing, incoming

    for rank in range(len(programs)):
        enter_next_step(rank, None)
    while needs:
        ready = {
            rank: [sent[a, b][number] for a, b, number in incoming]
            for rank, (outgoing, incoming) in needs.items()
            if all(number < receives[a, b] for a, b, number in outgoing)
            and all(number < len(sent[a, b]) for a, b, number in incoming)
        }
        assert ready, f"ranks {sorted(needs)} wait for ever"
        for rank, came in ready.items():
            enter_next_step(rank, came)
    for (a, b), messages in sent.items():
        assert len(messages) == receives[a, b], f"rank {a} sends more to {b} than that receives"


def chunk_trees(schedule: Schedule) -> list[dict[int, Tree]]:
    """What every rank has of every chunk at the end, by the definition of a step."""
    values = [dict.fromkeys(schedule.holds_before(r), r) for r in range(schedule.size)]
    in_lockstep([_run_schedule(schedule, rank, values[rank]) for rank in range(schedule.size)])
    return values


def _run_schedule(schedule: Schedule, rank: int, values: dict[int, Tree]) -> Program:
    for step in schedule.steps(rank):
        outgoing = [
            (send.peer, [values[chunk_of(c) if source_of(c) == rank else c] for c in send.chunks])
            for send in step.sends
        ]
        came = yield outgoing, [recv.peer for recv in step.recvs], False
        contributions: dict[int, list[tuple[int, Tree]]] = defaultdict(list)
        for recv, trees in zip(step.recvs, came, strict=True):
            for chunk, tree in zip(recv.chunks, trees, strict=True):
                if recv.reduce:
                    contributions[chunk].append((recv.peer, tree))
                else:
                    values[chunk] = tree
        for chunk, arrived in contributions.items():
            ascending = sorted([*arrived, (rank, values[chunk])], key=itemgetter(0))
            values[chunk] = tuple(tree for _, tree in ascending)
        for chunk in step.folds:
            copies = [name for name in values if name != chunk and chunk_of(name) == chunk]
            kept = [(source_of(name), values.pop(name)) for name in copies]
            ascending = sorted([*kept, (rank, values[chunk])], key=itemgetter(0))
            values[chunk] = tuple(tree for _, tree in ascending)


class Memory:
    """One rank's three buffers.  Nothing may be read before it was written, and INPUT not written.

    Each element is ``(index, tree)``: which element of the whole it is.
    """

    def __init__(self, source: list[Any], output_count: int, in_place: bool) -> None:
        self.in_place = in_place
        self.source = list(source)
        output = self.source if in_place else [None] * output_count
        self.buffers: list[list[Any]] = [self.source, output, []]

    def read(self, span: Span) -> list[Any]:
        self._check(span)
        values = self.buffers[span.buffer][span.start : span.stop]
        assert None not in values, f"{span} is read before it is written"
        return values

    def write(self, span: Span, values: list[Any]) -> None:
        self._check(span)
        assert span.buffer != INPUT, "the input is written"
        assert len(values) == span.stop - span.start
        self.buffers[span.buffer][span.start : span.stop] = values

    def _check(self, span: Span) -> None:
        assert 0 <= span.start <= span.stop <= len(self.buffers[span.buffer]), span

    def share(self, a: Span, b: Span) -> bool:
        """Whether two spans have an element in common."""
        same = a.buffer == b.buffer or (self.in_place and SCRATCH not in (a.buffer, b.buffer))
        return same and max(a.start, b.start) < min(a.stop, b.stop)


def run_plans(plans: Sequence[Plan], memories: Sequence[Memory], divides: bool) -> None:
    """Carry out every slice of the plans of all ranks; `divides`: mark what they call finished."""
    for index in range(plans[0].slices):
        for plan, memory in zip(plans, memories, strict=True):
            memory.buffers[SCRATCH] = [None] * plan.slice(index).scratch
        pairs = zip(plans, memories, strict=True)
        in_lockstep([_run_slice(plan, index, memory, divides) for plan, memory in pairs])


def _run_slice(plan: Plan, index: int, memory: Memory, divides: bool) -> Program:
    planned = plan.slice(index)
    leaving: list[Span] = []
    for step in planned.steps:
        leaving += [send.span for send in step.sends]
        assert_no_race(step, memory, leaving)
        if not step.more_parts:
            leaving = []
        for copy in step.packs:
            memory.write(copy.into, memory.read(copy.source))
        outgoing = [(m.peer, (m.signature, memory.read(m.span))) for m in step.sends]
        came = yield outgoing, [message.peer for message in step.recvs], step.more_parts
        for message, (signature, values) in zip(step.recvs, came, strict=True):
            assert signature == message.signature
            memory.write(message.span, values)
        for fold in step.folds:
            terms = zip(*map(memory.read, fold.sources), strict=True)
            memory.write(fold.into, [_folded(some, divides and fold.finishes) for some in terms])
    for copy in planned.final_copies:
        if not memory.in_place or copy.source != copy.into._replace(buffer=INPUT):
            memory.write(copy.into, memory.read(copy.source))


def _folded(terms: Sequence[tuple[int, Tree]], divide: bool) -> tuple[int, Tree]:
    assert len({element for element, _ in terms}) == 1, "different elements are folded"
    tree = tuple(tree for _, tree in terms)
    return terms[0][0], (DIVIDED, tree) if divide else tree


def assert_no_race(step: PlannedStep, memory: Memory, leaving: Sequence[Span]) -> None:
    """What is received may come at any time, and what is sent may leave at any time."""
    receives = [message.span for message in step.recvs]
    for a, b in combinations(receives, 2):
        assert not memory.share(a, b), "two messages come into the same memory"
    for span in leaving:
        assert not any(memory.share(span, other) for other in receives), "received into a send"
        if step.more_parts:
            folded = any(memory.share(span, fold.into) for fold in step.folds)
            assert not folded, "folded into what is being sent"
    for copy in step.packs:
        assert not any(memory.share(copy.into, other.source) for other in step.packs)
    for fold in step.folds:
        for operand in fold.sources:
            same = fold.into[1:] == operand[1:]
            assert same or not memory.share(fold.into, operand), "a fold overwrites what it reads"
