"""Bind a planned slice to memory and messages: a flow, which can be started any number of times.

Everything that the executor's inner loop uses is looked up here once: bound methods, views,
buffers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from operator import setitem
from typing import Any

import numpy as np

from ringreduce.control.signature import HEADER_BYTES
from ringreduce.devices.base import Device, FoldFunction, FoldManyFunction
from ringreduce.planning.operations import (
    BESIDE,
    INPUT,
    INSIDE,
    INSIDE_BYTES,
    OUTPUT,
    SCRATCH,
    Copy,
    PlannedMessage,
    PlannedSlice,
    PlannedStep,
    Span,
)
from ringreduce.transports.base import Request, Transport

Act = Callable[[], Any]


@dataclass(frozen=True)
class Arithmetic:
    """The functions by which a plan reduces values."""

    fold: FoldFunction | None = None
    fold_many: FoldManyFunction | None = None
    divide: Callable[[Any], Any] | None = None
    """Divides, for "mean", values that have all contributions."""


@dataclass(slots=True)
class BoundStep:
    index: int
    packs: list[Act] = field(default_factory=list)
    """Copy data to the memory that messages are sent from."""
    starts: list[Act] = field(default_factory=list)
    """Start the messages: the receives first."""
    tests: list[Callable[[], bool]] = field(default_factory=list)
    """Whether a message is complete; the step is complete after all of them."""
    started: list[Callable[[], bool]] = field(default_factory=list)
    """Whether the messages are under way; empty if no message waits for a device."""
    recvs: list[tuple[int, Request]] = field(default_factory=list)
    """(peer, request) of each receive."""
    sends: list[tuple[int, Request]] = field(default_factory=list)
    """(peer, request) of each send."""
    signatures: list[tuple[int, memoryview]] = field(default_factory=list)
    """(peer, the memory that receives its signature)"""
    acts: list[Act] = field(default_factory=list)
    """Copy, fold or divide the received data."""
    notes: list[tuple[int, str, int, int]] = field(default_factory=list)
    """(step, "send" or "recv", peer, bytes of data), for the message log."""


@dataclass(slots=True, eq=False)
class Flow:
    """A slice bound to memory and messages, and how far its run is."""

    slice: int
    slot: int
    """Index of the scratch memory that the flow uses."""
    steps: list[BoundStep] = field(default_factory=list)
    own_signatures: list[memoryview] = field(default_factory=list)
    """The memory that this rank's signature is sent from."""
    at: int = 0
    """Index of the current step; the number of steps if the run is complete."""
    tested: int = 0
    """Tests of the current step that were true."""
    runs: int = 0
    """Complete runs since the messages of the flow were last counted."""

    @property
    def finished(self) -> bool:
        return self.at == len(self.steps)

    def requests(self) -> Iterator[Request]:
        for step in self.steps:
            for _, request in (*step.recvs, *step.sends):
                yield request

    @property
    def size(self) -> int:
        return sum(len(step.recvs) + len(step.sends) for step in self.steps)

    def messages(self, steps: int) -> tuple[Counter[int], Counter[int]]:
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
    arithmetic: Arithmetic,
    index: int,
    slot: int = 0,
) -> Flow:
    """Bind slice `index` to `memory`: INPUT, OUTPUT and SCRATCH, flat and contiguous."""
    flow = Flow(index, slot)
    return fill(Binder(flow, memory, itemsize, transport, device, arithmetic), planned)


def fill(binder: Binder, planned: PlannedSlice) -> Flow:
    flow, memory = binder.flow, binder.memory
    flow.steps = [step for planned_step in planned.steps for step in binder.steps(planned_step)]
    in_place = memory[INPUT] is memory[OUTPUT]
    final_copies = [
        binder.copy(copy)
        for copy in planned.final_copies
        if not (in_place and copy.source.buffer == INPUT and copy.source[1:] == copy.into[1:])
    ]
    if final_copies:
        flow.steps = flow.steps or [BoundStep(0)]
        flow.steps[-1].acts += final_copies
    return flow


class Binder:
    """Binds a slice of arrays in host memory, which messages are sent from."""

    def __init__(
        self,
        flow: Flow,
        memory: tuple[Any, Any, Any],
        itemsize: int,
        transport: Transport,
        device: Device,
        arithmetic: Arithmetic,
    ) -> None:
        self.flow, self.memory, self.itemsize = flow, memory, itemsize
        self.transport, self.device, self.arithmetic = transport, device, arithmetic
        self.dtype = memory[SCRATCH].dtype
        self._views: dict[Span, Any] = {}
        self.untested: list[Callable[[], bool]] = []
        """Tests of sends that earlier parts of the step have started."""
        on_host = device.stream is None
        self.bytes = [device.bytes_of(array) for array in memory] if on_host else []

    def view(self, span: Span) -> Any:
        """Return a view of `span`, the same object each time: NumPy sees that a fold is in place.

        With another object of the same memory a fold of two elements takes 0.17 us longer.
        """
        in_place = span.buffer == OUTPUT and self.memory[OUTPUT] is self.memory[INPUT]
        place = span._replace(buffer=INPUT) if in_place else span
        if place not in self._views:
            self._views[place] = self.memory[place.buffer][place.start : place.stop]
        return self._views[place]

    def copy(self, copy: Copy) -> Act:
        return partial(setitem, self.view(copy.into), ..., self.view(copy.source))

    def steps(self, planned: PlannedStep) -> list[BoundStep]:
        """Bind a step as one or two: data behind a signature are received after its comparison.

        So received data always fit: some MPIs write past the end of a buffer that is too short.
        """
        step = BoundStep(planned.index, packs=[self.copy(copy) for copy in planned.packs])
        after = BoundStep(planned.index)
        signed = {m.peer for m in planned.recvs if m.signature is not None}
        early = any(m.signature is None and m.peer in signed for m in planned.recvs)
        last = after if early or any(m.signature == BESIDE for m in planned.recvs) else step
        operands: dict[Span, memoryview] = {}
        for message in planned.recvs:
            self.recv(message, step, last, operands)
        for message in planned.sends:
            self.send(message, step)
        bound = [step] if last is step else [step, last]
        self.wire(planned, bound)
        self._folds(planned, last, operands)
        return bound

    def wire(self, planned: PlannedStep, bound: list[BoundStep]) -> None:
        for part in bound:
            requests = [request for _, request in (*part.recvs, *part.sends)]
            part.starts = [request.Start for request in requests]
            part.tests = [request.Test for _, request in part.recvs]
        self.untested += [request.Test for _, request in bound[0].sends]
        if not planned.more_parts:
            bound[-1].tests += self.untested
            self.untested = []

    def _folds(
        self, planned: PlannedStep, step: BoundStep, operands: dict[Span, memoryview]
    ) -> None:
        """Bind folds; values that were received with a signature are folded in that buffer."""
        folded = {span for fold in planned.folds for span in fold.sources}
        for span in list(operands):
            if {other for other in folded if _overlap(span, other)} != {span}:
                step.acts.append(copy_bytes(self._plain(span), operands.pop(span)))
        received = {span: self._array(payload) for span, payload in operands.items()}
        for fold in planned.folds:
            sources = [received.get(span, self.view(span)) for span in fold.sources]
            into = self.view(fold.into)
            if len(sources) == 2:
                assert self.arithmetic.fold is not None, "a plan without an op has folds"
                step.acts.append(partial(self.arithmetic.fold, sources[0], sources[1], into))
            else:
                assert self.arithmetic.fold_many is not None
                step.acts.append(partial(self.arithmetic.fold_many, sources, into))
            if fold.finishes and self.arithmetic.divide is not None:
                step.acts.append(partial(self.arithmetic.divide, into))

    def send(self, message: PlannedMessage, step: BoundStep) -> None:
        if message.signature == INSIDE:
            buffer, payload = self._signed(message.span)
            self.flow.own_signatures.append(buffer[:HEADER_BYTES])
            if payload:
                step.packs.append(copy_bytes(payload, self._plain(message.span)))
        else:
            buffer = self._plain(message.span)
        if message.signature == BESIDE:
            header = memoryview(bytearray(HEADER_BYTES))
            self.flow.own_signatures.append(header)
            self.add_send(message, header, step)
        self.add_send(message, buffer, step)
        step.notes.append((step.index, "send", message.peer, self.nbytes(message.span)))

    def recv(
        self,
        message: PlannedMessage,
        step: BoundStep,
        last: BoundStep,
        operands: dict[Span, memoryview],
    ) -> None:
        if message.signature is None:
            self.add_recv(message, self._plain(message.span), last)
        else:
            buffer, payload = self._landing(message)
            step.signatures.append((message.peer, buffer[:HEADER_BYTES]))
            self.add_recv(message, buffer, step)
            if message.signature == BESIDE:
                self.add_recv(message, self._plain(message.span), last)
            elif payload:
                operands[message.span] = payload
        step.notes.append((step.index, "recv", message.peer, self.nbytes(message.span)))

    def add_send(self, message: PlannedMessage, buffer: memoryview, step: BoundStep) -> Request:
        request = self.transport.sender(message.peer, self.flow.slice, buffer)
        step.sends.append((message.peer, request))
        return request

    def add_recv(self, message: PlannedMessage, buffer: memoryview, step: BoundStep) -> Request:
        request = self.transport.receiver(message.peer, self.flow.slice, buffer)
        step.recvs.append((message.peer, request))
        return request

    def _signed(self, span: Span, least: int = 0) -> tuple[memoryview, memoryview]:
        """Allocate a message: signature, then `span` or `least` bytes; return it, and its data."""
        nbytes = self.nbytes(span)
        memory = self.device.bytes_of(self.device.empty(HEADER_BYTES + max(nbytes, least), "u1"))
        return memory, memory[HEADER_BYTES : HEADER_BYTES + nbytes]

    def _array(self, payload: memoryview) -> Any:
        return np.frombuffer(payload, self.dtype)

    def _landing(self, message: PlannedMessage) -> tuple[memoryview, memoryview]:
        """Allocate memory for a message with a signature, long enough for any such message."""
        inside = message.span if message.signature == INSIDE else Span(SCRATCH, 0, 0)
        return self._signed(inside, INSIDE_BYTES)

    def _plain(self, span: Span) -> memoryview:
        return self.bytes[span.buffer][span.start * self.itemsize : span.stop * self.itemsize]

    def nbytes(self, span: Span) -> int:
        return (span.stop - span.start) * self.itemsize


def copy_bytes(into: memoryview, source: memoryview) -> Act:
    """Return a copy of bytes: for a few bytes it takes half as long as a copy of arrays."""
    return partial(into.__setitem__, slice(None), source)


def _overlap(a: Span, b: Span) -> bool:
    return a.buffer == b.buffer and a.start < b.stop and b.start < a.stop
