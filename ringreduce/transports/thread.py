"""Ranks as threads of one process: for notebooks, for tests, for a first look.

The strictest transport there is: a send completes only once its receive is posted, so a schedule
that runs here cannot rely on buffering anywhere.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ringreduce.shm.layout import BLOCK_BYTES
from ringreduce.transports.base import SharedMemory

_LONGEST_PAUSE_S = 0.002


class Switchboard:
    """Connects the ranks of one group of threads: a mailbox each."""

    def __init__(self, size: int, share: bool = False) -> None:
        self.mailboxes = [_Mailbox() for _ in range(size)]
        self.memory = _CommonMemory(size) if share else None
        self._parts: dict[tuple[int, ...], Switchboard] = {}
        self._lock = threading.Lock()

    def part(self, number: int, members: Sequence[int]) -> Switchboard:
        """The one of these ranks in the split of this number: the same for all of them."""
        with self._lock:
            return self._parts.setdefault(
                (number, *members), Switchboard(len(members), self.memory is not None)
            )


class _CommonMemory:
    """A block of every rank, and all else that they have: it is one process."""

    nbytes = BLOCK_BYTES
    pulls = True

    def __init__(self, size: int) -> None:
        self._blocks = np.zeros((size, BLOCK_BYTES), np.uint8)
        self.addresses: Sequence[int] = [int(block.ctypes.data) for block in self._blocks]
        self.arena = np.empty(0, np.uint8)
        self.processes: Sequence[int] = [0] * size

    def word(self, rank: int, offset: int) -> Any:
        return self._blocks[rank, offset : offset + 8].view(np.int64)


@dataclass(eq=False)
class _Mailbox:
    """What lies waiting at one rank.  Its condition guards it and wakes the rank."""

    changed: threading.Condition = field(default_factory=threading.Condition)
    sends: list[_Message] = field(default_factory=list)
    recvs: list[_Message] = field(default_factory=list)
    control: deque[tuple[int, bytes]] = field(default_factory=deque)

    def wake(self) -> None:
        with self.changed:
            self.changed.notify_all()


@dataclass(eq=False)
class _Message:
    """One side of a message; complete once it has met the other side."""

    boxes: list[_Mailbox]
    source: int
    target: int
    flow: int
    buffer: memoryview
    sends: bool
    complete: bool = True

    def Start(self) -> None:  # noqa: N802 - mpi4py's name
        self.complete = False
        box = self.boxes[self.target]
        mine, theirs = (box.sends, box.recvs) if self.sends else (box.recvs, box.sends)
        with box.changed:
            other = next(
                (m for m in theirs if m.source == self.source and m.flow == self.flow), None
            )
            if other is None:
                mine.append(self)
            else:
                theirs.remove(other)
                _deliver(*((self, other) if self.sends else (other, self)))
            box.changed.notify_all()
        if other is not None:
            self.boxes[self.source].wake()

    def Test(self) -> bool:  # noqa: N802 - mpi4py's name
        return self.complete

    def Free(self) -> None:  # noqa: N802 - mpi4py's name
        self.buffer = memoryview(b"")


def _deliver(send: _Message, recv: _Message) -> None:
    recv.buffer[: len(send.buffer)] = send.buffer
    recv.complete = send.complete = True


class ThreadTransport:
    """One rank's end of a Switchboard."""

    name = "thread"
    spins = 0
    threads = True

    def __init__(self, switchboard: Switchboard, rank: int) -> None:
        self.rank = rank
        self.size = len(switchboard.mailboxes)
        self._boxes = switchboard.mailboxes
        self._switchboard = switchboard
        self.memory: SharedMemory | None = switchboard.memory

    def sender(self, peer: int, flow: int, buffer: memoryview) -> _Message:
        return _Message(self._boxes, self.rank, peer, flow, buffer, sends=True)

    def receiver(self, peer: int, flow: int, buffer: memoryview) -> _Message:
        return _Message(self._boxes, peer, self.rank, flow, buffer, sends=False)

    def translate(self, error: Exception) -> Exception:
        return error

    def withdraw(self, receiver: Any) -> bool:
        box = self._boxes[self.rank]
        with box.changed:
            if receiver in box.recvs:
                box.recvs.remove(receiver)
                receiver.complete = True
                return True
        return False

    def discard(self, peer: int) -> bool:
        box = self._boxes[self.rank]
        with box.changed:
            message = next((m for m in box.sends if m.source == peer), None)
            if message is None:
                return False
            box.sends.remove(message)
            message.complete = True
        self._boxes[peer].wake()
        return True

    def tell(self, peer: int, message: bytes) -> None:
        box = self._boxes[peer]
        with box.changed:
            box.control.append((self.rank, message))
            box.changed.notify_all()

    def told(self, peers: Iterable[int]) -> bool:
        return True

    def hear(self) -> list[tuple[int, bytes]]:
        control = self._boxes[self.rank].control
        return [control.popleft() for _ in range(len(control))]

    def pause(self, idle: int) -> None:
        box = self._boxes[self.rank]
        with box.changed:
            box.changed.wait(min(1e-5 * idle, _LONGEST_PAUSE_S))

    def nodes(self) -> tuple[tuple[int, ...], ...]:
        return (tuple(range(self.size)),)

    def split(self, members: Sequence[int], number: int, timeout_s: float) -> ThreadTransport:
        part = self._switchboard.part(number, members)
        return ThreadTransport(part, members.index(self.rank))

    def close(self) -> None:
        pass
