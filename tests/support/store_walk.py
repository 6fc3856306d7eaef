"""Walk the workers of a parameter store in any order, with losses, breaks and dying servers.

The decisions are those of `ringreduce.parallel.store_rule`.  Workers pull, push, ask for numbers
and close when they like; a `World` knows what each has done, and checks each decision.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from ringreduce.parallel import store_rule

PUSHES = 3  # of a worker without numbers


@dataclass
class Worker(store_rule.Worker):
    """What a worker knows; `number` is that of its turn, also after the push."""

    at: str = "busy"  # or in "pull", in "ask", has "left" its loop, is "gone"
    has_pushed: bool = False


@dataclass
class World:
    """A state of the walk; `counts` are the numbers of each loop, without which workers push."""

    rule_type: Any
    size: int
    staleness: int | None
    backup_workers: int = 0
    counts: tuple[int, ...] = ()
    losses: int = 0
    breaks: int = 0
    deaths: int = 0  # of deciding servers
    closed: int = 0  # steps
    begun: int = 0  # the first step after the last meeting
    pending: list[Any] = field(default_factory=list)  # step, worker, id and number of pushes
    dropped: list[Any] = field(default_factory=list)  # the same, where the worker may not know
    applied: list[Any] = field(default_factory=list)  # meetings before, and number
    ahead: int = field(default=0, repr=False)  # how far the worker was that last pulled

    def __post_init__(self) -> None:
        self.workers = [Worker() for _ in range(self.size)]
        reports = dict(enumerate(copy.deepcopy(self.workers)))
        self.rule = self.rule_type(reports, self.staleness, self.backup_workers)
        faults = self.losses + self.breaks + self.deaths
        self.has_batches = self.staleness == self.backup_workers + faults == 0

    def states(self) -> Iterator[World]:
        """Make every action in every state that can be reached; yield where each leads to."""
        seen, rest = set(), [self]
        while rest:
            world = rest.pop()
            for action in world.actions():
                after = copy.deepcopy(world)
                after.do(*action)
                yield after
                key = f"{after} {after.workers} {vars(after.rule)}"
                if key not in seen:
                    seen.add(key)
                    rest.append(after)

    def actions(self) -> list[tuple[str, int, int | None]]:
        """Return action, worker, and who alone has an answer if the deciding server then dies."""
        told = [None, *range(-1, self.size)] if self.deaths else [None]
        ranks = range(self.size)
        return [(name, rank, to) for rank in ranks for name in self._names(rank) for to in told]

    def _names(self, rank: int) -> Iterator[str]:
        worker = self.workers[rank]
        is_between = worker.number is None or worker.has_pushed
        may_push = not is_between if self.counts else worker.last < PUSHES
        if worker.at != "gone" and self.losses:
            yield "lose"
        if worker.at in ("busy", "left"):
            if worker.meetings == len(self.counts):
                yield "close"
            elif is_between:
                yield "ask"
        if worker.at == "busy":
            yield "pull"
            is_open = any(push[1] == rank for push in self.pending + self.dropped)
            if may_push and not (self.deaths and is_open):
                yield "push"
            if may_push and self.breaks:
                yield "break"

    def do(self, name: str, rank: int, told: int | None) -> None:
        """Make an action, and check what follows from it."""
        self._send(name, rank)
        self._take_decisions(told)
        if told is not None:
            self._resume(told)
        self._check_state()

    def _send(self, name: str, rank: int) -> None:
        worker = self.workers[rank]
        if name == "push":
            step = worker.step if self.staleness == 0 else self.closed
            worker.last, worker.pushes, worker.step = worker.last + 1, worker.pushes + 1, step + 1
            worker.has_pushed = True
            self.pending.append((step, rank, worker.last, worker.number))
            self.rule.push(rank, worker.last)
        elif name == "pull":
            worker.at = name
            self.rule.pull(rank)
        elif name == "ask":
            worker.at = name
            self.rule.steps(rank, self.counts[worker.meetings])
        elif name == "break":
            worker.at, worker.number, self.breaks = "left", None, self.breaks - 1
            self.rule.break_off(rank)
        else:
            worker.at, self.losses = "gone", self.losses - (name == "lose")
            self.rule.leave(rank)

    def _resume(self, told: int) -> None:
        """Make the next rule of what living workers report; then they send again."""
        again = [*self.pending, *(push for push in self.dropped if push[1] != told)]
        self.pending, self.dropped, self.deaths = [], [], self.deaths - 1
        reports = {}
        for rank, worker in enumerate(self.workers):
            for step, _, id, number in reversed([push for push in again if push[1] == rank]):
                worker.last, worker.pushes, worker.step = id - 1, worker.pushes - 1, step
                worker.number = number
            worker.step = min(worker.step, self.closed) if self.backup_workers else self.closed
            if worker.at != "gone":
                takes_part = worker.at != "left"
                reports[rank] = replace(worker, takes_part=takes_part, at="", has_pushed=False)
        known = self.closed, self._meeting(), (*self.counts, None)[self._meeting()], self._done()
        self.rule = self.rule_type(reports, self.staleness, self.backup_workers, *known)
        for rank in reports:
            for name in ["push" for push in again if push[1] == rank]:
                self._send(name, rank)
            if self.workers[rank].at in ("pull", "ask"):
                self._send(self.workers[rank].at, rank)
            self._take_decisions(None)

    def _take_decisions(self, told: int | None) -> None:
        for decision in self.rule.decisions():
            kind = type(decision).__name__
            if kind in ("Go", "Number"):
                if told not in (None, decision.worker):
                    continue
                self.dropped = [push for push in self.dropped if push[1] != decision.worker]
            getattr(self, f"_{kind.lower()}")(*decision)

    # --- what must hold ---

    def _own(self, rank: int) -> list[Any]:
        return [push for push in self.pending if push[1] == rank]

    def _meeting(self) -> int:
        """Return how many meetings the workers that live, and the servers, know of."""
        known = [worker.meetings for worker in self.workers if worker.at != "gone"]
        return max([0, *known, *(meetings for meetings, _ in self.applied)])

    def _done(self) -> set[int]:
        return {number for meetings, number in self.applied if meetings == self._meeting()}

    def _free(self) -> set[int]:
        """Return the numbers that nobody has, and that are not pushed."""
        at = self._meeting()
        has = {w.number for w in self.workers if w.at in ("busy", "pull") and w.meetings == at}
        has |= {number for *_, number in self.pending}
        return set(range((*self.counts, 0)[at])) - has - self._done()

    def _busy(self) -> list[Worker]:
        return [worker for worker in self.workers if worker.at in ("busy", "pull")]

    def _ahead(self, worker: Worker) -> int:
        return worker.pushes - min(other.pushes for other in self._busy())

    def _can_close(self) -> bool:
        lacks = sum(worker.step <= self.closed for worker in self._busy())
        return self.staleness != 0 or lacks <= self.backup_workers

    def _apply(self, step: int, pushes: list[Any]) -> None:
        due = sorted(push for push in self.pending if push[0] == self.closed)
        assert [*map(tuple, pushes)] == [push[1:] for push in due], "a step has other pushes"
        assert (step, True) == (self.closed, self._can_close()), "a step closes too early"
        for push in due:
            self.pending.remove(push)
            if push[3] is not None:
                turn = self.workers[push[1]].meetings, push[3]
                assert turn not in self.applied, "a number counts twice"
                self.applied = sorted([*self.applied, turn])
                batch = push[3] // self.size if self.has_batches else step - self.begun
                assert batch == step - self.begun, "a step has another batch"
        self.closed += 1

    def _discard(self, rank: int, id: int) -> None:
        (late,) = (push for push in self.pending if push[1:3] == (rank, id))
        assert late[0] < self.closed, "a push in time is dropped"
        self.pending.remove(late)
        self.dropped += [late] if self.deaths else []
        self.workers[rank].step, self.workers[rank].number = self.closed, None

    def _go(self, rank: int, step: int) -> None:
        worker = self.workers[rank]
        self.ahead = self._ahead(worker)
        assert self.ahead <= (self.staleness or math.inf), "a worker is too far ahead"
        assert (step, []) == (self.closed, self._own(rank)), "a pull lacks an own push"
        worker.at, worker.step = "busy", self.closed

    def _number(self, rank: int, number: int | None) -> None:
        worker, meeting = self.workers[rank], self._meeting()
        assert number is None or number in self._free(), "a number is dealt twice"
        if number is None and worker.meetings == meeting:
            assert self._done() == set(range(self.counts[meeting])), "a loop ends too early"
            assert not self._busy(), "a loop ends without a worker"
            self.begun = self.closed
        worker.at, worker.number, worker.has_pushed = "busy", number, False
        worker.step, worker.meetings = self.closed, worker.meetings + (number is None)
        worker.pushes = 0 if number is None else worker.pushes

    def _check_state(self) -> None:
        steps = {push[0] for push in self.pending}
        assert not (self.closed in steps and self._can_close()), "a step stays open"
        assert all(step >= self.closed for step in steps), "a late push stays"
        for rank, worker in enumerate(self.workers):
            if worker.at == "ask":
                assert worker.meetings == self._meeting(), "a loop does not end"
                assert not self._free() or self._own(rank), "a number is not dealt"
            if worker.at == "pull" and not self._own(rank):
                assert self._ahead(worker) > (self.staleness or math.inf), "a pull waits too long"
        at = {worker.at for worker in self.workers}
        assert at & {"busy", "left"} or at == {"gone"}, "nobody can go on"
