"""The interface of a road: how messages and their answers get from one rank to another.

There are two roads, `by_mailbox.MailboxRoad` through shared memory and `by_transport.TransportRoad`
by messages of the transport.  `endpoint.Endpoint` matches messages with receives and treats both
alike.  No method of a road waits.  What a road inherits serves one without compiled code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import Any, NamedTuple, Protocol

import numpy as np

OPEN, CLOSING, DRAINED, CLOSED = range(4)
"""States of a rank, in their order.

OPEN: it makes sends and receives.
CLOSING: it makes no new ones, and refuses messages for which it has no receive.
DRAINED: its own sends are over, too.
CLOSED: its receives are over, too, or it has left.
"""
_TEXT_LENGTH = 128
"""The most characters of a description.  Both ranks of a mismatch must name it alike."""


@dataclass(frozen=True)
class DtypeAndShape:
    text: str
    """Such as ``float32[3, 4]``, shortened to `_TEXT_LENGTH`."""
    digest: bytes
    """A hash of the whole text, of 16 bytes."""
    nbytes: int

    @staticmethod
    @lru_cache
    def of(dtype: np.dtype[Any], shape: tuple[int, ...]) -> DtypeAndShape:
        text = f"{dtype}[{', '.join(map(str, shape))}]"
        nbytes = dtype.itemsize
        for length in shape:
            nbytes *= length
        digest = blake2b(text.encode(), digest_size=16).digest()
        if len(text) > _TEXT_LENGTH:
            text = f"{text[: _TEXT_LENGTH - 3]}..."
        return DtypeAndShape(text, digest, nbytes)


class Arrival(NamedTuple):
    """A message that a peer has offered."""

    number: int
    """Number of the message among those of the pair, in the order of their sends."""
    tag: int
    digest: bytes
    text: str
    """The description of dtype and shape, shortened if it is long."""
    place: Any
    """Where the road finds the data."""


class Answered(NamedTuple):
    """The end of a message that this rank has sent."""

    number: int
    status: int
    """TAKEN, DIFFERENT or REFUSED: see `shm.mailbox`."""
    text: str
    """The description of the receive, if the status is DIFFERENT."""


class PeerState(NamedTuple):
    """The state of a peer, as it has last announced it."""

    state: int
    """OPEN, CLOSING, DRAINED or CLOSED."""
    reason: str
    """Why it is CLOSED."""
    broken: bool
    """Whether the peer has given up a message with this rank."""


class Road(Protocol):
    name: str
    """``"shared memory"`` or ``"messages"``."""

    def offer(self, peer: int, kind: DtypeAndShape, tag: int, data: np.ndarray) -> int:
        """Offer a message; return its number, from 1, or 0 if there is no place for it yet.

        `data` is contiguous.  It does not change until the message is answered.
        """

    def answers(self, peer: int) -> Iterator[Answered]:
        """Take the answers of a peer that have arrived."""

    def arrivals(self, peer: int) -> Iterator[Arrival]:
        """Take the offers of a peer in order; the road keeps short data until `read` or `drop`."""

    def read(self, peer: int, arrival: Arrival, into: np.ndarray) -> bool | None:
        """Copy the data of an arrival into a contiguous array of its kind.

        Returns True if they are copied, None if this has to be called again later, False if the
        sender can no longer give them.
        """

    def answer(self, peer: int, arrival: Arrival, status: int, kind: DtypeAndShape | None) -> None:
        """Answer a message, with the kind of the receive if the status is DIFFERENT."""

    def entry(
        self, name: str, general: Callable[..., Any], adopt: Callable[..., Any]
    ) -> Callable[..., Any]:
        """Return the function behind ``"send"``, ``"recv"`` or ``"probe"``, or `general`.

        The compiled one makes a message while no other is under way.  It calls `general` for all
        others, and ``adopt(x, peer[, tag])`` after a message that is not answered at once.
        """
        return general

    def offers(self, peer: int, tag: int) -> bool | None:
        """Return whether the next message of a quiet peer has arrived and has `tag`.

        Returns None if the endpoint has to take the peer's messages to find that out.
        """
        return None

    def admit(self, name: str, peer: int, array: np.ndarray, kind: DtypeAndShape) -> None:
        """Let compiled code make messages with arrays of this kind from now on."""
        return

    def set_quiet(self, peer: int, quiet: bool) -> None:
        """Let compiled code make messages with a peer, or not; then wait until it makes none.

        While a message is not adopted, compiled code makes none.
        """
        return

    def set_idle(self, idle: bool) -> None:
        """Let compiled code make messages with quiet peers, or with no peer at all."""
        return

    def forked(self) -> None:
        """Let compiled code make no more messages in a child process, and wait for no thread."""
        return

    def unadopted(self, peer: int) -> int:
        """Return the number of the message that compiled code has offered and has not answered."""
        return 0

    def adopted(self, peer: int) -> None:
        """Note that Python waits for the answer to that message."""
        return

    def announce(self, state: int, reason: str = "") -> None: ...

    def give_up(self, peer: int) -> None:
        """Announce that this rank makes no more messages with a peer."""

    def has_given_up(self, peer: int) -> bool:
        return False  # the pair has the error already

    def state_of(self, peer: int) -> PeerState: ...

    def has_unsent(self, peer: int) -> bool:
        """Return whether answers to a peer wait until the peer takes earlier ones."""
        return False

    def lost(self, peer: int) -> str:
        """Return why a peer can no longer answer, or ""."""

    def close(self) -> None:
        return
