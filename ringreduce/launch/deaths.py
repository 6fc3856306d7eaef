"""Find out which rank of this host died first: each rank keeps a connection to the launcher open.

When one rank dies, the MPI ends the others within milliseconds, and some MPIs do not say which rank
was the first.  The kernel closes the connections in the order in which the ranks end.  A rank that
ends by itself first sends its exit code.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import signal
import socket
import threading
from collections.abc import Mapping
from dataclasses import dataclass

WATCH = "RINGREDUCE_WATCH"
"""The environment variable with the name of the launcher's socket, in the abstract namespace."""

_RANKS = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK")
_DEADLY = frozenset(
    int(number)
    for number in (
        *(signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGKILL),
        *(signal.SIGQUIT, signal.SIGSEGV, signal.SIGSYS, signal.SIGTERM, signal.SIGTRAP),
        *(signal.SIGXCPU, signal.SIGXFSZ),
    )
)
"""Signals that end a process.  SIGHUP and SIGINT are left out: as exit codes they are 1 and 2."""
_INTELS_CODE = 255
"""The exit code of Intel MPI's mpiexec after any signal.  Its output names the signal."""
_LONGEST_MESSAGE = 64


@dataclass(frozen=True)
class End:
    """The end of a rank."""

    rank: int
    pid: int
    code: int | None
    """The exit code that the rank has sent.  None: it sent none, so it was killed."""


class RankWatch:
    """The launcher's side: waits in a thread for ranks that end.  Use it in ``with``."""

    def __init__(self) -> None:
        self.name = f"ringreduce-{os.getpid()}-{secrets.token_hex(4)}"
        """The value of the variable `WATCH` for the ranks."""
        self.first: End | None = None
        """The first rank that was killed, or that ended with a code other than 0."""
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(f"\0{self.name}")
        self._listener.listen(1024)
        self._woken, self._waker = socket.socketpair()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._received: dict[socket.socket, bytes] = {}

    def __enter__(self) -> RankWatch:
        return self

    def __exit__(self, *_: object) -> None:
        self._waker.close()
        if self._thread.ident is not None:
            self._thread.join()
        for each in (self._listener, self._woken, *self._received):
            each.close()

    def start(self) -> None:
        """Start the thread.  Ranks that connected before are not lost."""
        self._thread.start()

    def _watch(self) -> None:
        with selectors.EpollSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    if key.fileobj is self._woken:
                        return
                    if key.fileobj is self._listener:
                        connection, _ = self._listener.accept()
                        selector.register(connection, selectors.EVENT_READ)
                        self._received[connection] = b""
                    elif isinstance(key.fileobj, socket.socket) and self._has_ended(key.fileobj):
                        selector.unregister(key.fileobj)
                        key.fileobj.close()

    def _has_ended(self, connection: socket.socket) -> bool:
        """Receive from a rank; if the rank has ended, note how."""
        data = b""
        with contextlib.suppress(ConnectionError):
            data = connection.recv(_LONGEST_MESSAGE)
        if data:
            self._received[connection] += data
            return False
        words = self._received.pop(connection).split()
        if len(words) >= 2:
            rank, pid, *code = map(int, words)
            end = End(rank, pid, code[0] if code else None)
            if self.first is None and end.code != 0:
                self.first = end
        return True


def report(first: End | None, code: int) -> tuple[str, int]:
    """Return a sentence on the rank that was killed, and the exit code of the job.

    `code` is mpiexec's.  The sentence is empty, and the code is kept, if no rank was killed.
    """
    if first is None or first.code is not None or code == 0:
        return "", code
    number = code - 128 if code > 128 else code
    where = f"rank {first.rank} (process {first.pid} on {socket.gethostname()})"
    if number in _DEADLY:
        name = signal.Signals(number).name
        return f"{where} was killed by signal {number} ({name})", 128 + number
    return (f"{where} was killed", code) if code == _INTELS_CODE else ("", code)


class Connection:
    """A rank's side."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """Connect to the launcher that `environment` names; do nothing if there is none."""
        self._socket: socket.socket | None = None
        rank = next((environment[name] for name in _RANKS if name in environment), None)
        if WATCH not in environment or rank is None:
            return
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(f"\0{environment[WATCH]}")
            connection.sendall(f"{rank} {os.getpid()} ".encode())
        except OSError:  # the launcher is of another host, or it has been killed
            connection.close()
            return
        self._socket = connection
        # A child that the program forks would keep the connection open after the rank's death.
        os.register_at_fork(after_in_child=connection.close)

    def send_exit_code(self, code: int) -> None:
        """Tell the launcher that this rank ends by itself."""
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.sendall(f"{code} ".encode())
