"""Runs plans: starts their messages, folds what comes, slice beside slice.

Each slice is a flow at some step of the schedule.  Whichever flow has its messages complete reduces
and goes on, so one slice crosses the network while the next is reduced in the node, for every
algorithm and with no word about it in any of them.  Flows start in increasing order with at most
`in_flight` unfinished, each in a slot of scratch that the one `in_flight` before it has left.

Messages are bound to memory once and kept: the next call on the same arrays only starts them.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

from ringreduce.agreement import Agreement
from ringreduce.binding import BoundStep, Flow, bind
from ringreduce.config import Config
from ringreduce.devices.base import Device, FoldFunction, FoldManyFunction
from ringreduce.plan import Plan
from ringreduce.staging import Blocks, bind_staging
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


@dataclass(eq=False)
class Prepared:
    """A plan with what it does to the data, and where its messages are while it is in use."""

    plan: Plan
    device: Device
    """Where its arrays live."""
    dtype: Any
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    """Of input and output."""
    fold: FoldFunction | None = None
    fold_many: FoldManyFunction | None = None
    divide_by: int | None = None
    in_flight: int = 4
    """Slices under way at once."""
    staged: Flow | None = None
    """The only flow of a small plan, bound to `staging`."""
    staging: tuple[Any, Any] = (None, None)
    """The small plan's own memory, in the shapes of input and output."""
    bound: Flow | None = None
    """Its only flow, bound to the only arrays that it is ever run on."""
    last_run: int = 0
    """When it was last run, counted in runs; the executor keeps what ran last."""

    @property
    def nbytes(self) -> int:
        """The longer of its input and output."""
        return max(self.plan.input_count, self.plan.output_count) * self.plan.itemsize


_ABANDONED: list[Any] = []
"""Memory of broken communicators with messages under way: MPI may reach it until the very end."""

Place = tuple[Prepared, int, int]
"""A plan and the addresses of the input and output that its flows are bound to."""


class Executor:
    """Carries out prepared plans over one transport."""

    def __init__(self, transport: Transport, config: Config, agreement: Agreement) -> None:
        self.transport, self.config, self.agreement = transport, config, agreement
        self.log: list[LoggedMessage] | None = [] if config.log_messages else None
        self._staged: list[Prepared] = []
        self._runs = 0
        self._for_good: list[Prepared] = []
        """Plans with a flow that is bound to the only arrays that they are run on."""
        self._discarded: deque[Prepared] = deque()
        self._bound: OrderedDict[Place, list[Flow]] = OrderedDict()
        """Flows bound to the caller's memory, that used longest ago first."""
        self._bound_count = 0
        self._held: tuple[Any, ...] = ()
        """The caller's arrays, while messages that do not keep them alive are under way."""
        self.running: list[Flow] = []
        """The flows that are under way; none between calls."""
        self._sent: Counter[int] = Counter()
        self._received: Counter[int] = Counter()
        self._withdrawn: dict[int, bool] = {}
        self._scratch: dict[tuple[Device, int], Any] = {}
        """By device and slot."""
        self._blocks: dict[tuple[Device, int], Blocks] = {}
        """Pinned memory of devices that have a queue, by device and slot."""

    # --- staging ---

    def _stage(self, prepared: Prepared) -> Flow:
        """Give a small plan memory of its own, and bind its messages to that."""
        while len(self._staged) >= self.config.kept_plans:
            self.forget(min(self._staged, key=lambda kept: kept.last_run))
        plan, empty = prepared.plan, prepared.device.empty
        # Apart, so that folds are not in place: NumPy takes twice as long where one element is.
        source, target = (empty(n, prepared.dtype) for n in (plan.input_count, plan.output_count))
        scratch = empty(plan.slice(0).scratch, prepared.dtype)
        prepared.staging = source.reshape(prepared.shapes[0]), target.reshape(prepared.shapes[1])
        flow = prepared.staged = self._bind(prepared, (source, target, scratch), index=0)
        self._staged.append(prepared)
        return flow

    def bind_for_good(self, prepared: Prepared, source: Any, target: Any) -> None:
        """Promise that the plan will only ever be run on these arrays, which it keeps alive.

        Without effect on what is not contiguous or is cut in slices.  Until `discard`.
        """
        self._free_discarded()
        device = prepared.device
        flat = [device.flat(array) for array in (source, target)]
        pairs = zip(flat, (source, target), strict=True)
        direct = all(one.size == 0 or device.overlap(one, other) for one, other in pairs)
        if prepared.plan.slices == 1 and direct:
            planned = prepared.plan.slice(0)
            scratch = device.scratch(planned.scratch * prepared.dtype.itemsize)
            memory = (
                flat[0],
                flat[0] if target is source else flat[1],
                scratch.view(prepared.dtype),
            )
            prepared.bound = self._bind(prepared, memory, index=0)
            self._for_good.append(prepared)

    def discard(self, prepared: Prepared) -> None:
        """The plan will not be run again: let go of it soon.  From any thread at any time."""
        self._discarded.append(prepared)

    def _free_discarded(self) -> None:
        while self._discarded:
            self.forget(self._discarded.popleft())

    def forget(self, prepared: Prepared) -> None:
        """Let go of a prepared plan's messages and memory; it is not running, and may run again."""
        if prepared.bound is not None:
            self._for_good.remove(prepared)
            self._free(prepared.bound)
            prepared.bound = None
        if prepared.staged is not None:
            self._staged.remove(prepared)
            self._free(prepared.staged)
            prepared.staged, prepared.staging = None, (None, None)
        for place in [place for place in self._bound if place[0] is prepared]:
            self._unbind(place)

    def close(self) -> None:
        """Let go of all messages and memory; nothing is under way."""
        for prepared in [*self._staged, *self._for_good]:
            self.forget(prepared)
        for place in list(self._bound):
            self._unbind(place)
        self._scratch.clear()
        for device in {device for device, _ in self._blocks}:
            if device.queue is not None:
                device.queue.close()
        self._blocks.clear()

    # --- running ---

    def run(self, prepared: Prepared, source: Any, target: Any, header: bytes) -> None:
        """Run the plan on arrays of its shapes, strided as they may be; `target` may be `source`.

        Every signature that comes must equal `header`.  Raises an Interrupt when ranks disagree or
        stop answering.
        """
        if prepared.bound is not None:
            self._run_flow(prepared, prepared.bound, header)
        elif prepared.staged is not None or self._is_small(prepared):
            flow = prepared.staged or self._stage(prepared)
            self._runs = prepared.last_run = self._runs + 1
            staged_source, staged_target = prepared.staging
            staged_source[...] = source
            self._run_flow(prepared, flow, header)
            target[...] = staged_target
        else:
            idle, spins = 0, self.transport.spins
            for moved in self.advance(prepared, source, target, header):
                idle = 0 if moved else idle + 1
                if idle > spins:
                    self.agreement.wait(idle - spins)

    def _is_small(self, prepared: Prepared) -> bool:
        return prepared.nbytes <= self.config.staged_bytes and prepared.plan.slices == 1

    def _run_flow(self, prepared: Prepared, flow: Flow, header: bytes) -> None:
        """Run a flow alone to its end, where every tenth of a microsecond counts."""
        self._begin(flow, header)
        idle, spins, last = 0, self.transport.spins, len(flow.steps)
        while flow.at < last:
            if self._drive(flow, prepared, header):
                idle = 0
            else:
                idle += 1
                if idle > spins:
                    self.agreement.wait(idle - spins)
        self._settle(flow)
        self.running.clear()

    def advance(
        self, prepared: Prepared, source: Any, target: Any, header: bytes
    ) -> Iterator[bool]:
        """`run` in steps that do not wait: each says whether it got any further."""
        device = prepared.device
        if prepared.bound is not None:
            yield from self._run_flows(prepared, iter((prepared.bound,)), header)
            return
        if self._is_small(prepared):
            flow = prepared.staged or self._stage(prepared)
            self._runs = prepared.last_run = self._runs + 1
            staged_source, staged_target = prepared.staging
            staged_source[...] = source
            yield from self._run_flows(prepared, iter((flow,)), header)
            target[...] = staged_target
            return
        flat_target = device.flat(target)
        flat_source = flat_target if source is target else device.flat(source)
        self._held = source, target, flat_source, flat_target
        flows = self._flows(prepared, flat_source, flat_target)
        yield from self._run_flows(prepared, flows, header)
        self._held = ()
        if not device.overlap(flat_target, target):
            target[...] = flat_target.reshape(target.shape)

    def _flows(self, prepared: Prepared, source: Any, target: Any) -> Iterator[Flow]:
        """The flows of a plan on flat contiguous arrays, each bound when its first turn comes.

        They are kept by address, without keeping the arrays: an address is only ever used while
        the caller's array of that size lies there.
        """
        plan, device = prepared.plan, prepared.device
        place = (prepared, device.address(source), device.address(target))
        flows = self._bound.setdefault(place, [])
        self._bound.move_to_end(place)
        yield from flows
        if len(flows) == plan.slices:
            return
        unowned = device.unowned(source)
        memory = (unowned, unowned if target is source else device.unowned(target))
        for index in range(len(flows), plan.slices):
            planned, slot = plan.slice(index), index % prepared.in_flight
            scratch = self._scratch_slot(device, slot, planned.scratch, prepared.dtype)
            flow = self._bind(prepared, (*memory, scratch), index, slot)
            self._make_room(flow.size)
            flows.append(flow)
            self._bound_count += flow.size
            yield flow

    def _bind(
        self, prepared: Prepared, memory: tuple[Any, Any, Any], index: int, slot: int = 0
    ) -> Flow:
        """A flow of slice `index` in this INPUT, OUTPUT and SCRATCH."""
        device, planned = prepared.device, prepared.plan.slice(index)
        bound_to = (planned, memory, prepared.plan.itemsize, self.transport, device)
        if device.queue is None:
            return bind(*bound_to, index, slot)
        blocks = self._blocks.get((device, slot))
        if blocks is None:
            blocks = self._blocks[device, slot] = Blocks(device.queue)
        return bind_staging(*bound_to, blocks, index, slot)

    def _make_room(self, messages: int) -> None:
        """Unbind what is unused for longest, until there is room for so many messages more."""
        most = self.config.kept_messages - messages
        while len(self._bound) > 1 and self._bound_count > most:
            self._unbind(next(iter(self._bound)))

    def _unbind(self, place: Place) -> None:
        for flow in self._bound.pop(place):
            self._bound_count -= flow.size
            self._free(flow)

    def _free(self, flow: Flow) -> None:
        self._count(flow, len(flow.steps), flow.runs)
        flow.free()

    def _scratch_slot(self, device: Device, slot: int, count: int, dtype: Any) -> Any:
        """Scratch of one flow in flight: kept, and replaced when a call needs more.

        By twice as much at least, since flows bound earlier keep what they are bound to.
        """
        nbytes = count * dtype.itemsize
        kept = self._scratch.get((device, slot))
        if kept is None or kept.nbytes < nbytes:
            larger = nbytes if kept is None else max(nbytes, 2 * kept.nbytes)
            kept = self._scratch[device, slot] = device.scratch(larger)
        return kept[:nbytes].view(dtype)

    def _run_flows(
        self, prepared: Prepared, flows: Iterator[Flow], header: bytes
    ) -> Iterator[bool]:
        running = self.running
        begun, count, in_flight = 0, prepared.plan.slices, prepared.in_flight
        finished = True
        while True:
            if finished:
                while begun < count and all(flow.slot != begun % in_flight for flow in running):
                    self._begin(next(flows), header)
                    begun += 1
            moved = finished = False
            for flow in running:
                if self._drive(flow, prepared, header):
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
        if flow.steps:
            self._start(flow, flow.steps[0])

    def _start(self, flow: Flow, step: BoundStep) -> None:
        for into, source in step.packs:
            into[...] = source
        for start in step.starts:
            start()
        if self.log is not None:
            call = self.agreement.number
            self.log += [LoggedMessage(call, flow.slice, step.index, *note) for note in step.notes]

    def _drive(self, flow: Flow, prepared: Prepared, header: bytes) -> bool:
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
            for into, source in step.unpacks:
                into[...] = source
            for left, right, into in step.folds:
                prepared.fold(left, right, into)  # type: ignore[misc]  # folding plans have one
            for sources, into in step.folds_of_many:
                prepared.fold_many(sources, into)  # type: ignore[misc]
            if prepared.divide_by is not None:
                for total in step.finished:
                    prepared.device.divide(total, prepared.divide_by)
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
        self._settle(flow)
        return True

    def _settle(self, flow: Flow) -> None:
        for into, source in flow.settles:
            into[...] = source
        flow.runs += 1

    def _count(self, flow: Flow, steps: int, times: int) -> None:
        for total, messages in zip((self._sent, self._received), flow.messages(steps), strict=True):
            for peer, count in messages.items():
                total[peer] += count * times

    # --- what is under way, and how to take it back ---

    def where(self) -> tuple[int | None, list[int]]:
        """The step that the earliest unfinished flow is at, and the peers that it waits for."""
        for flow in self.running:
            if not flow.finished:
                index = flow.steps[flow.at].index
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
                    self._received[peer] += not untouched
        return True

    def tally(self) -> tuple[Counter[int], Counter[int]]:
        """Messages ever sent to and received from each peer, once all receives are withdrawn."""
        alone = [flow for kept in self._staged if (flow := kept.staged) is not None]
        alone += [flow for kept in self._for_good if (flow := kept.bound) is not None]
        for flow in chain(alone, *self._bound.values()):
            self._count(flow, len(flow.steps), flow.runs)
            flow.runs = 0
        for flow in self.running:
            self._count(flow, flow.at, 1)
            if not flow.finished:
                self._sent.update(peer for peer, _ in flow.steps[flow.at].sends)
        return self._sent, self._received

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
            _ABANDONED.append((self, self._held))

    def start_afresh(self) -> None:
        """Forget the call under way; its messages are all withdrawn, drained or complete."""
        self.running.clear()
        self._held = ()
        self._withdrawn.clear()
        self._sent.clear()
        self._received.clear()
