"""Carries a communicator's calls out, one at a time and in order, and ends it when one fails.

Between the collectives, which know what a call means, and the executor, which knows how data move.
"""

from __future__ import annotations

import copy
import os
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import cache, partial
from typing import Any, Protocol

import numpy as np

from ringreduce.calls.call import Call, Fused
from ringreduce.calls.queue import CallQueue, Program
from ringreduce.config import Config
from ringreduce.control.agreement import DIGEST_BYTES, Agreement, Interrupt, Signature
from ringreduce.devices.base import Stream
from ringreduce.errors import MismatchError, PeerLostError, RingReduceError
from ringreduce.messages.binding import Compiled, Flow
from ringreduce.messages.executor import Executor
from ringreduce.messages.flows import Prepared
from ringreduce.schedules.schedule import Schedule
from ringreduce.shm.fast_path import CompiledCall, FastPath, key_of
from ringreduce.shm.layout import DONE
from ringreduce.shm.list_table import ListTable
from ringreduce.shm.segments import Segments
from ringreduce.transports.base import Transport

Body = Callable[[bytes], Generator[bool, None, Any]]
"""What a call does with the header of its messages; a ValueError that it returns is raised."""

_WITHDRAWING_S = 0.05
"""How long a broken communicator tries to take its receives back."""
_LEAVING_S = 1.0
"""How long a call under way may take to notice that this rank leaves."""


_engines: weakref.WeakSet[Engine] = weakref.WeakSet()


class Opening(Protocol):
    """What is known of a call before it begins."""

    @property
    def signature(self) -> Signature: ...
    @property
    def schedule(self) -> Schedule: ...


class LeavingError(PeerLostError):
    """This rank gives up the communicator."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason

    def __str__(self) -> str:
        return f"this rank has left the communicator: {self.reason}"


class Engine:
    """One communicator's calls: their order, their errors, their end."""

    def __init__(
        self,
        transport: Transport,
        config: Config,
        timeout_s: float,
        segments: Segments | None = None,
    ) -> None:
        self._transport = transport
        self._agreement = Agreement(transport, timeout_s)
        self.executor = Executor(transport, config, self._agreement, segments)
        self.running = self.executor.running
        self.queue = CallQueue(self._agreement.wait, transport.spins, transport.threads)
        self.ended: Exception | None = None
        """Why no further call can be made; None while the communicator is usable."""
        self.fast_path: FastPath | None = None
        if self.executor.store.exchange is not None:
            self.fast_path = self.queue.lock = FastPath(
                self.queue.lock,
                self._is_idle,
                self._agreement,
                self.running,
                self.finish,
                self._on_orphaned,
                transport.size,
            )
        _heed_forks()
        _engines.add(self)

    # --- calls ---

    def _is_idle(self) -> bool:
        """Whether nothing is under way, announced or wrong."""
        busy = self.running or self.queue.works or self._agreement.warned
        return not busy and self.ended is None

    def _on_orphaned(self) -> None:
        """End the communicator: an exception ended a call before `finish` answered for it."""
        if self.ended is None:
            reason = "an exception came in the middle of a call"
            self._break(PeerLostError(reason), reason)

    def check_usable(self) -> None:
        """Raise the reason when no call can be made.  With the line's lock held."""
        if self.ended is not None:
            raise self.ended.with_traceback(None)
        if self.running and not self.queue.works:
            raise ValueError("a call from within a call, such as from a signal handler")

    def carry_out(
        self,
        opening: Opening,
        timeout_s: float | None,
        run: Callable[[bytes], None],
    ) -> None:
        """One call, now, as ``run(header)``; nothing is in line."""
        agreement = self._agreement
        try:
            run(agreement.begin(opening.signature, timeout_s))
            agreement.completed += 1
        except BaseException as error:
            raise self._broken_off(error, opening.schedule) from None

    # --- the fast path ---

    def admit(
        self, collective: str, call: Call, array: np.ndarray, arguments: Mapping[str, Any]
    ) -> None:
        """Let the fast path repeat a call that the general path has made on `array`."""
        path = self.fast_path
        if path is None or self.queue.works:
            return
        key = key_of(collective, array.dtype, [array.shape], arguments)
        if key is not None and path.call_of(key) is None:
            admitted = self._compiled_call(call, [call])
            if admitted is not None:
                path.admit(key, admitted, call.shape)

    def admit_list(
        self, fused: Fused, arrays: Sequence[np.ndarray], arguments: Mapping[str, Any]
    ) -> None:
        """Let the fast path repeat an all-reduce of a list that the general path has made."""
        path = self.fast_path
        if path is None or self.queue.works or not any(array.size for array in arrays):
            return
        dtype, shapes = arrays[0].dtype, [array.shape for array in arrays]
        key = key_of("all_reduce", dtype, shapes, arguments, is_list=True)
        if key is None or any(array.dtype != dtype for array in arrays):
            return
        known = path.call_of(key)
        if known is not None and known.opening is fused:
            return
        admitted = self._compiled_call(fused, [call for call, _ in fused.groups])
        if admitted is not None:
            batches = [[shapes[index] for index in members] for _, members in fused.groups]
            admitted.table = ListTable(batches, dtype, self.executor.config.pulled_from)
            path.admit(key, admitted, tuple(shapes))

    def admit_barrier(self, call: Call) -> None:
        """Let the fast path repeat a barrier that the general path has made."""
        path = self.fast_path
        if path is not None and not path.has_barrier and not self.queue.works:
            admitted = self._compiled_call(call, [call])
            if admitted is not None:
                path.admit_barrier(admitted)

    def planned(
        self,
        opening: Opening,
        flow: Flow,
        timeout_s: float | None,
        result: Any,
        general: Callable[[], Any],
    ) -> Callable[[], Any] | None:
        """A compiled function that runs a flow on the arrays that it is bound to.

        It returns `result`, and calls `general` when it is not eligible.  None if the flow is not
        one compiled program.
        """
        program = self._signed(opening, flow)
        if program is None or self.fast_path is None:
            return None
        admitted = CompiledCall(opening, [(flow, program)], timeout_s)
        return self.fast_path.planned(admitted, result, general)

    def _compiled_call(self, opening: Opening, calls: Sequence[Call]) -> CompiledCall | None:
        """A call with its compiled programs; None if it needs anything else."""
        if self.executor.log is not None or any(c.stream is not None or c.converts for c in calls):
            return None
        programs = []
        for call in calls:
            flow = self.executor.store.unbound(call.prepared)
            program = None if flow is None else self._signed(opening, flow)
            if program is None:
                return None
            programs.append((flow, program))
        return CompiledCall(opening, programs)

    def finish(self, call: CompiledCall, x: Any, out: Any, first: int) -> None:
        """Complete a call of the fast path whose program `first` waits for other ranks.

        The programs of the batches behind it are run here.  `x` and `out` are the caller's arrays.
        """
        path, agreement = self.fast_path, self._agreement
        assert path is not None
        try:
            path.take_over()
            with self.queue.lock:
                number = agreement.number = agreement.completed
                agreement.remember(call.opening.signature)
                agreement.deadline_s = call.timeout_s or agreement.timeout_s
                for index in range(first, len(call.programs)):
                    flow, program = call.programs[index]
                    flow.at = 0
                    if index == first or self._begin_batch(call, index, number):
                        self.executor.await_(program.goes_on)
                agreement.completed = number + 1
                self.running.clear()
        except BaseException as error:
            self.executor.held = x, out, call
            raise self._broken_off(error, call.opening.schedule) from None

    def _begin_batch(self, call: CompiledCall, index: int, number: int) -> bool:
        """Run the program of one batch of a list; whether it waits for other ranks."""
        flow, program = call.programs[index]
        assert call.table is not None
        self.running[:] = [flow]
        batch = call.table.batch(index)
        return program.enter(program.address, number, batch.source, batch.target) != DONE

    def _signed(self, opening: Opening, flow: Flow) -> Compiled | None:
        """A flow as one compiled program with this signature."""
        for own in flow.own_signatures:
            own[:DIGEST_BYTES] = opening.signature.digest
        return self.executor.compiled(flow)

    # --- calls in their turn ---

    def run(
        self,
        opening: Opening,
        body: Body,
        timeout_s: float | None,
        async_op: bool = False,
        stream: Stream | None = None,
    ) -> Any:
        """A call that does what `body` says, in its turn: its result, or the Work.

        What it asks of a device with a stream is in order with what the caller asks of that before
        and after.  A Work is over when the device has done it all.
        """
        if stream is not None:
            stream.follow()
            body = partial(_on_stream, stream, body, async_op)
        program = self._program(opening, body, timeout_s)
        if async_op:
            return self.queue.put(program)
        try:
            if self.queue.works:
                return self.queue.put(program).wait()
            return self.queue.run(program)
        finally:
            if stream is not None:
                stream.lead()

    def _program(self, opening: Opening, body: Body, timeout_s: float | None) -> Program:
        self.check_usable()
        try:
            header = self._agreement.begin(opening.signature, timeout_s)
            result = yield from body(header)
            self._agreement.completed += 1
        except BaseException as error:
            raise self._broken_off(error, opening.schedule) from None
        if isinstance(result, ValueError):
            raise result
        return result

    def free_discarded(self) -> None:
        """Let go of what persistent calls were bound to that are no more."""
        if not self.running and not self.queue.works:
            self.executor.store.free_discarded()

    # --- the end ---

    def close(self, opening: Opening, prepared: Prepared, nothing: Any) -> None:
        """Finish what is in line, part from the others, and let go of everything.

        `opening` and `prepared` are the last call.  Raises the error of a Work that nobody has
        waited for.
        """
        with self.queue.lock:
            self.queue.drain()
            unseen = self.queue.unseen_error()
            if self.ended is None:
                self.check_usable()
                run = partial(self.executor.run, prepared, nothing, nothing)
                self.carry_out(opening, None, run)
                try:
                    self._agreement.part()
                except BaseException as error:
                    raise self._broken_off(error, opening.schedule) from None
                self.executor.store.close()
                self._transport.close()
                self.ended = ValueError("the communicator is closed")
            self.queue.close()
            if unseen is not None:
                raise unseen.with_traceback(None)

    @property
    def usable(self) -> bool:
        """Whether calls can still be made."""
        return self.ended is None

    @property
    def broken(self) -> bool:
        """Whether a rank was lost, so that no call can be made any more."""
        return isinstance(self.ended, RingReduceError)

    def leave(self, reason: str) -> None:
        """Give up without the others: they raise PeerLostError with `reason` in the next call."""
        if self.ended is None:
            if self.queue.works:
                self.queue.interrupt(LeavingError(reason), _LEAVING_S)
            if self.ended is None:
                self._break(LeavingError(reason), reason)
            self.queue.close()

    def farewell(self, seconds: float) -> None:
        """Let the other living ranks of a broken communicator get this far, for so long at most."""
        self._agreement.farewell(seconds)

    def forked(self) -> None:
        """This process is a child of the one that made the communicator: it makes no calls."""
        self.ended = ValueError(
            "this process was forked from the one that made the communicator; "
            "make calls in that one, or start ranks with 'ringreduce run'"
        )
        self.queue.forked(self.ended)
        if self.fast_path is not None:
            self.fast_path.forked()

    # --- errors ---

    def _broken_off(self, error: BaseException, schedule: Schedule) -> BaseException:
        """What to raise in place of `error`, which broke a call off."""
        if isinstance(error, Interrupt):
            try:
                settled = self._agreement.settle(error, self.executor, schedule)
            except BaseException as worse:
                error = worse
            else:
                if not isinstance(settled, MismatchError):
                    self.ended = copy.copy(settled)
                    self.executor.abandon(_WITHDRAWING_S)
                return settled
        if isinstance(error, Exception):
            error = self._transport.translate(error)
        reason = (
            error.reason if isinstance(error, LeavingError) else f"{type(error).__name__}: {error}"
        )
        self._break(error if isinstance(error, RingReduceError) else PeerLostError(reason), reason)
        return error

    def _break(self, error: Exception, reason: str) -> None:
        self.ended = copy.copy(error)  # this one keeps the caller's frames alive
        if self.fast_path is not None:
            self.fast_path.disable()
        self._agreement.leave(reason)
        self.executor.abandon(_WITHDRAWING_S)


@cache
def _heed_forks() -> None:
    """Once a process: asking for its number in every call would cost 0.2 us."""

    def forked() -> None:
        for engine in _engines:
            engine.forked()

    os.register_at_fork(after_in_child=forked)


def _on_stream(
    stream: Stream, body: Body, to_the_end: bool, header: bytes
) -> Generator[bool, None, Any]:
    """What `body` does, with all that it asks of a device in its stream."""
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
