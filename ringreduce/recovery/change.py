"""A change of the ranks of a job, as hooks and events describe it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Change:
    """How the ranks of a job have changed: what the hooks of `State.on_resize` get.

    Example:
        >>> change = rr.Change(4, 3, (1,), 0, "killed", 2, generation=2)
        >>> f"{change.before} -> {change.after} ranks, lost {change.lost}"
        '4 -> 3 ranks, lost (1,)'
    """

    __module__ = "ringreduce"

    before: int
    """Ranks before."""
    after: int
    """Ranks now."""
    lost: tuple[int, ...]
    """The ranks that were lost, numbered as before."""
    joined: int
    """How many ranks are new."""
    cause: str
    """``"killed"``, or ``"stopped"`` for a rank that did not answer."""
    level: int
    """How training goes on: 1 in the same processes, 2 in a new MPI job."""
    generation: int
    """Number of the membership that begins; the first is 1."""
