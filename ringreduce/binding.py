"""Binds a planned slice to memory and messages: a flow, ready to be started again and again.

All that the executor's inner loop touches is looked up here once: bound methods, views, buffers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from ringreduce.agreement import HEADER_BYTES
from ringreduce.devices.base import Device
from ringreduce.slice_plan import (
    BESIDE,
    INPUT,
    INSIDE,
    INSIDE_BYTES,
    OUTPUT,
    SCRATCH,
    Copy,
    Message,
    PlannedSlice,
    PlannedStep,
    Span,
)
from ringreduce.transports.base import Request, Transport

CopyPair = tuple[Any, Any]
"""(into, source)"""


@dataclass(slots=True)
class BoundStep:
    """A step with its memory and messages."""

    index: int
    packs: list[CopyPair] = field(default_factory=list)
    starts: list[Callable[[], None]] = field(default_factory=list)
    """Receivers stand before senders."""
    tests: list[Callable[[], bool]] = field(default_factory=list)
    gates: list[Callable[[], bool]] = field(default_factory=list)
    """Whether what was started is under way: asked where messages wait for a device."""
    recvs: list[tuple[int, Request]] = field(default_factory=list)
    sends: list[tuple[int, Request]] = field(default_factory=list)
    signatures: list[tuple[int, memoryview]] = field(default_factory=list)
    """(peer, where its signature comes in)"""
    unpacks: list[CopyPair] = field(default_factory=list)
    folds: list[tuple[Any, Any, Any]] = field(default_factory=list)
    """(left, right, into)"""
    folds_of_many: list[tuple[list[Any], Any]] = field(default_factory=list)
    """(three sources or more, into)"""
    finished: list[Any] = field(default_factory=list)
    """What has all contributions once the folds are done."""
    notes: list[tuple[str, int, int]] = field(default_factory=list)
    """("send" or "recv", peer, bytes of data): for the message log."""


@dataclass(slots=True)
class Flow:
    """One slice on its way: its steps, the step it is at, how many of its messages have come."""

    slice: int
    slot: int
    steps: list[BoundStep] = field(default_factory=list)
    own_signatures: list[memoryview] = field(default_factory=list)
    """Where this rank's signature goes out from."""
    settles: list[CopyPair] = field(default_factory=list)
    at: int = 0
    tested: int = 0
    runs: int = 0
    """How often it has run to its end, since its messages were last counted."""

    @property
    def finished(self) -> bool:
        return self.at == len(self.steps)

    def requests(self) -> Iterator[Request]:
        for step in self.steps:
            for _, request in (*step.recvs, *step.sends):
                yield request

    @property
    def size(self) -> int:
        """How many messages it has."""
        return sum(len(step.recvs) + len(step.sends) for step in self.steps)

    def messages(self, steps: int) -> tuple[Counter[int], Counter[int]]:
        """How many messages the first `steps` steps send to and receive from each peer."""
        done = self.steps[:steps]
        return (
            Counter(peer for step in done for peer, _ in step.sends),
            Counter(peer for step in done for peer, _ in step.recvs),
        )

    def free(self) -> None:
        for request in self.requests():
            request.Free()
        self.steps.clear()


def bind(
    planned: PlannedSlice,
    memory: tuple[Any, Any, Any],
    itemsize: int,
    transport: Transport,
    device: Device,
    index: int,
    slot: int = 0,
) -> Flow:
    """A flow of slice `index` in `memory`: INPUT, OUTPUT and SCRATCH, flat and contiguous."""
    flow = Flow(index, slot)
    return fill(Binder(flow, memory, itemsize, transport, device), planned)


def fill(binder: Binder, planned: PlannedSlice) -> Flow:
    """Bind all steps of the binder's flow."""
    flow, memory = binder.flow, binder.memory
    flow.steps = [step for planned_step in planned.steps for step in binder.steps(planned_step)]
    in_place = memory[INPUT] is memory[OUTPUT]
    flow.settles = [
        binder.pair(copy)
        for copy in planned.settles
        if not (in_place and copy.source.buffer == INPUT and copy.source[1:] == copy.into[1:])
    ]
    return flow


class Binder:
    """Binds a slice whose arrays are in host memory: messages are sent from there."""

    def __init__(
        self,
        flow: Flow,
        memory: tuple[Any, Any, Any],
        itemsize: int,
        transport: Transport,
        device: Device,
    ) -> None:
        self.flow, self.memory, self.itemsize = flow, memory, itemsize
        self.transport, self.device = transport, device
        self.dtype = memory[SCRATCH].dtype
        self.unawaited: list[Callable[[], bool]] = []
        """Tests of sends that an earlier part of the step has started."""
        in_reach = device.queue is None
        self.bytes = [device.bytes_of(array) for array in memory] if in_reach else []

    def view(self, span: Span) -> Any:
        return self.memory[span.buffer][span.start : span.stop]

    def pair(self, copy: Copy) -> CopyPair:
        return self.view(copy.into), self.view(copy.source)

    def steps(self, planned: PlannedStep) -> list[BoundStep]:
        """One step, or two: what comes after a signature is received only once that is known.

        So what is received always fits: some MPIs write past the end of a buffer that is too short.
        """
        step = BoundStep(planned.index, packs=[self.pair(copy) for copy in planned.packs])
        after = BoundStep(planned.index)
        signed = {m.peer for m in planned.recvs if m.signature is not None}
        early = any(m.signature is None and m.peer in signed for m in planned.recvs)
        last = after if early or any(m.signature == BESIDE for m in planned.recvs) else step
        operands: dict[Span, Any] = {}
        for message in planned.recvs:
            self.recv(message, step, last, operands)
        for message in planned.sends:
            self.send(message, step)
        bound = [step] if last is step else [step, last]
        self.wire(planned, bound)
        self._folds(planned, last, operands)
        return bound

    def wire(self, planned: PlannedStep, bound: list[BoundStep]) -> None:
        """Say how the messages of a step are started, and how it is known that they have come."""
        for part in bound:
            requests = [request for _, request in (*part.recvs, *part.sends)]
            part.starts = [request.Start for request in requests]
            part.tests = [request.Test for _, request in part.recvs]
        self.unawaited += [request.Test for _, request in bound[0].sends]
        if not planned.goes_on:
            bound[-1].tests += self.unawaited
            self.unawaited = []

    def _folds(self, planned: PlannedStep, step: BoundStep, operands: dict[Span, Any]) -> None:
        """Bind folds; values that came with a signature are folded from where they came in."""
        folded = {span for fold in planned.folds for span in fold.sources}
        for span in list(operands):
            if {other for other in folded if _overlap(span, other)} != {span}:
                step.unpacks.append((self.view(span), operands.pop(span)))
        for fold in planned.folds:
            sources = [operands.get(span, self.view(span)) for span in fold.sources]
            into = self.view(fold.into)
            if len(sources) == 2:
                step.folds.append((*sources, into))
            else:
                step.folds_of_many.append((sources, into))
            if fold.finishes:
                step.finished.append(into)

    def send(self, message: Message, step: BoundStep) -> None:
        if message.signature == INSIDE:
            buffer, payload = self._signed(message.span)
            self.flow.own_signatures.append(buffer[:HEADER_BYTES])
            if payload.size:
                step.packs.append((payload, self.view(message.span)))
        else:
            buffer = self._plain(message.span)
        if message.signature == BESIDE:
            header = memoryview(bytearray(HEADER_BYTES))
            self.flow.own_signatures.append(header)
            self.add_send(message, header, step)
        self.add_send(message, buffer, step)
        step.notes.append(("send", message.peer, self.nbytes(message.span)))

    def recv(
        self, message: Message, step: BoundStep, last: BoundStep, operands: dict[Span, Any]
    ) -> None:
        if message.signature is None:
            self.add_recv(message, self._plain(message.span), last)
        else:
            buffer, payload = self._landing(message)
            step.signatures.append((message.peer, buffer[:HEADER_BYTES]))
            self.add_recv(message, buffer, step)
            if message.signature == BESIDE:
                self.add_recv(message, self._plain(message.span), last)
            elif payload.size:
                operands[message.span] = payload
        step.notes.append(("recv", message.peer, self.nbytes(message.span)))

    def add_send(self, message: Message, buffer: memoryview, step: BoundStep) -> Request:
        request = self.transport.sender(message.peer, self.flow.slice, buffer)
        step.sends.append((message.peer, request))
        return request

    def add_recv(self, message: Message, buffer: memoryview, step: BoundStep) -> Request:
        request = self.transport.receiver(message.peer, self.flow.slice, buffer)
        step.recvs.append((message.peer, request))
        return request

    def _signed(self, span: Span, room: int = 0) -> tuple[memoryview, Any]:
        """Memory for a message with its signature before it: all of it, and the data's part."""
        nbytes = self.nbytes(span)
        memory = self.device.empty(HEADER_BYTES + max(nbytes, room), "u1")
        payload = memory[HEADER_BYTES : HEADER_BYTES + nbytes].view(self.dtype)
        return self.device.bytes_of(memory), payload

    def _landing(self, message: Message) -> tuple[memoryview, Any]:
        """Memory for a first message, with room for as much as any brings: never too short."""
        inside = message.span if message.signature == INSIDE else Span(SCRATCH, 0, 0)
        return self._signed(inside, INSIDE_BYTES)

    def _plain(self, span: Span) -> memoryview:
        return self.bytes[span.buffer][span.start * self.itemsize : span.stop * self.itemsize]

    def nbytes(self, span: Span) -> int:
        return (span.stop - span.start) * self.itemsize


def _overlap(a: Span, b: Span) -> bool:
    return a.buffer == b.buffer and a.start < b.stop and b.start < a.stop
