"""Star: all data go through a server, the pattern of the parameter server.

Source: Li et al., "Scaling distributed machine learning with the parameter server", OSDI 2014.
Here the servers are ranks like the others.  It is the baseline that rings and trees are held
against: the server's link carries every rank's data.

`group` lists the ranks, `me` is this rank's place in it, `root` the server's.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from ringreduce.schedules.schedule import Chunks, Recv, Send, Step, Steps, in_parallel


def star_scatter(group: Sequence[int], me: int, root: int, chunks: Sequence[Chunks]) -> Steps:
    """The root sends ``chunks[i]`` to each place i.

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
    """Each place i sends ``chunks[i]`` to the root, which adds what comes if `reduce`.

    One step; the root receives (n-1)/n of the data.
    """
    others = [i for i in range(len(group)) if i != root]
    if me == root and others:
        yield Step(recvs=tuple(Recv(group[i], chunks[i], reduce) for i in others))
    elif others:
        yield Step(sends=(Send(group[root], chunks[me]),))


def star_broadcast(group: Sequence[int], me: int, root: int, chunks: Chunks) -> Steps:
    """The root sends everything to everybody.  One step; the root sends the data n-1 times."""
    yield from star_scatter(group, me, root, [chunks] * len(group))


def star_reduce(group: Sequence[int], me: int, root: int, chunks: Chunks) -> Steps:
    """Everybody sends everything to the root, which folds n values at once.

    One step; the root receives the data n-1 times.
    """
    yield from star_gather(group, me, root, [chunks] * len(group), reduce=True)


def star_all_reduce(group: Sequence[int], me: int, chunks: Sequence[Chunks]) -> Steps:
    """One server for each of ``chunks``: everybody sends them to the servers, and gets the sums.

    Two steps.  With k servers a rank that is none sends and receives the data once, and a server
    (n-1)/k times and what it sends to and gets from the other servers: 2(n-1)/k + 2(k-1)/k.
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
