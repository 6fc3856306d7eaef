"""Communicators that a program drops without `close`: their ranks close them together."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from ringreduce.calls.engine import Engine
from ringreduce.errors import RingReduceError

ANNOUNCED = 6
"""The most communicators that a rank announces in one exchange."""


class _Part(NamedTuple):
    """A communicator, and the ranks that have not announced it."""

    to_close: list[Engine]
    """`Engine.to_close`."""
    parts: Parts
    held: weakref.ref[Any]
    """Alive while this rank makes calls on the communicator."""
    left: set[int]

    def is_dropped(self) -> bool:
        """Return whether this rank makes no more calls on the communicator and its parts."""
        is_held = self.held() is not None
        if any(is_held or not each.is_at_rest for each in self.to_close):
            return False
        return all(part.is_dropped() for part in self.parts.made.values())

    def close(self) -> None:
        for part in self.parts.made.values():
            part.close()
        with contextlib.suppress(RingReduceError):  # the end of the program reports a lost rank
            for each in list(self.to_close):
                each.close()


class Parts:
    """The communicators that the ranks of a parent have made, one in each exchange of all of them.

    In an exchange a rank announces which of them its program has dropped.  Once all ranks of a
    communicator have announced it, they close it in that exchange, in which all of them are.
    """

    def __init__(self, rank: int) -> None:
        self._rank, self.exchanges = rank, 0
        self.made: dict[int, _Part] = {}
        """By the number of the exchange; ranks are numbered as in the parent."""

    def add(self, comm: Any, ranks: Iterable[int]) -> None:
        """Add the communicator that `ranks` have made in the latest exchange."""
        part = _Part(comm._engine.to_close, comm._parts, weakref.ref(comm._held), set(ranks))
        self.made[self.exchanges] = part

    def dropped(self) -> list[int]:
        """Return the numbers that this rank announces, with zeros behind them."""
        made = self.made.items()
        new = [n for n, part in made if self._rank in part.left and part.is_dropped()]
        return [*new, *[0] * ANNOUNCED][:ANNOUNCED]

    def close_dropped(self, announced: Sequence[Sequence[int]]) -> None:
        """End an exchange in which each rank has `announced` the numbers in its row."""
        self.exchanges += 1
        for number, part in list(self.made.items()):
            part.left.difference_update([r for r in part.left if number in announced[r]])
            if not part.left:
                self.made.pop(number).close()
