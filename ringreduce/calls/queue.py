"""Calls in order: those that are waited for at once, and those that go on while others compute.

Every call is a program: a generator that says at each poll whether it got any further, and returns
its result.  A communicator carries its programs out one after another, in the order of the calls.
While asynchronous ones are in line a thread does so, if the transport may be used from one; or else
they advance whenever somebody waits or asks.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from typing import Any

Program = Generator[bool, None, Any]

_AHEAD = 1900
"""Idle polls that the thread is ahead of others: it sleeps early, for they want the interpreter."""


class Work:
    """A call under way.  Made by a collective with ``async_op=True``.

    It keeps its arrays alive, and completes whether or not anybody waits for it.
    """

    def __init__(self, queue: CallQueue, program: Program) -> None:
        self.program = program
        self.completed = threading.Event()
        self._queue = queue
        self._result: Any = None
        self._error: BaseException | None = None
        self._seen = False
        self.began_s: float | None = None
        """When its turn came, on the clock of `time.perf_counter`."""
        self.seconds: float | None = None
        """How long it took from when its turn came; None while it is not over."""

    def done(self) -> bool:
        """Whether the call is over, well or not.  Does not wait."""
        if not self.completed.is_set():
            self._queue.advance()
        return self.completed.is_set()

    def wait(self, timeout_s: float | None = None) -> Any:
        """Wait for the call and return its result.

        Raises what the call raised: MismatchError, PeerTimeoutError, PeerLostError.  Raises
        TimeoutError when the call is not over within `timeout_s` seconds; it then still goes on.
        """
        if not self._queue.await_(self.completed, timeout_s):
            raise TimeoutError(f"the call is not over after {timeout_s} s; it goes on")
        self._seen = True
        if self._error is not None:
            raise self._error.with_traceback(None)
        return self._result

    @property
    def unseen_error(self) -> BaseException | None:
        """What the call raised, if nobody has waited for it."""
        return None if self._seen else self._error

    def forked(self, error: Exception) -> None:
        """In a child process: whoever held the lock of the event is no more."""
        self.completed = threading.Event()
        self.finish(error=error)

    def finish(self, result: Any = None, error: BaseException | None = None) -> None:
        """Called once by the line: the call is over."""
        self._result, self._error = result, error
        if self.began_s is not None:
            self.seconds = time.perf_counter() - self.began_s
        self.completed.set()


class CallQueue:
    """The calls of one communicator that wait for their turn."""

    def __init__(self, wait: Callable[[int, int], None], spins: int, threads: bool) -> None:
        self.lock: Any = threading.RLock()
        """Held while a call finds its place in the order."""
        self._wait, self._spins, self._threads = wait, spins, threads
        self.works: deque[Work] = deque()
        """Those that are not over yet, in order."""
        self._arrived = threading.Condition()
        self._thread: threading.Thread | None = None
        self._failed: list[Work] = []
        self._interrupt: BaseException | None = None
        self._ended = False
        self._idle = 0

    def put(self, program: Program) -> Work:
        """Let a program have its turn when all before it are over.  Call it with the lock held."""
        work = Work(self, program)
        self.works.append(work)
        if self._threads:
            with self._arrived:
                if self._thread is None:
                    self._thread = threading.Thread(
                        target=self._carry_out,
                        name="ringreduce progress",
                        daemon=True,
                    )
                    self._thread.start()
                self._arrived.notify()
        else:
            self.advance()
        return work

    def run(self, program: Program) -> Any:
        """Carry a program out at once and return its result; nothing is in line."""
        idle = 0
        try:
            while True:
                idle = 0 if next(program) else idle + 1
                if idle > self._spins:
                    self._pause(program, idle - self._spins, ahead=0)
        except StopIteration as end:
            return end.value

    def await_(self, completed: threading.Event, timeout_s: float | None) -> bool:
        """Wait until a work is over; False if it is not within the time."""
        if self._threads:
            return completed.wait(timeout_s)
        end = None if timeout_s is None else time.monotonic() + timeout_s
        while not completed.is_set():
            if end is not None and time.monotonic() > end:
                return False
            self.advance()
        return True

    def advance(self) -> None:
        """Without a thread: go on with the first work in line, up to where it has to wait."""
        if self._threads:
            return
        with self.lock:
            if self.works:
                self._poll(self.works[0], self._spins, ahead=0)

    def interrupt(self, error: BaseException, seconds: float) -> None:
        """Raise `error` in the program that has its turn, and wait a while for the line to end."""
        self._interrupt = error
        end = time.monotonic() + seconds
        while self.works and time.monotonic() < end:
            self.advance()
            time.sleep(1e-3)
        self._interrupt = None

    def drain(self) -> None:
        """Wait until every work in line is over.  Call it with the lock held."""
        for work in list(self.works):
            self.await_(work.completed, None)

    def close(self) -> None:
        """Let the thread end; nothing is in line, and nothing will be."""
        self._ended = True
        with self._arrived:
            self._arrived.notify()

    def forked(self, error: Exception) -> None:
        """In a child process, where no thread is left that could hold a lock or carry a work out.

        The works are the parent's: here they end with `error`.
        """
        self.lock, self._arrived = threading.RLock(), threading.Condition()
        works, self._thread, self._failed = list(self.works), None, []
        self.works.clear()
        for work in works:
            work.forked(error)

    def unseen_error(self) -> BaseException | None:
        """The first error of a work that nobody has waited for; asked for once."""
        failed, self._failed = self._failed, []
        return next((work.unseen_error for work in reversed(failed) if work.unseen_error), None)

    # --- carrying out ---

    def _carry_out(self) -> None:
        """The thread: one work after another."""
        while True:
            with self._arrived:
                while not self.works:
                    if self._ended:
                        return
                    self._arrived.wait()
            work = self.works[0]
            while not self._poll(work, spins=0, ahead=_AHEAD):
                pass

    def _poll(self, work: Work, spins: int, ahead: int) -> bool:
        """Let a work take one step; True when it is over and out of the line."""
        if work.began_s is None:
            work.began_s = time.perf_counter()
        try:
            self._idle = 0 if next(work.program) else self._idle + 1
            if self._idle > spins:
                self._pause(work.program, self._idle - spins, ahead)
            return False
        except StopIteration as end:
            result, error = end.value, None
        except BaseException as raised:
            result, error = None, raised
            self._failed = [work, *(failed for failed in self._failed if failed.unseen_error)]
        self._idle = 0
        self.works.popleft()
        work.finish(result, error)
        return True

    def _pause(self, program: Program, idle: int, ahead: int) -> None:
        """Let others have the core; what comes up meanwhile is raised in the program."""
        try:
            if self._interrupt is not None:
                raise self._interrupt
            self._wait(idle, ahead)
        except BaseException as error:
            program.throw(error)
