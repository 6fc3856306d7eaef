"""Star: all data go through a server, the pattern of the parameter server.

Source: Li et al., "Scaling distributed machine learning with the parameter server", OSDI 2014.
Here the servers are ranks like the others.  Rings and trees are compared with the star: its
server's link carries every rank's data.

`group` lists the ranks, `me` is this rank's place in it, `root` the server's.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from ringreduce.schedules.schedule import Chunks, Recv, Send, Step, Steps, in_parallel


def star_scatter(group: Sequence[int], me: int, root: int, chunks: Sequence[Chunks]) -> Steps:
    """Send ``chunks[i]`` from the root to each place i.

    One step; the root sends (n-1)/n of the data.
    """
    others = [i for i in range(len(group)) if i != root]
    if me == root and others:
        yield Step(sends=tuple(Send(group[i], chunks[i]) for i in others))
    elif others:
        yield Step(recvs=(Recv(group[root], chunks[me]),))


def star_gather(
    group: Sequence[int], me: int, root: int, chunks: Sequence[Chunks], reduce: bool = False
) -> Steps:
    """Send ``chunks[i]`` from each place i to the root, which reduces them if `reduce`.

    One step; the root receives (n-1)/n of the data.
    """
    others = [i for i in range(len(group)) if i != root]
    if me == root and others:
        yield Step(recvs=tuple(Recv(group[i], chunks[i], reduce) for i in others))
    elif others:
        yield Step(sends=(Send(group[root], chunks[me]),))


def star_broadcast(group: Sequence[int], me: int, root: int, chunks: Chunks) -> Steps:
    """Send all chunks from the root to every rank.  One step; it sends the data n-1 times."""
    yield from star_scatter(group, me, root, [chunks] * len(group))


def star_reduce(group: Sequence[int], me: int, root: int, chunks: Chunks) -> Steps:
    """Send all chunks from every rank to the root, which folds n values at once.

    One step; the root receives the data n-1 times.
    """
    yield from star_gather(group, me, root, [chunks] * len(group), reduce=True)


def star_all_reduce(group: Sequence[int], me: int, chunks: Sequence[Chunks]) -> Steps:
    """Reduce each of ``chunks`` on a server of its own, and broadcast the sums from there.

    Two steps, with k servers.  A rank that is no server sends the data once and receives the data
    once.  A server sends and receives, counted together, 2(n-1)/k + 2(k-1)/k of the data: its own
    part to and from every rank, and the other parts to and from the other servers.
    The servers are spread evenly over the group, so over the nodes as well.
    """
    n = len(group)
    places = [server * n // len(chunks) for server in range(len(chunks))]
    yield from in_parallel(
        *(
            chain(star_reduce(group, me, place, part), star_broadcast(group, me, place, part))
            for place, part in zip(places, chunks, strict=True)
        )
    )
