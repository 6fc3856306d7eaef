"""The engine of a communicator: runs its calls one at a time, in order, and ends it when one fails.

Only the engine numbers a call, runs its executable, and ends the communicator after an error.  The
compiled fast path (`ringreduce.shm.fast_path`) is a cache in front of the engine: it numbers and
starts repeated calls, and `Engine.finish` completes those that have to wait.
"""

from __future__ import annotations

import contextlib
import copy
import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from typing import Any

import numpy as np

from ringreduce.calls.call import Call, Fused
from ringreduce.calls.executables import Executables
from ringreduce.calls.queue import CallQueue
from ringreduce.calls.refusals import refusals_here
from ringreduce.calls.views import view_of_all
from ringreduce.calls.work import Polled
from ringreduce.config import Config
from ringreduce.control.agreement import Agreement, Interrupt
from ringreduce.control.diagnostics import call_text
from ringreduce.control.executable import Control, Executable, LoggedMessage, Note
from ringreduce.devices.base import Device, Stream
from ringreduce.errors import (
    NAME_RANKS,
    MismatchError,
    PeerLostError,
    RingReduceError,
    numbered,
)
from ringreduce.point_to_point.by_mailbox import MailboxRoad
from ringreduce.point_to_point.by_transport import TransportRoad
from ringreduce.point_to_point.endpoint import Endpoint
from ringreduce.point_to_point.road import Road
from ringreduce.schedules.schedule import Schedule
from ringreduce.shm.fast_path import CompiledCall, FastPath
from ringreduce.shm.segments import Segments
from ringreduce.trace.recorder import ASYNC, CALL, MESSAGE, RECORDERS
from ringreduce.transports.base import Transport

Body = Callable[[bytes], Polled]
"""Takes the header of the call's messages, and runs the call.  To refuse it after its messages, it
returns a ValueError, which the engine raises."""

NOTHING = np.empty(0, np.uint8)
"""The data of a meeting: it has a signature only."""

_engines: weakref.WeakSet[Engine] = weakref.WeakSet()


class LeavingError(PeerLostError):
    """This rank leaves the communicator."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason

    def __str__(self) -> str:
        return f"this rank has left the communicator: {self.reason}"


class Engine:
    """One communicator's calls: their order, their numbers, their errors."""

    def __init__(
        self,
        transport: Transport,
        host: Device,
        config: Config,
        timeout_s: float,
        segments: Segments | None = None,
    ) -> None:
        self.transport, self.size = transport, transport.size
        self.agreement = Agreement(transport, timeout_s)
        self.agreement.tell_others = self._tell_others
        self.origin = f"all {self.size} ranks"
        """How these ranks came together, for error texts."""
        self.log: list[LoggedMessage] | None = [] if config.log_messages else None
        """The messages of all runs that this rank has started; None: messages are not logged."""
        log = self._log if config.log_messages or RECORDERS else None
        self._messages: dict[int, tuple[int, Iterable[Note]]] = {}
        """Slice -> when its present messages began, and these messages, for the trace."""
        report_mismatch = self.agreement.report_mismatch
        rounds = self._log_rounds if config.log_messages else None
        control = Control(self.wait_until, self.wait_for, report_mismatch, log, rounds)
        self.executables = Executables(transport, host, config, control, segments)
        self._between_hosts = config.node_memory is not None
        if config.memory is None:
            segments = None
        self.running = self.executables.running
        self._discarded: deque[Call] = deque()
        """Calls whose executables are freed when no call is under way."""
        self.refusals = refusals_here()
        self.queue = CallQueue(self._wait, transport.yielding, transport.threads)
        self.endpoint = self._make_endpoint(segments, config, timeout_s)
        """The messages between two ranks."""
        self.ended: Exception | None = None
        """Why no further call can be made; None while the communicator is usable."""
        self.fast_path: FastPath | None = None
        """Repeats calls in compiled code; None if no calls are programs."""
        if config.memory is not None or config.node_memory is not None:
            self.fast_path = self.queue.lock = FastPath(
                self.queue.lock,
                self._is_idle,
                self.agreement,
                self.running,
                self.finish,
                self._on_orphaned,
                view_of_all,
                self.size,
                self.refusals.address,
            )
        self._lock = self.queue.lock
        _heed_forks()
        _engines.add(self)

    def _make_endpoint(
        self, segments: Segments | None, config: Config, timeout_s: float
    ) -> Endpoint:
        transport, memory = self.transport, config.memory
        road: Road
        if segments is not None and segments.single_copy:
            assert memory is not None
            road = MailboxRoad(segments, transport.rank, memory.crowded, self.refusals.address)
            how = transport.pause, transport.yielding, True
        else:
            channel = transport.channel()
            road = TransportRoad(channel)
            how = channel.pause, transport.yielding, transport.threads
        return Endpoint(
            road, transport.rank, transport.job_ranks, timeout_s, *how, self.queue.advance
        )

    def _wait(self, idle: int, ahead: int) -> None:
        """Pause as `Agreement.wait` does; asynchronous messages go on if they have no thread."""
        self.endpoint.advance_without_thread()
        self.agreement.wait(idle, ahead)

    # --- calls ---

    def _is_idle(self) -> bool:
        """Whether no call is under way or queued, no peer has warned, and the engine is usable."""
        busy = self.running or self.queue.busy or self.agreement.warned
        return not busy and self.ended is None

    def _on_orphaned(self) -> None:
        """End the communicator: an exception ended a call before `finish` answered for it."""
        if self.ended is None:
            reason = "an exception came in the middle of a call"
            self.break_off(PeerLostError(reason), reason)

    def check_open(self) -> None:
        """Raise an error if this thread can begin no message."""
        self.refusals.check()
        if self.ended is not None:
            raise self.ended.with_traceback(None)

    def check_usable(self) -> None:
        """Raise an error if this thread, which holds the queue's lock, can make no call now."""
        self.refusals.check()
        self._check_able()

    def _check_able(self) -> None:
        """Raise an error if no call can be made now."""
        if self.ended is not None:
            raise self.ended.with_traceback(None)
        if self.running and not self.queue.busy:
            raise ValueError("a call from within a call, such as from a signal handler")

    def run_now(self, call: Call, source: Any, target: Any, timeout_s: float | None) -> None:
        """Run a call of one plan to its end.  No other call is queued."""
        if self._discarded:
            self.free_discarded()
        agreement = self.agreement
        try:
            header = agreement.begin(call.signature, timeout_s)
            executable = call.executable or self.executables.of(call)
            begin_ns = time.perf_counter_ns() if RECORDERS else 0
            self.running.append(executable)
            executable.run(header, source, target)
            # Counted while it runs: a signal handler between the two lines can make no call.
            agreement.completed += 1
            self.running.clear()
            if RECORDERS:
                self._record(call, begin_ns)
        except BaseException as error:
            raise self._settle_error(error, call.schedule) from None

    def finish(self, call: CompiledCall, x: Any, out: Any, first: int) -> None:
        """Complete a call of the fast path, of which program number `first` waits or pauses.

        Runs the programs of the later batches too.  `x` and `out` are the caller's arrays.
        """
        path, agreement = self.fast_path, self.agreement
        assert path is not None
        try:
            # First of all: whatever is raised from here on, peers may still use the arrays.
            call.executables[first].adopt((x, out, call))
            path.take_over()
            with self.queue.lock:
                header = agreement.begin(call.engine_call.signature, call.timeout_s)
                for index, executable in enumerate(call.executables[first:], first):
                    if index > first:
                        assert call.table is not None
                        batch = call.table.batch(index)
                        self.running[:] = [executable]
                        executable.start_at(header, batch.source, batch.target, (x, out, call))
                    self.wait_for(executable)
                agreement.completed += 1
                self.running.clear()
        except BaseException as error:
            raise self._settle_error(error, call.engine_call.schedule) from None

    def run(
        self,
        call: Call | Fused,
        body: Body,
        timeout_s: float | None,
        async_op: bool = False,
        stream: Stream | None = None,
    ) -> Any:
        """Run `body` behind all queued calls; return its result, or the Work if `async_op`.

        With a `stream`, the call's work on the device runs after the caller's earlier work on the
        device, and before the caller's later work.  A Work is over when the device has completed
        all of the call.
        """
        if stream is not None:
            stream.follow()
            body = partial(_on_stream, stream, body, async_op)
        polled = self._polled(call, body, timeout_s)
        if async_op:
            return self.queue.submit(polled)
        try:
            if self.queue.busy:
                return self.queue.run_behind(polled)
            return self.queue.run(polled)
        finally:
            if stream is not None:
                stream.lead()

    def _polled(self, call: Call | Fused, body: Body, timeout_s: float | None) -> Polled:
        self._check_able()
        self.free_discarded()
        try:
            header = self.agreement.begin(call.signature, timeout_s)
            result = yield from body(header)
            self.agreement.completed += 1
        except BaseException as error:
            raise self._settle_error(error, call.schedule) from None
        if isinstance(result, ValueError):
            raise result
        return result

    def advance(self, call: Call, source: Any, target: Any, header: bytes) -> Iterator[bool]:
        """Run the plan of a call within a body; yield at each poll whether it made progress."""
        executable = call.executable or self.executables.of(call)
        begin_ns = time.perf_counter_ns() if RECORDERS else 0
        self.running.append(executable)
        executable.start(header, source, target)
        while not executable.test():
            yield executable.moved
        self.running.clear()
        if RECORDERS:
            self._record(call, begin_ns)

    def discard(self, call: Call) -> None:
        """Have the executable of a call freed soon.  Any thread may call this at any time."""
        if self.ended is None:
            self._discarded.append(call)
        else:
            call.executable = None

    def free_discarded(self) -> None:
        """Free the executables of discarded calls, at the beginning of a call.

        A discarded call that is queued makes a new executable in its turn.
        """
        while self._discarded:
            call = self._discarded.popleft()
            if call.executable is not None:
                if self._between_hosts and self.fast_path is not None:
                    self.fast_path.drop(call)  # its messages are not counted any more
                call.executable.free()
                call.executable = None

    def free_if_idle(self) -> None:
        """Free the executables of discarded calls, unless a call is under way or queued."""
        if not self.running and not self.queue.busy:
            self.free_discarded()

    # --- waiting ---

    def wait_until(self, test: Callable[[], bool]) -> None:
        """Poll `test` until it is true.  Raises an Interrupt if the call cannot complete."""
        idle, spins = 0, self.transport.yielding.spins
        while not test():
            idle += 1
            if idle > spins:
                self._wait(idle - spins, 0)

    def wait_for(self, executable: Executable) -> None:
        """Poll an executable until its run is complete.  Raises as `wait_until` does."""
        yielding = self.transport.yielding
        idle, spins = 0, yielding.spins
        while not executable.test():
            if executable.moved:
                idle, spins = 0, yielding.spins
                continue
            idle += 1
            if idle > spins:
                self._wait(idle - spins, 0)

    def _tell_others(self, unasked: bool) -> None:
        """Answer roll calls of this rank's other communicators with the call that it waits in."""
        others: list[Engine] = []
        # No call since a mismatch; another thread makes a communicator just now.
        with contextlib.suppress(IndexError, RuntimeError):
            call = self.agreement.calls[-1]
            text = f"{call_text([call.collective, call.arguments])} of {self.origin}"
            others.extend(_engines)
        for other in others:
            mine = other is not self and other.refusals is self.refusals
            if mine and other._lock.acquire(blocking=False):
                try:
                    with contextlib.suppress(Exception):  # the next call there raises it
                        if other.ended is None and not other.running and not other.queue.busy:
                            other.agreement.answer(text, unasked)
                finally:
                    other._lock.release()

    def _log_rounds(self, index: int, notes: Iterable[Note]) -> None:
        """Log the messages that slice `index` begins."""
        assert self.log is not None
        self.log += [LoggedMessage(self.agreement.number, index, *note) for note in notes]

    def _log(self, index: int, notes: Iterable[Note]) -> None:
        """Log the messages that slice `index` begins, and trace its messages before, as over."""
        if self.log is not None:
            self._log_rounds(index, notes)
        if RECORDERS:
            begin_ns, over = self._messages.get(index, (0, ()))
            self._messages[index] = time.perf_counter_ns(), notes
            for _, name, peer, nbytes in over:
                words = f"{'to' if name == 'send' else 'from'} {peer}"
                RECORDERS[0].add(MESSAGE, name, begin_ns, nbytes, words)

    def _record(self, call: Call, begin_ns: int) -> None:
        """Record a call that is over, and its last messages."""
        for index in self._messages:
            self._log(index, ())
        self._messages.clear()
        name, algorithm = call.signature.collective, call.schedule.algorithm
        kind = ASYNC if self.queue.works else CALL
        RECORDERS[0].add(kind, name, begin_ns, call.nbytes, algorithm)

    # --- the end ---

    @property
    def broken(self) -> bool:
        """Whether an error ended the communicator, so that no further call is possible."""
        return isinstance(self.ended, RingReduceError)

    def forked(self) -> None:
        """End the communicator in a forked child process, which cannot make calls."""
        self.ended = ValueError(
            "this process was forked from the one that made the communicator; "
            "make calls in that one, or start ranks with 'ringreduce run'"
        )
        self.executables.arena = None  # the parent goes on to allocate from it
        self.queue.forked(self.ended)
        self.endpoint.forked(self.ended)
        self.transport.forked()
        if self.fast_path is not None:
            self.fast_path.forked()

    def part(self, call: Call) -> None:
        """Wait until all ranks have completed `call`, their last one."""
        try:
            self.agreement.part()
        except BaseException as error:
            raise self._settle_error(error, call.schedule) from None

    def _settle_error(self, error: BaseException, schedule: Schedule) -> BaseException:
        """End the communicator after `error` if need be; return the error to raise."""
        if isinstance(error, Interrupt):
            try:
                settled = self.agreement.settle(error, self.executables, schedule)
            except BaseException as worse:
                error = worse
            else:
                self._messages.clear()
                if isinstance(settled, NAME_RANKS):
                    numbered(settled, self.transport.job_ranks)
                if not isinstance(settled, MismatchError):
                    self.ended = copy.copy(settled)
                    self.endpoint.end(self.ended, f"{type(settled).__name__}: {settled}")
                    self.executables.abandon()
                return settled
        if isinstance(error, Exception):
            error = self.agreement.why_lost(self.transport.translate(error))
        if isinstance(error, NAME_RANKS):
            numbered(error, self.transport.job_ranks)
        said = f"{type(error).__name__}: {error}"
        reason = error.reason if isinstance(error, LeavingError) else said
        ended = error if isinstance(error, RingReduceError) else PeerLostError(reason)
        self.break_off(ended, reason)
        return error

    def break_off(self, error: Exception, reason: str) -> None:
        """End the communicator with `error`; the other ranks get `reason`."""
        self.ended = copy.copy(error)  # `error` itself keeps the caller's frames alive
        if self.fast_path is not None:
            self.fast_path.disable()
        lost = error.ranks if isinstance(error, PeerLostError) else ()
        try:
            self.agreement.leave(reason, lost)
            self.endpoint.end(self.ended, reason)
        finally:
            self.executables.abandon()


@cache
def _heed_forks() -> None:
    """Register a hook for forks, once in a process: os.getpid() in every call would cost 0.2 us."""

    def forked() -> None:
        for engine in _engines:
            engine.forked()

    os.register_at_fork(after_in_child=forked)


def _on_stream(stream: Stream, body: Body, to_the_end: bool, header: bytes) -> Polled:
    """Run `body` with its device work in `stream`; `to_the_end`: until the device is done."""
    polled = body(header)
    result = None
    going_on = True
    while going_on:
        moved = False
        with stream.selected():
            try:
                moved = next(polled)
            except StopIteration as end:
                result, going_on = end.value, False
        yield moved
    if to_the_end:
        mark = stream.mark()
        mark.set()
        while not mark.reached():
            yield False
    return result
