"""The rule of a parameter store: who may go on, which pushes a step has, who gets which number.

A pull waits while its worker is more than `staleness` pushes ahead of the slowest one (Ho et al.,
NIPS 2013).  At 0 workers push in steps, and a step closes without the last `backup_workers` of them
(Chen et al., "Revisiting distributed synchronous SGD", 2016).  Otherwise each push is a step.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import InitVar, dataclass
from heapq import heappop, heappush
from typing import NamedTuple

Push = tuple[int, int, int | None]  # worker, id, and the number of its turn


class Go(NamedTuple):  # the pull returns what all steps before `step` have made
    worker: int
    step: int


class Apply(NamedTuple):  # one update with these pushes, which are in rank order
    step: int
    pushes: tuple[Push, ...]


class Discard(NamedTuple):  # a push of a step that has closed, or of another worker's number
    worker: int
    id: int


class Number(NamedTuple):  # the next number; None: the loop ends
    worker: int
    number: int | None


@dataclass(slots=True)
class Worker:
    last: int = 0  # id of the last push
    pushes: int = 0  # since the last meeting
    step: int = 0  # in which the next push counts
    number: int | None = None  # dealt, and not pushed
    meetings: int = 0  # loops that have ended
    takes_part: bool = True  # not while it waits for a number, nor after a break
    waits: str = ""  # for a "number", or in a "pull"


@dataclass
class Rule:
    """Decides for all servers.  What workers send after they have left is ignored.

    The next deciding server begins with what living workers report.  Then they send again what has
    no answer: a report is without that push, but has its number, and the step of the last `Go`.
    """

    workers: dict[int, Worker]
    staleness: int | None
    backup_workers: int = 0
    step: int = 0
    count: int | None = None
    applied: InitVar[Collection[int]] = ()

    def __post_init__(self, applied: Collection[int]) -> None:
        states = sorted(self.workers.values(), key=lambda worker: worker.step)
        self.meetings = max((worker.meetings for worker in states), default=0)
        # A dropped number is dealt again, perhaps before its worker knows: the later step has it.
        holders = {w.number: w for w in states if w.meetings == self.meetings}
        for worker in states:
            if worker.number in applied or holders.get(worker.number) is not worker:
                worker.number = None
            worker.step = min(worker.step, self.step) if self.backup_workers else self.step
        numbers = set(range(self.count or 0)).difference(applied)
        self._missing, self._pool = len(numbers), sorted(numbers - holders.keys())
        self._pushed: dict[int, list[Push]] = {}
        self._decided: list[Go | Apply | Discard | Number] = []

    def steps(self, worker: int, count: int) -> None:
        """Note that the worker asks for one of `count` numbers."""
        if state := self.workers.get(worker):
            state.waits, state.takes_part = "number", False
            if self.count is None and state.meetings == self.meetings:
                self.count, self._missing, self._pool = count, count, list(range(count))

    def pull(self, worker: int) -> None:
        """Note that the worker asks for the parameters."""
        if state := self.workers.get(worker):
            state.waits = "pull"

    def push(self, worker: int, id: int, number: int | None = None) -> None:
        """Note that a push is on all servers; the same one again is ignored."""
        state = self.workers.get(worker)
        if state is None or id <= state.last:
            return
        state.last, state.takes_part = id, True
        if self.staleness != 0:
            state.step = self.step + len(self._pushed)
        if state.step < self.step or number != state.number:
            self._decided.append(Discard(worker, id))
            self._take_back(state)
            state.step = self.step
        else:
            self._pushed.setdefault(state.step, []).append((worker, id, number))
            state.pushes, state.step, state.number = state.pushes + 1, state.step + 1, None

    def break_off(self, worker: int) -> None:
        """Note that the worker has left its loop: it takes no part until it asks or pushes."""
        if state := self.workers.get(worker):
            state.takes_part = False
            self._take_back(state)

    def leave(self, worker: int) -> None:
        """Note that the worker has closed, or is lost."""
        self._take_back(self.workers.pop(worker, Worker()))

    def _take_back(self, state: Worker) -> None:
        if state.number is not None:
            heappush(self._pool, state.number)
            state.number = None

    def decisions(self) -> list[Go | Apply | Discard | Number]:
        """Return what follows from the inputs since the last call, in order."""
        decided, self._decided = self._decided, []
        workers, closes = self.workers.items(), True
        while closes:
            for rank, worker in workers:
                if worker.waits == "number" and worker.step <= self.step and self._pool:
                    worker.number, worker.step = heappop(self._pool), self.step
                    worker.waits, worker.takes_part = "", True
                    decided.append(Number(rank, worker.number))
            missing = sum(w.takes_part and w.step <= self.step for _, w in workers)
            closes = self.step in self._pushed and (
                self.staleness != 0 or missing <= self.backup_workers
            )
            if closes:
                pushes = sorted(self._pushed.pop(self.step))
                decided.append(Apply(self.step, tuple(pushes)))
                self._missing -= sum(number is not None for _, _, number in pushes)
                self.step += 1
        if self.count is not None and not (self._missing or any(w.takes_part for _, w in workers)):
            self.count, self.meetings = None, self.meetings + 1
        least = min((w.pushes for _, w in workers if w.takes_part), default=math.inf)
        for rank, worker in workers:
            if worker.meetings < self.meetings and not worker.takes_part:
                worker.meetings, worker.pushes = self.meetings, 0
                if worker.waits == "number":
                    worker.waits, worker.takes_part = "", True
                    decided.append(Number(rank, None))
            elif (
                worker.waits == "pull"
                and worker.step <= self.step
                and (not self.staleness or worker.pushes - least <= self.staleness)
            ):
                worker.waits, worker.step = "", self.step
                decided.append(Go(rank, self.step))
        return decided
