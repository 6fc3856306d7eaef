"""What every transport offers: messages that can be started again and again, and a control channel.

A transport moves bytes between the ranks of one communicator and knows nothing of what they mean.
Data messages are bound once to a peer, a flow and a buffer, and then started any number of times.
Control messages are short, rare, and received by whoever asks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from ringreduce.errors import PeerTimeoutError


class Request(Protocol):
    """A message bound to its peer, flow and buffer; mpi4py's persistent requests are such."""

    def Start(self) -> None:  # noqa: N802 - mpi4py's name
        """Put the message under way."""

    def Test(self) -> bool:  # noqa: N802 - mpi4py's name
        """Whether the message is complete, or was never started; makes progress."""

    def Free(self) -> None:  # noqa: N802 - mpi4py's name
        """Let go of it; it is not under way."""


class Transport(Protocol):
    """Moves bytes between ranks.

    `collect`, `allocate_shared`, `split` and `close` wait for the other ranks; nothing else waits.
    """

    rank: int
    size: int
    name: str
    spins: int
    """Idle polls worth making before the first `pause`."""
    threads: bool
    """Whether another thread may use it, one at a time."""
    one_process: bool
    """Whether all ranks are threads of this process, so that each can read all memory."""

    def sender(self, peer: int, flow: int, buffer: memoryview) -> Request:
        """A message, not yet started, that sends `buffer` to `peer`."""

    def receiver(self, peer: int, flow: int, buffer: memoryview) -> Request:
        """A message, not yet started, that receives at most ``len(buffer)`` bytes from `peer`.

        Nothing longer may come: whoever posts it knows.  Messages of one ordered pair of ranks and
        one flow match first in, first out.
        """

    def translate(self, error: Exception) -> Exception:
        """What an error out of a request means: PeerLostError, or itself."""

    def withdraw(self, receiver: Any) -> bool | None:
        """Take back a receiver: True if no message came, False if one did, None to ask again."""

    def discard(self, peer: int) -> bool:
        """Receive and drop the earliest message from `peer` that nobody took; False if none."""

    def tell(self, peer: int, message: bytes) -> None:
        """Send a control message.  It is delivered once, in order, whenever the peer listens."""

    def told(self, peers: Iterable[int]) -> bool:
        """Whether all that was told to `peers` reaches them with no further call of this rank."""

    def hear(self) -> list[tuple[int, bytes]]:
        """The control messages that have come since, each with the rank that sent it."""

    def pause(self, idle: int) -> None:
        """Leave the core to others for a moment, longer as the count of `idle` polls grows."""

    def nodes(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each node, as far as the transport can tell."""

    def collect(self, mine: bytes) -> bytes:
        """Return the bytes that the ranks pass, in rank order; all pass the same length.

        Collective.  For the time before the first call alone: raises PeerTimeoutError if not all
        ranks get here within the timeout that the transport was made with.
        """

    def allocate_shared(self, nbytes: int) -> Sequence[Any] | None:
        """Allocate `nbytes` bytes for each rank, mapped by all ranks.  Collective.

        Returns a buffer for each rank, or None on all ranks if they are not on one host.  Once a
        transport, before the first call.  The memory is freed by `close`.
        """

    def split(self, members: Sequence[int], number: int, timeout_s: float) -> Transport:
        """One for these ranks alone, in this order.  Collective among them.

        `number` says which split of this transport it is, the same on all ranks.
        """

    def close(self) -> None:
        """Let go of everything.  Collective."""


def not_assembled(timeout_s: float, missing: Sequence[int]) -> PeerTimeoutError:
    """Return the error of a rank that has waited for all ranks, given those that are missing."""
    absent = f"not there: {', '.join(map(str, missing))}" if missing else "none gets on"
    return PeerTimeoutError(
        f"init: waited {timeout_s:g} s for all ranks of the communicator; {absent}", tuple(missing)
    )
