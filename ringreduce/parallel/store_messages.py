"""Messages of a `ParameterStore`: heads of requests and replies, and pieces of variables."""

from __future__ import annotations

import struct
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ringreduce.parallel.sampler import part

REQUEST, DATA, REPLY, SLOTS = ((1 << 48) + number for number in range(4))
"""The tags of requests, of gradients and parameters, of short replies, and of slots."""
_LINE = 64
"""Pieces begin at multiples of this number of bytes."""
Placement = dict[str, tuple[tuple[int, int, int], ...]]
"""Name of a variable -> ``(server, start, stop)`` of its pieces."""
Views = dict[str, np.ndarray]
"""Name of a variable -> its piece in a message, one-dimensional."""


class HeadKind:
    """Requests and replies.  They are numbers, since members of an enum take longer to compare."""

    PUSH = 1  # gradients follow, of a worker or of the server before in the chain
    PUSHED = 2  # all servers have received them; not sent to the only server
    PULL = 3  # may this worker go on?  The only server answers by its parameters
    SETTLE = 4  # was the last push applied or dropped?
    HELD = 5  # do all replicas have the last push?
    FETCH = 6  # the parameters, now
    NUMBER = 7  # the next number of `steps`
    BREAK = 8  # the worker has left the loop of `steps`
    CLOSE = 9
    APPLY = 10  # to other servers: the pushes of these workers are an update
    DROP = 11
    DONE = 12  # a reply
    AGAIN = 13  # a reply: servers were lost, and perhaps the push with them
    LOST = 14  # a reply: server `rank` is lost
    DIFFERENT = 15  # a reply: `rank` calls `steps` with `number`, `other` with `total`


class MessageHead(NamedTuple):
    """The beginning of every message."""

    kind: int = 0
    rank: int = 0
    push: int = 0
    number: int = 0
    meeting: int = 0
    staleness: int = 0
    slots: int = 0
    other: int = 0
    total: int = 0
    """Updates that the parameters have; in a request the count of `steps`."""
    shard: int = 0
    step: int = 0
    ended: int = 0
    pushes: int = 0
    samples: float = 0.0
    share: float = 0.0
    ranks: bytes = b""
    """1 for each rank that is meant."""


class Heads:
    """Writes heads to messages, and reads them, in a job of this many ranks."""

    def __init__(self, ranks: int) -> None:
        self._struct = struct.Struct(f"<13q2d{ranks}s")
        self.nbytes = self._struct.size

    def message(self, head: MessageHead = MessageHead()) -> np.ndarray:  # noqa: B008 - a head cannot change
        """Return a message that is a head alone."""
        message = np.empty(self.nbytes, np.uint8)
        self.write(message, head)
        return message

    def write(self, message: np.ndarray, head: MessageHead) -> None:
        self._struct.pack_into(message.data, 0, *head)

    def read(self, message: np.ndarray) -> MessageHead:
        return MessageHead._make(self._struct.unpack_from(message.data))


def flags_of(ranks: Collection[int]) -> bytes:
    return bytes(rank in ranks for rank in range(1 + max(ranks, default=-1)))


def ranks_of(head: MessageHead) -> list[int]:
    return [rank for rank, flag in enumerate(head.ranks) if flag]


@dataclass(frozen=True)
class StoreStats:
    """Counts, times and bytes of one rank of a `ParameterStore`, from its beginning.

    Example:
        >>> rr.train.StoreStats().pushes
        0
    """

    pushes: int = 0
    """Pushes: of a worker its own, of a server those that it has applied."""
    discarded: int = 0
    """Pushes that came too late for their step, and were dropped."""
    staleness: Mapping[int, int] = field(default_factory=dict)
    """Staleness -> number of applied pushes that had it."""
    waited_s: float = 0.0
    """Seconds in which this rank has waited for other ranks."""
    sent_bytes: int = 0
    """Bytes that this rank has sent."""
    held_bytes: int = 0
    """Bytes of messages, and of a server's parameters and slots."""
    lost: tuple[int, ...] = ()
    """The ranks that are lost."""


StoreStats.__module__ = "ringreduce.train"  # not before: dataclasses look that module up


class Shard:
    """The pieces of variables on one server, and where they lie in a message, behind its head."""

    def __init__(
        self, server: int, placement: Placement, like: Mapping[str, np.ndarray], ranks: int
    ) -> None:
        self.server, self.heads = server, Heads(ranks)
        self.pieces: dict[str, slice] = {}
        """Name of a variable -> the numbers of the flat variable that lie here."""
        self._places: dict[str, tuple[slice, Any]] = {}
        self.nbytes = -(-self.heads.nbytes // _LINE) * _LINE
        for name, places in placement.items():
            for start, stop in ((start, stop) for owner, start, stop in places if owner == server):
                nbytes = (stop - start) * like[name].itemsize
                self.pieces[name] = slice(start, stop)
                self._places[name] = slice(self.nbytes, self.nbytes + nbytes), like[name].dtype
                self.nbytes += -(-nbytes // _LINE) * _LINE

    def views(self, message: np.ndarray) -> Views:
        return {name: message[where].view(dtype) for name, (where, dtype) in self._places.items()}


def place(sizes: Mapping[str, int], servers: int) -> Placement:
    """Return where variables lie, given how many numbers each has.

    Each lies on one server, the largest first on the server with the fewest numbers.  One that is
    larger than a server's share of all numbers is cut evenly over all servers.
    """
    share, full = sum(sizes.values()) / servers, [0] * servers
    placed: Placement = {}
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        pieces = [(min(range(servers), key=full.__getitem__), 0, sizes[name])]
        if sizes[name] > share:
            cuts = [part(sizes[name], server, servers) for server in range(servers)]
            pieces = [(server, cut.start, cut.stop) for server, cut in enumerate(cuts)]
        placed[name] = tuple(piece for piece in pieces if piece[1] < piece[2])
        for server, start, stop in pieces:
            full[server] += stop - start
    return {name: placed[name] for name in sizes}
