"""The definition of a rendezvous."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Rendezvous:
    """An exchange of bytes among all ranks, and the place of this rank, if it is known."""

    collect: Callable[[bytes], Sequence[bytes]]
    """Passes this rank's bytes, and returns the bytes of all ranks, in rank order."""
    rank: int | None
    """None: the index of this rank's bytes."""
    size: int | None
    """Number of ranks.  None: the number of elements that `collect` returns."""
    one_host: bool = False
    """Whether all ranks are known to be on this host."""
