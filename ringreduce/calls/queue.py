"""The order of calls: synchronous calls run at once, asynchronous calls run behind each other.

A communicator runs its calls one after another, each as a generator.  While asynchronous calls are
queued, a progress thread runs them, if the transport may be used from a thread.  Otherwise they
advance whenever the user waits for a call or asks about one.

The callbacks of a call (`Work.then`) run in the thread that completed it, before any later call.  A
call that a callback makes runs at once.  A thread attaches its callback before it makes its next
call, so all ranks run the calls of callbacks in the same place of the order.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from ringreduce.calls.refusals import refusals_here
from ringreduce.calls.work import Polled, Work
from ringreduce.transports.yielding import HEAD_START, Yielding

_ENDS_S = 1.0
"""Seconds that `close` waits for the thread, which is idle."""


class _MeteredLock:
    """A lock that a thread holds to make a call; measures the seconds from before it is acquired.

    Another thread must make no calls meanwhile.
    """

    def __init__(self, lock: Any) -> None:
        self.lock, self.seconds = lock, 0.0
        self.refusals = refusals_here()
        self._depth, self._since = 0, 0.0

    def __enter__(self) -> None:
        self.begin()
        self.lock.__enter__()

    def __exit__(self, *error: object) -> None:
        self.lock.__exit__(*error)
        self.end()

    def begin(self) -> None:
        if not self._depth:
            self._since = time.perf_counter()
        self._depth += 1

    def end(self) -> None:
        self._depth -= 1
        if not self._depth:
            self.seconds += time.perf_counter() - self._since


class CallQueue:
    """The calls of one communicator: the running one, and those behind it."""

    def __init__(self, wait: Callable[[int, int], None], yielding: Yielding, threads: bool) -> None:
        self.lock: Any = threading.RLock()
        """Held while a call takes its place in the order."""
        self._meter: _MeteredLock | None = None
        """The metered lock in `lock`, while the calls of a thread are measured."""
        self._wait, self._yielding, self._threads = wait, yielding, threads
        self.works: deque[Work[Any]] = deque()
        """The asynchronous calls that are not over, in order."""
        self._arrived = threading.Condition()
        self._thread: threading.Thread | None = None
        self.failed: list[Work[Any]] = []
        """Works with errors, the latest first: some may be unseen."""
        self._interrupt: BaseException | None = None
        self._calling_back: int | None = None
        """The thread that runs the callbacks of a work; None: no thread does."""
        self._ended = False
        self._idle, self._spins = 0, yielding.spins
        """Polls since the latest progress that moved nothing, and how many of them do not pause."""
        self.begins_here_s = 0.0
        """Seconds that an asynchronous call may wait for other ranks in the caller's thread, before
        the progress thread goes on with it; for hosts without a core for that thread.  0: the
        progress thread begins it."""

    @property
    def busy(self) -> bool:
        """Whether an asynchronous call is not over, or its callbacks are not."""
        return bool(self.works) or self._calling_back is not None

    @property
    def in_callback(self) -> bool:
        """Whether this thread runs the callbacks of a work."""
        return self._calling_back == threading.get_ident()

    def submit(self, polled: Polled) -> Work[Any]:
        """Queue a call behind all others, and return its Work.  The caller holds the lock.

        In a callback the call runs at once.
        """
        work: Work[Any] = Work(self, polled)
        if self.in_callback:
            with self.unlocked():
                while not self._poll(work):
                    pass
            return work
        if self.begins_here_s and not self.busy and self._run_here_first(work):
            return work
        self.works.append(work)
        if self._threads:
            with self._arrived:
                if self._thread is None:
                    self._thread = threading.Thread(
                        target=self._run_works,
                        name="ringreduce progress",
                        daemon=True,
                    )
                    self._thread.start()
                self._arrived.notify()
        else:
            self.advance()
        return work

    def _run_here_first(self, work: Work[Any]) -> bool:
        """Run a work in this thread; return False if it has waited `begins_here_s` for other ranks.

        The caller holds the lock, and no call is queued.
        """
        end = 0.0
        while not self._poll(work):
            now = time.monotonic()
            if not self._idle or not end:
                end = now + self.begins_here_s
            if now > end:
                return False
        error = work.unseen_error
        if error is not None and not isinstance(error, Exception):
            raise error  # such as KeyboardInterrupt, which is for this thread
        return True

    def run(self, polled: Polled) -> Any:
        """Run a call at once and return its result; no other is queued."""
        idle, spins = 0, self._yielding.spins
        try:
            while True:
                if next(polled):
                    idle, spins = 0, self._yielding.spins
                    continue
                idle += 1
                if idle > spins:
                    self._pause(polled, idle - spins, ahead=0)
        except StopIteration as end:
            return end.value

    def run_behind(self, polled: Polled) -> Any:
        """Run a call behind all others, and return its result.  The caller holds the lock.

        The lock is free meanwhile, as callbacks of the works before may make calls.
        """
        work = self.submit(polled)
        with self.unlocked():
            return work.wait()

    @contextmanager
    def unlocked(self) -> Iterator[None]:
        """Release the lock, which the caller holds once, within the block."""
        lock = self.lock
        lock.__exit__(None, None, None)
        try:
            yield
        finally:
            lock.__enter__()

    def wait_for(self, completed: threading.Event, timeout_s: float | None) -> bool:
        meter = self._meter
        if meter is None:
            return self._wait_for(completed, timeout_s)
        meter.begin()
        try:
            return self._wait_for(completed, timeout_s)
        finally:
            meter.end()

    def _wait_for(self, completed: threading.Event, timeout_s: float | None) -> bool:
        if self._threads and not self.in_callback:
            return completed.wait(timeout_s)
        end = None if timeout_s is None else time.monotonic() + timeout_s
        while not completed.is_set():
            if end is not None and time.monotonic() > end:
                return False
            self._advance()
        return True

    def begin_meter(self) -> None:
        """Measure the calls of this thread, which makes none now, until `end_meter`.

        They take the general path.  Messages between two ranks are not measured.
        """
        self.lock = self._meter = _MeteredLock(self.lock)
        self._meter.refusals.keep_general()

    def end_meter(self) -> float:
        """Return the seconds that this thread has spent in calls since `begin_meter`."""
        meter = self._meter
        assert meter is not None
        self.lock, self._meter = meter.lock, None
        meter.refusals.end_general()  # of the thread that began, which may be another
        return meter.seconds

    def advance(self) -> None:
        """Without a progress thread: run the first work until it waits for another rank."""
        if not self._threads:
            self._advance()

    def _advance(self) -> None:
        with nullcontext() if self.in_callback else self.lock:
            if self.works:
                self._poll(self.works[0])

    def interrupt(self, error: BaseException, seconds: float) -> None:
        """Raise `error` in the running call, and wait up to `seconds` for all works to end."""
        self._interrupt = error
        end = time.monotonic() + seconds
        while self.works and time.monotonic() < end:
            self.advance()
            time.sleep(1e-3)
        self._interrupt = None

    def drain(self) -> None:
        """Wait until every work and its callbacks are over.  The caller holds the lock."""
        with self.unlocked():
            for work in list(self.works):
                self.wait_for(work.completed, None)
            with self._arrived:
                self._arrived.wait_for(lambda: self._calling_back is None or self.in_callback)

    def close(self) -> None:
        """End the thread; no work is queued, and none will be.

        A thread that outlived the interpreter could end the process with a signal.
        """
        self._ended = True
        with self._arrived:
            self._arrived.notify()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_ENDS_S)

    def forked(self, error: Exception) -> None:
        """Reset the queue in a child process, which has none of the parent's threads.

        The works are the parent's.  In the child they end with `error`.
        """
        self.lock, self._arrived = threading.RLock(), threading.Condition()
        self._calling_back = None
        works, self._thread, self.failed = list(self.works), None, []
        self.works.clear()
        for work in works:
            work.forked(error)

    # --- running ---

    def _run_works(self) -> None:
        """Run one work after another, in the progress thread."""
        while True:
            with self._arrived:
                while not self.works:
                    if self._ended:
                        return
                    self._arrived.wait()
            work = self.works[0]
            self._idle = 0  # the caller's thread may have begun the work: the timeout begins anew
            while not self._poll(work, HEAD_START):
                pass

    def _poll(self, work: Work[Any], ahead: int = 0) -> bool:
        """Poll a work once; return True if it is over and no longer queued.

        A progress thread, which is `ahead`, pauses from the first idle poll on.
        """
        if work.began_s is None:
            work.began_s = time.perf_counter()
        try:
            if next(work.polled):
                self._idle, self._spins = 0, self._yielding.spins
                return False
            self._idle += 1
            spins = 0 if ahead else self._spins
            if self._idle > spins:
                self._pause(work.polled, self._idle - spins, ahead)
            return False
        except StopIteration as end:
            result, error = end.value, None
        except BaseException as raised:
            result, error = None, raised
            self.failed = [work, *(failed for failed in self.failed if failed.unseen_error)]
        self._idle = 0
        callbacks = work.take_callbacks()
        before = self._calling_back
        if callbacks:
            self._calling_back = threading.get_ident()
        if self.works and self.works[0] is work:
            self.works.popleft()
        work.finish(result, error)
        for callback in callbacks:
            callback()
        if callbacks:
            with self._arrived:
                self._calling_back = before
                self._arrived.notify_all()
        return True

    def _pause(self, polled: Polled, idle: int, ahead: int) -> None:
        """Pause after an idle poll; raise the pause's errors inside the call."""
        try:
            if self._interrupt is not None:
                raise self._interrupt
            self._wait(idle, ahead)
        except BaseException as error:
            polled.throw(error)
