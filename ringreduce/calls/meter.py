"""Measure the seconds that a thread spends in the calls of a communicator."""

from __future__ import annotations

import time
from typing import Any

from ringreduce.calls.refusals import refusals_here


class Meter:
    """The seconds that this thread has spent in calls, or waiting for them, since it was made.

    Another thread must make no calls meanwhile.  Messages between two ranks are not measured.  All
    calls take the general path until `end`.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._depth, self._since = 0, 0.0
        self._refusals = refusals_here()
        self._refusals.keep_general()

    def end(self) -> None:
        """Let calls take the compiled path again."""
        self._refusals.end_general()

    def __enter__(self) -> None:
        if not self._depth:
            self._since = time.perf_counter()
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if not self._depth:
            self.seconds += time.perf_counter() - self._since


class MeteredLock:
    """A lock whose holder makes a call: the time from before it is acquired is measured."""

    def __init__(self, lock: Any, meter: Meter) -> None:
        self._lock, self._meter = lock, meter

    def __enter__(self) -> None:
        self._meter.__enter__()
        self._lock.__enter__()

    def __exit__(self, *error: object) -> None:
        self._lock.__exit__(*error)
        self._meter.__exit__()
