"""Runs a plan by messages: starts them, reduces the data, and keeps several slices under way.

Each slice is a flow at some step of the schedule.  A flow whose messages are complete reduces and
starts its next step.  So one slice crosses the network while the next is reduced in the node, for
every algorithm, and no algorithm has to provide for it.  Flows start in increasing order with at
most `Task.in_flight` unfinished.  Each uses the slot of scratch memory that the flow `in_flight`
before it has finished with.
"""

from __future__ import annotations

from typing import Any

from ringreduce.control.executable import Control
from ringreduce.devices.base import flat_pair, shares_memory
from ringreduce.messages.binding import BoundStep, Flow
from ringreduce.messages.flows import FlowCache, Task
from ringreduce.messages.unrolled import unrolled

_MOST_UNROLLED = 128
"""Messages of an unrolled flow: compiling it takes more than in proportion to their number."""


class MessageExecutable:
    """A plan that is run by messages; see `ringreduce.control.executable.Executable`.

    A small plan has one flow, in memory of its own (`Task.staged_bytes`).  A plan that is bound
    to its arrays has one flow in these.  The flows of all other plans are kept by the addresses of
    the caller's arrays.
    """

    def __init__(self, task: Task, cache: FlowCache, control: Control) -> None:
        self.task = task
        self._cache, self._control = cache, control
        self.moved = False
        self._only: Flow | None = None
        """The one flow of a plan that is small or bound to its arrays."""
        self._own: tuple[Any, Any] | None = None
        """A small plan's own memory, in the shapes of input and output."""
        self._flows: list[Flow] = []
        self._begun = self._count = 0
        """Flows of this run that have been started, and how many there are."""
        self._under_way: list[Flow] = []
        self._header = b""
        self._source: Any = None
        """Input of this run, kept alive while peers may receive it."""
        self._target: Any = None
        """Output of this run, kept alive while peers may send to it."""
        self._flat: tuple[Any, Any] = (None, None)
        self._withdrawn: dict[int, bool] = {}
        """By the id of a withdrawn receive's request: whether it received no message."""

    # --- running ---

    def run(self, header: bytes, source: Any, target: Any) -> None:
        if (self._only is not None or self._stage()) and self._only_is_short:
            self._unroll()
            self.run(header, source, target)
        else:
            self.start(header, source, target)
            self._control.wait_for(self)

    @property
    def _only_is_short(self) -> bool:
        return self._only is not None and self._only.size <= _MOST_UNROLLED

    def start(self, header: bytes, source: Any, target: Any) -> None:
        self._header, self._source, self._target = header, source, target
        if self._only is not None or self._stage():
            assert self._only is not None
            self._flows, self._count = [self._only], 1
            if self._own is not None:
                self._own[0][...] = source
        else:
            self._flat = flat_pair(self.task.device, source, target)
            self._flows = self._cache.by_address(self.task, *self._flat)
            self._count = self.task.plan.slices
        self._begun = 0
        self._begin()

    def test(self) -> bool:
        moved = finished = False
        for flow in self._under_way:
            if self._drive(flow):
                moved = True
                finished |= flow.finished
        self.moved = moved
        if finished:
            for flow in self._under_way:
                flow.runs += flow.finished
            self._under_way[:] = [flow for flow in self._under_way if not flow.finished]
            self._begin()
        if self._under_way or self._begun < self._count:
            return False
        self._finish()
        return True

    def _finish(self) -> None:
        target, (_, flat) = self._target, self._flat
        if self._own is not None:
            target[...] = self._own[1]
        elif flat is not None and not shares_memory(self.task.device, flat, target):
            target[...] = flat.reshape(target.shape)
        self._source = self._target = None
        self._flat = (None, None)

    def _begin(self) -> None:
        in_flight = self.task.in_flight
        while self._begun < self._count:
            if any(flow.slot == self._begun % in_flight for flow in self._under_way):
                return
            if self._begun == len(self._flows):
                self._cache.bind_next(self._flows, self.task, *self._flat)
            flow = self._flows[self._begun]
            for own in flow.own_signatures:
                own[:] = self._header
            flow.at = flow.tested = 0
            self._under_way.append(flow)
            if flow.steps:
                self._start_step(flow, flow.steps[0])
            self._begun += 1

    def _start_step(self, flow: Flow, step: BoundStep) -> None:
        for pack in step.packs:
            pack()
        for start in step.starts:
            start()
        if self._control.log is not None:
            self._control.log(flow.slice, step.notes)

    def _drive(self, flow: Flow) -> bool:
        """Reduce what a flow has received, start its next steps; return whether a message came."""
        steps, tested, header = flow.steps, flow.tested, self._header
        moved = not steps
        while flow.at < len(steps):
            step = steps[flow.at]
            for test in step.tests[tested:]:
                if not test():
                    moved |= tested > flow.tested
                    flow.tested = tested
                    return moved
                tested += 1
            for peer, received in step.signatures:
                if received != header:
                    self._control.report_mismatch(peer, bytes(received))
            for act in step.acts:
                act()
            flow.at += 1
            flow.tested = tested = 0
            moved = True
            if flow.at < len(steps):
                self._start_step(flow, steps[flow.at])
            elif self._control.log is not None:
                self._control.log(flow.slice, ())  # its last messages are over
        return moved

    # --- the one flow of a small or bound plan ---

    def bind(self, source: Any, target: Any) -> None:
        task = self.task
        device = task.device
        flat = flat_pair(device, source, target)
        pairs = zip(flat, (source, target), strict=True)
        if task.plan.slices == 1 and all(shares_memory(device, *pair) for pair in pairs):
            scratch = device.scratch(task.plan.slice(0).scratch * task.dtype.itemsize)
            self._keep_only((flat[0], flat[1], scratch.view(task.dtype)))

    def replan(self, plan: Any) -> bool:
        return False  # messages are bound to their lengths

    def _stage(self) -> bool:
        task = self.task
        plan, device = task.plan, task.device
        if task.nbytes > task.staged_bytes or plan.slices != 1:
            return False
        # Two arrays, so that no fold is in place: NumPy takes twice as long where one element is.
        source, target = (
            device.empty(n, task.dtype) for n in (plan.input_count, plan.output_count)
        )
        scratch = device.empty(plan.slice(0).scratch, task.dtype)
        self._own = source.reshape(task.shapes[0]), target.reshape(task.shapes[1])
        self._keep_only((source, target, scratch))
        return True

    def _keep_only(self, memory: tuple[Any, Any, Any]) -> None:
        self._only = self._cache.bind(self.task, memory, index=0)

    def _unroll(self) -> None:
        """Unroll the one flow in place of the method `run`: without a frame of Python around it.

        A call of several plans starts them without `run`, and so without an unrolled flow.
        """
        assert self._only is not None
        unroll = unrolled(self._only, self._under_way, self._control, self._own)
        self.__dict__["run"] = unroll

    # --- the run under way ---

    def where(self) -> tuple[int, list[int]]:
        for flow in self._under_way:
            if not flow.finished:
                index = flow.steps[flow.at].index
                parts = [step for step in flow.steps[: flow.at + 1] if step.index == index]
                messages = [m for step in parts for m in (*step.recvs, *step.sends)]
                return index, sorted({peer for peer, request in messages if not request.Test()})
        return 0, []

    def withdraw(self) -> bool:
        """Withdraw the posted receives, the latest first.

        So a message that arrives meanwhile still matches its own receive.
        """
        for flow in self._under_way:
            if flow.finished:
                continue
            step = flow.steps[flow.at]
            if not all(started() for started in step.started):
                return False
            for peer, request in reversed(step.recvs):
                if id(request) not in self._withdrawn:
                    untouched = self._cache.transport.withdraw(request)
                    if untouched is None:
                        return False
                    self._withdrawn[id(request)] = untouched
                    self._cache.received[peer] += not untouched
        return True

    def tally(self) -> None:
        for flow in self._under_way:
            self._cache.count(flow, flow.at)
            if not flow.finished:
                self._cache.sent.update(peer for peer, _ in flow.steps[flow.at].sends)

    def sends_done(self) -> bool:
        return all(
            request.Test()
            for flow in self._under_way
            for step in flow.steps[: flow.at + 1]
            for _, request in step.sends
        )

    def reset(self) -> None:
        self._under_way.clear()
        self._withdrawn.clear()
        self._source = self._target = None
        self._flat = (None, None)
        self._begun = self._count = 0

    def free(self) -> None:
        if self._only is not None:
            self._cache.free(self._only)
            self._only = self._own = None
            self.__dict__.pop("run", None)
        self._cache.free_task(self.task)
