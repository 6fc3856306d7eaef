"""Messages between a launcher and its ranks on one host.

A message is one packet of a Unix socket: JSON with the token of the job, and open files.  A file
that was sent stays open in the socket even if its sender is killed.  The receiver refuses a message
with a wrong token: its sender belongs to an earlier generation, or to another job.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import hmac
import json
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from ringreduce.system.proc import is_exiting
from ringreduce.system.unix_sockets import peer_process

ADDRESS = "RINGREDUCE_LAUNCHER"
"""The environment variable with the launcher's address: a path, or a name without a file."""
TOKEN = "RINGREDUCE_TOKEN"
"""The environment variable with the token of the job, or of its generation."""
ELASTIC = "RINGREDUCE_ELASTIC"
"""The environment variable that is "1" in a job that goes on after losses."""
EXPECTED_SIZE = "RINGREDUCE_EXPECTED_SIZE"
"""The environment variable with the number of ranks that the launcher asked for."""
MORE_WORDS = "RINGREDUCE_MORE_WORDS_"
"""The environment variables of this name and 1, 2, … have the rest of a long list of words."""
_MOST_BYTES = 1 << 16
_HIGH = 512
"""A descriptor above those that MPI uses."""
_MOST_FILES = 2


class WireError(ValueError):
    """A message is none of this protocol, or has a wrong token."""


@dataclass(frozen=True)
class WireMessage:
    """A received message.  Its receiver closes the files."""

    kind: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    files: tuple[int, ...] = ()

    def close(self) -> None:
        for file in self.files:
            os.close(file)


class Connection:
    """One end of a connection.  A child that this process forks sends nothing."""

    def __init__(self, to: socket.socket, token: str) -> None:
        self.socket, self.token = to, token
        self._pid = os.getpid()

    def send(self, kind: str, files: Sequence[int] = (), **fields: Any) -> bool:
        """Send a message.  Returns False if the other end is gone, or in a forked child.

        Raises ValueError if the message is too long.
        """
        if os.getpid() != self._pid:
            return False
        packet = json.dumps({"token": self.token, "kind": kind, **fields}).encode()
        if len(packet) > _MOST_BYTES:
            raise ValueError(f"a message {kind!r} of {len(packet)} bytes, more than {_MOST_BYTES}")
        try:
            socket.send_fds(self.socket, [packet], files)
        except OSError:
            return False
        return True

    def receive(self, flags: int = 0) -> WireMessage | None:
        """Wait for a message.  None: the other end is gone.  Raises WireError for a wrong one."""
        files: list[int] = []
        try:
            packet, files, _, _ = socket.recv_fds(
                self.socket, _MOST_BYTES, _MOST_FILES, flags | socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            raise
        except OSError:  # as if the other end had closed the connection
            packet = b""
        if not packet:
            return None
        try:
            return self._message(packet, files)
        except WireError:
            for file in files:
                os.close(file)
            raise

    def ask(self, kind: str, **fields: Any) -> WireMessage | None:
        """Send a message and wait for the answer.  None: the other end is gone."""
        return self.receive() if self.send(kind, **fields) else None

    @property
    def peer_ends(self) -> bool:
        """Whether the process at the other end has begun to end, though its files may be open.

        The kernel closes a process's files with its last thread, and may report the end of the
        first one before.
        """
        peer = peer_process(self.socket)
        return peer is not None and peer > 0 and is_exiting(peer)

    def close_first(self) -> None:
        """Let the kernel close this end before MPI's files when the process is killed.

        The kernel begins with the highest descriptor.  MPI's process manager kills the
        other ranks when it sees that a rank's files are closed, and the launcher must have
        seen it before.
        """
        with contextlib.suppress(OSError):  # the process may not have so many descriptors
            high = fcntl.fcntl(self.socket.fileno(), fcntl.F_DUPFD_CLOEXEC, _HIGH)
            lower, self.socket = self.socket, socket.socket(fileno=high)
            lower.close()

    def close(self) -> None:
        self.socket.close()

    def _message(self, packet: bytes, files: Sequence[int]) -> WireMessage:
        try:
            fields = json.loads(packet)
            token, kind = fields.pop("token"), fields.pop("kind")
        except (ValueError, AttributeError, KeyError, TypeError, RecursionError):
            raise WireError("a message that is no JSON with a token") from None
        if not isinstance(token, str) or not isinstance(kind, str):
            raise WireError("a message whose token or kind is no text")
        if not hmac.compare_digest(token.encode(errors="replace"), self.token.encode()):
            raise WireError(f"a message {kind!r} with a wrong token")
        return WireMessage(kind, fields, tuple(files))


def bound(name: str) -> socket.socket:
    """Return a socket with an address: a path, or else a name that needs no file."""
    return _prepared(lambda found: found.bind(_address(name)))


def connected(name: str, token: str) -> Connection:
    """Return a connection to the socket of a name.  Raises OSError if there is none."""
    return Connection(_prepared(lambda to: to.connect(_address(name))), token)


def connect(environment: Mapping[str, str]) -> Connection | None:
    """Connect to the launcher that the variables name; None if there is none on this host."""
    with contextlib.suppress(OSError):
        if name := environment.get(ADDRESS, ""):
            connection = connected(name, environment.get(TOKEN, ""))
            connection.close_first()
            return connection
    return None


@cache
def to_launcher() -> Connection | None:
    """Return this process's connection to its launcher; None if it has none on this host."""
    connection = connect(os.environ)
    if connection is not None:
        # The kernel closes it at the very end, and Python must not warn of that.
        atexit.register(connection.socket.detach)
    return connection


def _prepared(prepare: Callable[[socket.socket], None]) -> socket.socket:
    """Return a new socket after `prepare`; close it if that raises."""
    found = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        prepare(found)
    except BaseException:
        found.close()
        raise
    return found


def _address(name: str) -> str | bytes:
    return name if name.startswith("/") else b"\0" + os.fsencode(name)
