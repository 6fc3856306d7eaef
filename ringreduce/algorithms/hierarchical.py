"""Hierarchical: reduce inside each node, all-reduce between nodes, gather inside each node.

Only the middle phase crosses the network, and each node's data crosses it once, however many ranks
share the node.  Nodes may differ in size and hold any ranks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise

from ringreduce.algorithms.ring import ring_all_gather, ring_all_reduce, ring_reduce_scatter
from ringreduce.schedule import Steps, in_parallel

Nodes = Sequence[Sequence[int]]
"""The ranks of each node, in order."""


def cut_points(nodes: Nodes) -> list[Fraction]:
    """Where shards begin and end, 0 and 1 included: j/s for all node sizes s.

    Between two neighbouring cut points lies a shard that exactly one rank of each node owns.
    """
    return sorted({Fraction(j, len(node)) for node in nodes for j in range(len(node) + 1)})


def owned_shards(cuts: Sequence[Fraction], node_size: int, local_rank: int) -> list[int]:
    """The contiguous shards that lie in this local rank's 1/node_size of the data."""
    low, high = (bisect_left(cuts, Fraction(local_rank + end, node_size)) for end in (0, 1))
    return list(range(low, high))


def hierarchical_all_reduce(nodes: Nodes, rank: int) -> Steps:
    """Reduce-scatter in the node, ring all-reduce along each rail, all-gather in the node.

    A rail is the owners of one shard, one a node.  With H nodes each shard is H chunks; chunk
    ``shard * H + i`` is the part of it that node i finishes.  A rank on several rails serves them
    in one step.  2(s-1) + 2(H-1) steps for a rank whose node has s ranks; with K shards, m of them
    the rank's own and m' its right neighbour's, it sends (2K-m-m')H + 2(H-1)m chunks.
    """
    cuts, width = cut_points(nodes), len(nodes)
    here, node = next((i, node) for i, node in enumerate(nodes) if rank in node)
    me = list(node).index(rank)
    owned = [owned_shards(cuts, len(node), local) for local in range(len(node))]
    parts = [tuple(s * width + i for s in mine for i in range(width)) for mine in owned]

    yield from ring_reduce_scatter(node, me, parts)
    yield from in_parallel(
        *(
            ring_all_reduce(rail, here, [(shard * width + i,) for i in range(width)])
            for shard, rail in rails(nodes)
            if rail[here] == rank
        )
    )
    yield from ring_all_gather(node, me, parts)


def rails(nodes: Nodes) -> list[tuple[int, list[int]]]:
    """Each shard with its owners, one a node, in node order."""
    cuts = cut_points(nodes)
    owners: list[list[int]] = [[] for _ in pairwise(cuts)]
    for node in nodes:
        for local_rank, rank in enumerate(node):
            for shard in owned_shards(cuts, len(node), local_rank):
                owners[shard].append(rank)
    return list(enumerate(owners))
