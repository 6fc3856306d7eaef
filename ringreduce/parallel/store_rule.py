"""The rule of a parameter store: who may go on, which pushes a step has, who gets which number.

A pull waits while its worker is more than `staleness` pushes ahead of the slowest one (Ho et al.,
NIPS 2013).  At 0 workers push in steps, and a step closes without the last `backup_workers` of them
(Chen et al., "Revisiting distributed synchronous SGD", 2016).  Otherwise each push is a step.
"""

from __future__ import annotations

import math
from collections import namedtuple
from dataclasses import dataclass, field
from heapq import heappop, heappush

Push = namedtuple("Push", "worker id number")  # the number is None without `steps`
Apply = namedtuple("Apply", "step pushes")  # one update, with pushes in rank order
Discard = namedtuple("Discard", "worker id")  # a push whose step had closed
Go = namedtuple("Go", "worker step")
"""The worker's pull returns the parameters after all steps before this one."""
Number = namedtuple("Number", "worker number")  # of its next turn in `steps`; None ends the loop


@dataclass(slots=True)
class Worker:
    last: int = 0  # id of the last push
    pushes: int = 0  # since the last meeting
    step: int = 0  # in which the next push counts
    number: int | None = None  # of its turn, until it is pushed
    meetings: int = 0  # loops that have ended
    takes_part: bool = True  # not while it waits for a number, nor after a break
    waits: str = ""  # for a "number", or in a "pull"


@dataclass
class Rule:
    """Decides for all servers.  What workers send after they have left is ignored.

    The next deciding server makes it of what living workers report, as of before the pushes that
    they send again (`step` is that of the last `Go`), and of what servers know: how many steps have
    closed, how many meetings have ended, and which of the present `count` numbers are `applied`.
    """

    workers: dict[int, Worker]
    staleness: int | None
    backup_workers: int = 0
    step: int = 0
    meetings: int = 0
    count: int | None = None
    applied: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._bound = self.staleness or math.inf
        self._may_lack = self.backup_workers if self.staleness == 0 else len(self.workers)
        for state in self.workers.values():
            state.step = min(state.step, self.step) if self.backup_workers else self.step
            state.number = state.number if state.meetings == self.meetings else None
        held = {state.number for state in self.workers.values()}
        self._pool = sorted(set(range(self.count or 0)) - self.applied - held)
        self._pushed: dict[int, list[Push]] = {}
        self._decided: list[Apply | Discard | Go | Number] = []

    def steps(self, worker: int, count: int) -> None:
        self.break_off(worker)
        if state := self.workers.get(worker):
            state.waits = "number"
            if self.count is None and state.meetings == self.meetings:
                self.count, self.applied, self._pool = count, set(), list(range(count))

    def break_off(self, worker: int) -> None:
        """Note that the worker ends its turn; it takes no part until it gets a number or pushes."""
        if state := self.workers.get(worker):
            number, state.number, state.takes_part = state.number, None, False
            is_held = any(other.number == number for other in self.workers.values())
            if number is not None and number not in self.applied and not is_held:
                heappush(self._pool, number)

    def leave(self, worker: int) -> None:
        self.break_off(worker)
        self.workers.pop(worker, None)

    def pull(self, worker: int) -> None:
        if state := self.workers.get(worker):
            state.waits = "pull"

    def push(self, worker: int, id: int) -> None:
        """Note that a push is on all servers; the same one again is ignored."""
        if (state := self.workers.get(worker)) and id > state.last:
            state.last, state.takes_part = id, True
            if self.staleness != 0:
                state.step = self.step + len(self._pushed)
            if state.step < self.step:
                self.break_off(worker)  # a worker that waits gets the number
                self._decided.append(Discard(worker, id))
                state.step, state.takes_part = self.step, True
            else:
                self._pushed.setdefault(state.step, []).append(Push(worker, id, state.number))
                if state.number is not None:
                    self.applied.add(state.number)
                state.pushes, state.step, state.number = state.pushes + 1, state.step + 1, None

    def _busy(self) -> list[Worker]:
        return [state for state in self.workers.values() if state.takes_part]

    def decisions(self) -> list[Apply | Discard | Go | Number]:
        """Return what follows from the inputs since the last call, in order."""
        decided, self._decided = self._decided, []
        while True:
            for rank, state in self.workers.items():
                over = state.meetings < self.meetings
                if state.waits == "number" and (over or (self._pool and state.step <= self.step)):
                    state.number = None if over else heappop(self._pool)
                    state.meetings, state.pushes = state.meetings + over, state.pushes * (not over)
                    state.step, state.waits, state.takes_part = self.step, "", True
                    decided.append(Number(rank, state.number))
            if not self._pushed and self.count is None:
                break
            busy = self._busy()
            lacks = sum([state.step <= self.step for state in busy])
            if self.step in self._pushed and lacks <= self._may_lack:
                decided.append(Apply(self.step, sorted(self._pushed.pop(self.step))))
                self.step += 1
            elif self.count == len(self.applied) and not busy:
                self.count, self.meetings = None, self.meetings + 1
            else:
                break
        pulls = [(rank, state) for rank, state in self.workers.items() if state.waits == "pull"]
        least = min([state.pushes for state in self._busy()], default=0) if pulls else 0
        for rank, state in pulls:
            ahead = state.pushes - least if state.takes_part else 0
            if state.step <= self.step and ahead <= self._bound:
                state.waits, state.step = "", self.step
                decided.append(Go(rank, self.step))
        return decided
