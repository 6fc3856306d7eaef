"""The handle of an asynchronous call or message."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from ringreduce.calls.refusals import refuse_copy
from ringreduce.config import as_seconds
from ringreduce.trace.recorder import waiting
from ringreduce.transports.yielding import LONGEST_SLEEP_S

Polled = Generator[bool, None, Any]
"""A call, or a part of one: it yields at each poll whether it made progress, and returns the
result."""
T = TypeVar("T")
_NEVER_POLLED: Polled = (moved for moved in (True,))
"""The generator of messages between two ranks: their endpoint makes progress."""

_BUSY_LOOKS, _BETWEEN_LOOKS_S = 200, 1e-4
"""`wait_any` looks 200 times without a pause, then every 1e-4 s, and less often as it waits."""
_attaching = threading.Lock()
"""Held while a callback is attached to a work, or the callbacks of a work are taken."""


class Queue(Protocol):
    """The queue that a `Work` is in."""

    def advance(self) -> Any:
        """Make progress without waiting, unless another thread does."""

    def wait_for(self, completed: threading.Event, timeout_s: float | None) -> bool:
        """Wait until a work is over; return False if it is not over after `timeout_s` seconds."""


class Work(Generic[T]):
    """An asynchronous call.  A collective returns it with ``async_op=True``.

    The Work keeps the call's arrays alive.  The call completes whether or not anybody waits for it.

    Attributes:
        began_s: when the call began to run, on the clock of ``time.perf_counter``; None before.
        seconds: seconds that the call ran; None while it is not over.

    Example:
        >>> def program(comm):
        ...     work = comm.all_reduce(np.array([1, 2]), async_op=True)
        ...     meanwhile = np.square(np.arange(1000)).sum()
        ...     return work.wait()
        >>> rr.spawn(program, 2)[0]
        array([2, 4])
    """

    __module__ = "ringreduce"

    __reduce__ = refuse_copy

    def __init__(self, queue: Queue, polled: Polled = _NEVER_POLLED) -> None:
        self.polled = polled
        self.completed = threading.Event()
        self._queue = queue
        self._result: Any = None
        self._error: BaseException | None = None
        self._seen = False
        self._callbacks: list[Callable[[Work[T]], object]] | None = []
        """Called when the call is over; None: it is over, or about to be."""
        self._called_back: threading.Event | None = None
        """Set once the callbacks have run; None: there was none before the end of the call."""
        self._calling: int | None = None
        """The thread that runs the callbacks; None: no thread does."""
        self._raised: Exception | None = None
        """The first exception that a callback raised."""
        self.began_s: float | None = None
        self.seconds: float | None = None

    def done(self) -> bool:
        """Return whether the call is over, with a result or an error.  Does not wait.

        Returns:
            True or False.

        Example:
            >>> def program(comm):
            ...     work = comm.all_reduce(1, async_op=True)
            ...     while not work.done():
            ...         pass  # compute
            ...     return work.wait().item()
            >>> rr.spawn(program, 2)
            [2, 2]
        """
        if not self.completed.is_set():
            self._queue.advance()
        return self.completed.is_set()

    def wait(self, timeout_s: float | None = None) -> T:
        """Wait for the call and return its result.

        Args:
            timeout_s: seconds to wait at most; None: without a limit.

        Returns:
            The result of the collective.

        Raises:
            ValueError: `timeout_s` is neither None nor a number above 0.
            TimeoutError: the call is not over after `timeout_s` seconds.  The call goes on.
            MismatchError, PeerTimeoutError, PeerLostError: the call's error.
            Exception: what a callback of `then` raised, if the call has no error.

        Example:
            >>> rr.spawn(lambda comm: comm.all_reduce(np.ones(2), async_op=True).wait(), 3)[0]
            array([3., 3.])
        """
        timeout_s = as_seconds("wait", timeout_s)
        end = None if timeout_s is None else time.monotonic() + timeout_s
        with waiting():
            is_over = self._queue.wait_for(self.completed, timeout_s)
        if not is_over:
            raise TimeoutError(f"the call is not over after {timeout_s} s; it goes on")
        self._seen = True
        if self._error is not None:
            raise self._error.with_traceback(None)
        if self._called_back is not None and self._calling != threading.get_ident():
            left = None if end is None else max(end - time.monotonic(), 0.0)
            if not self._queue.wait_for(self._called_back, left):
                raise TimeoutError(f"callbacks are not over after {timeout_s} s; they go on")
        if self._raised is not None and self._calling is None:
            raise self._raised.with_traceback(None)
        result: T = self._result
        return result

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """Raise TypeError: NumPy would make an array of one object."""
        raise TypeError("a Work is no array; call its wait() for the result")

    def then(self, callback: Callable[[Work[T]], object]) -> None:
        """Have `callback` called once the call is over, with a result or an error.

        The callback runs in the thread that completes the call, before any later call of the
        communicator runs; at once, in this thread, if the call is over already.  It may make calls:
        they run at once, so on all ranks they come right after this call.  A callback of a message
        between two ranks may make none.

        Args:
            callback: a function of this Work.  `threading.excepthook` prints what it raises, and
                `wait` raises that, too: it returns when all callbacks have.

        Raises:
            TypeError: `callback` is not callable.

        Example:
            >>> def program(comm):
            ...     totals = []
            ...     work = comm.all_reduce(np.array([1, 2]), async_op=True)
            ...     work.then(lambda work: totals.append(comm.all_reduce(work.wait(), "max")))
            ...     comm.barrier()
            ...     return totals
            >>> rr.spawn(program, 2)[0]
            [array([2, 4])]
        """
        if not callable(callback):
            raise TypeError(f"then: callback is {callback!r}; pass a function of the Work")
        with _attaching:
            if self._callbacks is not None:
                self._callbacks.append(callback)
                self._called_back = self._called_back or threading.Event()
                return
        self._call_back(callback)

    def take_callbacks(self) -> list[Callable[[], None]]:
        """Return a function that runs the callbacks, if there are any.  Later ones run at once.

        :meta private:
        """
        with _attaching:
            callbacks, self._callbacks = self._callbacks, None
            self._calling = threading.get_ident() if callbacks else None
        return [partial(self._call_all_back, callbacks)] if callbacks else []

    def _call_all_back(self, callbacks: Sequence[Callable[[Work[T]], object]]) -> None:
        try:
            for callback in callbacks:
                self._call_back(callback)
        finally:
            self._calling = None
            assert self._called_back is not None
            self._called_back.set()

    def _call_back(self, callback: Callable[[Work[T]], object]) -> None:
        try:
            callback(self)
        except Exception as error:
            if error is not self._error:
                name = getattr(callback, "__qualname__", type(callback).__name__)
                error.add_note(f"raised by {name}, which `then` of an asynchronous call was given")
                self._raised = self._raised or error
            thread = threading.current_thread()
            threading.excepthook(
                threading.ExceptHookArgs((type(error), error, error.__traceback__, thread))
            )

    @property
    def unseen_error(self) -> BaseException | None:
        """The call's error, if `wait` was never called.

        :meta private:
        """
        return None if self._seen else self._error

    def forked(self, error: Exception) -> None:
        """End with `error` in a child process, where no thread can release the event's lock.

        :meta private:
        """
        self.completed, self._called_back = threading.Event(), None
        self.finish(error=error)

    def finish(self, result: Any = None, error: BaseException | None = None) -> None:
        """Record the end of the call.  The queue calls this once.

        :meta private:
        """
        self._result, self._error = result, error
        if self.began_s is not None:
            self.seconds = time.perf_counter() - self.began_s
        self.completed.set()


def wait_any(works: Sequence[Work[Any]], timeout_s: float | None = None) -> int:
    """Wait until one of several works is over; return its index.

    Args:
        works: works of `Communicator` calls, such as asynchronous messages and collectives.
        timeout_s: seconds to wait at most; None: without a limit.

    Returns:
        The index of the first work in `works` that is over.  Call its `Work.wait` for the result or
        the error.

    Raises:
        TypeError: `works` is no list of Works.
        ValueError: `works` is empty, or `timeout_s` is no number above 0.
        TimeoutError: none is over after `timeout_s` seconds.  All go on.

    Example:
        >>> def program(comm):
        ...     if comm.rank:
        ...         return comm.send(comm.rank, peer=0)
        ...     works = [comm.recv(np.empty((), int), peer, async_op=True) for peer in (1, 2)]
        ...     first = rr.wait_any(works)
        ...     return sorted(work.wait().item() for work in works), works[first].done()
        >>> rr.spawn(program, 3)[0]
        ([1, 2], True)
    """
    timeout_s = as_seconds("wait_any", timeout_s)
    works = list(works) if isinstance(works, Iterable) else [works]
    if not all(isinstance(each, Work) for each in works):
        raise TypeError("wait_any: works is no list of Works; pass what async_op=True returns")
    if not works:
        raise ValueError("wait_any: works is empty; pass at least one Work")
    end = None if timeout_s is None else time.monotonic() + timeout_s
    idle = 0
    with waiting():
        while True:
            for index, work in enumerate(works):
                if work.done():
                    return index
            if end is not None and time.monotonic() > end:
                raise TimeoutError(f"wait_any: no work is over after {timeout_s} s; all go on")
            idle += 1
            pause_s = min(_BETWEEN_LOOKS_S * idle / _BUSY_LOOKS, LONGEST_SLEEP_S)
            time.sleep(0 if idle < _BUSY_LOOKS else pause_s)
