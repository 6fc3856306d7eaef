"""The sends and receives of a rank, and what the rank keeps of those with one peer."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from ringreduce.point_to_point.road import Answered, Arrival, DtypeAndShape

ANY = -1
"""The peer of a receive from any rank, until it has taken a message."""


@dataclass(eq=False)
class Operation:
    where: str
    """The name of the user's call, for errors."""
    sends: bool
    peer: int
    tag: int
    kind: DtypeAndShape
    data: np.ndarray
    memory: np.ndarray
    """The caller's array in host memory, if it is not `data`."""
    timeout_s: float
    """Seconds until the operation fails."""
    number: int = 0
    """Number of the message, once it is offered or matched."""
    arrival: Arrival | None = None
    """The message that this receive has taken."""
    since: float = 0.0
    """When the operation began, on the endpoint's clock."""
    began_ns: int = 0
    """The same on the clock of `time.perf_counter_ns`."""
    place: int = 0
    """Number of operations of this rank that began before this one."""
    over: bool = False
    error: Exception | None = None
    at_end: Callable[[Operation], None] | None = None
    """Called when an asynchronous operation is over."""

    def __str__(self) -> str:
        return f"{self.kind.text} with tag {self.tag}"

    def overlaps(self, other: Operation) -> bool:
        return self.uses(other.memory)

    def uses(self, memory: np.ndarray) -> bool:
        mine = self.memory
        return bool(np.may_share_memory(mine, memory)) and bool(np.shares_memory(mine, memory))


@dataclass(eq=False)
class Pair:
    unoffered: deque[Operation] = field(default_factory=deque)
    """Sends for which the road has had no place."""
    offered: dict[int, Operation] = field(default_factory=dict)
    """Sends without an answer, by number."""
    receives: defaultdict[int, deque[Operation]] = field(default_factory=lambda: defaultdict(deque))
    """Receives without a message, by tag."""
    arrivals: defaultdict[int, deque[Arrival]] = field(default_factory=lambda: defaultdict(deque))
    """Messages without a receive, by tag."""
    reading: list[Operation] = field(default_factory=list)
    """Receives whose data are on their way."""
    early: dict[int, Answered] = field(default_factory=dict)
    """Answers to messages that nobody waits for, by number."""
    error: Exception | None = None
    """Why there can be no more messages with this peer."""

    def operations(self) -> list[Operation]:
        receives = (each for queue in self.receives.values() for each in queue)
        return [*self.unoffered, *self.offered.values(), *self.reading, *receives]

    @property
    def is_busy(self) -> bool:
        waits = self.unoffered or self.offered or self.reading
        return bool(waits) or any(self.receives.values())

    def discard(self, operation: Operation) -> None:
        if operation in self.unoffered:
            self.unoffered.remove(operation)
        if operation in self.reading:
            self.reading.remove(operation)
        self.offered.pop(operation.number, None)
        queue = self.receives[operation.tag]
        if operation in queue:
            queue.remove(operation)
