"""Star: all data go through a server, the pattern of the parameter server.

Source: Li et al., "Scaling distributed machine learning with the parameter server", OSDI 2014.
Here the servers are ranks like the others.  Rings and trees are compared with the star: its
server's link carries every rank's data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

from ringreduce.algorithms.definition import Algorithm, Sizes, algorithm, backwards, one
from ringreduce.schedules.schedule import (
    Chunks,
    Claim,
    Recv,
    Send,
    Step,
    Steps,
    in_parallel,
    joined,
)


def broadcast_claims(group: Sequence[int], root: int, sizes: Sizes) -> list[Claim]:
    n = len(group)
    claims = [Claim(int(n > 1), sent=0, received=1)] * n
    claims[root] = Claim(int(n > 1), sent=n - 1, received=0)
    return claims


def reduce_claims(group: Sequence[int], root: int, sizes: Sizes) -> list[Claim]:
    return backwards(broadcast_claims(group, root, sizes))


def all_reduce_claims(group: Sequence[int], sizes: Sizes) -> list[Claim]:
    n, servers = len(group), len(sizes)
    claims = [Claim(2 * (n > 1), servers, servers)] * n
    for server in range(servers):
        moved = servers - 1 + n - 1
        claims[server * n // servers] = Claim(2 * (n > 1), moved, moved)
    return claims


@algorithm("scatter", "star", broadcast_claims)
def star_scatter(group: Sequence[int], me: int, root: int, chunks: Sequence[Chunks]) -> Steps:
    """Send ``chunks[i]`` from the root to each place i.

    One step; the root sends (n-1)/n of the data.
    """
    others = [i for i in range(len(group)) if i != root]
    if me == root and others:
        yield Step(sends=tuple(Send(group[i], chunks[i]) for i in others))
    elif others:
        yield Step(recvs=(Recv(group[root], chunks[me]),))


@algorithm("gather", "star", reduce_claims)
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


@algorithm("broadcast", "star", broadcast_claims, one)
def star_broadcast(group: Sequence[int], me: int, root: int, chunks: Sequence[Chunks]) -> Steps:
    """Send all chunks from the root to every rank.  One step; it sends the data n-1 times."""
    yield from star_scatter.steps(group, me, root, [joined(chunks)] * len(group))


@algorithm("reduce", "star", reduce_claims, one)
def star_reduce(group: Sequence[int], me: int, root: int, chunks: Sequence[Chunks]) -> Steps:
    """Send all chunks from every rank to the root, which folds n values at once.

    One step; the root receives the data n-1 times.
    """
    yield from star_gather.steps(group, me, root, [joined(chunks)] * len(group), reduce=True)


@algorithm("all_reduce", "star", all_reduce_claims, one)
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
            chain(
                star_reduce.steps(group, me, place, [part]),
                star_broadcast.steps(group, me, place, [part]),
            )
            for place, part in zip(places, chunks, strict=True)
        )
    )


def star_of(servers: int) -> Algorithm:
    """Return the star with `servers` servers, or with all ranks as servers if there are fewer."""
    name = f"star({servers})"
    return replace(star_all_reduce, name=name, parts=lambda n: min(servers, n))
