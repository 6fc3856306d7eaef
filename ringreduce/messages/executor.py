"""Runs plans: starts their messages, folds what comes, slice beside slice.

Each slice is a flow at some step of the schedule.  Whichever flow has its messages complete reduces
and goes on, so one slice crosses the network while the next is reduced in the node, for every
algorithm and with no word about it in any of them.  Flows start in increasing order with at most
`in_flight` unfinished, each in a slot of scratch that the one `in_flight` before it has left.

A `FlowCache` keeps them bound to memory: the next call on the same arrays only starts them.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

from ringreduce.config import Config
from ringreduce.control.agreement import Agreement
from ringreduce.messages.binding import BoundStep, Compiled, Flow
from ringreduce.messages.flows import FlowCache, Prepared
from ringreduce.messages.unrolled import straight
from ringreduce.shm.segments import Segments
from ringreduce.transports.base import Transport


class LoggedMessage(NamedTuple):
    """A message that this rank has started: which call, slice and step, where to or from."""

    call: int
    slice: int
    step: int
    direction: str
    """``"send"`` or ``"recv"``."""
    peer: int
    nbytes: int
    """Bytes of data, the signature not counted."""


_MOST_WRITTEN_OUT = 128
"""Messages of a flow.  Compiling takes longer the more there are, more than in proportion."""
_ABANDONED: list[Any] = []
"""Memory of broken communicators with messages under way: MPI may reach it until the very end."""


class Executor:
    """Carries out prepared plans over one transport."""

    def __init__(
        self,
        transport: Transport,
        config: Config,
        agreement: Agreement,
        segments: Segments | None = None,
    ) -> None:
        self.transport, self.config, self.agreement = transport, config, agreement
        self.log: list[LoggedMessage] | None = [] if config.log_messages else None
        self.store = FlowCache(transport, config, self._foreign, segments)
        self.held: tuple[Any, ...] = ()
        """The caller's arrays, while messages that do not keep them alive are under way."""
        self.running: list[Flow] = []
        """The flows that are under way; none between calls."""
        self._withdrawn: dict[int, bool] = {}

    # --- running ---

    def run(self, prepared: Prepared, source: Any, target: Any, header: bytes) -> None:
        """Run the plan on arrays of its shapes, strided as they may be; `target` may be `source`.

        Every signature that comes must equal `header`.  Raises an Interrupt when ranks disagree or
        stop answering.
        """
        flow = self.store.staged(prepared)
        if flow is not None:
            staged_source, staged_target = prepared.staging
            staged_source[...] = source
            self.alone(flow)(header)
            target[...] = staged_target
        else:
            self._poll(self.advance(prepared, source, target, header))

    def alone(self, flow: Flow) -> Callable[[bytes], None]:
        """A function that runs a flow alone to its end, where tenths of a microsecond count."""
        if flow.alone is None:
            if flow.size <= _MOST_WRITTEN_OUT:
                log = self._log if self.log is not None else None
                foreign = self.agreement.foreign
                flow.alone = straight(flow, self.running, self.await_, foreign, log)
            else:
                flow.alone = partial(self._drive_to_the_end, flow)
        return flow.alone

    def compiled(self, flow: Flow) -> Compiled | None:
        """The flow as one compiled call, unless its messages are to be logged."""
        return flow.compiled if self.log is None else None

    def _drive_to_the_end(self, flow: Flow, header: bytes) -> None:
        self._poll(self._run_flows(iter((flow,)), 1, 1, header))

    def _poll(self, progress: Iterator[bool]) -> None:
        """Go on until the end; wait whenever nothing moves."""
        idle, spins = 0, self.transport.spins
        for moved in progress:
            idle = 0 if moved else idle + 1
            if idle > spins:
                self.agreement.wait(idle - spins)

    def await_(self, test: Callable[[], bool]) -> None:
        idle, spins = 0, self.transport.spins
        while not test():
            idle += 1
            if idle > spins:
                self.agreement.wait(idle - spins)

    def advance(
        self, prepared: Prepared, source: Any, target: Any, header: bytes
    ) -> Iterator[bool]:
        """`run` in steps that do not wait: each says whether it got any further."""
        device = prepared.device
        if prepared.bound is not None:
            yield from self._run_flows(iter((prepared.bound,)), 1, 1, header)
            return
        flow = self.store.staged(prepared)
        if flow is not None:
            staged_source, staged_target = prepared.staging
            staged_source[...] = source
            yield from self._run_flows(iter((flow,)), 1, 1, header)
            target[...] = staged_target
            return
        flat_target = device.flat(target)
        flat_source = flat_target if source is target else device.flat(source)
        self.held = source, target, flat_source, flat_target
        flows = self.store.flows(prepared, flat_source, flat_target)
        count = prepared.plan.slices
        yield from self._run_flows(flows, count, self.store.in_flight(prepared), header)
        self.held = ()
        if not device.overlap(flat_target, target):
            target[...] = flat_target.reshape(target.shape)

    def _run_flows(
        self, flows: Iterator[Flow], count: int, in_flight: int, header: bytes
    ) -> Iterator[bool]:
        running = self.running
        begun = 0
        finished = True
        while True:
            if finished:
                while begun < count and all(flow.slot != begun % in_flight for flow in running):
                    flow = next(flows)
                    self._begin(flow, header)
                    if flow.steps:
                        self._start(flow, flow.steps[0])
                    begun += 1
            moved = finished = False
            for flow in running:
                if self._drive(flow, header):
                    moved = True
                    finished |= flow.finished
            if finished:
                running[:] = [flow for flow in running if not self._retire(flow)]
                if not running and begun == count:
                    return
            yield moved

    def _begin(self, flow: Flow, header: bytes) -> None:
        for own in flow.own_signatures:
            own[:] = header
        flow.at = flow.tested = 0
        self.running.append(flow)

    def _start(self, flow: Flow, step: BoundStep) -> None:
        for pack in step.packs:
            pack()
        for start in step.starts:
            start()
        if self.log is not None:
            self._log(flow, step)

    def _log(self, flow: Flow, step: BoundStep) -> None:
        assert self.log is not None
        call = self.agreement.number
        self.log += [LoggedMessage(call, flow.slice, *note) for note in step.notes]

    def _drive(self, flow: Flow, header: bytes) -> bool:
        """Take a flow as far as its messages have come: fold, and start the next step.

        False if nothing has come since the last time.
        """
        steps, tested = flow.steps, flow.tested
        moved = not steps
        while flow.at < len(steps):
            step = steps[flow.at]
            for test in step.tests[tested:]:
                if not test():
                    moved |= tested > flow.tested
                    flow.tested = tested
                    return moved
                tested += 1
            for peer, came in step.signatures:
                if came != header:
                    self.agreement.foreign(peer, bytes(came))
            for act in step.acts:
                act()
            flow.at += 1
            flow.tested = tested = 0
            moved = True
            if flow.at < len(steps):
                self._start(flow, steps[flow.at])
        return moved

    def _retire(self, flow: Flow) -> bool:
        """Finish a flow that has run all its steps; False if it has not."""
        if not flow.finished:
            return False
        flow.runs += 1
        return True

    def _foreign(self, peer: int, header: bytes) -> None:
        self.agreement.foreign(peer, header)

    # --- what is under way, and how to take it back ---

    def where(self) -> tuple[int | None, list[int]]:
        """The step that the earliest unfinished flow is at, and the peers that it waits for."""
        for flow in self.running:
            if not flow.finished:
                at = flow.steps[flow.at]
                index = at.index
                if at.where is not None:
                    return at.where()
                parts = [step for step in flow.steps[: flow.at + 1] if step.index == index]
                messages = [m for step in parts for m in (*step.recvs, *step.sends)]
                return index, sorted({peer for peer, request in messages if not request.Test()})
        return None, []

    def withdraw(self) -> bool:
        """Take back the receives that are under way.  False: some must be asked for again.

        The latest first: a message that comes meanwhile still meets the one that it is for.
        """
        for flow in self.running:
            if not flow.finished and not all(gate() for gate in flow.steps[flow.at].gates):
                return False
            for peer, request in [] if flow.finished else reversed(flow.steps[flow.at].recvs):
                if id(request) not in self._withdrawn:
                    untouched = self.transport.withdraw(request)
                    if untouched is None:
                        return False
                    self._withdrawn[id(request)] = untouched
                    self.store.received[peer] += not untouched
        return True

    def tally(self) -> tuple[Counter[int], Counter[int]]:
        """Messages ever sent to and received from each peer, once all receives are withdrawn."""
        store = self.store
        store.count_all()
        for flow in self.running:
            store.count(flow, flow.at)
            if not flow.finished:
                store.sent.update(peer for peer, _ in flow.steps[flow.at].sends)
        return store.sent, store.received

    def sends_done(self) -> bool:
        """Whether every send that was started is complete."""
        return all(
            request.Test()
            for flow in self.running
            for step in flow.steps[: flow.at + 1]
            for _, request in step.sends
        )

    def abandon(self, seconds: float) -> None:
        """Give up what is under way, for good: take receives back, as far as they go in this time.

        What cannot be taken back may still be written to or read by peers, so its memory is kept
        for as long as the process lives.
        """
        end = time.monotonic() + seconds
        with contextlib.suppress(Exception):  # whatever MPI says now, this rank is giving up
            while not self.withdraw() and time.monotonic() < end:
                self.transport.pause(1)
        if self.running:
            _ABANDONED.append((self, self.held))

    @property
    def exchanges(self) -> int:
        """Exchanges through shared memory that were ever begun."""
        return 0 if self.store.exchange is None else self.store.exchange.count

    def start_afresh(self, exchanges: int) -> None:
        """Forget the call under way; its messages are all withdrawn, drained or complete.

        `exchanges` is the most that any rank has begun.
        """
        for flow in self.running:
            for step in flow.steps:
                if step.reset is not None:
                    step.reset()
        if self.store.exchange is not None:
            self.store.exchange.go_on_from(exchanges)
        self.running.clear()
        self.held = ()
        self._withdrawn.clear()
        self.store.count_afresh()
