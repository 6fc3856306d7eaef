"""What ranks suspect: that others are gone, or do not answer.  They wait for an answer."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass

from ringreduce.supervisor.ranks import Rank

_GONE_S = 2.0
"""A reported loss is wrong if the end of the process is not seen within these seconds."""
_BLAME_S = 0.05
"""Seconds to wait for further reports of ranks that do not answer: a rank that reports is alive."""


@dataclass(frozen=True)
class _Suspicion:
    """A rank suspects that others are lost."""

    by: Rank
    ranks: frozenset[int]
    stopped: bool
    """Whether they do not answer; otherwise they are gone."""
    until: float
    """When it is judged, by the monotonic clock."""


class Suspicions:
    """The suspicions that have no answer yet."""

    def __init__(self) -> None:
        self._all: list[_Suspicion] = []

    def add(self, by: Rank, ranks: Collection[int], *, stopped: bool) -> None:
        """A rank suspects others; `stopped`: they do not answer."""
        until = time.monotonic() + (_BLAME_S if stopped else _GONE_S)
        self._all.append(_Suspicion(by, frozenset(ranks), stopped, until))

    @property
    def wakes_at(self) -> float | None:
        """When the next one is to be judged; None: there is none."""
        return min((each.until for each in self._all), default=None)

    def blamed(self) -> frozenset[int]:
        """Return the ranks that do not answer, once all others have had time to report."""
        now = time.monotonic()
        if all(each.until > now for each in self._all):
            return frozenset()
        alive = {int(each.by.number) for each in self._all}
        return frozenset().union(*(each.ranks for each in self._all if each.stopped)) - alive

    def take_due(self) -> list[Rank]:
        """Return the ranks whose suspicions were not confirmed in time; forget these."""
        now = time.monotonic()
        due = [each for each in self._all if each.until <= now]
        self._all = [each for each in self._all if each.until > now]
        return [each.by for each in due]

    def take(self) -> list[Rank]:
        """Return all ranks that suspect others; forget what they suspect."""
        everyone, self._all = self._all, []
        return [each.by for each in everyone]
