"""A change of the ranks of a job, as hooks and events describe it."""

from __future__ import annotations

from dataclasses import dataclass

OF_A_RESIZE = frozenset(
    [
        *("event", "time", "before", "after", "lost", "joined", "cause", "level", "generation"),
        *("detected_s", "recovered_s", "redone", "step"),
    ]
)
"""Names of the fields of an event ``resized`` that a program cannot add."""


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
    """The ranks that were lost or have left, numbered as before."""
    joined: int
    """How many ranks are new."""
    cause: str
    """``"killed"``; ``"stopped"`` for a rank that did not answer; ``"notice"`` for one that was
    told to end; ``"slow"``; or who wanted another number of ranks, ``"command"`` or
    ``"discover"``."""
    level: int
    """How training goes on: 1 in the same processes; 2 in a new MPI job; 3 as planned, with no step
    made twice."""
    generation: int
    """Number of the membership that begins; the first is 1."""
