"""Messages of a `ParameterStore`: heads of requests and replies, and pieces of variables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum, auto
from typing import Any

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


class Kind(IntEnum):
    """The request, or the answer, of a head."""

    PUSH = auto()  # gradients follow, of a worker or of the server before in the chain
    PUSHED = auto()  # all servers have received them; not sent to the only server
    PULL = auto()  # may this worker go on?  The only server answers by its parameters
    SETTLE = auto()  # was the last push applied or dropped?
    HELD = auto()  # do all replicas have the last push?
    FETCH = auto()  # the parameters, now
    NUMBER = auto()  # the next number of `steps`
    BREAK = auto()  # the worker has left the loop of `steps`
    CLOSE = auto()
    APPLY = auto()  # to other servers: the pushes of these workers are an update
    DROP = auto()
    DONE = auto()  # a reply
    AGAIN = auto()  # a reply: servers were lost, and perhaps the push with them
    LOST = auto()  # a reply: server `rank` is lost
    DIFFERENT = auto()  # a reply: `rank` calls `steps` with `number`, `other` with `count`


def head_of(ranks: int) -> np.dtype[Any]:
    """Return the dtype of a head in a job of this many ranks."""
    whole = "kind rank push number meeting staleness slots other count shard step ended pushes"
    fields: list[Any] = [(name, np.int64) for name in whole.split()]
    fields += [(name, np.float64) for name in ("samples", "share")]
    return np.dtype([*fields, ("ranks", np.bool_, (ranks,))])


def write(head: np.ndarray, **values: Any) -> None:
    """Write the fields of a head; the others are 0."""
    head.view(np.uint8).fill(0)
    for name, value in values.items():
        head[name] = value


def kept(head: Any) -> Any:
    """Return a copy of a head.  NumPy's own copy takes five times as long."""
    return np.frombuffer(head.tobytes(), head.dtype)[0]


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
        self.server, self.head = server, head_of(ranks)
        self.pieces: dict[str, slice] = {}
        """Name of a variable -> the numbers of the flat variable that lie here."""
        self._places: dict[str, tuple[slice, Any]] = {}
        self.nbytes = -(-self.head.itemsize // _LINE) * _LINE
        for name, places in placement.items():
            for start, stop in ((start, stop) for owner, start, stop in places if owner == server):
                nbytes = (stop - start) * like[name].itemsize
                self.pieces[name] = slice(start, stop)
                self._places[name] = slice(self.nbytes, self.nbytes + nbytes), like[name].dtype
                self.nbytes += -(-nbytes // _LINE) * _LINE

    def head_in(self, message: np.ndarray) -> np.ndarray:
        return message[: self.head.itemsize].view(self.head)

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
