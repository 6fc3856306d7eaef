"""Messages of arrays that the processor cannot reach: staged through pinned host memory.

A send is copied out to a block of host memory, in its turn in the device's stream.  Its message
starts when a mark behind the copy is reached.  A receive comes into a block, from where it is
copied in.  Nothing waits: `StagedStep.test` is polled, and takes every message as far as it gets.
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
    Message,
    PlannedSlice,
    PlannedStep,
    Span,
)
from ringreduce.transports.base import Request, Transport

_SHORTEST_BLOCK = 8 << 10


@dataclass(slots=True, eq=False)
class Block:
    """Pinned host memory of one message at a time."""

    memory: Any
    copied: Mark
    """Behind the latest copy from or to it."""


class Blocks:
    """Pinned memory of the flows of one slot, which run one after another and all use it."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._blocks: list[Block] = []
        self._outgrown: list[Block] = []
        """Flows that were bound before stay bound to these; copies from them may be under way."""

    def take(self, index: int, nbytes: int) -> Block:
        """Block `index`, of at least so many bytes: the one there is, or else a longer one.

        Lengths are powers of two, so all that were outgrown are no longer than those in use.
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
    """A message with its block; without one it is in host memory as it is."""

    request: Request
    block: Block | None = None
    host: Any = None
    """The block's bytes for the data."""
    array: Any = None
    """Where the data are from, or go to, on the device; None for none."""
    header: tuple[memoryview, memoryview] | None = None
    """Where the signature of what is sent goes in the block, and where it is from."""


class Outbox:
    """The sends of one step: each starts when its data have arrived in its block, in order."""

    def __init__(self, stream: Stream, sends: Sequence[Staged]) -> None:
        self._stream, self._sends = stream, sends
        self._started = self._done = 0

    def start(self) -> None:
        """Ask for all copies."""
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
                # Not before: until the mark is reached the block may still be copied in from.
                place, signature = send.header
                place[:] = signature
            send.request.Start()
            self._started += 1
        return True

    def done(self) -> bool:
        """Whether all messages are complete."""
        if not self.started():
            return False
        while self._done < len(self._sends) and self._sends[self._done].request.Test():
            self._done += 1
        return self._done == len(self._sends)


class Inbox:
    """The receives of one step, or of a part of one."""

    def __init__(self, stream: Stream, recvs: Sequence[Staged]) -> None:
        self._stream, self._recvs = stream, recvs
        self._started = self._done = 0

    def start(self) -> None:
        """Post the receives whose blocks are free."""
        self._started = self._done = 0
        self.started()

    def started(self) -> bool:
        """Post, in order, what could not be posted; True if all are.

        A block is not free while what came in it before is still being copied in.
        """
        for recv in self._recvs[self._started :]:
            if recv.block is not None and not recv.block.copied.reached():
                return False
            recv.request.Start()
            self._started += 1
        return True

    def done(self) -> bool:
        """Ask for the copies of what has come; True if all has."""
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
    """All messages of one step, or of a part of one, as the executor sees them: one."""

    def __init__(self, inbox: Inbox, outboxes: Sequence[Outbox], awaits: bool) -> None:
        self._inbox, self._outboxes, self._awaits = inbox, outboxes, awaits

    def started(self) -> bool:
        """Whether all messages are under way, so that they can be counted and taken back."""
        return all([self._inbox.started(), *(outbox.started() for outbox in self._outboxes)])

    def test(self) -> bool:
        """Take all messages further; True when the step has all that it waits for."""
        out = [outbox.done() if self._awaits else outbox.started() for outbox in self._outboxes]
        return self._inbox.done() and (all(out) or not self._awaits)


class StagingBinder(Binder):
    """Binds a slice whose arrays are on a device that has a stream."""

    def __init__(
        self,
        flow: Flow,
        memory: tuple[Any, Any, Any],
        itemsize: int,
        transport: Transport,
        device: Device,
        arithmetic: Arithmetic,
        blocks: Blocks,
    ) -> None:
        super().__init__(flow, memory, itemsize, transport, device, arithmetic)
        assert device.stream is not None
        self._stream, self._blocks = device.stream, blocks
        self._taken = 0
        """Blocks that are in use in this step of the schedule; the next one uses them again."""
        self._sends: list[Staged] = []
        self._recvs: list[tuple[BoundStep, Staged]] = []
        self._outboxes: list[Outbox] = []
        """Of this step and its earlier parts."""

    def wire(self, planned: PlannedStep, bound: list[BoundStep]) -> None:
        outbox = Outbox(self._stream, self._sends)
        self._outboxes.append(outbox)
        for part in bound:
            inbox = Inbox(self._stream, [recv for step, recv in self._recvs if step is part])
            awaits = part is bound[-1] and not planned.more_parts
            staged = StagedStep(inbox, tuple(self._outboxes), awaits)
            part.starts = [inbox.start, outbox.start] if part is bound[0] else [inbox.start]
            part.tests, part.started = [staged.test], [staged.started]
        self._sends, self._recvs = [], []
        if not planned.more_parts:
            self._outboxes, self._taken = [], 0

    def send(self, message: Message, step: BoundStep) -> None:
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
        self, message: Message, step: BoundStep, last: BoundStep, operands: dict[Span, memoryview]
    ) -> None:
        """Received data are copied to their span, and never folded from where they came in."""
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

    def _recv_signed(self, message: Message, step: BoundStep) -> None:
        """A message with its signature inside: copied in once that is known to be right."""
        block, host, buffer = self._block(message.span, HEADER_BYTES, INSIDE_BYTES)
        step.signatures.append((message.peer, buffer[:HEADER_BYTES]))
        self._recvs.append((step, Staged(self.add_recv(message, buffer, step), block)))
        array = self._on_device(message.span)
        if array is not None:

            def land() -> None:
                self._stream.copy_in(host, array)
                block.copied.set()

            step.acts.append(land)

    def _block(self, span: Span, start: int = 0, room: int = 0) -> tuple[Block, Any, memoryview]:
        """The next block, its bytes for the data from `start` on, and all that is a message."""
        nbytes = self.nbytes(span)
        length = start + max(nbytes, room)
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
    blocks: Blocks,
    index: int,
    slot: int,
) -> Flow:
    """`ringreduce.messages.binding.bind` for a device that has a stream."""
    flow = Flow(index, slot)
    return fill(
        StagingBinder(flow, memory, itemsize, transport, device, arithmetic, blocks), planned
    )
