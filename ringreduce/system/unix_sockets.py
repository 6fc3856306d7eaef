"""Unix sockets between processes of one user."""

from __future__ import annotations

import os
import socket
import struct
import time

BACKLOG = 4096
"""Connections that may wait until they are accepted."""
LONGEST_WAIT_S = 2e6
"""The most seconds that one call of a socket can wait."""
_CREDENTIALS = struct.Struct("3i")
"""``struct ucred``: process id, user id and group id of the peer of a socket."""
_RETRY_S = 0.002
"""Seconds between two attempts to connect."""


def peer_process(connection: socket.socket) -> int | None:
    """Return the process id of the peer; None if the process belongs to another user."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    process, user, _ = _CREDENTIALS.unpack(credentials)
    return int(process) if user == os.geteuid() else None


def connect(connection: socket.socket, address: bytes, deadline: float) -> None:
    """Connect to `address` before `deadline`, a time of ``time.monotonic``.

    Waits while the listener's backlog is full.

    Raises TimeoutError after the deadline, and ConnectionRefusedError if no process listens.
    """
    while True:
        left = max(deadline - time.monotonic(), 0.001)
        connection.settimeout(min(left, LONGEST_WAIT_S))
        try:
            return connection.connect(address)
        except BlockingIOError:  # Linux does not wait for a place in the backlog
            if time.monotonic() >= deadline:
                raise TimeoutError from None
        time.sleep(_RETRY_S)
