"""The next generation while it starts beside the present one, and the ranks that are to leave."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass

from ringreduce.supervisor.generation import Generation
from ringreduce.supervisor.ranks import Rank

_GATHER_S = 0.1
"""Seconds in which notices to several ranks are taken for one wish."""
_READY_S = 120.0
"""Seconds in which the next generation must be ready."""


@dataclass(frozen=True)
class _Departure:
    """Why a rank is to leave, and when it counts as lost if it has not left by then."""

    cause: str
    until: float


class Handover:
    """What the supervisor knows of the next generation, and of ranks that are to leave."""

    def __init__(self, grace_s: float) -> None:
        self.next: Generation | None = None
        """The next generation, whose processes start; None: there is none."""
        self._ready: list[Rank] = []
        """Its ranks that are ready."""
        self._until = 0.0
        """When it must be ready."""
        self._grace_s = grace_s
        self._leaving: dict[Rank, _Departure] = {}
        self._pursue_at: float | None = None
        """When to compare the wanted ranks with the present ones; None: nothing to compare."""

    def begin(self, generation: Generation) -> None:
        """Start waiting for the ranks of `generation`."""
        self.next, self._until = generation, time.monotonic() + _READY_S
        self._ready.clear()

    def owns(self, rank: Rank) -> bool:
        """Return whether a rank belongs to the next generation."""
        return self.next is not None and rank in self.next.ranks

    def ready(self, rank: Rank) -> None:
        """Note that `rank`, of the next generation, is ready."""
        self._ready.append(rank)

    @property
    def is_ready(self) -> bool:
        """Whether all ranks of the next generation are ready."""
        return self.next is not None and len(self._ready) == self.next.size

    @property
    def is_late(self) -> bool:
        """Whether the next generation is not ready in time."""
        return self.next is not None and not self.is_ready and time.monotonic() >= self._until

    def take(self) -> tuple[Generation, list[Rank]]:
        """Return the next generation, which begins, and its ranks that are ready."""
        assert self.next is not None
        taken, ready = self.next, list(self._ready)
        self.next = None
        self._leaving.clear()  # they belonged to the generation before
        return taken, ready

    def drop(self) -> None:
        """Kill the processes of the next generation, if there are any."""
        if self.next is not None:
            self.next.kill()
            self.next = None

    # --- ranks that are to leave ---

    def leaves(self, rank: Rank, cause: str) -> None:
        """Note that `rank` has to leave, and why."""
        now = time.monotonic()
        if rank not in self._leaving:
            self._leaving[rank] = _Departure(cause, now + self._grace_s)
            self._pursue_at = self._pursue_at or now + _GATHER_S

    def leaving(self, living: Collection[Rank]) -> dict[int, str]:
        """Return the number of each living rank that is to leave, with the cause."""
        self._pursue_at = None
        found = {rank: each for rank, each in self._leaving.items() if rank in living}
        return {int(rank.number): each.cause for rank, each in found.items()}

    def departures(self, living: Collection[Rank]) -> int:
        """Return how many living ranks are to leave."""
        return sum(rank in living for rank in self._leaving)

    def overdue(self, living: Collection[Rank]) -> dict[Rank, str]:
        """Return the living ranks that should have left by now, once, with the cause."""
        now = time.monotonic()
        found = {rank: each.cause for rank, each in self._leaving.items() if now >= each.until}
        for rank in found:
            del self._leaving[rank]
        return {rank: cause for rank, cause in found.items() if rank in living}

    @property
    def is_due(self) -> bool:
        """Whether what is wanted must be looked at now."""
        return self._pursue_at is not None and time.monotonic() >= self._pursue_at

    @property
    def wakes_at(self) -> float | None:
        """When something has to be looked at; None: never."""
        times = [each.until for each in self._leaving.values()]
        if self._pursue_at is not None:
            times.append(self._pursue_at)
        if self.next is not None and not self.is_ready:
            times.append(self._until)
        return min(times, default=None)
