"""Measure how long this rank computes in one step of 53; the launcher compares the ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the launcher makes no calls
    from ringreduce.calls.communicator import Communicator

_EVERY = 53
"""One step in `_EVERY` is measured: a prime number, as other work is done every 50 or 100 steps."""


class Pace:
    """Measures the seconds of a step that this rank does not spend in calls of `comm`."""

    def __init__(self, comm: Communicator, tell: Callable[[int, float], None]) -> None:
        """Call ``tell(step, seconds)`` after each step that was measured."""
        self._queue, self._tell = comm._engine.queue, tell
        self._since: float | None = None
        """When the measured step began; None: none is measured."""

    def after(self, step: int) -> None:
        """Begin or end a measurement, after number `step`, when one is due."""
        if self._since is not None:
            seconds = time.perf_counter() - self._since
            self._since = None
            self._tell(step, max(0.0, seconds - self._queue.end_meter()))
        elif step % _EVERY == 0:
            self._queue.begin_meter()
            self._since = time.perf_counter()

    def close(self) -> None:
        """Measure no more."""
        if self._since is not None:
            self._since = None
            self._queue.end_meter()
