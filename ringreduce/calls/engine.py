"""Carries a communicator's calls out, one at a time and in order, and ends it when one fails.

Between the collectives, which know what a call means, and the executor, which knows how data move.
"""

from __future__ import annotations

import copy
import os
import weakref
from collections.abc import Callable, Generator, Sequence
from functools import cache, partial
from itertools import chain
from typing import Any, Protocol

import numpy as np

from ringreduce.calls.queue import CallQueue, Program
from ringreduce.compiler.pyobjects import Table
from ringreduce.config import Config
from ringreduce.control.agreement import DIGEST_BYTES, Agreement, Interrupt, Signature
from ringreduce.devices.base import Stream
from ringreduce.errors import MismatchError, PeerLostError, RingReduceError
from ringreduce.messages.binding import Compiled, Flow
from ringreduce.messages.executor import Executor
from ringreduce.messages.flows import Prepared
from ringreduce.schedules.schedule import Schedule
from ringreduce.shm import functions
from ringreduce.shm.fast_path import Finish, Gate
from ringreduce.shm.layout import UNUSUAL
from ringreduce.shm.segments import Segments
from ringreduce.transports.base import Transport

Body = Callable[[bytes], Generator[bool, None, Any]]
"""What a call does with the header of its messages; a ValueError that it returns is raised."""

Quick = Callable[[np.ndarray, Any], Any]
"""``quick(x, out)``: the result, or USUAL if the call has to be carried out as usual."""
QuickList = Callable[[Sequence[Any], Any], Any]
"""``quick_list(members, out)``: the results, or USUAL."""
USUAL = object()

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
        self.gate: Gate | None = None
        if self.executor.store.exchange is not None:
            self.gate = self.queue.lock = Gate(
                self.queue.lock, self._is_quiet, self._agreement, self.running, self._lose
            )
        _heed_forks()
        _engines.add(self)

    # --- calls ---

    def _is_quiet(self) -> bool:
        unquiet = self.running or self.queue.works or self._agreement.warned
        return not unquiet and self.ended is None

    def _lose(self) -> None:
        """A call was begun, and an exception came before anything could answer for it."""
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

    # Calls that were made before, as fast as Python allows: tenths of a microsecond count.  Each is
    # one compiled call, which also looks at the arrays; everything unusual goes the usual way.

    def again(
        self,
        opening: Opening,
        flow: Flow,
        timeout_s: float | None,
        result: Any,
        usual: Callable[[], Any],
    ) -> Callable[[], Any] | None:
        """A flow on the arrays that it is bound to; None if that is not one compiled call.

        It returns `result`; if it may not pass, `usual` is called.
        """
        compiled = self._signed(opening, flow)
        if compiled is None or self.gate is None:
            return None
        finish = self._finishing(opening, flow, compiled.goes_on, timeout_s)
        return self.gate.again(flow, compiled.address, opening.signature, finish, result, usual)

    def admit(self, opening: Opening, flow: Flow, shape: Any, dtype: Any, op: str) -> None:
        """Let all-reduces by this flow pass the gate, if that is one compiled call."""
        compiled = self._signed(opening, flow)
        if compiled is not None and self.gate is not None:
            finish = self._finishing(opening, flow, compiled.goes_on, None)
            address, signature = compiled.address, opening.signature
            self.gate.admit(dtype, shape, op, flow, address, signature, finish)

    def _finishing(
        self,
        opening: Opening,
        flow: Flow,
        goes_on: Callable[[], bool],
        timeout_s: float | None,
    ) -> Finish:
        """What is done for a call that has passed the gate and waits for other ranks."""
        agreement, gate = self._agreement, self.gate
        assert gate is not None

        def finish(x: Any = None, out: Any = None) -> Any:
            try:
                gate.take_over()
                with self.queue.lock:
                    number = agreement.number = agreement.completed
                    flow.at = 0
                    agreement.remember(opening.signature)
                    self._go_on(goes_on, timeout_s)
                    agreement.completed = number + 1
                    self.running.clear()
                return out
            except BaseException as error:
                self.executor.held = x, out
                raise self._broken_off(error, opening.schedule) from None

        return finish

    def quick(
        self, opening: Opening, flow: Flow, shape: tuple[int, ...] | None, dtype: Any
    ) -> Quick | None:
        """A flow whose result has that shape and dtype; None if that is not one compiled call.

        Without a shape there is no result on this rank.
        """
        compiled = self._signed(opening, flow)
        if compiled is None:
            return None
        enter, address, goes_on = compiled
        agreement, running, works = self._agreement, self.running, self.queue.works
        remember, signature, empty = agreement.calls.append, opening.signature, np.empty
        nothing = empty(0, dtype) if shape is None else None
        like = nothing if shape is None else np.broadcast_to(empty((), dtype), shape)

        def quick(x: np.ndarray, out: Any) -> Any:
            if out is None:
                out = empty(shape, dtype) if nothing is None else nothing
            elif nothing is not None:
                return USUAL
            if running or works or agreement.warned or self.ended is not None:
                return USUAL
            number = agreement.completed
            try:
                flow.at = 0
                running.append(flow)
                came = enter(address, number, x, out, like)
                if came == UNUSUAL:
                    running.clear()
                    return USUAL
                agreement.number = number
                remember(signature)
                if came:
                    self._go_on(goes_on, None)
                agreement.completed = number + 1
                running.clear()
                return out if nothing is None else None
            except BaseException as error:
                self.executor.held = x, out
                raise self._broken_off(error, opening.schedule) from None

        return quick

    def quick_list(
        self,
        opening: Opening,
        flows: Sequence[Flow],
        turns: Sequence[Sequence[tuple[int, ...]]],
        dtype: Any,
    ) -> QuickList | None:
        """A list of arrays of these shapes and this dtype, reduced in turns, by a flow each.

        None as for `quick`.
        """
        signed = [made for flow in flows if (made := self._signed(opening, flow)) is not None]
        find, mixes = functions.python_function("find"), functions.python_function("mixes")
        if len(signed) < len(flows) or find is None or mixes is None:
            return None
        agreement, running, works = self._agreement, self.running, self.queue.works
        remember, signature, empty = agreement.calls.append, opening.signature, np.empty
        table = Table(turns, dtype, self.executor.config.pulled_from)
        shapes, places = [*chain.from_iterable(turns)], table.address
        steps = [*zip(flows, signed, table.turns, strict=True)]
        mixed: bool | None = None  # of the arrays that the table has; None if that is not known

        def quick_list(members: Sequence[Any], out: Any) -> Any:
            nonlocal mixed
            fresh = out is None
            if fresh:
                out = [empty(shape, dtype) for shape in shapes]
            # Whoever has the lists may put other arrays there meanwhile.
            given = tuple(members)
            into = given if out is members else tuple(out) if type(out) is list else out
            if running or works or agreement.warned or self.ended is not None:
                return USUAL
            known, mixed = mixed, None
            found = find(places, given, into)
            if found < 0:
                return USUAL
            if found or known is None:
                known = not fresh and mixes(places)
            mixed = known
            if mixed:
                return USUAL
            number = agreement.completed
            try:
                agreement.number = number
                remember(signature)
                for flow, (enter, address, goes_on), turn in steps:
                    flow.at = 0
                    running.append(flow)
                    if enter(address, number, turn):
                        self._go_on(goes_on, None)
                    running.clear()
                agreement.completed = number + 1
                return out
            except BaseException as error:
                self.executor.held = given, into, table
                raise self._broken_off(error, opening.schedule) from None

        return quick_list

    def _signed(self, opening: Opening, flow: Flow) -> Compiled | None:
        """A flow as one compiled call of this signature."""
        for own in flow.own_signatures:
            own[:DIGEST_BYTES] = opening.signature.digest
        return self.executor.compiled(flow)

    def _go_on(self, goes_on: Callable[[], bool], timeout_s: float | None) -> None:
        """Wait for a flow that was begun."""
        self._agreement.deadline_s = timeout_s or self._agreement.timeout_s
        self.executor.await_(goes_on)

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
        if self.gate is not None:
            self.gate.forked()

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
        if self.gate is not None:
            self.gate.shut()
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
