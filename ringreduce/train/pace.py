"""Slow ranks down by sleeping, so that ranks that share cores behave as machines of their own."""

from __future__ import annotations

import time

import numpy as np


class ComputePace:
    """The time that one rank computes: `unit_s` seconds for a sample and weight, times `factor`.

    A layer computes one unit in forward, and two in backward.  If `jitter` is above 0, each step
    has another factor, from a gamma distribution of mean 1 with this coefficient of variation,
    drawn with the seed `key`.
    """

    def __init__(self, unit_s: float, factor: float, jitter: float, key: tuple[int, ...]) -> None:
        self._unit_s, self._factor, self._jitter, self._key = unit_s, factor, jitter, key
        self._step = 0
        self._of_step = factor
        self._left_s = 0.0

    def begin(self, began_s: float) -> None:
        """Begin a step, for which this thread has computed since `began_s`, by `thread_time`."""
        self._step += 1
        if self._jitter:
            rng = np.random.default_rng((*self._key, self._step))
            self._of_step = self._factor * rng.gamma(self._jitter**-2, self._jitter**2)
        self._left_s = began_s - time.thread_time()

    def stretch(self, units: int, began_s: float) -> None:
        """Sleep as long as the units of this step take longer than what was computed for them."""
        self._left_s += units * self._unit_s * self._of_step - (time.thread_time() - began_s)
        if self._left_s > 0:
            begin = time.perf_counter()
            time.sleep(self._left_s)
            self._left_s -= time.perf_counter() - begin
