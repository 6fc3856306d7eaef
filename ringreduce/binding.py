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
from ringreduce.plan import (
    BESIDE,
    INPUT,
    INSIDE,
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
    recvs: list[tuple[int, Request]] = field(default_factory=list)
    sends: list[tuple[int, Request]] = field(default_factory=list)
    signatures: list[tuple[int, memoryview]] = field(default_factory=list)
    """(peer, where its signature comes in)"""
    unpacks: list[CopyPair] = field(default_factory=list)
    folds: list[tuple[Any, Any, Any, bool]] = field(default_factory=list)
    """(left, right, into, finishes)"""
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

    @property
    def finished(self) -> bool:
        return self.at == len(self.steps)

    def requests(self) -> Iterator[Request]:
        for step in self.steps:
            for _, request in (*step.recvs, *step.sends):
                yield request

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
    binder = _Binder(flow, memory, itemsize, transport, device)
    flow.steps = [binder.step(step) for step in planned.steps]
    in_place = memory[INPUT] is memory[OUTPUT]
    flow.settles = [
        binder.pair(copy)
        for copy in planned.settles
        if not (in_place and copy.source.buffer == INPUT and copy.source[1:] == copy.into[1:])
    ]
    return flow


class _Binder:
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
        self.bytes = [None if array is None else device.bytes_of(array) for array in memory]

    def view(self, span: Span) -> Any:
        return self.memory[span.buffer][span.start : span.stop]

    def pair(self, copy: Copy) -> CopyPair:
        return self.view(copy.into), self.view(copy.source)

    def step(self, planned: PlannedStep) -> BoundStep:
        step = BoundStep(planned.index, packs=[self.pair(copy) for copy in planned.packs])
        operands: dict[Span, Any] = {}
        for message in planned.recvs:
            for buffer in self._recv_buffers(message, step, operands):
                request = self.transport.receiver(message.peer, self.flow.slice, buffer)
                step.recvs.append((message.peer, request))
            self._note("recv", message, step)
        for message in planned.sends:
            for buffer in self._send_buffers(message, step):
                request = self.transport.sender(message.peer, self.flow.slice, buffer)
                step.sends.append((message.peer, request))
            self._note("send", message, step)
        requests = [request for _, request in (*step.recvs, *step.sends)]
        step.starts = [request.Start for request in requests]
        step.tests = [request.Test for request in requests]
        self._folds(planned, step, operands)
        return step

    def _folds(self, planned: PlannedStep, step: BoundStep, operands: dict[Span, Any]) -> None:
        """Bind folds; values that came with a signature are folded from where they came in."""
        folded = {span for fold in planned.folds for span in (fold.left, fold.right)}
        for span in list(operands):
            if span not in folded:
                step.unpacks.append((self.view(span), operands.pop(span)))
        for fold in planned.folds:
            left, right = (operands.get(span, self.view(span)) for span in (fold.left, fold.right))
            step.folds.append((left, right, self.view(fold.into), fold.finishes))
            operands.pop(fold.into, None)

    def _send_buffers(self, message: Message, step: BoundStep) -> Iterator[memoryview]:
        if message.signature == INSIDE:
            whole, payload = self._signed(message)
            self.flow.own_signatures.append(whole[:HEADER_BYTES])
            step.packs.append((payload, self.view(message.span)))
            yield whole
            return
        if message.signature == BESIDE:
            header = memoryview(bytearray(HEADER_BYTES))
            self.flow.own_signatures.append(header)
            yield header
        yield self._plain(message.span)

    def _recv_buffers(
        self, message: Message, step: BoundStep, operands: dict[Span, Any]
    ) -> Iterator[memoryview]:
        if message.signature == INSIDE:
            whole, payload = self._signed(message)
            step.signatures.append((message.peer, whole[:HEADER_BYTES]))
            if payload.size:
                operands[message.span] = payload
            yield whole
            return
        if message.signature == BESIDE:
            header = memoryview(bytearray(HEADER_BYTES))
            step.signatures.append((message.peer, header))
            yield header
        yield self._plain(message.span)

    def _signed(self, message: Message) -> tuple[memoryview, Any]:
        """Memory for a message with its signature before it: all of it, and the data's part."""
        memory = self.device.empty(HEADER_BYTES + self._nbytes(message.span), "u1")
        return self.device.bytes_of(memory), memory[HEADER_BYTES:].view(self.dtype)

    def _plain(self, span: Span) -> memoryview:
        whole = self.bytes[span.buffer]
        assert whole is not None, "the plan reads or writes a buffer that this rank does not have"
        return whole[span.start * self.itemsize : span.stop * self.itemsize]

    def _nbytes(self, span: Span) -> int:
        return (span.stop - span.start) * self.itemsize

    def _note(self, direction: str, message: Message, step: BoundStep) -> None:
        step.notes.append((direction, message.peer, self._nbytes(message.span)))
