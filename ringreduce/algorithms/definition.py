"""What an algorithm is, and the table of all algorithms: the library's and users'.

Ranks take their places in the order of the nodes, so that neighbours share a node where possible.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache, reduce
from hashlib import blake2b

from ringreduce.schedules.check import check
from ringreduce.schedules.collectives import COLLECTIVES, IN_PARTS, ROOTED, held
from ringreduce.schedules.schedule import Chunks, Claim, Schedule, Steps, to_text

Nodes = Sequence[Sequence[int]]
"""The ranks of each node, in order."""

Builder = Callable[[Nodes, int], Schedule]
"""(nodes, root) -> schedule.  The nodes list every rank once; only rooted collectives use root."""

Sizes = Sequence[int]
"""Part -> number of its chunks."""

_REMEMBERED = 16
"""Proven schedules that are cached for each algorithm without a claim, by nodes and root."""

REGISTERED: dict[tuple[str, str], Builder] = {}
"""(collective, name) -> builder.  A name means the same to every communicator of the process."""


@dataclass(frozen=True)
class Algorithm:
    """An algorithm of a collective, for the ranks of any group.

    `group` lists the ranks, `me` is this rank's place in it.  Rooted collectives also pass `root`,
    the root's place.
    """

    collective: str
    name: str
    steps: Callable[..., Steps]
    """(group, me[, root], chunks) -> the steps of ``group[me]``.

    ``chunks[i]`` are the chunks of part i.
    """
    claims: Callable[..., Sequence[Claim]]
    """(group[, root], sizes) -> the claim of each rank of the group."""
    parts: Callable[[int], int] | None = None
    """Number of ranks -> number of parts that the data are divided into; None: see `part_count`."""
    shape: Callable[[int], str] = lambda n: ""
    """Number of ranks -> text that is added to the algorithm's name."""

    def part_count(self, n: int) -> int:
        """Return the number of parts among n ranks: by default one for each rank.

        In an all-to-all one for each ordered pair of ranks, a rank with itself included.
        """
        if self.parts:
            return self.parts(n)
        return n * n if "its sender" in COLLECTIVES[self.collective] else n

    def __call__(self, nodes: Nodes, root: int) -> Schedule:
        group = [rank for node in nodes for rank in node]
        parts = self.part_count(len(group))
        chunks, sizes = _chunks(self.collective, group, parts), (1,) * parts
        before, after = COLLECTIVES[self.collective]
        every = len(group), root, tuple(range(parts))
        place = (group.index(root),) if self.collective in ROOTED else ()

        @cache
        def claims() -> dict[int, Claim]:
            return dict(zip(group, self.claims(group, *place, sizes), strict=True))

        return Schedule(
            collective=self.collective,
            algorithm=self.name + self.shape(len(group)),
            size=len(group),
            weights=sizes,
            steps=lambda rank: self.steps(group, group.index(rank), *place, chunks),
            holds_before=lambda rank: held(before, rank, *every),
            holds_after=lambda rank: held(after, rank, *every),
            claim=lambda rank: claims()[rank],
        )


def algorithm(
    collective: str,
    name: str,
    claims: Callable[..., Sequence[Claim]] | None,
    parts: Callable[[int], int] | None = None,
    shape: Callable[[int], str] = lambda n: "",
) -> Callable[[Callable[..., Steps]], Algorithm]:
    """Register a generator of steps under `name`.  `Algorithm` says what is passed.

    If `claims` is None, schedules are proven before they run, and claim what their steps do.
    """

    def register(steps: Callable[..., Steps]) -> Algorithm:
        made = Algorithm(collective, name, steps, claims or _unclaimed, parts, shape)
        REGISTERED[collective, name] = made if claims else _proven(made)
        return made

    return register


def _unclaimed(group: Sequence[int], *given: object) -> list[Claim]:
    return [Claim(0, 0, 0)] * len(group)


def _proven(algorithm: Algorithm) -> Builder:
    @lru_cache(_REMEMBERED)
    def build_proven(nodes: tuple[tuple[int, ...], ...], root: int) -> Schedule:
        schedule = algorithm(nodes, root)
        ranks = [tuple(schedule.steps(rank)) for rank in range(schedule.size)]
        schedule = replace(
            schedule,
            steps=lambda rank: iter(ranks[rank]),
            claim=lambda rank: Claim.of(ranks[rank]),
            digest=blake2b(to_text(ranks).encode(), digest_size=8).hexdigest(),
        )
        completed = check(schedule).completed
        return replace(
            schedule,
            completes=lambda rank: frozenset((step, c) for r, step, c in completed if r == rank),
        )

    return lambda nodes, root: build_proven(tuple(map(tuple, nodes)), root)


def backwards(claims: Iterable[Claim]) -> list[Claim]:
    """Return the claims of a schedule run backwards in time: it sends what was received."""
    return [Claim(claim.steps, claim.received, claim.sent) for claim in claims]


def in_turn(*phases: Iterable[Claim]) -> list[Claim]:
    """Return the claims of a schedule whose phases have these claims."""
    return [reduce(Claim.__add__, claims) for claims in zip(*phases, strict=True)]


def one(n: int) -> int:
    return 1


def _chunks(collective: str, group: Sequence[int], parts: int) -> list[Chunks]:
    """Return one chunk for each part; a part that belongs to a place has its rank's chunk."""
    if collective not in IN_PARTS:
        return [(i,) for i in range(parts)]
    if "its sender" in COLLECTIVES[collective]:
        return [(sender * len(group) + receiver,) for sender in group for receiver in group]
    return [(rank,) for rank in group]
