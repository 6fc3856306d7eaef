"""The algorithms, and the table that finds them: which collectives each one knows.

An algorithm file holds generators alone.  Here each gets what the rest of the library needs to know
of it: how long its chunks are, who holds what before and after, and what its docstring claims.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
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
from ringreduce.schedule import Chunks, Claim, Schedule, Steps

Builder = Callable[[Nodes, int], Schedule]
"""(nodes, root) -> schedule.  The nodes list every rank once; only rooted collectives read root."""

RingSteps = Callable[[list[int], int, list[Chunks]], Steps]


def _ring(collective: str, algorithm: RingSteps, steps_per_peer: int, own: str) -> Builder:
    """A ring of all ranks with one chunk each.

    Every rank takes, sends and receives `steps_per_peer` steps and chunks for each other rank.
    `own` says where a rank has its own chunk only: ``"before"``, ``"after"``, or ``""``: nowhere.
    """

    def build_ring(nodes: Nodes, root: int) -> Schedule:
        n = size_of(nodes)
        claim = Claim(*[steps_per_peer * (n - 1)] * 3)
        every = tuple(range(n))
        return Schedule(
            collective=collective,
            algorithm="ring",
            size=n,
            weights=(1,) * n,
            steps=lambda rank: algorithm(list(range(n)), rank, [(i,) for i in range(n)]),
            holds_before=lambda rank: (rank,) if own == "before" else every,
            holds_after=lambda rank: (rank,) if own == "after" else every,
            claim=lambda rank: claim,
        )

    return build_ring


def _ring_broadcast(nodes: Nodes, root: int) -> Schedule:
    n = size_of(nodes)
    return Schedule(
        collective="broadcast",
        algorithm="ring",
        size=n,
        weights=(1,),
        steps=lambda rank: ring_broadcast(range(n), rank, root, (0,)),
        holds_before=lambda rank: (0,) if rank == root else (),
        holds_after=lambda rank: (0,),
        claim=lambda rank: Claim(
            steps=n - 1, sent=int((rank - root) % n != n - 1), received=int(rank != root)
        ),
    )


def _dissemination_barrier(nodes: Nodes, root: int) -> Schedule:
    n = size_of(nodes)
    return Schedule(
        collective="barrier",
        algorithm="dissemination",
        size=n,
        weights=(),
        steps=lambda rank: dissemination_barrier(range(n), rank),
        holds_before=lambda rank: (),
        holds_after=lambda rank: (),
        claim=lambda rank: Claim(steps=(n - 1).bit_length(), sent=0, received=0),
    )


def _hierarchical_all_reduce(nodes: Nodes, root: int) -> Schedule:
    hosts, cuts = len(nodes), cut_points(nodes)
    scale = lcm(*map(len, nodes))
    shards = [int((high - low) * scale) for low, high in pairwise(cuts)]
    every = tuple(range(len(shards) * hosts))

    def claim(rank: int) -> Claim:
        node = next(list(node) for node in nodes if rank in node)
        me, s = node.index(rank), len(node)
        left, mine, right = (len(owned_shards(cuts, s, (me + d) % s)) for d in (-1, 0, 1))
        along_rails = 2 * (hosts - 1) * mine
        return Claim(
            steps=2 * (s - 1) + 2 * (hosts - 1),
            sent=(2 * len(shards) - mine - right) * hosts + along_rails,
            received=(2 * len(shards) - mine - left) * hosts + along_rails,
        )

    return Schedule(
        collective="all_reduce",
        algorithm="hierarchical",
        size=size_of(nodes),
        weights=tuple(length for length in shards for _ in range(hosts)),
        steps=lambda rank: hierarchical_all_reduce(nodes, rank),
        holds_before=lambda rank: every,
        holds_after=lambda rank: every,
        claim=claim,
    )


ALGORITHMS: Mapping[str, Mapping[str, Builder]] = {
    "all_reduce": {
        "ring": _ring("all_reduce", ring_all_reduce, 2, own=""),
        "hierarchical": _hierarchical_all_reduce,
    },
    "reduce_scatter": {"ring": _ring("reduce_scatter", ring_reduce_scatter, 1, own="after")},
    "all_gather": {"ring": _ring("all_gather", ring_all_gather, 1, own="before")},
    "broadcast": {"ring": _ring_broadcast},
    "barrier": {"dissemination": _dissemination_barrier},
}
"""Collective -> algorithm name -> builder of its schedule."""


def size_of(nodes: Nodes) -> int:
    """The number of ranks on all nodes together."""
    return sum(map(len, nodes))


def build(collective: str, algorithm: str, nodes: Nodes, root: int = 0) -> Schedule:
    """The schedule of `collective` by `algorithm` for ranks placed on `nodes`."""
    return ALGORITHMS[collective][algorithm](nodes, root)
