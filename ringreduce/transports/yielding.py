"""How a rank waits in Python: when it polls, yields its core or sleeps, and for how long."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

YIELDS = 2000
"""Idle polls after each of which a rank only yields the core; after later polls it sleeps."""
HEAD_START = 1900
"""Head start of a progress thread's idle count: it sleeps sooner than a user's thread."""
_SHORTEST_SLEEP_S, LONGEST_SLEEP_S = 5e-5, 1e-3
_SPINS = 200
"""Idle polls without a pause, where the rank seems to have a core of its own."""
_LONG_S = 3e-6
"""A yield that takes longer shows that another process ran on the core."""
_SHORT_YIELDS = 3000
"""Short yields in a row, after which the rank seems to have its core for itself again."""
_ABSENT_S = 1.0
"""Seconds between two polls after which the rank itself was stopped: it did not wait meanwhile."""
_GAP_COUNTS_S = 0.1
"""Seconds that such a gap counts as waiting, so that a rank that is often stopped times out too."""


class Yielding:
    """Decides after each idle poll of a rank whether the rank gives up its core.

    A rank whose host has a core for each rank polls `spins` times before it yields.  But other
    programs may run there, or ranks of another job.  So a yield that takes long makes `spins` 0,
    until yields are short again for some thousand times.
    """

    def __init__(
        self,
        crowded: bool,
        clock: Callable[[], float] = time.perf_counter,
        yield_core: Callable[[], object] = os.sched_yield,
    ) -> None:
        """`crowded`: the ranks of this host have fewer cores than there are ranks."""
        self.crowded = crowded
        self.spins = 0 if crowded else _SPINS
        """Idle polls to make before the first pause, as far as the rank knows now."""
        self._clock, self._yield_core = clock, yield_core
        self._short = 0

    def pause(self, idle: int, yields: int, sleep: Callable[[float], object]) -> None:
        """Yield the core after `idle` polls; `sleep` instead after more than `yields` polls."""
        if idle >= yields:
            sleep(min(_SHORTEST_SLEEP_S * (idle / yields), LONGEST_SLEEP_S))
            return
        start = self._clock()
        self._yield_core()
        if self._clock() - start > _LONG_S:
            self.spins = self._short = 0
        elif not self.spins and not self.crowded:
            self._short += 1
            if self._short >= _SHORT_YIELDS:
                self.spins = _SPINS


class WaitClock:
    """A clock for waits, which stands still while the rank is stopped or does not poll."""

    def __init__(self) -> None:
        self._absent_s, self._polled_at = 0.0, time.monotonic()

    def now(self) -> float:
        """Return seconds; call it at each poll."""
        now = time.monotonic()
        if now - self._polled_at > _ABSENT_S:
            self._absent_s += now - self._polled_at - _GAP_COUNTS_S
        self._polled_at = now
        return now - self._absent_s
