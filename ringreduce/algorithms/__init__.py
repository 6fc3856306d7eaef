"""The algorithms, and the table that finds them: which collectives each one knows.

An algorithm file holds generators alone.  Here each gets what the rest of the library needs to know
of it: how long its chunks are, who holds what before and after, and what its docstring claims.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import lcm

from ringreduce.algorithms.dissemination import dissemination_barrier
from ringreduce.algorithms.hierarchical import (
    Nodes,
    cut_points,
    hierarchical_all_reduce,
    owned_shards,
)
from ringreduce.algorithms.ring import (
    ring_all_gather,
    ring_all_reduce,
    ring_broadcast,
    ring_reduce_scatter,
)
from ringreduce.schedule import Chunks, Claim, Schedule

Builder = Callable[[Nodes, int], Schedule]
"""(nodes, root) -> schedule.  The nodes list every rank once; only rooted collectives read root."""


def _all_ranks(nodes: Nodes) -> list[int]:
    return sorted(rank for node in nodes for rank in node)


def _single_chunks(n: int) -> list[Chunks]:
    return [(i,) for i in range(n)]


def _ring_all_reduce(nodes: Nodes, root: int) -> Schedule:
    ring, n = _all_ranks(nodes), len(_all_ranks(nodes))
    every = tuple(range(n))
    return Schedule(
        collective="all_reduce",
        algorithm="ring",
        size=n,
        weights=(1,) * n,
        steps=lambda rank: ring_all_reduce(ring, rank, _single_chunks(n)),
        holds_before=lambda rank: every,
        holds_after=lambda rank: every,
        claim=lambda rank: Claim(steps=2 * (n - 1), sent=2 * (n - 1), received=2 * (n - 1)),
    )


def _ring_reduce_scatter(nodes: Nodes, root: int) -> Schedule:
    ring, n = _all_ranks(nodes), len(_all_ranks(nodes))
    every = tuple(range(n))
    return Schedule(
        collective="reduce_scatter",
        algorithm="ring",
        size=n,
        weights=(1,) * n,
        steps=lambda rank: ring_reduce_scatter(ring, rank, _single_chunks(n)),
        holds_before=lambda rank: every,
        holds_after=lambda rank: (rank,),
        claim=lambda rank: Claim(steps=n - 1, sent=n - 1, received=n - 1),
    )


def _ring_all_gather(nodes: Nodes, root: int) -> Schedule:
    ring, n = _all_ranks(nodes), len(_all_ranks(nodes))
    every = tuple(range(n))
    return Schedule(
        collective="all_gather",
        algorithm="ring",
        size=n,
        weights=(1,) * n,
        steps=lambda rank: ring_all_gather(ring, rank, _single_chunks(n)),
        holds_before=lambda rank: (rank,),
        holds_after=lambda rank: every,
        claim=lambda rank: Claim(steps=n - 1, sent=n - 1, received=n - 1),
    )


def _ring_broadcast(nodes: Nodes, root: int) -> Schedule:
    ring, n = _all_ranks(nodes), len(_all_ranks(nodes))
    return Schedule(
        collective="broadcast",
        algorithm="ring",
        size=n,
        weights=(1,),
        steps=lambda rank: ring_broadcast(ring, rank, root, (0,)),
        holds_before=lambda rank: (0,) if rank == root else (),
        holds_after=lambda rank: (0,),
        claim=lambda rank: Claim(
            steps=n - 1, sent=int((rank - root) % n != n - 1), received=int(rank != root)
        ),
    )


def _dissemination_barrier(nodes: Nodes, root: int) -> Schedule:
    group, n = _all_ranks(nodes), len(_all_ranks(nodes))
    return Schedule(
        collective="barrier",
        algorithm="dissemination",
        size=n,
        weights=(),
        steps=lambda rank: dissemination_barrier(group, rank),
        holds_before=lambda rank: (),
        holds_after=lambda rank: (),
        claim=lambda rank: Claim(steps=(n - 1).bit_length(), sent=0, received=0),
    )


def _hierarchical_all_reduce(nodes: Nodes, root: int) -> Schedule:
    n, width, cuts = len(_all_ranks(nodes)), len(nodes), cut_points(nodes)
    scale = lcm(*(len(node) for node in nodes))
    shards = [int((b - a) * scale) for a, b in zip(cuts, cuts[1:], strict=False)]
    every = tuple(range(len(shards) * width))

    def claim(rank: int) -> Claim:
        node = next(list(node) for node in nodes if rank in node)
        me, s = node.index(rank), len(node)
        left, mine, right = (len(owned_shards(cuts, s, (me + d) % s)) for d in (-1, 0, 1))
        along_rails = 2 * (width - 1) * mine
        return Claim(
            steps=2 * (s - 1) + 2 * (width - 1),
            sent=(2 * len(shards) - mine - right) * width + along_rails,
            received=(2 * len(shards) - mine - left) * width + along_rails,
        )

    return Schedule(
        collective="all_reduce",
        algorithm="hierarchical",
        size=n,
        weights=tuple(length for length in shards for _ in range(width)),
        steps=lambda rank: hierarchical_all_reduce(nodes, rank),
        holds_before=lambda rank: every,
        holds_after=lambda rank: every,
        claim=claim,
    )


ALGORITHMS: Mapping[str, Mapping[str, Builder]] = {
    "all_reduce": {"ring": _ring_all_reduce, "hierarchical": _hierarchical_all_reduce},
    "reduce_scatter": {"ring": _ring_reduce_scatter},
    "all_gather": {"ring": _ring_all_gather},
    "broadcast": {"ring": _ring_broadcast},
    "barrier": {"dissemination": _dissemination_barrier},
}
"""Collective -> algorithm name -> builder of its schedule."""


def build(collective: str, algorithm: str, nodes: Nodes, root: int = 0) -> Schedule:
    """The schedule of `collective` by `algorithm` for ranks placed on `nodes`.

    Raises ValueError naming the algorithms that there are, when there is none of that name.
    """
    known = ALGORITHMS[collective]
    if algorithm not in known:
        raise ValueError(
            f"{collective}: unknown algorithm {algorithm!r}; choose 'auto' or one of "
            + ", ".join(map(repr, known))
        )
    return known[algorithm](nodes, root)
