"""Walk the workers of a parameter store in any order, with losses, breaks and dying servers.

The decisions are those of `ringreduce.parallel.store_rule`.  Workers pull, push, ask for numbers
and close when they like; a `World` knows what each has done, and checks each decision.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ringreduce.parallel import store_rule

PUSHES = 3
"""How often a worker pushes without numbers."""


class WalkError(AssertionError):
    """A decision, or a state, that must not be."""


def check(holds: bool, text: str) -> None:
    if not holds:
        raise WalkError(text)


@dataclass
class Worker:
    at: str = "busy"
    """Or in "pull", in "ask", or "gone"."""
    made: int = 0
    """All pushes; `pushes`: those since the last meeting."""
    pushes: int = 0
    step: int = 0
    """The step of the parameters that it has, or the one after that of its last push."""
    number: int | None = None
    """The number of its turn, also after the push."""
    has_pulled: bool = False
    has_pushed: bool = False
    has_broken: bool = False
    meetings: int = 0

    @property
    def takes_part(self) -> bool:
        return self.at in ("busy", "pull") and not self.has_broken


@dataclass
class World:
    """A state of the walk; `counts` are the numbers of each loop, without which workers push."""

    rule_type: Any
    """The rule, perhaps with a mistake."""
    size: int
    staleness: int | None
    backup_workers: int = 0
    counts: tuple[int, ...] = ()
    losses: int = 0
    breaks: int = 0
    deaths: int = 0
    """Of deciding servers."""
    closed: int = 0
    begun: int = 0
    """The first step after the last meeting."""
    pending: list[tuple[int, int, int, int | None]] = field(default_factory=list)
    """Step whose parameters the worker had, worker, id and number of each push."""
    applied: list[tuple[int, int | None]] = field(default_factory=list)
    """Meetings before, and number, of each push."""
    is_whole: bool = True
    """Whether no worker has left its loop, and no server has died."""
    ahead: float = 0
    """How far a worker was ahead when its pull returned, at most."""

    def __post_init__(self) -> None:
        self.workers = [Worker() for _ in range(self.size)]
        reports = {rank: store_rule.Worker() for rank in range(self.size)}
        self.rule = self.rule_type(reports, self.staleness, self.backup_workers)

    def states(self) -> Iterator[World]:
        """Make every action in every state that can be reached."""
        seen, rest = set(), [self]
        while rest:
            world = rest.pop()
            yield world
            for action in world.actions():
                after = copy.deepcopy(world)
                after.do(*action)
                key = f"{after} {after.workers} {vars(after.rule)}"
                if key not in seen:
                    seen.add(key)
                    rest.append(after)

    def actions(self) -> list[tuple[str, int, int | None]]:
        """Return what workers may do; then, where a number follows, the deciding server may die.

        It has answered the worker of that number alone, or none.
        """
        told = [None, *range(-1, self.size)] if self.deaths else [None]
        ranks = range(self.size)
        return [(name, r, t) for r in ranks for name in self._names(self.workers[r]) for t in told]

    def _names(self, worker: Worker) -> Iterator[str]:
        if worker.at != "gone" and self.losses:
            yield "lose"
        if worker.at == "busy":
            yield "close"
            if not worker.has_pulled:
                yield "pull"
            if self.counts and (worker.number is None or worker.has_pushed):
                if worker.meetings < len(self.counts):
                    yield "ask"
            elif self.counts or worker.made < PUSHES:
                if not self.deaths or self._own(worker) == []:  # else its last push has no answer
                    yield "push"
                if self.counts and self.breaks:
                    yield "break"

    def do(self, name: str, rank: int, told: int | None) -> None:
        """Make an action, and check what follows from it."""
        worker = self.workers[rank]
        has_left = name == "close" and worker.meetings < len(self.counts)
        self.is_whole &= told is None and not has_left and name not in ("lose", "break")
        if name == "push":
            worker.made += 1
            self._push(rank, worker.made)
        elif name in ("pull", "ask"):
            worker.at = name
            self._wait(rank)
        elif name == "break":
            worker.number, worker.has_broken, self.breaks = None, True, self.breaks - 1
            self.rule.break_off(rank)
        else:
            worker.at, self.losses = "gone", self.losses - (name == "lose")
            self.rule.leave(rank)
        self._take_decisions(told)
        if told is not None:
            self._resume()
        self._check_state()

    def _push(self, rank: int, id: int) -> None:
        worker = self.workers[rank]
        step = worker.step if self.staleness == 0 else self.closed
        self.pending.append((step, rank, id, worker.number))
        worker.pushes, worker.step = worker.pushes + 1, step + 1
        worker.has_pulled, worker.has_pushed, worker.has_broken = False, True, False
        self.rule.push(rank, id)

    def _wait(self, rank: int) -> None:
        worker = self.workers[rank]
        if worker.at == "pull":
            self.rule.pull(rank)
        elif worker.at == "ask":
            worker.has_broken = False
            worker.number = worker.number if self._own(rank) else None
            self.rule.steps(rank, self.counts[worker.meetings])

    def _resume(self) -> None:
        """Make the next rule of what living workers report; then they send again."""
        living = {rank: worker for rank, worker in enumerate(self.workers) if worker.at != "gone"}
        again = [push for push in self.pending if push[1] in living]
        self.deaths, self.pending = self.deaths - 1, []
        done, reports = self._done(), {}
        for step, rank, _, _ in again:
            living[rank].step, living[rank].pushes = step, living[rank].pushes - 1
        for rank, worker in living.items():
            worker.step = min(worker.step, self.closed) if self.backup_workers else self.closed
            reports[rank] = store_rule.Worker(
                last=worker.made - sum(push[1] == rank for push in again),
                pushes=worker.pushes,
                step=worker.step,
                number=None if (worker.meetings, worker.number) in self.applied else worker.number,
                meetings=worker.meetings,
                takes_part=not worker.has_broken,
            )
        count = dict(enumerate(self.counts)).get(self._meeting())
        rule = self.rule_type
        self.rule = rule(reports, self.staleness, self.backup_workers, self.closed, count, done)
        for _, rank, id, _ in again:
            self._push(rank, id)
        for rank in living:
            self._wait(rank)
            self._take_decisions(None)

    def _meeting(self) -> int:
        return max((worker.meetings for worker in self.workers if worker.at != "gone"), default=0)

    def _done(self) -> set[int | None]:
        at = self._meeting()
        return {number for meetings, number in self.applied if meetings == at} - {None}

    def _can_close(self) -> bool:
        lacks = sum(worker.takes_part and worker.step <= self.closed for worker in self.workers)
        return self.staleness != 0 or lacks <= self.backup_workers

    def _own(self, rank: int) -> list[Any]:
        return [push for push in self.pending if push[1] == rank]

    def _ahead(self, worker: Worker) -> float:
        clocks = [other.pushes for other in self.workers if other.takes_part]
        return worker.pushes - min(clocks) if worker.takes_part else 0

    def _free(self) -> set[int]:
        """Return the numbers that nobody has, and that are not pushed."""
        at = self._meeting()
        has = {w.number for w in self.workers if w.at in ("busy", "pull") and w.meetings == at}
        numbers = range(dict(enumerate(self.counts)).get(at, 0))
        return set(numbers) - has - {push[3] for push in self.pending} - self._done()

    def _take_decisions(self, told: int | None) -> None:
        for decision in self.rule.decisions():
            kind = type(decision).__name__
            if kind == "Apply":
                self._apply(*decision)
            elif told in (None, decision.worker):
                getattr(self, f"_{kind.lower()}")(*decision)

    def _apply(self, step: int, pushes: list[Any]) -> None:
        due = [push for push in self.pending if push[0] == self.closed]
        check([*map(tuple, pushes)] == sorted(push[1:] for push in due), "a step has other pushes")
        check(step == self.closed and self._can_close(), "a step closes too early")
        if self.counts and self.staleness == 0 and self.is_whole and not self.backup_workers:
            first = (step - self.begun) * self.size
            batch = set(range(self.counts[self._meeting()])[first : first + self.size])
            check({number for *_, number in due} == batch, "a step has another batch")
        for push in due:
            turn = self.workers[push[1]].meetings, push[3]
            check(push[3] is None or turn not in self.applied, "a number counts twice")
            self.pending.remove(push)
            self.applied.append(turn)
        self.closed += 1

    def _discard(self, rank: int, id: int) -> None:
        late = [push for push in self.pending if push[1:3] == (rank, id)]
        check(self.staleness == 0 and late[0][0] < self.closed, "a push in time is dropped")
        self.pending.remove(late[0])
        self.workers[rank].step = self.closed

    def _go(self, rank: int, step: int) -> None:
        worker = self.workers[rank]
        ahead = self._ahead(worker)
        check(ahead <= (self.staleness or PUSHES), "a worker is too far ahead")
        check(self._own(rank) == [] and step == self.closed, "a pull lacks an own push")
        worker.at, worker.has_pulled, worker.step = "busy", True, self.closed
        self.ahead = max(self.ahead, ahead)

    def _number(self, rank: int, number: int | None) -> None:
        worker, meeting = self.workers[rank], self._meeting()
        if number is not None:
            check(number in self._free(), "a number is dealt twice")
            check(self.staleness != 0 or self._own(rank) == [], "a worker is two steps ahead")
        else:
            if worker.meetings == meeting:
                check(self._done() == set(range(self.counts[meeting])), "a loop ends too early")
                check(not any(other.takes_part for other in self.workers), "a loop waits for nobody")
                self.begun = self.closed
            worker.meetings, worker.pushes = worker.meetings + 1, 0
        worker.at, worker.number, worker.has_pushed = "busy", number, False
        worker.step = self.closed

    def _check_state(self) -> None:
        steps = {push[0] for push in self.pending}
        check(not (self.closed in steps and self._can_close()), "a step stays open")
        check(all(step >= self.closed for step in steps), "a late push stays")
        for rank, worker in enumerate(self.workers):
            if worker.at == "ask":
                check(worker.meetings == self._meeting(), "a loop does not end")
                check(not self._free() or self._own(rank) != [], "a number is not dealt")
            if worker.at == "pull" and not self._own(rank):
                check(self._ahead(worker) > (self.staleness or math.inf), "a pull waits too long")
        at = {worker.at for worker in self.workers}
        check("busy" in at or at == {"gone"}, "nobody can go on")
