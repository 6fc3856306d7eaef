"""Prove a schedule: combine the steps of all ranks and execute them on symbols.

`check` proves, for exactly the meaning of a step in `ringreduce.schedules.schedule`:

- every result has every contribution exactly once.  A fold of two values that share a contribution
  is an error at once, so one bit a rank is enough to count exactly;
- every send matches one receive of the same chunks, first in, first out, and no message is left;
- it cannot deadlock, even if a send completes only once its receive is posted;
- no step races with itself;
- all ranks form the same expression for a chunk, hence the same bits.  A fold of three values in
  one step differs from two folds of two: 16-bit floats round once in the first, twice in the
  second;
- the steps and chunks equal the schedule's claims, and the holders of each chunk are those that the
  collective promises;
- no rank leaves a barrier before it has heard, directly or through other ranks, from every rank.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from ringreduce.errors import ScheduleError, counted
from ringreduce.schedules.collectives import COLLECTIVES
from ringreduce.schedules.matching import (
    Message,
    Posted,
    RankStep,
    chunks_text,
    match,
    posts,
    progress,
)
from ringreduce.schedules.schedule import (
    Claim,
    Recv,
    Schedule,
    Send,
    Step,
    chunk_of,
    chunk_text,
    source_of,
)

Expression: TypeAlias = "int | tuple[Expression, ...]"
"""An ordered sum: an int is that rank's contribution, a tuple is one fold, left to right."""


@dataclass(frozen=True)
class Proof:
    """The counts of a proven schedule, and the sums that it forms."""

    steps: int
    """Steps of the rank that takes the most."""
    messages: int
    chunks: int
    """Chunks moved, over all messages."""
    results: Mapping[int, Expression]
    """Chunk -> the expression that every rank forms for it."""
    completed: frozenset[tuple[int, int, int]]
    """The (rank, step, chunk) of every fold whose result has all contributions."""


def check(schedule: Schedule) -> Proof:
    """Prove a schedule, or raise ScheduleError naming the step, the ranks and the chunk.

    >>> from ringreduce.algorithms import build
    >>> check(build("reduce_scatter", "ring", nodes=[[0, 1, 2]])).results
    {0: (0, (1, 2)), 1: ((0, 2), 1), 2: ((0, 1), 2)}
    """
    try:
        return _prove(schedule)
    except ScheduleError as error:
        name = f"{schedule.collective} {schedule.algorithm} of {counted(schedule.size, 'rank')}"
        raise ScheduleError(f"{name}: {error}", error.places) from None


def _prove(schedule: Schedule) -> Proof:
    ranks = [list(schedule.steps(rank)) for rank in range(schedule.size)]
    _check_collective(schedule)
    for rank, steps in enumerate(ranks):
        for number, step in enumerate(steps):
            _check_step(schedule, RankStep(rank, number), step)
    messages = match(ranks)
    posted = posts(messages)
    execution = _Execution(schedule, ranks, posted)
    for place in progress(ranks, posted):
        execution.enter(place)
    results = execution.results(schedule)
    if schedule.collective == "barrier":
        execution.check_barrier()
    for rank, steps in enumerate(ranks):
        _check_claim(rank, steps, schedule.claim(rank))
    return Proof(
        steps=max(map(len, ranks), default=0),
        messages=len(messages),
        chunks=sum(len(message.chunks) for message in messages),
        results=results,
        completed=frozenset(execution.completed),
    )


# --- checks without execution ---------------------------------------------------------------------


def _check_collective(schedule: Schedule) -> None:
    """Check that chunks exist, and have as many holders as the collective promises.

    Else a schedule in which no rank holds anything would pass.
    """
    size, chunks = schedule.size, range(len(schedule.weights))
    before, after = COLLECTIVES.get(schedule.collective, ("", ""))
    for when, holds, holder in (
        ("before", schedule.holds_before, before),
        ("after", schedule.holds_after, after),
    ):
        holders = Counter(chunk for rank in range(size) for chunk in set(holds(rank)))
        if unknown := sorted(holders.keys() - chunks):
            raise ScheduleError(f"{chunks_text(unknown)} held {when}, of {len(chunks)}")
        who, wanted = ("every rank", size) if holder == "every rank" else ("one rank", 1)
        for chunk in chunks:
            if holder and holders[chunk] != wanted:
                raise ScheduleError(
                    f"chunk {chunk} is held {when} by {holders[chunk]} of "
                    f"{counted(size, 'rank')}; {schedule.collective} wants it held by {who}"
                )


def _check_step(schedule: Schedule, place: RankStep, step: Step) -> None:
    """Check that peers and chunks exist, and that the step does not race with itself."""
    rank = place.rank
    messages: tuple[Send | Recv, ...] = (*step.sends, *step.recvs)
    for message in messages:
        if message.peer == rank:
            raise _wrong(place, "has a message with itself")
        if not 0 <= message.peer < schedule.size:
            raise _wrong(place, f"has a message with rank {message.peer}, of {schedule.size}")
        for chunk in message.chunks:
            if not _exists(schedule, chunk):
                raise _wrong(
                    place,
                    f"has a message with chunk {chunk_text(chunk)}, of {len(schedule.weights)}",
                )
    _check_copies(schedule, place, step)

    overwritten = Counter(c for recv in step.recvs if not recv.reduce for c in recv.chunks)
    read = {
        "sends it": {_known_as(c, rank) for send in step.sends for c in send.chunks},
        "reduces into it": {c for recv in step.recvs if recv.reduce for c in recv.chunks},
        "overwrites it again": {c for c, times in overwritten.items() if times > 1},
    }
    for action, chunks in read.items():
        for chunk in sorted(overwritten.keys() & chunks):
            raise _wrong(
                place, f"overwrites chunk {chunk_text(chunk)} and {action} in the same step"
            )


def _check_copies(schedule: Schedule, place: RankStep, step: Step) -> None:
    """Check copies: received without reducing, folded into chunks that nothing else changes."""
    rank = place.rank
    for recv in step.recvs:
        for chunk in recv.chunks:
            if source_of(chunk) == rank:
                raise _wrong(place, f"receives its own copy, chunk {chunk_text(chunk)}")
            if source_of(chunk) is not None and recv.reduce:
                raise _wrong(place, f"reduces into a copy, chunk {chunk_text(chunk)}")
    if step.folds and not step.recvs:
        raise _wrong(place, f"folds {chunks_text(step.folds)} but receives nothing")
    changed = {chunk for recv in step.recvs for chunk in recv.chunks}
    for chunk, times in Counter(step.folds).items():
        if source_of(chunk) is not None or not _exists(schedule, chunk):
            raise _wrong(place, f"folds chunk {chunk_text(chunk)}, of {len(schedule.weights)}")
        if times > 1 or chunk in changed:
            how = "folds it again" if times > 1 else "receives it"
            raise _wrong(place, f"folds chunk {chunk} and {how} in the same step")


def _exists(schedule: Schedule, name: int) -> bool:
    source = source_of(name)
    whose = source is None or source < schedule.size
    return name >= 0 and whose and chunk_of(name) < len(schedule.weights)


def _rank_of(copy: int) -> int:
    source = source_of(copy)
    assert source is not None
    return source


def _known_as(name: int, rank: int) -> int:
    """Return the chunk for the rank's own copy of it; any other name unchanged."""
    return chunk_of(name) if source_of(name) == rank else name


def _check_claim(rank: int, steps: Sequence[Step], claim: Claim) -> None:
    actual = Claim.of(steps)
    if actual != claim:
        raise ScheduleError(
            f"rank {rank} takes {counted(actual.steps, 'step')}, sends "
            f"{counted(actual.sent, 'chunk')} and receives {actual.received}; claimed are "
            f"{counted(claim.steps, 'step')}, {claim.sent} sent and {claim.received} received"
        )


# --- execution on symbols -------------------------------------------------------------------------


class _Execution:
    """The values that every rank holds, while ranks go through their steps.

    A value names an expression: an int below `size` a rank's contribution, each further int a
    fold.  Equal expressions have equal names, so comparing them is cheap.
    """

    def __init__(self, schedule: Schedule, ranks: Sequence[Sequence[Step]], posted: Posted) -> None:
        size = schedule.size
        self.held = [dict.fromkeys(schedule.holds_before(rank), rank) for rank in range(size)]
        """Rank -> its chunks and copies -> their values."""
        self._ranks = ranks
        self.heard = [1 << rank for rank in range(size)]
        """Rank -> a bit for each rank that it has heard from, directly or not."""
        self.expressions: list[Expression] = list(range(size))
        """Value -> its expression."""
        self.contributors = [1 << rank for rank in range(size)]
        """Value -> a bit for each rank that contributes to it."""
        self._folds: dict[tuple[int, ...], int] = {}
        """Operands of a fold -> its value."""
        self._under_way: dict[Message, tuple[list[int], int]] = {}
        """Message -> the values sent, and the ranks that its sender had heard from."""
        self._posted = posted
        self.all_contributors = [0] * len(schedule.weights)
        """Chunk -> a bit for each rank that contributes to its sum."""
        for rank in range(size):
            for chunk in schedule.holds_before(rank):
                self.all_contributors[chunk] |= 1 << rank
        self.completed: set[tuple[int, int, int]] = set()

    def enter(self, place: RankStep) -> None:
        """End the rank's previous step, then send the values from before this one."""
        self._land(RankStep(place.rank, place.step - 1))
        held = self.held[place.rank]
        for message in self._posted.get(place, ()):
            if message.sender != place:
                continue
            chunks = [_known_as(chunk, place.rank) for chunk in message.chunks]
            for chunk, name in zip(chunks, message.chunks, strict=True):
                if chunk not in held:
                    raise _wrong(
                        place,
                        f"sends chunk {chunk_text(name)} to rank {message.receiver.rank}, "
                        "but holds no value of it",
                    )
            values = [held[chunk] for chunk in chunks]
            self._under_way[message] = values, self.heard[place.rank]

    def _land(self, place: RankStep) -> None:
        rank = place.rank
        terms: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for message in self._posted.get(place, ()):
            if message.receiver != place:
                continue
            values, heard = self._under_way.pop(message)
            self.heard[rank] |= heard
            for chunk, value in zip(message.chunks, values, strict=True):
                if message.reduce:
                    terms[chunk].append((message.sender.rank, value))
                else:
                    self.held[rank][chunk] = value
        for chunk, received in terms.items():
            if chunk not in self.held[rank]:
                raise _wrong(
                    place,
                    f"reduces chunk {chunk} from rank {received[0][0]}, but holds no value of it",
                )
            received.append((rank, self.held[rank][chunk]))
            received.sort(key=lambda term: term[0])
            self.held[rank][chunk] = self._fold(place, chunk, received)
        if place.step >= 0:
            for chunk in self._ranks[rank][place.step].folds:
                self.held[rank][chunk] = self._fold(place, chunk, self._copies(place, chunk))

    def _copies(self, place: RankStep, chunk: int) -> list[tuple[int, int]]:
        """Return the (rank, value) of a chunk and of its copies, by rank, and drop the copies."""
        held = self.held[place.rank]
        names = [name for name in held if name != chunk and chunk_of(name) == chunk]
        if not names or chunk not in held:
            lacks = "value" if names else "copy"
            raise _wrong(place, f"folds the copies of chunk {chunk}, but holds no {lacks} of it")
        terms = [(_rank_of(name), held.pop(name)) for name in names]
        return sorted([*terms, (place.rank, held[chunk])])

    def _fold(self, place: RankStep, chunk: int, terms: Sequence[tuple[int, int]]) -> int:
        """Return the value of the fold of (rank, value) terms, in this order."""
        together = 0
        for _, value in terms:
            if twice := together & self.contributors[value]:
                raise _wrong(
                    place,
                    f"folds chunk {chunk} of {_ranks(rank for rank, _ in terms)} and counts the "
                    f"contribution of {_ranks(_members(twice))} twice",
                )
            together |= self.contributors[value]
        values = tuple(value for _, value in terms)
        name = self._folds.setdefault(values, len(self.expressions))
        if name == len(self.expressions):
            self.expressions.append(tuple(self.expressions[value] for value in values))
            self.contributors.append(together)
        if together == self.all_contributors[chunk]:
            self.completed.add((place.rank, place.step, chunk))
        return name

    def results(self, schedule: Schedule) -> dict[int, Expression]:
        """Return each chunk's expression: complete, and the same on all ranks that hold it."""
        found: dict[int, tuple[int, int]] = {}
        for rank in range(schedule.size):
            for chunk in schedule.holds_after(rank):
                value = self.held[rank].get(chunk)
                if value is None:
                    raise ScheduleError(f"at the end rank {rank} holds no value of chunk {chunk}")
                if missing := self.all_contributors[chunk] & ~self.contributors[value]:
                    raise ScheduleError(
                        f"at the end chunk {chunk} on rank {rank} lacks the contribution of "
                        f"{_ranks(_members(missing))}"
                    )
                first, same = found.setdefault(chunk, (rank, value))
                if value != same:
                    raise ScheduleError(
                        f"at the end chunk {chunk} is {_text(self.expressions[same])} on rank "
                        f"{first} but {_text(self.expressions[value])} on rank {rank}; the order "
                        "of addition must be the same on every rank"
                    )
        return {chunk: self.expressions[value] for chunk, (_, value) in sorted(found.items())}

    def check_barrier(self) -> None:
        for rank, heard in enumerate(self.heard):
            if missing := ((1 << len(self.heard)) - 1) & ~heard:
                raise ScheduleError(
                    f"at the end rank {rank} has not heard from {_ranks(_members(missing))}"
                )


# --- texts ----------------------------------------------------------------------------------------


def _wrong(place: RankStep, what: str) -> ScheduleError:
    return ScheduleError(f"step {place.step}: rank {place.rank} {what}", [place])


def _ranks(ranks: Iterable[int]) -> str:
    numbers = [str(rank) for rank in ranks]
    return f"rank{'s' * (len(numbers) > 1)} {', '.join(numbers)}"


def _members(mask: int) -> list[int]:
    return [rank for rank in range(mask.bit_length()) if mask >> rank & 1]


def _text(expression: Expression, depth: int = 6) -> str:
    """Return text such as ((0+1)+2); folds nested deeper than `depth` become an ellipsis."""
    if isinstance(expression, int):
        return str(expression)
    if not depth:
        return "(…)"
    return "(" + "+".join(_text(term, depth - 1) for term in expression) + ")"
