"""Find out which rank ended a job, and how.

A rank that `ringreduce run` has started connects to a socket of the launcher, and reports how it
ends.  A killed rank cannot report: the kernel tells the launcher that its process is gone.  MPI's
process manager ends the other ranks a moment later, so the first end counts.  The kernel lists the
ends in their order, even if the launcher is late.  Ranks on other hosts cannot connect.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import select
import signal
import socket
import struct
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ringreduce.launch.mpiexec import Flavour
from ringreduce.topology import RANK_VARIABLES

ADDRESS = "RINGREDUCE_LAUNCHER"
"""The environment variable with the name of the launcher's socket."""
_MOST_BYTES = 1024
"""Bytes of the longest report."""
_CREDENTIALS = struct.Struct("3i")
"""``struct ucred``: process id, user id and group id of the peer of a socket."""
_PROCESS_INFO = struct.Struct("Q52xi")
"""``struct pidfd_info`` of Linux: the mask of fields asked for and returned; the exit status."""
_WITH_STATUS = 1 << 3
"""``PIDFD_INFO_EXIT`` in the mask."""
_GET_PROCESS_INFO = 3 << 30 | _PROCESS_INFO.size << 16 | 0xFF << 8 | 11
"""The ioctl ``PIDFD_GET_INFO``."""
_INTELS_CODE = 255
"""The exit code that Intel MPI's mpiexec may return after a killed rank."""
_DEADLY = (
    *(signal.SIGILL, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGKILL),
    *(signal.SIGSEGV, signal.SIGPIPE, signal.SIGALRM, signal.SIGTERM, signal.SIGXCPU),
    *(signal.SIGXFSZ, signal.SIGSYS),
)
"""Signals that end a rank before it can report."""


class Report:
    """A rank's connection to the launcher.  It reports nothing if there is no launcher here."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._pid = os.getpid()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        rank = next((environment[name] for name in RANK_VARIABLES if name in environment), "")
        with contextlib.suppress(OSError):
            self._socket.connect(_abstract(environment.get(ADDRESS, "")))
        self._send(rank)

    def end(self, how: str = "") -> None:
        """Report that this rank ends the job, and how.

        With "" report that the rank ends but the job goes on.  A child that the rank has forked
        reports nothing.
        """
        if os.getpid() == self._pid:
            self._send(how)

    def _send(self, text: str) -> None:
        with contextlib.suppress(OSError):
            self._socket.send(text.encode(errors="replace")[:_MOST_BYTES] or b" ")


def _abstract(name: str) -> bytes:
    """Return the address of a socket that has a name but no file."""
    return b"\0" + name.encode()


@dataclass
class _Rank:
    """A rank, as the launcher sees it."""

    connection: socket.socket
    pid: int
    number: str = ""
    """Its number; "" before its first report."""
    reported: bool = False
    """Whether it has reported how it ends."""


@dataclass(frozen=True)
class End:
    """How the first rank ended that ended the job."""

    rank: str
    how: str
    """What the rank did, such as "raised ValueError"; "": it was gone without a report."""
    status: int | None = None
    """The status of its process, as for ``os.waitstatus_to_exitcode``; None if not known."""

    def text(self, returncode: int, flavour: Flavour) -> str:
        """Describe the end; "" if it is not known.  `returncode` is that of mpiexec."""
        how, number = self.how, self.signal(returncode, flavour)
        if number:
            how = f"was killed by signal {number} ({signal.Signals(number).name})"
        where = f"rank {self.rank} on {platform.node()}"
        return f"{where} {how}; this ended the job" if how else ""

    def signal(self, returncode: int, flavour: Flavour) -> int:
        """Return the number of the signal that killed the rank; 0 if none did.

        After signal n Open MPI's mpiexec returns 128 + n, as shells do, and hydra's returns n.
        That of Intel MPI may return 255, and the status of the process has the signal.  Without a
        signal hydra's may return that of the signal with which it ended other ranks.
        """
        number = returncode - 128 if flavour is Flavour.OPEN_MPI else returncode
        is_killed = self.status is None or os.WIFSIGNALED(self.status)
        if flavour is Flavour.INTEL and returncode == _INTELS_CODE and self.status is not None:
            number = os.WTERMSIG(self.status)
        return number if is_killed and number in _DEADLY and not self.how else 0


class Watch:
    """Watches the ranks of a job in a thread, until `stop`."""

    def __init__(self) -> None:
        self.address = f"ringreduce {os.getpid()} {os.urandom(8).hex()}"
        """The name of the socket that ranks connect to."""
        self.first: End | None = None
        """The first end that ended the job."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.bind(_abstract(self.address))
        self._socket.listen(socket.SOMAXCONN)
        self._stopping = os.eventfd(0)
        self._ranks: dict[int, _Rank] = {}
        """By the descriptor of its connection, and by that of its process."""
        self._thread = threading.Thread(target=self._run, name="ringreduce watch", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread, once it has seen all that happened before.  Call it once, after start."""
        os.eventfd_write(self._stopping, 1)
        self._thread.join()
        os.close(self._stopping)
        self._socket.close()
        for descriptor, rank in self._ranks.items():
            if descriptor == rank.connection.fileno():
                rank.connection.close()
            else:
                os.close(descriptor)

    def _run(self) -> None:
        with select.epoll() as events:
            for descriptor in (self._socket.fileno(), self._stopping):
                events.register(descriptor, select.EPOLLIN)
            stopping = False
            while happened := events.poll(0 if stopping else None):
                for descriptor, _ in happened:
                    if descriptor == self._stopping:
                        stopping = True  # and look at what is left
                        events.unregister(descriptor)
                    elif descriptor == self._socket.fileno():
                        self._accept(events)
                    elif not self._handle(descriptor, self._ranks[descriptor]):
                        events.unregister(descriptor)

    def _accept(self, events: select.epoll) -> None:
        connection, _ = self._socket.accept()
        credentials = connection.getsockopt(
            socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size
        )
        rank = _Rank(connection, _CREDENTIALS.unpack(credentials)[0])
        descriptors = [connection.fileno()]
        with contextlib.suppress(OSError):  # the process may be gone already
            descriptors.append(os.pidfd_open(rank.pid))
        for descriptor in descriptors:
            self._ranks[descriptor] = rank
            events.register(descriptor, select.EPOLLIN)

    def _handle(self, descriptor: int, rank: _Rank) -> bool:
        """Handle an event of `descriptor`.  Returns False if no further event can follow."""
        if descriptor != rank.connection.fileno():  # the process is gone
            if not rank.reported:
                self._record(End(rank.number, "", status_of(rank.pid, descriptor)))
            return False
        message = b""
        with contextlib.suppress(OSError):
            message = rank.connection.recv(_MOST_BYTES)
        text = message.decode(errors="replace").strip()
        if not rank.number:
            rank.number = text
        elif message:
            rank.reported = True
            if text:
                self._record(End(rank.number, text))
        return bool(message)

    def _record(self, end: End) -> None:
        self.first = self.first or end


def status_of(pid: int, descriptor: int) -> int | None:
    """Return the status of a process that has ended; None if it is not known.

    `descriptor` is the pidfd of the process.  A process that its parent has reaped is not in /proc.
    Linux 6.15 and later return its status by the pidfd.
    """
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().split()[-1])
    info = bytearray(_PROCESS_INFO.size)
    _PROCESS_INFO.pack_into(info, 0, _WITH_STATUS, 0)
    with contextlib.suppress(OSError):
        fcntl.ioctl(descriptor, _GET_PROCESS_INFO, info)
        mask, status = _PROCESS_INFO.unpack(info)
        return int(status) if mask & _WITH_STATUS else None
    return None
