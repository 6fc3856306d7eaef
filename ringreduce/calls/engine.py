"""The engine of a communicator: runs its calls one at a time, in order, and ends it when one fails.

Only the engine numbers a call, runs its executable, and ends the communicator after an error.  The
compiled fast path (`ringreduce.shm.fast_path`) is a cache in front of the engine: it numbers and
starts repeated calls, and `Engine.finish` completes those that have to wait.
"""

from __future__ import annotations

import contextlib
import copy
import os
import sys
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np

from ringreduce.calls.call import Call, Fused, Shape
from ringreduce.calls.queue import CallQueue, Program
from ringreduce.calls.refusals import refusals_here
from ringreduce.calls.views import view_of_all
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
from ringreduce.messages.binding import Arithmetic
from ringreduce.messages.executor import MessageExecutable
from ringreduce.messages.flows import FlowCache, Task
from ringreduce.planning.plan import Plan
from ringreduce.point_to_point.by_mailbox import MailboxRoad
from ringreduce.point_to_point.by_transport import TransportRoad
from ringreduce.point_to_point.endpoint import Endpoint
from ringreduce.point_to_point.road import Road
from ringreduce.schedules.schedule import Schedule
from ringreduce.shm.allocator import Arena
from ringreduce.shm.executable import ShmExecutable
from ringreduce.shm.fast_path import SCATTER_TO_OUT, CompiledCall, FastPath, key_of
from ringreduce.shm.gpu_staging import GpuExecutable, PinnedPieces
from ringreduce.shm.list_table import ListTable
from ringreduce.shm.program import SharedMemory
from ringreduce.shm.segments import Segments
from ringreduce.trace.recorder import ASYNC, CALL, MESSAGE, RECORDERS
from ringreduce.transports.base import ABANDONED, Transport

Body = Callable[[bytes], Generator[bool, None, Any]]
"""Takes the header of the call's messages, and runs the call.  To refuse it after its messages, it
returns a ValueError, which the engine raises."""

NOTHING = np.empty(0, np.uint8)
"""The data of a meeting: it has a signature only."""
_WITHDRAWING_S = 0.05
"""Seconds that a broken communicator tries to withdraw its receives."""
_LEAVING_S = 1.0
"""Seconds that a call under way may take to notice that this rank leaves."""

_engines: weakref.WeakSet[Engine] = weakref.WeakSet()


class LeavingError(PeerLostError):
    """This rank leaves the communicator."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason

    def __str__(self) -> str:
        return f"this rank has left the communicator: {self.reason}"


class Engine:
    """One communicator's calls: their order, their numbers, their errors, their end."""

    def __init__(
        self,
        transport: Transport,
        host: Device,
        config: Config,
        timeout_s: float,
        segments: Segments | None = None,
    ) -> None:
        self._transport, self._host, self._config = transport, host, config
        self.size = transport.size
        self._agreement = Agreement(transport, timeout_s)
        self._agreement.tell_others = self._tell_others
        self.origin = f"all {self.size} ranks"
        """How these ranks came together, for error texts."""
        self.log: list[LoggedMessage] | None = [] if config.log_messages else None
        """The messages of all runs that this rank has started; None: messages are not logged."""
        log = self._log if config.log_messages or RECORDERS else None
        config = replace(config, log_messages=log is not None)
        self._messages: dict[int, tuple[float, Iterable[Note]]] = {}
        """Slice -> when its present messages began, and these messages, for the trace."""
        self._control = Control(self.wait_until, self.wait_for, self._report_mismatch, log)
        self._flows = FlowCache(transport, config)
        self.arena = None if segments is None else Arena(segments.arena)
        """Allocates arrays that the other ranks reach; None if the ranks share no memory."""
        self._blocks: dict[Device, PinnedPieces] = {}
        """Pinned host memory for calls on a GPU, by device."""
        self.shared_memory: SharedMemory | None = None
        """The memory that all ranks of the communicator share; None if they share none."""
        if config.memory is not None:
            assert segments is not None
            self.shared_memory = SharedMemory(
                segments, transport.rank, config, self._report_mismatch
            )
        self.running: list[Executable] = []
        """The executable that is running; empty between calls."""
        self._discarded: deque[Call] = deque()
        """Calls whose executables are freed when no call is under way."""
        self._refusals = refusals_here()
        self._is_superseded = False
        """Whether the ranks that are left have shrunk the communicator."""
        self.queue = CallQueue(self._wait, transport.yielding, transport.threads)
        self.endpoint = self._make_endpoint(segments, timeout_s)
        """The messages between two ranks."""
        self.ended: Exception | None = None
        """Why no further call can be made; None while the communicator is usable."""
        self.before_close: Callable[[], None] | None = None
        """Makes the last calls of this rank, in `close`."""
        self.last_call: Call
        """The meeting in which all ranks close the communicator."""
        self.survives_losses = False
        """Whether a lost rank does not count when the communicator is closed."""
        self.has_survived = False
        """Whether the communicator was closed although a rank was lost: MPI_Finalize may hang."""
        self.to_close = [self]
        """A list of this engine, which `close` empties.  Others keep the list, not the engine."""
        self.fast_path: FastPath | None = None
        """Repeats calls in compiled code; None if the ranks share no memory."""
        if self.shared_memory is not None:
            self.fast_path = self.queue.lock = FastPath(
                self.queue.lock,
                self._is_idle,
                self._agreement,
                self.running,
                self.finish,
                self._on_orphaned,
                view_of_all,
                transport.size,
                self._refusals.address,
            )
        self._lock = self.queue.lock
        _heed_forks()
        _engines.add(self)

    def _make_endpoint(self, segments: Segments | None, timeout_s: float) -> Endpoint:
        transport, memory = self._transport, self._config.memory
        road: Road
        if segments is not None and segments.single_copy:
            assert memory is not None
            road = MailboxRoad(segments, transport.rank, memory.crowded, self._refusals.address)
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
        self._agreement.wait(idle, ahead)

    # --- calls ---

    def _is_idle(self) -> bool:
        """Whether no call is under way or queued, no peer has warned, and the engine is usable."""
        busy = self.running or self.queue.busy or self._agreement.warned
        return not busy and self.ended is None

    def _on_orphaned(self) -> None:
        """End the communicator: an exception ended a call before `finish` answered for it."""
        if self.ended is None:
            reason = "an exception came in the middle of a call"
            self._break(PeerLostError(reason), reason)

    def check_allowed(self) -> None:
        """Raise ValueError if calls of this thread are refused."""
        self._refusals.check()

    def check_usable(self) -> None:
        """Raise an error if this thread, which holds the queue's lock, can make no call now."""
        self._refusals.check()
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
            self._free_discarded()
        agreement = self._agreement
        try:
            header = agreement.begin(call.signature, timeout_s)
            executable = call.executable or self.executable(call)
            begin_s = time.perf_counter() if RECORDERS else 0.0
            self.running.append(executable)
            executable.run(header, source, target)
            # Counted while it runs: a signal handler between the two lines can make no call.
            agreement.completed += 1
            self.running.clear()
            if RECORDERS:
                self._record(call, begin_s)
        except BaseException as error:
            raise self._settle_error(error, call.schedule) from None

    def finish(self, call: CompiledCall, x: Any, out: Any, first: int) -> None:
        """Complete a call of the fast path, of which program number `first` waits or pauses.

        Runs the programs of the later batches too.  `x` and `out` are the caller's arrays.
        """
        path, agreement = self.fast_path, self._agreement
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
        program = self._program(call, body, timeout_s)
        if async_op:
            return self.queue.submit(program)
        try:
            if self.queue.busy:
                return self.queue.run_behind(program)
            return self.queue.run(program)
        finally:
            if stream is not None:
                stream.lead()

    def _program(self, call: Call | Fused, body: Body, timeout_s: float | None) -> Program:
        self._check_able()
        self._free_discarded()
        try:
            header = self._agreement.begin(call.signature, timeout_s)
            result = yield from body(header)
            self._agreement.completed += 1
        except BaseException as error:
            raise self._settle_error(error, call.schedule) from None
        if isinstance(result, ValueError):
            raise result
        return result

    def advance(self, call: Call, source: Any, target: Any, header: bytes) -> Iterator[bool]:
        """Run the plan of a call within a body; yield at each poll whether it made progress."""
        executable = call.executable or self.executable(call)
        begin_s = time.perf_counter() if RECORDERS else 0.0
        self.running.append(executable)
        executable.start(header, source, target)
        while not executable.test():
            yield executable.moved
        self.running.clear()
        if RECORDERS:
            self._record(call, begin_s)

    # --- executables ---

    def executable(self, call: Call) -> Executable:
        """Return the executable of a call; make it first if needed."""
        if call.executable is None:
            call.executable = self._through_shared_memory(call) or self._by_messages(call)
        return call.executable

    def _through_shared_memory(self, call: Call) -> Executable | None:
        """Return the shared-memory executable; None on all ranks if `call` goes by messages."""
        if call.pieces:
            return self._by_pieces(call)
        return self._by_program(call.plan, call) if call.shares else None

    def _by_program(self, plan: Plan, call: Call) -> ShmExecutable | None:
        """As `_through_shared_memory`, for one plan of a call in host memory."""
        assert self.shared_memory is not None
        op, dtype = call.op, call.wire_dtype
        instructions = self.shared_memory.instructions(plan, op, dtype)
        if instructions is None:
            return None
        program = self.shared_memory.program(instructions, plan, self._host, op, dtype)
        return ShmExecutable(program, self._host, self._control)

    def _by_pieces(self, call: Call) -> Executable | None:
        """As `_through_shared_memory`, for an all-reduce on a GPU."""
        assert call.stream is not None
        pieces = []
        for plan, _ in call.pieces:
            piece = self._by_program(plan, call)
            if piece is None:
                return None
            pieces.append(piece)
        call.plan = call.pieces[0][0]  # errors show its schedule
        blocks = self._blocks.get(call.device)
        if blocks is None:
            blocks = self._blocks[call.device] = PinnedPieces(self.reachable, call.stream)
        return GpuExecutable(pieces, call.device, call.wire_dtype, blocks)

    def reachable(self, shape: Shape, dtype: np.dtype[Any]) -> np.ndarray:
        """Return an array in this rank's segment, or a private array without space there."""
        array = None
        # A lost rank that was stopped may continue, and write to the memory of its peers.
        if self.arena is not None and not self.broken:
            self.free_discarded()
            array = self.arena.empty(shape, dtype)
        return np.empty(shape, dtype) if array is None else array

    def _by_messages(self, call: Call) -> Executable:
        device, op, dtype, size = call.device, call.op, call.wire_dtype, self.size
        arithmetic = Arithmetic()
        if op is not None:
            arithmetic = Arithmetic(
                device.fold(op, dtype),
                device.fold_many(op, dtype) if size > 2 else None,
                partial(device.divide, by=size) if op == "mean" else None,
            )
        how = arithmetic, call.in_flight, call.staged_bytes
        task = Task(call.plan, device, dtype, call.shapes, *how)
        return MessageExecutable(task, self._flows, self._control)

    def discard(self, call: Call) -> None:
        """Have the executable of a call freed soon.  Any thread may call this at any time."""
        if self.ended is None:
            self._discarded.append(call)
        else:
            call.executable = None

    def free_discarded(self) -> None:
        """Free the executables of discarded calls; do nothing if a call is under way or queued."""
        if not self.running and not self.queue.busy:
            self._free_discarded()

    def _free_discarded(self) -> None:
        """Free the executables of discarded calls, at the beginning of a call.

        A discarded call that is queued makes its executable anew in its turn.
        """
        while self._discarded:
            call = self._discarded.popleft()
            if call.executable is not None:
                call.executable.free()
                call.executable = None

    # --- the fast path ---

    def admit(
        self, collective: str, call: Call, array: np.ndarray, arguments: Mapping[str, Any]
    ) -> None:
        """Admit a call to the fast path, which there is, after it was made on `array`."""
        path = self.fast_path
        assert path is not None
        if self.queue.busy or self._control.log is not None:
            return
        if call.takes_out:
            collective = SCATTER_TO_OUT
        key = key_of(collective, array.dtype, [array.shape], arguments)
        if key is not None and path.call_of(key) is None:
            admitted = self._compiled_call(call, [call])
            if admitted is not None:
                path.admit(key, admitted, call.shape)

    def admit_list(
        self, fused: Fused, arrays: Sequence[np.ndarray], arguments: Mapping[str, Any]
    ) -> None:
        """Admit an all-reduce of a list to the fast path after the general path has made it."""
        path = self.fast_path
        if path is None or self.queue.busy or not any(array.size for array in arrays):
            return
        dtype, shapes = arrays[0].dtype, [array.shape for array in arrays]
        key = key_of("all_reduce", dtype, shapes, arguments, is_list=True)
        if key is None or any(array.dtype != dtype for array in arrays):
            return
        known = path.call_of(key)
        if known is not None and known.engine_call is fused:
            return
        admitted = self._compiled_call(fused, fused.calls)
        if admitted is not None:
            batches = [[shapes[index] for index in members] for _, members in fused.groups]
            admitted.table = ListTable(batches, dtype, self._config.single_copy_from)
            path.admit(key, admitted, tuple(shapes))

    def admit_barrier(self, call: Call) -> None:
        """Admit a barrier to the fast path after the general path has made it."""
        path = self.fast_path
        if path is not None and not path.has_barrier and not self.queue.busy:
            admitted = self._compiled_call(call, [call])
            if admitted is not None:
                path.admit_barrier(admitted)

    def planned(
        self, call: Call, timeout_s: float | None, result: Any, general: Callable[[], Any]
    ) -> Callable[[], Any] | None:
        """Return a compiled function that makes a call on the arrays its executable is bound to.

        The function returns `result`.  It calls `general` if the call is not eligible for the fast
        path at that time.  Returns None if the call is not one compiled program.
        """
        if self.fast_path is None:
            return None
        admitted = self._compiled_call(call, [call])
        if admitted is None or not admitted.executables[0].is_bound:
            return None
        admitted.timeout_s = timeout_s
        return self.fast_path.planned(admitted, result, general)

    def _compiled_call(self, call: Call | Fused, batches: Sequence[Call]) -> CompiledCall | None:
        """Return `call` with the compiled program of each batch; None if a batch has none."""
        if self._control.log is not None or any(batch.converts for batch in batches):
            return None
        executables = []
        for batch in batches:
            executable = self.executable(batch)
            if not isinstance(executable, ShmExecutable):
                return None
            executable.sign(call.signature.digest)
            executables.append(executable)
        return CompiledCall(call, executables)

    # --- functions for executables ---

    def wait_until(self, test: Callable[[], bool]) -> None:
        """Poll `test` until it is true.  Raises an Interrupt if the call cannot complete."""
        idle, spins = 0, self._transport.yielding.spins
        while not test():
            idle += 1
            if idle > spins:
                self._wait(idle - spins, 0)

    def wait_for(self, executable: Executable) -> None:
        """Poll an executable until its run is complete.  Raises as `wait_until` does."""
        yielding = self._transport.yielding
        idle, spins = 0, yielding.spins
        while not executable.test():
            if executable.moved:
                idle, spins = 0, yielding.spins
                continue
            idle += 1
            if idle > spins:
                self._wait(idle - spins, 0)

    def _report_mismatch(self, peer: int, header: bytes) -> None:
        self._agreement.report_mismatch(peer, header)

    def _tell_others(self, unasked: bool) -> None:
        """Answer roll calls of this rank's other communicators with the call that it waits in."""
        others: list[Engine] = []
        # No call since a mismatch; another thread makes a communicator just now.
        with contextlib.suppress(IndexError, RuntimeError):
            call = self._agreement.calls[-1]
            text = f"{call_text([call.collective, call.arguments])} of {self.origin}"
            others.extend(_engines)
        for other in others:
            mine = other is not self and other._refusals is self._refusals
            if mine and other._lock.acquire(blocking=False):
                try:
                    with contextlib.suppress(Exception):  # the next call there raises it
                        if other.ended is None and not other.running and not other.queue.busy:
                            other._agreement.answer(text, unasked)
                finally:
                    other._lock.release()

    def _log(self, index: int, notes: Iterable[Note]) -> None:
        """Log the messages that slice `index` begins; its messages before are over."""
        if self.log is not None:
            self.log += [LoggedMessage(self._agreement.number, index, *note) for note in notes]
        if RECORDERS:
            begin_s, over = self._messages.get(index, (0.0, ()))
            self._messages[index] = time.perf_counter(), notes
            for _, name, peer, nbytes in over:
                words = f"{'to' if name == 'send' else 'from'} {peer}"
                RECORDERS[0].add(MESSAGE, name, begin_s, nbytes, words)

    def _record(self, call: Call, begin_s: float) -> None:
        """Record a call that is over, and its last messages."""
        for index in self._messages:
            self._log(index, ())
        self._messages.clear()
        name, algorithm = call.signature.collective, call.schedule.algorithm
        kind, plans = ASYNC if self.queue.works else CALL, call.pieces or ((call.plan, 1),)
        nbytes = call.dtype.itemsize * sum(plan.count * times for plan, times in plans)
        RECORDERS[0].add(kind, name, begin_s, nbytes, algorithm)

    # --- functions for the agreement, after an error ---

    def where(self) -> tuple[int | None, list[int]]:
        """Return the step of the running executable, and the peers that it waits for."""
        return self.running[0].where() if self.running else (None, [])

    def withdraw(self) -> bool:
        """Withdraw the receives under way; False if this has to be called again."""
        return all(executable.withdraw() for executable in self.running)

    def tally(self) -> tuple[Counter[int], Counter[int]]:
        """Return the messages ever sent to and received from each peer.

        All receives are withdrawn before.
        """
        self._flows.count_all()
        for executable in self.running:
            executable.tally()
        return self._flows.sent, self._flows.received

    def sends_done(self) -> bool:
        """Whether every send that was started is complete."""
        return all(executable.sends_done() for executable in self.running)

    @property
    def rounds(self) -> int:
        """Number of rounds through shared memory that this rank has begun."""
        return 0 if self.shared_memory is None else self.shared_memory.rounds

    def start_afresh(self, rounds: int) -> None:
        """Forget the call under way, whose messages are all withdrawn, drained or complete.

        Rounds are counted from `rounds` on: the most that any rank has begun.
        """
        for executable in self.running:
            executable.reset()
        if self.shared_memory is not None:
            self.shared_memory.go_on_from(rounds)
        self.running.clear()
        self._messages.clear()
        self._flows.forget_counts()

    def _abandon(self) -> None:
        """Withdraw the receives under way, for `_WITHDRAWING_S` at most.

        Peers may still read or write the memory of the other messages, and a peer that is stopped
        may go on to write to the arrays of the call.  So all these are kept until the process ends.
        """
        if self.shared_memory is not None:
            self.shared_memory.leave()
        end = time.monotonic() + _WITHDRAWING_S
        with contextlib.suppress(Exception):  # an error of MPI changes nothing now
            while not self.withdraw() and time.monotonic() < end:
                self._transport.pause(1)
        ABANDONED.extend(self.running)

    # --- the end ---

    def close(self, end_of: str = "", timeout_s: float | None = None) -> None:
        """Complete the queued calls and the meeting `last_call`, and free everything.

        `end_of` is for error texts: the place whose end this rank has reached, or empty if the user
        closes.  `timeout_s`: seconds to wait for messages, and then for the meeting; None: those of
        the communicator.  Raises the error of a Work that was never waited for.
        """
        before, self.before_close = self.before_close, None
        if before is not None and self.ended is None:
            before()
        with self.queue.lock:
            if self.ended is None:
                self._refusals.check()
            self._agreement.end_of = end_of
            self.queue.drain()
            if self.ended is None:
                self.endpoint.close(None if timeout_s is None else time.monotonic() + timeout_s)
            unseen = self._unseen_error()
            self.queue.failed, self.endpoint.works = [], []
            if self.ended is None:
                self.check_usable()
                if self.survives_losses:
                    self.endpoint.end(_closed())  # it has announced a close in good order
                try:
                    self.run_now(self.last_call, NOTHING, NOTHING, timeout_s)
                    self._part(self.last_call)
                except PeerLostError:
                    if not self.survives_losses:
                        raise
                    self.ended = _closed()  # the living ranks need not meet
                    self.has_survived = True
                else:
                    self._free_discarded()
                    self._flows.close()
                    for blocks in self._blocks.values():
                        blocks.close()
                    self.ended = _closed()
                    self.to_close.clear()
                    self.endpoint.end(self.ended)
                    self._transport.close()
                finally:
                    if self.broken:
                        self.queue.close()
            self.queue.close()
            if self.fast_path is not None:
                self.fast_path.forget()
            if unseen is not None:
                raise unseen.with_traceback(None)

    def _part(self, call: Call) -> None:
        """Wait until all ranks have completed `call`, their last one."""
        try:
            self._agreement.part()
        except BaseException as error:
            raise self._settle_error(error, call.schedule) from None

    def _unseen_error(self) -> BaseException | None:
        """Return the first error of a work that was never waited for."""
        works = [*reversed(self.queue.failed), *self.endpoint.works]
        return next((work.unseen_error for work in works if work.unseen_error), None)

    @property
    def is_at_rest(self) -> bool:
        """Whether nothing is under way, and no error awaits its report."""
        busy = self.queue.busy or self.endpoint.is_busy or self.broken
        return not busy and self._unseen_error() is None

    @property
    def usable(self) -> bool:
        """Whether calls can still be made."""
        return self.ended is None

    @property
    def closed(self) -> bool:
        """Whether the communicator was closed, and not broken before."""
        return self.ended is not None and not self.broken

    @property
    def broken(self) -> bool:
        """Whether an error ended the communicator, so that no further call is possible."""
        return isinstance(self.ended, RingReduceError)

    def leave(self, reason: str) -> None:
        """Leave without the other ranks; their next call raises PeerLostError with `reason`."""
        if self.ended is None:
            if self.queue.works:
                self.queue.interrupt(LeavingError(reason), _LEAVING_S)
            elif self.running and not _is_within_call():
                self._end_call_of_other_thread(LeavingError(reason))
            if self.ended is None:
                self._break(LeavingError(reason), reason)
            self.queue.close()

    def _end_call_of_other_thread(self, error: LeavingError) -> None:
        """Have the call of another thread raise `error`; wait for that `_LEAVING_S` at most."""
        self._agreement.interrupt = error
        end = time.monotonic() + _LEAVING_S
        while self.running and self.ended is None and time.monotonic() < end:
            time.sleep(1e-3)
        self._agreement.interrupt = None

    def check_shrinkable(self) -> None:
        """Raise ValueError if the communicator is closed, or this thread's calls are refused."""
        self._refusals.check()
        if isinstance(self.ended, ValueError) and not self._is_superseded:
            raise self.ended.with_traceback(None)

    def supersede(self) -> None:
        """End the communicator, whose ranks have another one.  Nothing is sent."""
        if not self._is_superseded:
            self._is_superseded = True
            ended = ValueError("the communicator is superseded; use that of shrink()")
            if self.ended is None:
                self.ended = ended
                self.endpoint.end(ended)
                self._abandon()
            self.ended = ended
            if self.fast_path is not None:
                self.fast_path.disable()
            self.queue.close()

    def farewell(self, seconds: float) -> None:
        """Wait `seconds` at most until the other living ranks call `farewell` too."""
        self._agreement.farewell(seconds)

    def flush(self, seconds: float) -> None:
        """Wait `seconds` at most until all control messages are on their way, if this rank left."""
        with contextlib.suppress(RingReduceError):  # a rank that is lost needs no message
            if self.broken:
                self._agreement.flush(seconds)

    def forked(self) -> None:
        """End the communicator in a forked child process, which cannot make calls."""
        self.ended = ValueError(
            "this process was forked from the one that made the communicator; "
            "make calls in that one, or start ranks with 'ringreduce run'"
        )
        self.arena = None  # the parent goes on to allocate from it
        self.queue.forked(self.ended)
        self.endpoint.forked(self.ended)
        self._transport.forked()
        if self.fast_path is not None:
            self.fast_path.forked()

    # --- errors ---

    def _settle_error(self, error: BaseException, schedule: Schedule) -> BaseException:
        """End the communicator after `error` if need be; return the error to raise."""
        if isinstance(error, Interrupt):
            try:
                settled = self._agreement.settle(error, self, schedule)
            except BaseException as worse:
                error = worse
            else:
                if isinstance(settled, NAME_RANKS):
                    numbered(settled, self._transport.job_ranks)
                if not isinstance(settled, MismatchError):
                    self.ended = copy.copy(settled)
                    self.endpoint.end(self.ended, f"{type(settled).__name__}: {settled}")
                    self._abandon()
                return settled
        if isinstance(error, Exception):
            error = self._agreement.why_lost(self._transport.translate(error))
        if isinstance(error, NAME_RANKS):
            numbered(error, self._transport.job_ranks)
        reason = (
            error.reason if isinstance(error, LeavingError) else f"{type(error).__name__}: {error}"
        )
        self._break(error if isinstance(error, RingReduceError) else PeerLostError(reason), reason)
        return error

    def _break(self, error: Exception, reason: str) -> None:
        self.ended = copy.copy(error)  # `error` itself keeps the caller's frames alive
        if self.fast_path is not None:
            self.fast_path.disable()
        lost = error.ranks if isinstance(error, PeerLostError) else ()
        try:
            self._agreement.leave(reason, lost)
            self.endpoint.end(self.ended, reason)
        finally:
            self._abandon()


def _closed() -> ValueError:
    text = "the communicator is closed; call before close(), or make another communicator"
    return ValueError(text)


_CALLING_CODE = {each.__code__ for each in (Engine.run_now, Engine.finish, Engine.run)}
"""The code of the methods that run calls."""


def _is_within_call() -> bool:
    """Return whether this thread is in a call: a signal handler has interrupted the call."""
    frame = sys._getframe()
    while frame is not None and frame.f_code not in _CALLING_CODE:
        frame = frame.f_back  # type: ignore[assignment]  # None above the outermost frame
    return frame is not None


@cache
def _heed_forks() -> None:
    """Register a hook for forks, once in a process: os.getpid() in every call would cost 0.2 us."""

    def forked() -> None:
        for engine in _engines:
            engine.forked()

    os.register_at_fork(after_in_child=forked)


def _on_stream(
    stream: Stream, body: Body, to_the_end: bool, header: bytes
) -> Generator[bool, None, Any]:
    """Run `body` with its device work in `stream`; `to_the_end`: until the device is done."""
    steps = body(header)
    result = None
    going_on = True
    while going_on:
        moved = False
        with stream.selected():
            try:
                moved = next(steps)
            except StopIteration as end:
                result, going_on = end.value, False
        yield moved
    if to_the_end:
        mark = stream.mark()
        mark.set()
        while not mark.reached():
            yield False
    return result
