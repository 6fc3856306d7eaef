"""Rooted collectives of long arrays: the root sends a part to each rank, or receives the parts.

Sources: Barnett, Gupta, Payne, Shuler, van de Geijn & Watts, "Interprocessor collective
communication library (InterCom)", SHPCC 1994, for the broadcast; Rabenseifner, "Optimization of
collective reduction operations", ICCS 2004, LNCS 3036, for the reduction.  In these papers the root
has a part of its own, so part of the data travels to the root and from it again.  Here the root has
no part.

`group` lists the ranks, `me` is this rank's place in it, `root` the root's.  ``chunks`` are one
part for each other rank, from the place after the root on.
"""

from __future__ import annotations

from collections.abc import Sequence

from ringreduce.algorithms.definition import Sizes, algorithm, backwards
from ringreduce.algorithms.ring import ring_all_gather, ring_reduce_scatter
from ringreduce.algorithms.star import star_gather, star_scatter
from ringreduce.schedules.schedule import Chunks, Claim, Step, Steps


def broadcast_claims(group: Sequence[int], root: int, sizes: Sizes) -> list[Claim]:
    others = len(group) - 1
    claims = [Claim(others, sent=others - 1, received=others)] * len(group)
    claims[root] = Claim(others, sent=others, received=0)
    return claims


def reduce_claims(group: Sequence[int], root: int, sizes: Sizes) -> list[Claim]:
    return backwards(broadcast_claims(group, root, sizes))


def each_other(n: int) -> int:
    return max(1, n - 1)


@algorithm("broadcast", "scatter_all_gather", broadcast_claims, each_other)
def scatter_all_gather_broadcast(
    group: Sequence[int], me: int, root: int, chunks: Sequence[Chunks]
) -> Steps:
    """Scatter the parts from the root to the others, which all-gather them round a ring.

    n-1 steps; the root sends the data once, and the others receive the data once.
    """
    ranks, place = [*group[root:], *group[:root]], (me - root) % len(group)
    yield from star_scatter.steps(ranks, place, 0, [(), *chunks])
    if place:
        yield from ring_all_gather.steps(ranks[1:], place - 1, chunks)
    else:
        yield from (Step() for _ in ranks[2:])


@algorithm("reduce", "reduce_scatter_gather", reduce_claims, each_other)
def reduce_scatter_gather_reduce(
    group: Sequence[int], me: int, root: int, chunks: Sequence[Chunks]
) -> Steps:
    """Reduce-scatter among all ranks but the root, round a ring; then gather and add at the root.

    n-1 steps; the root receives the data once, and the others send the data once.
    """
    ranks, place = [*group[root:], *group[:root]], (me - root) % len(group)
    if place:
        yield from ring_reduce_scatter.steps(ranks[1:], place - 1, chunks)
    else:
        yield from (Step() for _ in ranks[2:])
    yield from star_gather.steps(ranks, place, 0, [(), *chunks], reduce=True)
