"""Hierarchical: reduce inside each node, all-reduce between nodes, gather inside each node.

Only the middle phase crosses the network, and each node's data cross it once, for any number of
ranks on the node.  Nodes may differ in size and have any ranks.  The caller chooses the algorithms:
a reduce-scatter and an all-gather for the node, an all-reduce for the rails.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise
from math import lcm

from ringreduce.algorithms.definition import REGISTERED, Algorithm, Builder, Nodes
from ringreduce.algorithms.direct import direct_all_gather, direct_reduce_scatter
from ringreduce.algorithms.halving_doubling import doubling_all_gather, halving_reduce_scatter
from ringreduce.algorithms.ring import ring_all_gather, ring_all_reduce, ring_reduce_scatter
from ringreduce.schedules.schedule import Chunks, Claim, Schedule, Steps, in_parallel, joined

IN_NODE = {
    "ring": (ring_reduce_scatter, ring_all_gather),
    "halving_doubling": (halving_reduce_scatter, doubling_all_gather),
    "two_shot": (direct_reduce_scatter, direct_all_gather),
}
"""All-reduce -> the reduce-scatter and the all-gather that it consists of."""


def cut_points(nodes: Nodes) -> list[int]:
    """Return the borders of the shards: j/s of the data for all node sizes s and j = 0 to s.

    The data between two neighbouring cut points are a shard, and exactly one rank of each node owns
    it.  The unit is chosen so that all cut points are integers.
    """
    whole = lcm(*map(len, nodes))
    return sorted({j * whole // s for s in map(len, nodes) for j in range(s + 1)})


def owned_shards(cuts: Sequence[int], node_size: int, local_rank: int) -> list[int]:
    """Return the contiguous shards within this local rank's 1/node_size of the data."""
    part = cuts[-1] // node_size
    low, high = (bisect_left(cuts, (local_rank + end) * part) for end in (0, 1))
    return list(range(low, high))


def hierarchical_all_reduce(
    nodes: Nodes,
    rank: int,
    shards: Sequence[Sequence[Chunks]],
    reduce_scatter: Algorithm,
    all_reduce: Algorithm,
    all_gather: Algorithm,
) -> Steps:
    """Run `reduce_scatter` in the node, `all_reduce` along each rail, `all_gather` in the node.

    A rail is the owners of one shard, one rank of each node; ``shards[i]`` are the parts into which
    the rail's algorithm divides shard i.  A rank on several rails takes their steps together.  The
    steps are those of the three phases: with rings 2(s-1) + 2(H-1), on a node of s ranks, one of H
    nodes.
    """
    cuts = cut_points(nodes)
    here, node = next((i, node) for i, node in enumerate(nodes) if rank in node)
    me = list(node).index(rank)
    owned = [owned_shards(cuts, len(node), local) for local in range(len(node))]
    chunks = [joined(part for shard in mine for part in shards[shard]) for mine in owned]

    yield from reduce_scatter.steps(node, me, chunks)
    yield from in_parallel(
        *(
            all_reduce.steps(rail, here, shards[shard])
            for shard, rail in rails(nodes)
            if rail[here] == rank
        )
    )
    yield from all_gather.steps(node, me, chunks)


def rails(nodes: Nodes) -> list[tuple[int, list[int]]]:
    """Return each shard with its rail: its owners, one rank of each node, in node order."""
    cuts = cut_points(nodes)
    owners: list[list[int]] = [[] for _ in pairwise(cuts)]
    for node in nodes:
        for local_rank, rank in enumerate(node):
            for shard in owned_shards(cuts, len(node), local_rank):
                owners[shard].append(rank)
    return list(enumerate(owners))


def all_reduce_claim(
    nodes: Nodes,
    rank: int,
    parts: int,
    reduce_scatter: Algorithm,
    all_reduce: Algorithm,
    all_gather: Algorithm,
) -> Claim:
    """Add the claims of the phases.  In the node every shard is `parts` chunks."""
    here, node = next((i, node) for i, node in enumerate(nodes) if rank in node)
    me, cuts = list(node).index(rank), cut_points(nodes)
    sizes = [len(owned_shards(cuts, len(node), local)) * parts for local in range(len(node))]
    along_rails = [
        all_reduce.claim(rail, here, (1,) * parts) for _, rail in rails(nodes) if rail[here] == rank
    ]
    crossing = Claim(
        along_rails[0].steps,
        sent=sum(claim.sent for claim in along_rails),
        received=sum(claim.received for claim in along_rails),
    )
    return reduce_scatter.claim(node, me, sizes) + crossing + all_gather.claim(node, me, sizes)


def hierarchical(name: str, in_node: str, all_reduce: Algorithm) -> Builder:
    """Return the builder of an all-reduce: `in_node` in the node, `all_reduce` along the rails.

    Every shard is divided into the number of parts that `all_reduce` requires.
    """
    reduce_scatter, all_gather = IN_NODE[in_node]
    phases = reduce_scatter, all_reduce, all_gather

    def build_hierarchical(nodes: Nodes, root: int) -> Schedule:
        parts, cuts = all_reduce.part_count(len(nodes)), cut_points(nodes)
        lengths = [high - low for low, high in pairwise(cuts)]
        shards = [[(shard * parts + i,) for i in range(parts)] for shard in range(len(lengths))]
        every = tuple(range(len(lengths) * parts))
        return Schedule(
            collective="all_reduce",
            algorithm=name,
            size=sum(map(len, nodes)),
            weights=tuple(length for length in lengths for _ in range(parts)),
            steps=lambda rank: hierarchical_all_reduce(nodes, rank, shards, *phases),
            holds_before=lambda rank: every,
            holds_after=lambda rank: every,
            claim=lambda rank: all_reduce_claim(nodes, rank, parts, *phases),
        )

    return build_hierarchical


REGISTERED["all_reduce", "hierarchical"] = hierarchical("hierarchical", "ring", ring_all_reduce)
