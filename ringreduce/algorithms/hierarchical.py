"""Hierarchical: reduce inside each node, all-reduce between nodes, gather inside each node.

Only the middle phase crosses the network, and each node's data cross it once, for any number of
ranks on the node.  Nodes may differ in size and have any ranks.  The caller chooses the algorithms:
a reduce-scatter and an all-gather for the node, an all-reduce for the rails.  With `LEADER` in the
node one rank of each node, its leader, takes part in the middle phase for all of them: so short
arrays cross the network in few messages.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import cache
from itertools import pairwise, repeat
from math import lcm

from ringreduce.algorithms.definition import REGISTERED, Algorithm, Builder, Nodes, in_turn
from ringreduce.algorithms.direct import direct_all_gather, direct_reduce_scatter
from ringreduce.algorithms.halving_doubling import doubling_all_gather, halving_reduce_scatter
from ringreduce.algorithms.ring import ring_all_gather, ring_all_reduce, ring_reduce_scatter
from ringreduce.algorithms.star import star_broadcast, star_reduce
from ringreduce.schedules.schedule import Chunks, Claim, Schedule, Step, Steps, in_parallel, joined

IN_NODE = {
    "ring": (ring_reduce_scatter, ring_all_gather),
    "halving_doubling": (halving_reduce_scatter, doubling_all_gather),
    "two_shot": (direct_reduce_scatter, direct_all_gather),
}
"""All-reduce -> the reduce-scatter and the all-gather that it consists of."""
LEADER = "leader"
"""In the node: a reduce to one rank, and a broadcast from it."""


def cut_points(nodes: Nodes) -> list[int]:
    """Return the borders of the shards: j/s of the data for all node sizes s and j = 0 to s.

    The data between two neighbouring cut points are a shard, and exactly one rank of each node owns
    it.  The unit is chosen so that all cut points are integers.
    """
    sizes = set(map(len, nodes))
    whole = lcm(*sizes)
    return sorted({j * whole // s for s in sizes for j in range(s + 1)})


def owned_shards(cuts: Sequence[int], node_size: int, local_rank: int) -> list[int]:
    """Return the contiguous shards within this local rank's 1/node_size of the data."""
    part = cuts[-1] // node_size
    low, high = (bisect_left(cuts, (local_rank + end) * part) for end in (0, 1))
    return list(range(low, high))


def owned_by_all(cuts: Sequence[int], node_size: int) -> list[list[int]]:
    """Return the shards of each local rank."""
    return [owned_shards(cuts, node_size, local_rank) for local_rank in range(node_size)]


def hierarchical_all_reduce(
    nodes: Nodes,
    rank: int,
    rails: Sequence[Sequence[int]],
    shards: Sequence[Sequence[Chunks]],
    reduce_scatter: Algorithm,
    all_reduce: Algorithm,
    all_gather: Algorithm,
) -> Steps:
    """Run `reduce_scatter` in the node, `all_reduce` along each rail, `all_gather` in the node.

    ``rails[i]`` are the owners of shard i, as `rails_of` returns them; ``shards[i]`` are the parts
    into which the rail's algorithm divides the shard.  A rank on several rails takes their steps
    together.  The steps are those of the three phases: with rings 2(s-1) + 2(H-1), on a node of s
    ranks, one of H nodes.
    """
    cuts = cut_points(nodes)
    here, node = next((i, node) for i, node in enumerate(nodes) if rank in node)
    me = list(node).index(rank)
    owned = owned_by_all(cuts, len(node))
    chunks = [joined(part for shard in mine for part in shards[shard]) for mine in owned]

    yield from reduce_scatter.steps(node, me, chunks)
    yield from in_parallel(
        *(
            all_reduce.steps(rail, here, shards[shard])
            for shard, rail in enumerate(rails)
            if rail[here] == rank
        )
    )
    yield from all_gather.steps(node, me, chunks)


def rails_of(nodes: Nodes) -> list[list[int]]:
    """Return the rail of each shard: its owners, one rank of each node, in node order."""
    cuts = cut_points(nodes)
    owned = {size: owned_by_all(cuts, size) for size in set(map(len, nodes))}
    owners: list[list[int]] = [[] for _ in pairwise(cuts)]
    for node in nodes:
        for rank, shards in zip(node, owned[len(node)], strict=True):
            for shard in shards:
                owners[shard].append(rank)
    return owners


def all_reduce_claims(
    nodes: Nodes,
    rails: Sequence[Sequence[int]],
    parts: int,
    reduce_scatter: Algorithm,
    all_reduce: Algorithm,
    all_gather: Algorithm,
) -> dict[int, Claim]:
    """Return each rank's claim of the phases together.  In the node a shard is `parts` chunks.

    What the ranks of a rail, or of nodes of one size, share is computed once.
    """
    cuts, crossing = cut_points(nodes), dict[int, Claim]()
    for rail in rails:
        for rank, claim in zip(rail, all_reduce.claims(rail, (1,) * parts), strict=True):
            if others := crossing.get(rank):
                moved = others.sent + claim.sent, others.received + claim.received
                claim = Claim(claim.steps, *moved)
            crossing[rank] = claim
    in_node: dict[int, list[Claim]] = {}
    for size in set(map(len, nodes)):
        sizes = [len(shards) * parts for shards in owned_by_all(cuts, size)]
        phases = (
            algorithm.claims(range(size), sizes) for algorithm in (reduce_scatter, all_gather)
        )
        in_node[size] = in_turn(*phases)
    return {
        rank: claim + crossing[rank]
        for node in nodes
        for rank, claim in zip(node, in_node[len(node)], strict=True)
    }


def leader_all_reduce(
    nodes: Nodes,
    rank: int,
    crossing: Sequence[Claim],
    chunks: Sequence[Chunks],
    all_reduce: Algorithm,
) -> Steps:
    """Reduce to the first rank of each node, `all_reduce` among these, broadcast in each node.

    ``crossing[i]`` is the claim of node i's leader in `all_reduce`.  On a node of several ranks the
    phases in the node have a step each.  A leader sends and receives the data as often as
    `all_reduce` does, and once to and from each rank of its node.
    """
    here, node = next((i, node) for i, node in enumerate(nodes) if rank in node)
    me = list(node).index(rank)
    yield from star_reduce.steps(node, me, 0, chunks)
    if me == 0:
        yield from all_reduce.steps([each[0] for each in nodes], here, chunks)
    else:
        yield from repeat(Step(), crossing[here].steps)
    yield from star_broadcast.steps(node, me, 0, chunks)


def leader_claims(nodes: Nodes, crossing: Sequence[Claim], parts: int) -> dict[int, Claim]:
    claims = {}
    for node, across in zip(nodes, crossing, strict=True):
        others, steps = len(node) - 1, across.steps + 2 * (len(node) > 1)
        led, moved = Claim(steps, parts, parts), parts * others
        claims.update(dict.fromkeys(node, led))
        claims[node[0]] = Claim(steps, across.sent + moved, across.received + moved)
    return claims


def hierarchical(name: str, in_node: str, all_reduce: Algorithm) -> Builder:
    """Return the builder of an all-reduce: `in_node` in the node, `all_reduce` along the rails.

    Every shard is divided into the number of parts that `all_reduce` requires.
    """
    if in_node == LEADER:
        return _hierarchical_by_leaders(name, all_reduce)
    reduce_scatter, all_gather = IN_NODE[in_node]
    phases = reduce_scatter, all_reduce, all_gather

    def build_hierarchical(nodes: Nodes, root: int) -> Schedule:
        parts, cuts = all_reduce.part_count(len(nodes)), cut_points(nodes)
        lengths = [high - low for low, high in pairwise(cuts)]
        shards = [[(shard * parts + i,) for i in range(parts)] for shard in range(len(lengths))]
        every, rails = tuple(range(len(lengths) * parts)), rails_of(nodes)

        @cache
        def claims() -> dict[int, Claim]:
            return all_reduce_claims(nodes, rails, parts, *phases)

        return Schedule(
            collective="all_reduce",
            algorithm=name,
            size=sum(map(len, nodes)),
            weights=tuple(length for length in lengths for _ in range(parts)),
            steps=lambda rank: hierarchical_all_reduce(nodes, rank, rails, shards, *phases),
            holds_before=lambda rank: every,
            holds_after=lambda rank: every,
            claim=lambda rank: claims()[rank],
        )

    return build_hierarchical


def _hierarchical_by_leaders(name: str, all_reduce: Algorithm) -> Builder:
    def build_leader(nodes: Nodes, root: int) -> Schedule:
        parts = all_reduce.part_count(len(nodes))
        chunks, every = [(part,) for part in range(parts)], tuple(range(parts))

        @cache
        def crossing() -> Sequence[Claim]:
            return all_reduce.claims([node[0] for node in nodes], (1,) * parts)

        @cache
        def claims() -> dict[int, Claim]:
            return leader_claims(nodes, crossing(), parts)

        return Schedule(
            collective="all_reduce",
            algorithm=name,
            size=sum(map(len, nodes)),
            weights=(1,) * parts,
            steps=lambda rank: leader_all_reduce(nodes, rank, crossing(), chunks, all_reduce),
            holds_before=lambda rank: every,
            holds_after=lambda rank: every,
            claim=lambda rank: claims()[rank],
        )

    return build_leader


REGISTERED["all_reduce", "hierarchical"] = hierarchical("hierarchical", "ring", ring_all_reduce)
