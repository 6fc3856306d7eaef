"""Hierarchical: reduce inside each node, all-reduce between nodes, gather inside each node.

Only the middle phase crosses the network, and each node's data cross it once, for any number of
ranks on the node.  Nodes may differ in size and have any ranks.  The caller chooses the algorithms:
a reduce-scatter and an all-gather for the node, an all-reduce for the rails.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import pairwise
from math import lcm

from ringreduce.schedules.schedule import Chunks, Steps, in_parallel, joined

Nodes = Sequence[Sequence[int]]
"""The ranks of each node, in order."""

GroupSteps = Callable[[Sequence[int], int, Sequence[Chunks]], Steps]
"""(group, me, chunks) -> the steps of ``group[me]``; ``chunks[i]`` are the chunks of part i."""


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
    reduce_scatter: GroupSteps,
    all_reduce: GroupSteps,
    all_gather: GroupSteps,
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

    yield from reduce_scatter(node, me, chunks)
    yield from in_parallel(
        *(
            all_reduce(rail, here, shards[shard])
            for shard, rail in rails(nodes)
            if rail[here] == rank
        )
    )
    yield from all_gather(node, me, chunks)


def rails(nodes: Nodes) -> list[tuple[int, list[int]]]:
    """Return each shard with its rail: its owners, one rank of each node, in node order."""
    cuts = cut_points(nodes)
    owners: list[list[int]] = [[] for _ in pairwise(cuts)]
    for node in nodes:
        for local_rank, rank in enumerate(node):
            for shard in owned_shards(cuts, len(node), local_rank):
                owners[shard].append(rank)
    return list(enumerate(owners))
