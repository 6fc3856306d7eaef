"""Subclasses of torch's Work: of calls that are over or under way, and of messages."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import ringreduce as rr

_A_LOOK_S = 1e-6
"""Seconds for which `is_completed` waits for a message."""


class _End:
    """A function that is called once the calls of a Work are over, before `wait` returns."""

    def __init__(self) -> None:
        self.is_reached = True
        """Whether the function has been called, if there is one."""
        self._function: Callable[[], object] | None = None
        self._lock = threading.RLock()

    def after(self, work: Any, function: Callable[[], object]) -> None:
        """Have `function` called once `work` is over."""
        self._function, self.is_reached = function, False
        work.then(lambda _: self.reach())

    def reach(self) -> None:
        """Call the function, unless another thread calls it: then wait for that."""
        if self.is_reached:
            return
        with self._lock:
            function, self._function = self._function, None
            if function is not None:
                try:
                    function()
                finally:
                    self.is_reached = True


class Finished(dist._Work):  # type: ignore[misc]  # torch has no types here
    """The Work of a call that is over."""

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
        """Call `function`: the call is over."""
        function()

    def get_future(self) -> Any:
        future: Any = torch.futures.Future()
        future.set_result(list(self._tensors))
        return future


class UnderWay(dist._Work):  # type: ignore[misc]
    """The Work of collectives that a thread of the group makes, one after another."""

    def __init__(
        self, works: Sequence[Any], tensors: Any, deliver: Callable[..., None] | None = None
    ) -> None:
        """Keep the Works of the calls; `deliver` gets their results once they are over."""
        super().__init__()
        self._works, self._tensors, self._deliver = works, tensors, deliver
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._future: Any = None
        self._end = _End()

    def wait(self, timeout: Any = None) -> bool:
        timeout_s = seconds_of(timeout)
        try:
            results = [work.wait(timeout_s) for work in self._works]
            with self._lock:
                if self._deliver is not None:
                    self._deliver(*results)
                    self._deliver = None  # if it raised, a later wait raises again
        except TimeoutError:
            raise
        except BaseException as error:
            self._error = error
            raise
        self._end.reach()
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

        The thread that makes the calls runs `function`, or a thread that waits.  No other function
        may have been passed before.
        """
        if self._works:
            self._end.after(self._works[-1], function)
        else:
            function()

    def get_future(self) -> Any:
        """Return a future that the thread completes which makes the calls."""
        if self._future is None:
            # An error becomes torch's own only if a function raises it within `then`.
            over: Any = torch.futures.Future()
            self._future = over.then(lambda _: self.result())
            if self._works:
                self._works[-1].then(lambda _: over.set_result(None))
            else:
                over.set_result(None)
        return self._future


class _Message(dist._Work):  # type: ignore[misc]
    """A message between two ranks that may be under way."""

    def __init__(self, tensors: Any, source: int) -> None:
        super().__init__()
        self._tensors, self._source = tensors, source

    def finish(self, timeout_s: float | None) -> None:
        """Wait for the message; None: without a limit of its own."""
        raise NotImplementedError

    def wait(self, timeout: Any = None) -> bool:
        self.finish(seconds_of(timeout))
        return True

    def synchronize(self) -> None:
        self.wait()

    def at_end(self, function: Callable[[], object]) -> None:
        """Have `function` called once the message is over, before `wait` returns.

        It may make no calls.  No other function may have been passed before.
        """
        raise NotImplementedError

    def result(self) -> list[Any]:
        return list(self._tensors)

    def source_rank(self) -> int:
        return self._source

    def _source_rank(self) -> int:
        return self._source

    def get_future(self) -> Any:
        self.wait()
        return Finished(self._tensors).get_future()


class FromAnyRank(_Message):
    """A receive of the first message with its tag, from any rank."""

    def __init__(self, comm: rr.Communicator, out: np.ndarray, tag: int, tensors: Any) -> None:
        super().__init__(tensors, source=-1)
        self._comm, self._out, self._tag = comm, out, tag
        self._at_end: Callable[[], object] = _nothing

    def finish(self, timeout_s: float | None) -> None:
        if self._source < 0:
            source = self._comm.probe(self._tag, timeout_s=timeout_s)
            self._comm.recv(self._out, source, self._tag)
            self._source = source
            self._at_end()

    def at_end(self, function: Callable[[], object]) -> None:
        self._at_end = function

    def is_completed(self) -> bool:
        try:
            self.finish(_A_LOOK_S)
        except rr.PeerTimeoutError:
            return False
        return True

    def is_success(self) -> bool:
        return self._source >= 0

    def exception(self) -> None:
        return None


class Message(_Message):
    """A send to one rank, or a receive from one rank."""

    def __init__(self, work: Any, tensors: Any, source: int) -> None:
        super().__init__(tensors, source)
        self._work = work
        self._end = _End()

    def finish(self, timeout_s: float | None) -> None:
        self._work.wait(timeout_s)
        self._end.reach()

    def at_end(self, function: Callable[[], object]) -> None:
        self._end.after(self._work, function)

    def is_completed(self) -> bool:
        return bool(self._work.done()) and self._end.is_reached

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        error: BaseException | None = self._work.unseen_error
        return error


def _nothing() -> None:
    pass


def seconds_of(timeout: timedelta | None) -> float | None:
    """Return a timeout of torch in seconds; None if it stands for the group's."""
    seconds = 0.0 if timeout is None else timeout.total_seconds()
    return seconds if seconds > 0 else None
