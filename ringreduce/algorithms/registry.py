"""Algorithms that users write in their own scripts: found by name, proven before they run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import lru_cache
from hashlib import blake2b

from ringreduce.algorithms.builders import Builder, default_parts, holders
from ringreduce.algorithms.hierarchical import Nodes
from ringreduce.errors import ScheduleError, shown
from ringreduce.schedules.check import check
from ringreduce.schedules.schedule import Claim, Schedule, Step, to_text

OwnSteps = Callable[..., Iterable[Step]]
"""``steps(size, rank)``, or ``steps(size, rank, root)`` for a collective with a root."""

ROOTED = ("broadcast", "reduce", "gather", "scatter")
_REMEMBERED = 16
"""Proven schedules that are cached for each algorithm, by nodes and root."""

_registered: dict[tuple[str, str], Builder] = {}
"""(collective, name) -> builder.  A name means the same to every communicator of the process."""


def registered(collective: str, name: str) -> Builder | None:
    """Return the builder of the algorithm registered under this name, if any."""
    return _registered.get((collective, name))


def remember(
    collective: str, name: str, steps: OwnSteps, chunks: Callable[[int], int] | None
) -> None:
    """Store the builder of a name that `algorithms.register` has checked."""
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
        ranks = [_checked(f"{collective} {name}", steps(size, r, *rooted)) for r in range(size)]
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
        completed = check(schedule).completed
        return replace(
            schedule,
            completes=lambda rank: frozenset((step, c) for r, step, c in completed if r == rank),
        )

    def build(nodes: Nodes, root: int) -> Schedule:
        return build_own(tuple(map(tuple, nodes)), root)

    return build


def _checked(where: str, steps: object) -> tuple[Step, ...]:
    """Return the steps of a rank.  Raises ScheduleError if they are anything else."""
    if not isinstance(steps, Iterable):
        raise ScheduleError(f"{where}: steps returned {shown(steps)}; yield a Step for each step")
    made = tuple(steps)
    for step in made:
        if not isinstance(step, Step):
            raise ScheduleError(f"{where}: steps yielded {shown(step)}; yield a Step for each step")
    return made


def _counted(steps: Iterable[Step]) -> Claim:
    """Return the counts of the steps as their claim: users state none."""
    steps = tuple(steps)
    return Claim(
        steps=len(steps),
        sent=sum(len(send.chunks) for step in steps for send in step.sends),
        received=sum(len(recv.chunks) for step in steps for recv in step.recvs),
    )
