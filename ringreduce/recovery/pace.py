"""How long ranks compute: each measures one step in 53, and the launcher compares them."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median_low
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the launcher makes no calls
    from ringreduce.calls.communicator import Communicator

_EVERY = 53
"""One step in `_EVERY` is measured: a prime number, as other work is done every 50 or 100 steps."""
_TIMES, _RUNNING = 2.0, 3
"""A rank is slow after `_RUNNING` measured steps in a row of over `_TIMES` times the median."""


class Pace:
    """Measures the seconds of a step that this rank does not spend in calls of `comm`."""

    def __init__(self, comm: Communicator, tell: Callable[[int, float], None]) -> None:
        """Call ``tell(step, seconds)`` after each step that was measured."""
        self._comm, self._tell = comm, tell
        self._since: float | None = None
        """When the measured step began; None: none is measured."""

    def after(self, step: int) -> None:
        """Begin or end a measurement, after number `step`, when one is due."""
        if self._since is not None:
            seconds = time.perf_counter() - self._since
            self._since = None
            self._tell(step, max(0.0, seconds - self._comm.end_meter()))
        elif step % _EVERY == 0:
            self._comm.begin_meter()
            self._since = time.perf_counter()

    def close(self) -> None:
        """Measure no more."""
        if self._since is not None:
            self._since = None
            self._comm.end_meter()


class Paces:
    """The measured times of all ranks of a generation."""

    def __init__(self) -> None:
        self._step = 0
        self._times: dict[int, float] = {}
        """Rank -> seconds that it has computed in this step."""
        self._strikes: dict[int, int] = {}
        """Rank -> how often running it was slow."""

    def told(
        self, rank: int, step: int, seconds: float, ranks: int
    ) -> dict[int, tuple[float, float]]:
        """Record that `rank` computed for `seconds` in `step`.

        Returns the ranks that are slow now and were not before: the seconds of each, and the
        median.  Of an even number of ranks the lower median counts.
        """
        if step > self._step:
            self._step, self._times = step, {}
        if step == self._step:
            self._times[rank] = seconds
        if len(self._times) < ranks:
            return {}
        times, self._times = self._times, {}
        median = median_low(times.values())
        slow = {}
        for each, took in times.items():
            self._strikes[each] = self._strikes.get(each, 0) + 1 if took > _TIMES * median else 0
            if self._strikes[each] == _RUNNING:
                slow[each] = took, median
        return slow
