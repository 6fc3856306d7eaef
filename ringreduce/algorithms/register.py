"""The door for algorithms that people write in scripts of their own."""

from __future__ import annotations

from collections.abc import Callable

from ringreduce.algorithms import ALGORITHMS
from ringreduce.algorithms.registry import OwnSteps, remember


def register_algorithm(
    name: str,
    steps: OwnSteps,
    *,
    collective: str = "all_reduce",
    chunks: Callable[[int], int] | None = None,
) -> None:
    """Let ``algorithm=name`` stand for your own schedule.  Register the same on every rank.

    Args:
        name: a word that no algorithm of this collective has.
        steps: called as ``steps(size, rank)`` yields the steps of `rank`; for broadcast, reduce,
            gather and scatter as ``steps(size, rank, root)``.
        collective: what the schedule does.
        chunks: ``chunks(size)`` is into how many equal chunks all_reduce, broadcast or reduce cuts
            the array: one a rank unless it says otherwise.  In the other collectives chunk i
            belongs to rank i, and in all_to_all chunk ``i * size + j`` goes from rank i to rank j.

    Raises ValueError for a name that is taken or is no word.  The schedule is checked when it is
    first built for a number of ranks: a wrong one is a ScheduleError on each, and nothing is sent.
    A later registration under the same name replaces the former.
    """
    if collective not in ALGORITHMS or collective == "barrier":
        raise ValueError(f"register_algorithm: unknown collective {collective!r}")
    if not name.isidentifier() or name in ALGORITHMS[collective] or name == "auto":
        raise ValueError(
            f"register_algorithm: {name!r} is no word, or is {collective}'s own; choose another"
        )
    remember(collective, name, steps, chunks)
