"""Rooted collectives of long arrays: the root deals its data out in parts, or collects parts.

Sources: Barnett, Gupta, Payne, Shuler, van de Geijn & Watts, "Interprocessor collective
communication library (InterCom)", SHPCC 1994, for the broadcast; Rabenseifner, "Optimization of
collective reduction operations", ICCS 2004, LNCS 3036, for the reduction.  There the root has a
part of its own, so part of the data goes to it and comes from it again; here it has none.

`group` lists the ranks, `me` is this rank's place in it, `root` the root's.  ``chunks`` are a part
for each of the others, counted from the root on.
"""

from __future__ import annotations

from collections.abc import Sequence

from ringreduce.algorithms.ring import ring_all_gather, ring_reduce_scatter
from ringreduce.algorithms.star import star_gather, star_scatter
from ringreduce.schedules.schedule import Chunks, Step, Steps


def scatter_all_gather_broadcast(
    group: Sequence[int], me: int, root: int, chunks: Sequence[Chunks]
) -> Steps:
    """The root sends each of the others a part; they pass the parts round a ring of their own.

    n-1 steps; the root sends the data once, and the others receive it once.
    """
    ranks, place = [*group[root:], *group[:root]], (me - root) % len(group)
    yield from star_scatter(ranks, place, 0, [(), *chunks])
    if place:
        yield from ring_all_gather(ranks[1:], place - 1, chunks)
    else:
        yield from (Step() for _ in ranks[2:])


def reduce_scatter_gather_reduce(
    group: Sequence[int], me: int, root: int, chunks: Sequence[Chunks]
) -> Steps:
    """The others sum the parts round a ring of their own; the root adds its own to what they send.

    n-1 steps; the root receives the data once, and the others send it once.
    """
    ranks, place = [*group[root:], *group[:root]], (me - root) % len(group)
    if place:
        yield from ring_reduce_scatter(ranks[1:], place - 1, chunks)
    else:
        yield from (Step() for _ in ranks[2:])
    yield from star_gather(ranks, place, 0, [(), *chunks], reduce=True)
