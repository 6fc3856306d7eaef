"""Messages of arrays in device memory: staged through blocks of pinned host memory.

To send, the device's stream copies the data to a block and then reaches a mark; only then the
message starts.  To receive, the message is received in a block, and the stream copies the data to
the device.  Nothing blocks: each poll of `StagedStep.test` advances every message as far as
possible.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ringreduce.control.signature import HEADER_BYTES
from ringreduce.devices.base import Device, Mark, Stream
from ringreduce.messages.binding import Arithmetic, Binder, BoundStep, Flow, fill
from ringreduce.planning.operations import (
    BESIDE,
    INSIDE,
    INSIDE_BYTES,
    PlannedMessage,
    PlannedSlice,
    PlannedStep,
    Span,
)
from ringreduce.transports.base import Request, Transport

_SHORTEST_BLOCK = 8 << 10
"""Bytes."""


@dataclass(slots=True, eq=False)
class Block:
    """Pinned host memory for one message at a time."""

    memory: Any
    copied: Mark
    """Reached when the latest copy from or to the block is complete."""


class PinnedBuffers:
    """The blocks of one slot: its flows run one after another, and all use these blocks."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._blocks: list[Block] = []
        self._outgrown: list[Block] = []
        """Shorter blocks that were replaced: earlier flows stay bound to them."""

    def take(self, index: int, nbytes: int) -> Block:
        """Return block `index`, of at least `nbytes` bytes; a shorter one is replaced.

        Lengths are powers of two, so all replaced blocks together are not longer than those in use.
        """
        if index < len(self._blocks) and self._blocks[index].memory.nbytes >= nbytes:
            return self._blocks[index]
        length = max(_SHORTEST_BLOCK, 1 << (nbytes - 1).bit_length())
        block = Block(self._stream.pinned(length), self._stream.mark())
        self._outgrown += self._blocks[index : index + 1]
        self._blocks[index : index + 1] = [block]
        return block


@dataclass(slots=True, eq=False)
class Staged:
    """A message, and the block that it is sent from or received in."""

    request: Request
    block: Block | None = None
    """None: the message is in ordinary host memory."""
    host: Any = None
    """The block's bytes for the data."""
    array: Any = None
    """The data on the device; None if the message has no data to copy."""
    header: tuple[memoryview, memoryview] | None = None
    """(place in the block, source) of the signature to send; None: the message has none."""


class Outbox:
    """The sends of one step: each starts when its data are in its block, in order."""

    def __init__(self, stream: Stream, sends: Sequence[Staged]) -> None:
        self._stream, self._sends = stream, sends
        self._started = self._done = 0

    def start(self) -> None:
        self._started = self._done = 0
        for send in self._sends:
            if send.block is not None:
                if send.array is not None:
                    self._stream.copy_out(send.array, send.host)
                send.block.copied.set()

    def started(self) -> bool:
        """Start the messages whose copies are done; True if all are under way."""
        for send in self._sends[self._started :]:
            if send.block is not None and not send.block.copied.reached():
                return False
            if send.header is not None:
                # Not earlier: until the mark is reached, a copy to the device may read the block.
                place, signature = send.header
                place[:] = signature
            send.request.Start()
            self._started += 1
        return True

    def done(self) -> bool:
        if not self.started():
            return False
        while self._done < len(self._sends) and self._sends[self._done].request.Test():
            self._done += 1
        return self._done == len(self._sends)


class Inbox:
    """The receives of one step, or of a part of a step."""

    def __init__(self, stream: Stream, recvs: Sequence[Staged]) -> None:
        self._stream, self._recvs = stream, recvs
        self._started = self._done = 0

    def start(self) -> None:
        """Post the receives whose blocks are free."""
        self._started = self._done = 0
        self.started()

    def started(self) -> bool:
        """Post, in order, the receives whose blocks are free; return whether all are posted."""
        for recv in self._recvs[self._started :]:
            if recv.block is not None and not recv.block.copied.reached():
                return False
            recv.request.Start()
            self._started += 1
        return True

    def done(self) -> bool:
        """Enqueue the copies of received data to the device; True if all data are received."""
        self.started()
        while self._done < self._started and self._recvs[self._done].request.Test():
            recv = self._recvs[self._done]
            if recv.block is not None:
                if recv.array is not None:
                    self._stream.copy_in(recv.host, recv.array)
                recv.block.copied.set()
            self._done += 1
        return self._done == len(self._recvs)


class StagedStep:
    """All messages of one step, or of a part of a step, with one test for the executor."""

    def __init__(self, inbox: Inbox, outboxes: Sequence[Outbox], waits: bool) -> None:
        self._inbox, self._outboxes = inbox, outboxes
        self._waits = waits
        """Whether the step is complete only after its sends; else after its receives."""

    def started(self) -> bool:
        return all([self._inbox.started(), *(outbox.started() for outbox in self._outboxes)])

    def test(self) -> bool:
        out = [outbox.done() if self._waits else outbox.started() for outbox in self._outboxes]
        return self._inbox.done() and (all(out) or not self._waits)


class StagingBinder(Binder):
    def __init__(
        self,
        flow: Flow,
        memory: tuple[Any, Any, Any],
        itemsize: int,
        transport: Transport,
        device: Device,
        arithmetic: Arithmetic,
        blocks: PinnedBuffers,
    ) -> None:
        super().__init__(flow, memory, itemsize, transport, device, arithmetic)
        assert device.stream is not None
        self._stream, self._blocks = device.stream, blocks
        self._taken = 0
        """Blocks taken by the current step of the schedule; the next step takes them again."""
        self._sends: list[Staged] = []
        self._recvs: list[tuple[BoundStep, Staged]] = []
        self._outboxes: list[Outbox] = []
        """Outboxes of the current step, and of its earlier parts."""

    def wire(self, planned: PlannedStep, bound: list[BoundStep]) -> None:
        outbox = Outbox(self._stream, self._sends)
        self._outboxes.append(outbox)
        for part in bound:
            inbox = Inbox(self._stream, [recv for step, recv in self._recvs if step is part])
            waits = part is bound[-1] and not planned.more_parts
            staged = StagedStep(inbox, tuple(self._outboxes), waits)
            part.starts = [inbox.start, outbox.start] if part is bound[0] else [inbox.start]
            part.tests, part.started = [staged.test], [staged.started]
        self._sends, self._recvs = [], []
        if not planned.more_parts:
            self._outboxes, self._taken = [], 0

    def send(self, message: PlannedMessage, step: BoundStep) -> None:
        own = memoryview(bytearray(HEADER_BYTES))
        if message.signature is not None:
            self.flow.own_signatures.append(own)
        if message.signature == BESIDE:
            self._sends.append(Staged(self.add_send(message, own, step)))
        start = HEADER_BYTES if message.signature == INSIDE else 0
        block, host, buffer = self._block(message.span, start)
        header = (buffer[:start], own) if start else None
        request = self.add_send(message, buffer, step)
        self._sends.append(Staged(request, block, host, self._on_device(message.span), header))
        step.notes.append((step.index, "send", message.peer, self.nbytes(message.span)))

    def recv(
        self,
        message: PlannedMessage,
        step: BoundStep,
        last: BoundStep,
        operands: dict[Span, memoryview],
    ) -> None:
        """Bind a receive: data are copied from the block to their span before any fold."""
        if message.signature == INSIDE:
            self._recv_signed(message, step)
        else:
            if message.signature == BESIDE:
                buffer = memoryview(bytearray(HEADER_BYTES + INSIDE_BYTES))
                step.signatures.append((message.peer, buffer[:HEADER_BYTES]))
                self._recvs.append((step, Staged(self.add_recv(message, buffer, step))))
            block, host, buffer = self._block(message.span)
            request = self.add_recv(message, buffer, last)
            self._recvs.append((last, Staged(request, block, host, self._on_device(message.span))))
        step.notes.append((step.index, "recv", message.peer, self.nbytes(message.span)))

    def _recv_signed(self, message: PlannedMessage, step: BoundStep) -> None:
        """Bind a receive with a signature inside: copied to the device after its comparison."""
        block, host, buffer = self._block(message.span, HEADER_BYTES, INSIDE_BYTES)
        step.signatures.append((message.peer, buffer[:HEADER_BYTES]))
        self._recvs.append((step, Staged(self.add_recv(message, buffer, step), block)))
        array = self._on_device(message.span)
        if array is not None:

            def land() -> None:
                self._stream.copy_in(host, array)
                block.copied.set()

            step.acts.append(land)

    def _block(self, span: Span, start: int = 0, least: int = 0) -> tuple[Block, Any, memoryview]:
        """Take the next block; return it, its bytes of data from `start` on, and the message."""
        nbytes = self.nbytes(span)
        length = start + max(nbytes, least)
        block = self._blocks.take(self._taken, max(1, length))
        self._taken += 1
        whole = self.device.bytes_of(block.memory)
        return block, block.memory[start : start + nbytes], whole[:length]

    def _on_device(self, span: Span) -> Any:
        return self.view(span) if span.start < span.stop else None


def bind_staging(
    planned: PlannedSlice,
    memory: tuple[Any, Any, Any],
    itemsize: int,
    transport: Transport,
    device: Device,
    arithmetic: Arithmetic,
    blocks: PinnedBuffers,
    index: int,
    slot: int,
) -> Flow:
    flow = Flow(index, slot)
    return fill(
        StagingBinder(flow, memory, itemsize, transport, device, arithmetic, blocks), planned
    )
