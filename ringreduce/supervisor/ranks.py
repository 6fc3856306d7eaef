"""The ranks of a job, as their launcher sees them: their messages, and the ends of their processes.

A rank connects to a socket of the launcher.  A killed rank sends nothing: the kernel reports the
end of its process.  Ranks on other hosts cannot connect.

When a process ends, the kernel closes its files, and reports the end a moment later.  In between
MPI's process manager sees the closed files and kills other ranks, whose ends may be reported first.
So the order in which ranks close their connections, which the kernel keeps even if the launcher is
late, is the order of the ends.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field

from ringreduce.recovery.wire import Connection, WireError, WireMessage
from ringreduce.system.proc import is_exiting, status_of
from ringreduce.system.unix_sockets import peer_process

ENDING_S = 1.0
"""Seconds to wait for the end of a process that has closed its files."""


@dataclass(eq=False)
class Rank:
    connection: Connection
    pid: int
    number: str = ""
    reported: bool = False
    """Whether it has reported how it ends."""
    process: int | None = field(default=None, repr=False)
    """The descriptor of its process; None if the process is gone, or `Ranks` has forgotten it."""
    gone: bool = False

    @property
    def is_exiting(self) -> bool:
        """Whether its process ends already, though it may not be gone yet."""
        return is_exiting(self.pid)

    def send(self, number: int) -> None:
        """Send a signal to its process, and to no later process of the same id."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.process, number)

    def kill(self) -> None:
        self.send(signal.SIGKILL)


@dataclass(frozen=True)
class Said:
    rank: Rank
    message: WireMessage


@dataclass(frozen=True)
class Gone:
    rank: Rank
    status: int | None
    """Its status, as for ``os.waitstatus_to_exitcode``; None if not known."""


class Ranks:
    """Listens to the ranks that connect, and watches their processes.

    `fileno` can be read when `happened` has something to return.
    """

    def __init__(self, listening: socket.socket, token: str, stdin: int | None = None) -> None:
        """Give the descriptor `stdin` to ranks that ask for the launcher's standard input."""
        self._stdin = () if stdin is None else (stdin,)
        self.token = token
        """The token of the messages of ranks that connect from now on."""
        self._socket = listening
        self._socket.listen(socket.SOMAXCONN)
        self._events = select.epoll()
        self._events.register(self._socket.fileno(), select.EPOLLIN)
        self._closings = select.epoll()
        """Lists the connections in the order in which ranks close them, whatever is unread."""
        self._ranks: dict[int, Rank] = {}
        """By the descriptor of the rank's connection, and by that of its process."""
        self._closed: list[Rank] = []
        """The ranks that have closed their connections, in the order in which they closed them."""

    def fileno(self) -> int:
        return self._events.fileno()

    def known(self) -> list[Rank]:
        return list(dict.fromkeys(self._ranks.values()))

    def happened(self) -> Iterator[Said | Gone]:
        """Yield the messages and ends since the last call, in their order."""
        while ready := self._events.poll(0):
            self._note_closings()
            for descriptor, _ in ready:
                if descriptor == self._socket.fileno():
                    self._accept()
                elif (rank := self._ranks.get(descriptor)) is not None:
                    yield from self._handle(descriptor, rank)

    def forget(self, rank: Rank) -> None:
        if rank in self._closed:
            self._closed.remove(rank)
        for descriptor in (rank.connection.socket.fileno(), rank.process):
            if descriptor is not None and self._ranks.pop(descriptor, None) is not None:
                with contextlib.suppress(OSError):  # a connection that has ended is not registered
                    self._events.unregister(descriptor)
        rank.connection.close()
        if rank.process is not None:
            os.close(rank.process)
            rank.process = None

    def close(self) -> None:
        for rank in self.known():
            self.forget(rank)
        self._events.close()
        self._closings.close()
        self._socket.close()

    def _accept(self) -> None:
        connection, _ = self._socket.accept()
        pid = peer_process(connection)
        if pid is None:
            connection.close()
            return
        rank = Rank(Connection(connection, self.token), pid)
        with contextlib.suppress(OSError):  # the process may be gone already
            rank.process = os.pidfd_open(rank.pid)
        for descriptor in (connection.fileno(), rank.process):
            if descriptor is not None:
                self._ranks[descriptor] = rank
                self._events.register(descriptor, select.EPOLLIN)
        self._closings.register(connection.fileno(), select.EPOLLRDHUP | select.EPOLLONESHOT)

    def _handle(self, descriptor: int, rank: Rank) -> Iterator[Said | Gone]:
        if descriptor == rank.process:
            while (said := self._receive(rank)) is not None:  # what it said comes before its end
                yield said
            if descriptor in self._ranks:
                yield from self._end(rank)
        elif (said := self._receive(rank)) is not None:
            yield said
        elif rank.process is None:
            yield from self._end(rank)

    def _end(self, rank: Rank) -> Iterator[Said | Gone]:
        """Yield the end of a rank whose process is gone, after those of ranks that ended before."""
        for earlier in self._ending_before(rank):
            if earlier.process is not None and _is_ready(earlier.process, ENDING_S):
                yield from self._handle(earlier.process, earlier)
        if rank.gone or rank not in self.known():
            return
        rank.gone, status = True, None
        if rank.process is not None:
            self._events.unregister(rank.process)
            status = status_of(rank.pid, rank.process)
        yield Gone(rank, status)

    def _ending_before(self, rank: Rank) -> list[Rank]:
        """Return the ranks that began to end before a rank that is gone, and are not gone yet."""
        self._note_closings()
        if rank not in self._closed:
            return []
        before = self._closed[: self._closed.index(rank)]
        return [each for each in before if not each.gone and each.is_exiting]

    def _note_closings(self) -> None:
        """Note which ranks have closed their connections.

        An answer to a rank makes the kernel list its connection, though it is open.  A look takes
        it off the list; else it would stand before those that close earlier.
        """
        for descriptor, _ in self._closings.poll(0):
            if (closed := self._ranks.get(descriptor)) is not None:
                self._closed.append(closed)

    def _receive(self, rank: Rank) -> Said | None:
        """Return the next message; None if there is none, or no other can follow."""
        try:
            message = rank.connection.receive(socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None
        except WireError:  # a process of another job, or of an earlier generation: no answer
            self.forget(rank)
            return None
        if message is None:
            with contextlib.suppress(OSError):
                self._events.unregister(rank.connection.socket.fileno())
            return None
        if message.kind == "hello":
            rank.number = str(message.fields.get("rank", ""))
        elif message.kind == "stdin":
            rank.connection.send("stdin", self._stdin)
            return self._receive(rank)
        elif message.kind == "end":
            rank.reported = True
        return Said(rank, message)


def _is_ready(descriptor: int, within_s: float) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(within_s * 1000))
