"""Algorithms that people write in scripts of their own: proven before they run, found by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from hashlib import blake2b

from ringreduce.algorithms.builders import Builder, default_parts, holders
from ringreduce.algorithms.hierarchical import Nodes
from ringreduce.check import check
from ringreduce.schedule import Claim, Schedule, Step, to_text

OwnSteps = Callable[..., Iterable[Step]]
"""``steps(size, rank)``, or ``steps(size, rank, root)`` for a collective with a root."""

ROOTED = ("broadcast", "reduce", "gather", "scatter")
_REMEMBERED = 16
"""Proven schedules that are kept, by nodes and root."""

_registered: dict[tuple[str, str], Builder] = {}
"""(collective, name) -> builder.  A name means the same to every communicator of the process."""


def registered(collective: str, name: str) -> Builder | None:
    """The builder of an algorithm that was registered under this name."""
    return _registered.get((collective, name))


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
    from ringreduce.algorithms import ALGORITHMS

    if collective not in ALGORITHMS or collective == "barrier":
        raise ValueError(f"register_algorithm: unknown collective {collective!r}")
    if not name.isidentifier() or name in ALGORITHMS[collective] or name == "auto":
        raise ValueError(
            f"register_algorithm: {name!r} is no word, or is {collective}'s own; choose another"
        )
    _registered[collective, name] = _builder(collective, name, steps, chunks)


def _builder(
    collective: str, name: str, steps: OwnSteps, chunks: Callable[[int], int] | None
) -> Builder:
    @lru_cache(_REMEMBERED)
    def build_own(nodes: tuple[tuple[int, ...], ...], root: int) -> Schedule:
        size = sum(map(len, nodes))
        parts = chunks(size) if chunks else default_parts(collective, size)
        before, after = holders(collective, size, root, parts)
        rooted = (root,) if collective in ROOTED else ()
        ranks = [tuple(steps(size, rank, *rooted)) for rank in range(size)]
        text = to_text(ranks)
        schedule = Schedule(
            collective=collective,
            algorithm=name,
            size=size,
            weights=(1,) * parts,
            steps=lambda rank: iter(ranks[rank]),
            holds_before=before,
            holds_after=after,
            claim=lambda rank: _counted(ranks[rank]),
            digest=blake2b(text.encode(), digest_size=8).hexdigest(),
        )
        check(schedule)
        return schedule

    def build(nodes: Nodes, root: int) -> Schedule:
        return build_own(tuple(map(tuple, nodes)), root)

    return build


def _counted(steps: Iterable[Step]) -> Claim:
    """What the steps come to: nobody else has promised anything."""
    steps = tuple(steps)
    return Claim(
        steps=len(steps),
        sent=sum(len(send.chunks) for step in steps for send in step.sends),
        received=sum(len(recv.chunks) for step in steps for recv in step.recvs),
    )
