"""Talk with several processes at the same time.  Any of them may be a stranger.

A conversation is a generator that yields how many bytes it reads next.  So a process that says
nothing keeps no other process waiting.
"""

from __future__ import annotations

import errno
import logging
import os
import selectors
import socket
import time
from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

_log = logging.getLogger("ringreduce.transports")
Conversation = Generator[int, bytes, Callable[[], None] | None]
"""Yields the number of bytes that it reads next, and gets them; below 0: a line of at most so many
bytes.  After its end the connection stays open.  The function that it returns is called if the
peer then ends the connection before it sends anything more."""
TALK_S, CONNECT_S = 5.0, 2.0
"""Seconds that a process which has connected may take for its conversation; seconds that it takes
at most to connect to another host, if that can be reached."""
TIMED_OUT = "timed out"
_PART_BYTES = 1 << 16


class StrangerError(Exception):
    """The process of a conversation does not belong here.

    The text says what it did; "": nothing that has to be logged.
    """


@dataclass(eq=False)
class _Talk:
    connection: socket.socket
    conversation: Conversation
    seconds: float
    """How long the process may take, once it is connected."""
    drop: Callable[[str], None]
    """Called with the reason after the connection is closed without an end of the conversation."""
    ends: float = 0.0
    """When the process is dropped, a time of ``time.monotonic``."""
    connects: bool = False
    """Whether the connection is still being made."""
    wanted: int = 0
    received: bytearray = field(default_factory=bytearray)


class Conversations:
    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        """With each connection: the function to call when the kernel has something of it."""
        self._talks: dict[socket.socket, _Talk] = {}

    def serve(
        self, listening: socket.socket, talk: Callable[[socket.socket], Conversation]
    ) -> None:
        """Have each process that connects to `listening` talk with what `talk` returns."""
        listening.setblocking(False)
        accept = partial(self._accept, listening, talk)
        self._selector.register(listening, selectors.EVENT_READ, accept)

    def begin(
        self,
        connection: socket.socket,
        conversation: Conversation,
        seconds: float,
        drop: Callable[[str], None],
        where: tuple[str, int] | None = None,
    ) -> None:
        """Connect to `where`, if it is given, within `CONNECT_S`; then talk for `seconds` at most.

        `drop` is called with the reason if the conversation does not come to its end.
        """
        connection.setblocking(False)
        talk = self._talks[connection] = _Talk(connection, conversation, seconds, drop)
        if where is None:
            self._selector.register(connection, selectors.EVENT_READ, partial(self._read, talk))
            self._connected(talk)
            return
        talk.ends, talk.connects = time.monotonic() + CONNECT_S, True
        self._selector.register(connection, selectors.EVENT_WRITE, partial(self._connected, talk))
        problem = connection.connect_ex(where)
        if problem not in (0, errno.EINPROGRESS):
            self._drop(talk, os.strerror(problem))

    def step(self, seconds: float) -> None:
        """Go on with all conversations, after at most `seconds` of waiting for the first byte."""
        now = time.monotonic()
        ends = min((talk.ends for talk in self._talks.values()), default=now + seconds)
        for key, _ in self._selector.select(max(0.0, min(seconds, ends - now))):
            key.data()
        now = time.monotonic()
        for talk in [talk for talk in self._talks.values() if talk.ends < now]:
            said = f"sent only {len(talk.received)} bytes" if talk.received else "sent nothing"
            self._drop(talk, TIMED_OUT if talk.connects else f"it {said}")

    def end(self, connection: socket.socket) -> None:
        """Close a connection, without a further word, if it has a conversation."""
        if self._talks.pop(connection, None) is not None:
            self._selector.unregister(connection)
            connection.close()

    def close(self) -> None:
        """Close the connections of all conversations that have not ended."""
        for connection in list(self._talks):
            self.end(connection)
        self._selector.close()

    def _accept(
        self, listening: socket.socket, talk: Callable[[socket.socket], Conversation]
    ) -> None:
        try:
            connection, whence = listening.accept()
        except OSError:  # the process has gone meanwhile
            return
        place = f"{whence[0]} port {whence[1]}" if isinstance(whence, tuple) else "this host"

        def drop(reason: str) -> None:
            if reason:
                _log.warning("init: dropped a stranger at %s: %s", place, reason)

        self.begin(connection, talk(connection), TALK_S, drop)

    def _connected(self, talk: _Talk) -> None:
        if talk.connects:
            if problem := talk.connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                self._drop(talk, os.strerror(problem))
                return
            self._selector.modify(talk.connection, selectors.EVENT_READ, partial(self._read, talk))
        talk.ends, talk.connects = time.monotonic() + talk.seconds, False
        self._advance(talk, None)

    def _read(self, talk: _Talk) -> None:
        try:
            most = abs(talk.wanted) - len(talk.received)
            part = talk.connection.recv(min(most, _PART_BYTES))
        except BlockingIOError:
            return
        except OSError:  # also if another conversation has ended this one meanwhile
            part = b""
        if not part:
            self._drop(talk, "it has closed the connection")
            return
        talk.received += part
        if (talk.wanted < 0 and part.endswith(b"\n")) or len(talk.received) == talk.wanted:
            received = bytes(talk.received)
            talk.received.clear()
            self._advance(talk, received)
        elif len(talk.received) == abs(talk.wanted):
            self._drop(talk, f"its line has more than {-talk.wanted} bytes")

    def _advance(self, talk: _Talk, received: bytes | None) -> None:
        try:
            talk.wanted = talk.conversation.send(received)  # type: ignore[arg-type]
        except StopIteration as end:
            del self._talks[talk.connection]
            self._selector.unregister(talk.connection)
            if end.value is not None:
                peek = partial(self._peek, talk.connection, end.value)
                self._selector.register(talk.connection, selectors.EVENT_READ, peek)
        except (StrangerError, OSError) as error:
            self._drop(talk, str(error))

    def _drop(self, talk: _Talk, reason: str) -> None:
        if talk.connection in self._talks:  # not if another conversation has ended this one
            self.end(talk.connection)
            talk.drop(reason)

    def _peek(self, connection: socket.socket, lost: Callable[[], None]) -> None:
        ended = True
        with suppress(OSError):
            ended = not connection.recv(1, socket.MSG_PEEK)
        self._selector.unregister(connection)
        if ended:
            lost()
