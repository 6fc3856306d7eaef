"""Messages between ranks that are threads of one process: for notebooks and for tests.

No message is buffered: a send completes only once its receive is posted.  A schedule that runs here
therefore needs no buffering of any transport.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ringreduce.transports.base import Transport, not_assembled
from ringreduce.transports.yielding import Yielding

_LONGEST_PAUSE_S = 0.002
"""Seconds; a message that arrives ends the pause."""
_CHANNEL = -1
"""The number of the part of a switchboard that is the channel: splits count from 1."""


class Switchboard:
    """Connects the ranks of one group of threads: a mailbox for each rank."""

    def __init__(self, size: int) -> None:
        self.mailboxes = [_Mailbox() for _ in range(size)]
        self._parts: dict[tuple[int, ...], Switchboard] = {}
        self._lock = threading.Lock()
        """Guards `_parts` and `_shared`."""
        self._collected = threading.Condition()
        """Guards `_collections`, and wakes the ranks that wait in one."""
        self._collections: dict[int, dict[int, bytes]] = {}
        """By number of the collection and rank: the bytes that ranks have passed."""
        self._shared: Any = None
        """The memory of `allocate_shared`, once some rank has called it."""

    def part(self, number: int, members: Sequence[int]) -> Switchboard:
        with self._lock:
            return self._parts.setdefault((number, *members), Switchboard(len(members)))

    def collect(self, number: int, rank: int, mine: bytes, timeout_s: float) -> bytes:
        size = len(self.mailboxes)
        with self._collected:
            passed = self._collections.setdefault(number, {})
            passed[rank] = mine
            self._collected.notify_all()
            if not self._collected.wait_for(lambda: len(passed) == size, timeout_s):
                raise not_assembled(timeout_s, [r for r in range(size) if r not in passed])
            return b"".join(passed[each] for each in range(size))

    def allocate_shared(self, nbytes: int) -> Any:
        with self._lock:
            if self._shared is None:
                self._shared = np.zeros((len(self.mailboxes), nbytes), np.uint8)
            return self._shared


@dataclass(eq=False)
class _Mailbox:
    """Sends and receives of one rank without a counterpart yet, and control messages.

    `changed` guards them; a notification wakes the rank.
    """

    changed: threading.Condition = field(default_factory=threading.Condition)
    sends: list[_Message] = field(default_factory=list)
    recvs: list[_Message] = field(default_factory=list)
    control: deque[tuple[int, bytes]] = field(default_factory=deque)

    def wake(self) -> None:
        with self.changed:
            self.changed.notify_all()


@dataclass(eq=False)
class _Message:
    """A send or a receive; complete once it has matched its counterpart."""

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


class ThreadTransport(Transport):
    name = "thread"
    threads = True
    one_process = True

    def __init__(self, switchboard: Switchboard, rank: int, timeout_s: float = 600.0) -> None:
        self.rank = rank
        self.yielding = Yielding(crowded=True)  # threads of one process run one at a time
        self.size = len(switchboard.mailboxes)
        self.job_ranks: Sequence[int] = range(self.size)
        self._boxes = switchboard.mailboxes
        self._switchboard = switchboard
        self._timeout_s = timeout_s
        self._collections = 0
        self._channel: ThreadChannel | None = None

    def sender(self, peer: int, flow: int, buffer: memoryview) -> _Message:
        return _Message(self._boxes, self.rank, peer, flow, buffer, sends=True)

    def receiver(self, peer: int, flow: int, buffer: memoryview) -> _Message:
        return _Message(self._boxes, peer, self.rank, flow, buffer, sends=False)

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

    def send_control(self, peer: int, message: bytes) -> None:
        box = self._boxes[peer]
        with box.changed:
            box.control.append((self.rank, message))
            box.changed.notify_all()

    def control_sent(self, peers: Iterable[int]) -> bool:
        return True

    def poll_control(self) -> list[tuple[int, bytes]]:
        control = self._boxes[self.rank].control
        return [control.popleft() for _ in range(len(control))]

    def pause(self, idle: int) -> None:
        box = self._boxes[self.rank]
        with box.changed:
            box.changed.wait(min(1e-5 * idle, _LONGEST_PAUSE_S))

    def collect(self, mine: bytes, patience_s: float = 0.0) -> bytes:
        number, self._collections = self._collections, self._collections + 1
        return self._switchboard.collect(number, self.rank, mine, self._timeout_s + patience_s)

    def allocate_shared(self, nbytes: int) -> Sequence[Any]:
        return list(self._switchboard.allocate_shared(nbytes))

    def channel(self) -> ThreadChannel:
        if self._channel is None:
            part = self._switchboard.part(_CHANNEL, range(self.size))
            self._channel = ThreadChannel(ThreadTransport(part, self.rank, self._timeout_s))
        return self._channel

    def split(self, members: Sequence[int], number: int, timeout_s: float) -> ThreadTransport:
        part = self._switchboard.part(number, members)
        return ThreadTransport(part, members.index(self.rank), timeout_s)

    def shrunk(self, timeout_s: float) -> ThreadTransport:
        raise NotImplementedError(
            "shrink: the ranks are threads of one process, which end together"
        )


class ThreadChannel:
    def __init__(self, transport: ThreadTransport) -> None:
        self.rank, self.size = transport.rank, transport.size
        self._transport = transport
        self._arrived: list[list[bytes]] = [[] for _ in range(self.size)]
        """By peer: the envelopes that nobody has polled."""
        self.sender, self.receiver = transport.sender, transport.receiver
        self.translate, self.pause = transport.translate, transport.pause

    def post(self, peer: int, envelope: bytes) -> None:
        self._transport.send_control(peer, envelope)

    def poll(self, peer: int) -> list[bytes]:
        for sender, envelope in self._transport.poll_control():
            self._arrived[sender].append(envelope)
        arrived, self._arrived[peer] = self._arrived[peer], []
        return arrived

    def close(self) -> None:
        pass
