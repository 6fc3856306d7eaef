"""Messages of a `ParameterStore`: where variables lie, and what a request and its reply contain."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np

REQUEST, DATA, REPLY, SLOTS = ((1 << 48) + number for number in range(4))
"""The tags of requests, of gradients and parameters, of short replies, and of slots."""
_LINE = 64
"""Pieces begin at multiples of this number of bytes."""
Placement = dict[str, tuple[tuple[int, int, int], ...]]
"""Name of a variable -> ``(server, start, stop)`` of its pieces."""
Views = dict[str, np.ndarray]
"""Name of a variable -> its piece in a message, one-dimensional."""


class Kind(IntEnum):
    """What a head asks for, or answers."""

    PUSH = 1
    """Gradients follow.  Where there are several servers, `PUSHED` comes after them."""
    PUSHED = 2
    """All servers have received the last push."""
    PULL = 3
    """May this worker go on?  The only server answers by its parameters."""
    SETTLE = 4
    """What has become of the last push?"""
    FETCH = 5
    """Send the parameters, and what has become of the last push."""
    NUMBER = 6
    """Deal the next number."""
    BREAK = 7
    """The worker has left the loop of `steps`; its number is free."""
    CLOSE = 8
    DECIDED = 9
    """From the deciding server: pushes to apply, or to drop, follow."""
    DONE = 10
    """A reply."""
    LOST = 11
    """A reply: a server is lost."""
    DIFFERENT = 12
    """A reply: workers have called `steps` with different counts."""


class Field(IntEnum):
    """Place of a number in a head.  The last places tell of each rank whether it is lost."""

    KIND = 0
    RANK = 1
    """The sender; in a reply about counts, or a lost server, the rank that it is about."""
    PUSH = 2
    """The number of the worker's last push, from 1."""
    NUMBER = 3
    """The number of `steps`, or its count; -1: none."""
    MEETING = 4
    """How many loops of `steps` the worker has begun."""
    SAMPLES = 5
    SHARE = 6
    """A number that the deciding server adds up over the pushes that it applies."""
    STALENESS = 7
    """Of the last push on this server; -1: it was dropped."""
    SLOTS = 8
    """Whether the slots are wanted, too."""
    OTHER_RANK = 9
    OTHER_COUNT = 10
    LOST = 11


@dataclass(frozen=True)
class StoreStats:
    """What a rank of a `ParameterStore` has done so far.

    Example:
        >>> StoreStats().pushes
        0
    """

    __module__ = "ringreduce.train"

    pushes: int = 0
    """Pushes: of a worker its own, of a server those that it has applied."""
    discarded: int = 0
    """Pushes that came too late for their step, and were dropped."""
    staleness: Mapping[int, int] = field(default_factory=dict)
    """Staleness -> number of applied pushes that had it."""
    waited_s: float = 0.0
    """Seconds in which this rank has waited for other ranks."""
    sent_bytes: int = 0
    """Bytes of data that this rank has sent."""
    held_bytes: int = 0
    """Bytes of all buffers, and of a server's parameters and slots."""
    lost: tuple[int, ...] = ()
    """The ranks that are lost."""


class Head:
    """The head of a message: numbers, at the beginning of a buffer of bytes."""

    def __init__(self, ranks: int, buffer: np.ndarray | None = None) -> None:
        """View the head in `buffer`, or in memory of its own."""
        count = Field.LOST + ranks
        self.numbers = np.zeros(count) if buffer is None else buffer[: 8 * count].view(np.float64)

    def __getitem__(self, field: Field) -> int:
        return int(self.numbers[field])

    @property
    def lost(self) -> tuple[int, ...]:
        return tuple(np.flatnonzero(self.numbers[Field.LOST :]).tolist())

    def copy(self) -> Head:
        """Return a head that later messages do not change."""
        other = Head(len(self.numbers) - Field.LOST)
        other.numbers[:] = self.numbers
        return other

    def write(self, kind: Kind, fields: Mapping[Field, float], lost: Iterable[int] = ()) -> None:
        self.numbers[:] = 0
        self.numbers[Field.KIND] = kind
        for field, value in fields.items():
            self.numbers[field] = value
        for rank in lost:
            self.numbers[Field.LOST + rank] = 1


class Shard:
    """The pieces of variables on one server, and where they lie in a message, behind its head."""

    def __init__(
        self, server: int, placement: Placement, dtypes: Mapping[str, Any], ranks: int
    ) -> None:
        self.server = server
        self.pieces: dict[str, slice] = {}
        """Name of a variable -> the numbers of the flat variable that lie here."""
        self._places: dict[str, tuple[slice, Any]] = {}
        end = -(-8 * (Field.LOST + ranks) // _LINE) * _LINE
        for name, pieces in placement.items():
            for owner, start, stop in pieces:
                if owner == server:
                    nbytes = (stop - start) * dtypes[name].itemsize
                    self.pieces[name] = slice(start, stop)
                    self._places[name] = slice(end, end + nbytes), dtypes[name]
                    end += -(-nbytes // _LINE) * _LINE
        self.nbytes = end

    def views(self, buffer: np.ndarray) -> Views:
        """Return the pieces in a message."""
        return {name: buffer[where].view(dtype) for name, (where, dtype) in self._places.items()}


def place(sizes: Mapping[str, int], servers: int) -> Placement:
    """Return where variables lie, given how many numbers each has.

    Each lies on one server, the largest first on the server with the fewest numbers.  One that is
    larger than a server's share of all numbers is cut evenly over all servers.
    """
    share = sum(sizes.values()) / servers
    full = [0] * servers
    placed: Placement = {}
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        size = sizes[name]
        if size > share:
            borders = [size * server // servers for server in range(servers + 1)]
            pieces = list(zip(range(servers), borders, borders[1:], strict=False))
        else:
            pieces = [(min(range(servers), key=full.__getitem__), 0, size)]
        for server, start, stop in pieces:
            full[server] += stop - start
        placed[name] = tuple(piece for piece in pieces if piece[2] > piece[1])
    return {name: placed[name] for name in sizes}
