"""Subclasses of torch's Work: of calls that are over or under way, and of messages."""

from __future__ import annotations

import copy
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist


class _EndFunctions:
    """Functions that are called once the calls of a Work are over, before `wait` returns."""

    def __init__(self) -> None:
        self._left = 0
        self._functions: deque[Callable[[], object]] = deque()
        self._lock = threading.RLock()

    @property
    def is_reached(self) -> bool:
        return self._left == 0

    def after(self, work: Any, function: Callable[[], object]) -> None:
        """Have `function` called once `work` is over, after those that were passed before."""
        with self._lock:
            self._left += 1
            self._functions.append(function)
        work.then(lambda _: self.reach())

    def reach(self) -> None:
        """Call the functions.  If another thread calls them, wait until it has."""
        if self.is_reached:
            return
        with self._lock:
            while self._functions:
                function = self._functions.popleft()
                try:
                    function()
                finally:
                    self._left -= 1


class FinishedWork(dist._Work):  # type: ignore[misc]  # torch has no types here
    def __init__(self, tensors: Any = ()) -> None:
        super().__init__()
        self._tensors = tensors

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def exception(self) -> None:
        return None

    def result(self) -> list[Any]:
        return list(self._tensors)

    def synchronize(self) -> None:
        pass

    def at_end(self, function: Callable[[], object]) -> None:
        function()

    def get_future(self) -> Any:
        future: Any = torch.futures.Future()
        future.set_result(list(self._tensors))
        return future


class AsyncWork(dist._Work):  # type: ignore[misc]
    """The Work of calls that a thread of the group makes, one after another."""

    def __init__(
        self, works: Sequence[Any], tensors: Any, deliver: Callable[..., None] | None = None
    ) -> None:
        """Keep the Works of calls; `deliver` gets their results before any later call runs."""
        super().__init__()
        self._works, self._tensors = works, tensors
        self._error: BaseException | None = None
        self._future: Any = None
        self._end = _EndFunctions()
        if deliver is not None:
            self.at_end(partial(self._deliver, deliver))

    def _deliver(self, deliver: Callable[..., None]) -> None:
        """Pass the results to `deliver` if there are any; keep its error for `wait`."""
        if any(work.unseen_error is not None for work in self._works):
            return
        try:
            deliver(*[work.wait() for work in self._works])
        except Exception as error:
            self._error = copy.copy(error)

    def wait(self, timeout: Any = None) -> bool:
        seconds = seconds_of(timeout)
        end = None if seconds is None else time.monotonic() + seconds
        for work in self._works:
            try:
                work.wait(None if end is None else max(end - time.monotonic(), 1e-6))
            except Exception as error:
                if _is_of(work, error):
                    self._error = copy.copy(error)
                if all(each.completed.is_set() for each in self._works):
                    self._end.reach()
                raise
        self._end.reach()
        if self._error is not None:
            raise self._error.with_traceback(None)
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return all(work.done() for work in self._works) and self._end.is_reached

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        errors = (work.unseen_error for work in self._works)
        return self._error or next((error for error in errors if error is not None), None)

    def result(self) -> list[Any]:
        self.wait()
        return list(self._tensors)

    def at_end(self, function: Callable[[], object]) -> None:
        """Have `function` called once all calls are over, before `wait` returns.

        The thread that makes the calls runs `function`, or a thread that waits.
        """
        if self._works:
            self._end.after(self._works[-1], function)
        else:
            function()

    def get_future(self) -> Any:
        """Return a future, which the thread that makes the calls completes."""
        if self._future is None:
            # An error becomes torch's own only if a function raises it within `then`.
            over: Any = torch.futures.Future()
            self._future = over.then(lambda _: self.result())
            if self._works:
                self._works[-1].then(lambda _: over.set_result(None))
            else:
                over.set_result(None)
        return self._future


class TensorMessage(AsyncWork):
    """The Work of a message between two ranks.  Functions for its end may make no calls."""

    def __init__(
        self,
        work: Any,
        tensors: Any,
        source: int | None = None,
        deliver: Callable[..., None] | None = None,
    ) -> None:
        """`source` is the sender; None: `work` is a receive from any rank."""
        super().__init__([work], tensors, deliver)
        self._source = source

    def result(self) -> list[Any]:
        return list(self._tensors)

    def source_rank(self) -> int:
        return int(self._works[0].peer if self._source is None else self._source)

    def _source_rank(self) -> int:
        return self.source_rank()

    def get_future(self) -> Any:
        """Wait for the message; return a future that is over."""
        self.wait()
        return FinishedWork(self._tensors).get_future()


def _is_of(work: Any, error: Exception) -> bool:
    """Return whether `error` is the error of a Work, not that of a wait or of a signal handler."""
    return type(error) is not TimeoutError and work.completed.is_set()


def seconds_of(timeout: timedelta | None) -> float | None:
    """Return a timeout of torch in seconds; None if it stands for the group's."""
    seconds = 0.0 if timeout is None else timeout.total_seconds()
    return seconds if seconds > 0 else None
