"""The interface of a transport: persistent data messages, a control channel, and a channel.

A transport moves bytes between the ranks of one communicator, and does not interpret them.
A data message is bound once to a peer, a flow and a buffer, and then started any number of times.
Control messages are short and rare; a rank polls for them, from any peer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from ringreduce.errors import PeerLostError, PeerTimeoutError
from ringreduce.transports.yielding import Yielding

ABANDONED: list[Any] = []
"""Messages that were given up, or not withdrawn.  They keep their memory, which peers and MPI may
read and write until the process ends."""


class NativeMessages(NamedTuple):
    """The functions by which compiled code sends data messages, and what it passes to them."""

    isend: int
    """Address of MPI_Isend; the two below: of MPI_Irecv and MPI_Test."""
    irecv: int
    test: int
    comm: int
    """Handle of the communicator of data messages; the next one: of MPI_BYTE."""
    byte: int
    error: Callable[[int], Exception]
    """Returns the exception for an error code."""
    request: Callable[[int], Any]
    """Returns a `Request` for a handle."""

    @classmethod
    def by_python(cls) -> NativeMessages:
        """Return the native messages of a transport whose messages Python starts and tests."""
        return cls(0, 0, 0, 0, 0, RuntimeError, int)


class Request(Protocol):
    """A message bound to its peer, flow and buffer, such as a persistent request of mpi4py."""

    def Start(self) -> None:  # noqa: N802 - mpi4py's name
        """Start the message, which is not under way."""

    def Test(self) -> bool:  # noqa: N802 - mpi4py's name
        """Make progress; return whether the message is complete or was never started."""

    def Free(self) -> None:  # noqa: N802 - mpi4py's name
        """Free the request, which is not under way."""


class Transport(Protocol):
    """One rank's end of the messages between the ranks of a communicator.

    `collect`, `allocate_shared`, `split` and `close` wait for other ranks; no other method waits.
    """

    rank: int
    size: int
    job_ranks: Sequence[int]
    """By rank: its number in the transport from which this one was split."""
    name: str
    """``"mpi"``, ``"sockets"``, ``"tcp"`` between hosts, or ``"thread"``."""
    yielding: Yielding
    """Decides how many idle polls this rank makes before the first `pause`."""
    threads: bool
    """Whether any thread may call the transport, one thread at a time."""
    one_process: bool
    """Whether all ranks are threads of this process, so that each can read all memory."""

    def sender(self, peer: int, flow: int, buffer: memoryview) -> Request:
        """Bind a message that sends `buffer` to `peer`; it is not started."""

    def receiver(self, peer: int, flow: int, buffer: memoryview) -> Request:
        """Bind a message that receives at most ``len(buffer)`` bytes from `peer`; not started.

        The caller starts it only if it knows that no longer message can match: Open MPI writes the
        excess past the end of the buffer.  Messages of one ordered pair of ranks and one flow match
        first in, first out.
        """

    def translate(self, error: Exception) -> Exception:
        """Return PeerLostError if `error`, raised by a request, means that; else `error`."""
        return error

    def withdraw(self, receiver: Any) -> bool | None:
        """Take back a started receive.

        Returns True if it matched no message, False if it received one, None if neither is known
        yet: call again.
        """

    def discard(self, peer: int) -> bool:
        """Receive and drop the earliest unmatched message from `peer`, of any flow.

        Returns False if there is none or it has not arrived whole: call again.
        """

    def send_control(self, peer: int, message: bytes) -> None:
        """Send a control message.  The peer's `poll_control` returns it once, in order."""

    def control_sent(self, peers: Iterable[int]) -> bool:
        """Return whether all control messages to `peers` arrive without further calls here.

        `peers` may contain this rank, to which nothing is sent.
        """

    def poll_control(self) -> list[tuple[int, bytes]]:
        """Return the control messages that arrived since the last poll, each with its sender."""

    def pause(self, idle: int) -> None:
        """Let other threads and processes use the core; longer after more `idle` polls."""

    def nodes(self) -> tuple[tuple[int, ...], ...]:
        """Return the ranks of each node, as far as the transport can tell."""
        return (tuple(range(self.size)),)

    def collect(self, mine: bytes, patience_s: float = 0.0) -> bytes:
        """Return the bytes that the ranks pass, in rank order; all pass the same length.

        Collective, before the first call.  Raises PeerTimeoutError if a rank does not call
        it within the transport's timeout and `patience_s` more.
        """

    def allocate_shared(self, nbytes: int) -> Sequence[Any] | None:
        """Allocate `nbytes` bytes for each rank, in memory that all ranks map; return all buffers.

        Collective, once, before the first call.  None, on all ranks, if they are not on one
        host.
        """

    def native(self) -> NativeMessages | None:
        """Return how programs send data messages, on all ranks alike; None if they cannot."""
        return None

    def channel(self) -> Channel:
        """Return the transport's channel for messages between two ranks; the same each time."""

    def split(self, members: Sequence[int], number: int, timeout_s: float) -> Transport:
        """Make a transport between `members` alone, ranked in that order.  Collective among them.

        `number` counts the splits of this transport, alike on all ranks.
        """

    def shrunk(self, timeout_s: float) -> Transport:
        """Make a transport between the ranks that are not lost, in the same order.  Collective.

        All other calls of this transport fail from then on, on all ranks.  Raises
        NotImplementedError, with the reason, if this transport cannot; otherwise as
        `translate` does.
        """

    def replace_world(self) -> None:
        """From now on, have `init` make communicators of the ranks of this transport."""
        raise AssertionError("shrunk() makes no transport that could replace this one")

    def forked(self) -> None:
        """In a forked child: close the child's copies of the rank's connections.

        Peers would not notice the end of the rank while another process keeps its connections open.
        """
        return

    def close(self) -> None:
        """Free what the transport holds.  Collective."""
        return


class Channel(Protocol):
    """One rank's end of short envelopes and of data, apart from all other messages of a transport.

    No method waits.  A method raises if the peer is lost; `translate` makes a PeerLostError of it.
    """

    rank: int
    size: int

    def post(self, peer: int, envelope: bytes) -> None:
        """Send an envelope.  The peer's `poll` returns it once, in order."""

    def poll(self, peer: int) -> list[bytes]:
        """Return the envelopes of `peer` that arrived since the last poll."""

    def sender(self, peer: int, flow: int, buffer: memoryview) -> Request:
        """Bind a message as `Transport.sender` does; flows are below 8,192."""

    def receiver(self, peer: int, flow: int, buffer: memoryview) -> Request: ...

    def translate(self, error: Exception) -> Exception: ...

    def pause(self, idle: int) -> None:
        """As `Transport.pause`; an envelope or data may end it."""

    def close(self) -> None:
        """Drop the envelopes that nobody has polled.  All ranks have posted their last."""


def lost(ranks: Sequence[int]) -> PeerLostError:
    who = f"rank {ranks[0]} is" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} are"
    return PeerLostError(
        f"{who} lost; the communicator is broken, calls on it can no longer complete",
        tuple(ranks),
    )


def not_assembled(
    timeout_s: float, missing: Sequence[int], where: str = "init"
) -> PeerTimeoutError:
    absent = f"not there: {', '.join(map(str, missing))}" if missing else "none gets on"
    return PeerTimeoutError(
        f"{where}: waited {timeout_s:g} s for all ranks of the communicator; {absent}",
        tuple(missing),
    )
