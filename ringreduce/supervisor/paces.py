"""Compare how long the ranks of a generation compute in a step, and find those that are slow."""

from __future__ import annotations

from statistics import median_low

_TIMES, _RUNNING = 2.0, 3
"""A rank is slow after `_RUNNING` measured steps in a row of over `_TIMES` times the median."""


class Paces:
    def __init__(self) -> None:
        self._step = 0
        self._times: dict[int, float] = {}
        """Rank -> seconds of computing in this step."""
        self._strikes: dict[int, int] = {}
        """Rank -> number of measured steps in a row in which it was slow."""

    def told(
        self, rank: int, step: int, seconds: float, ranks: int
    ) -> dict[int, tuple[float, float]]:
        """Record that `rank` computed for `seconds` in `step`.

        Returns the newly slow ranks: the seconds of each, and the (lower) median.
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
