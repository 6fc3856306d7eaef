"""Ring: every rank exchanges messages with its two neighbours only.

Source: Patarasuk & Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations",
JPDC 69(2), 2009.

`ring` lists the ranks in ring order, `me` is this rank's place in it, and ``chunks[i]`` are the
chunks (mostly one) that place ``i`` is responsible for; they travel as one message.
"""

from __future__ import annotations

from collections.abc import Sequence

from ringreduce.algorithms.definition import Sizes, algorithm, backwards, in_turn, one
from ringreduce.schedules.schedule import Chunks, Claim, Recv, Send, Step, Steps, joined


def reduce_scatter_claims(group: Sequence[int], sizes: Sizes) -> list[Claim]:
    total, steps = sum(sizes), len(group) - 1
    return [Claim(steps, total - size, total - sizes[me - 1]) for me, size in enumerate(sizes)]


def all_gather_claims(group: Sequence[int], sizes: Sizes) -> list[Claim]:
    total, steps, to_the_right = sum(sizes), len(group) - 1, [*sizes[1:], *sizes[:1]]
    return [
        Claim(steps, total - right, total - size)
        for size, right in zip(sizes, to_the_right, strict=True)
    ]


def all_reduce_claims(group: Sequence[int], sizes: Sizes) -> list[Claim]:
    return in_turn(reduce_scatter_claims(group, sizes), all_gather_claims(group, sizes))


def broadcast_claims(group: Sequence[int], root: int, sizes: Sizes) -> list[Claim]:
    n, last = len(group), (root - 1) % len(group)
    return [Claim(n - 1, sent=int(me != last), received=int(me != root)) for me in range(n)]


def reduce_claims(group: Sequence[int], root: int, sizes: Sizes) -> list[Claim]:
    return backwards(broadcast_claims(group, root, sizes))


@algorithm("reduce_scatter", "ring", reduce_scatter_claims)
def ring_reduce_scatter(ring: Sequence[int], me: int, chunks: Sequence[Chunks]) -> Steps:
    """Send each part once round the ring, summing; ``ring[me]`` ends owning ``chunks[me]``.

    n-1 steps.  A rank sends every part but its own, and receives every part but its left
    neighbour's: (n-1)/n of the data each way.
    """
    n = len(ring)
    left, right = ring[me - 1], ring[(me + 1) % n]
    for step in range(n - 1):
        yield Step(
            sends=(Send(right, chunks[(me - step - 1) % n]),),
            recvs=(Recv(left, chunks[(me - step - 2) % n], reduce=True),),
        )


@algorithm("all_gather", "ring", all_gather_claims)
def ring_all_gather(ring: Sequence[int], me: int, chunks: Sequence[Chunks]) -> Steps:
    """Pass each part once round the ring, starting at its owner; every rank ends with all.

    n-1 steps.  A rank sends every part but its right neighbour's, and receives every part but its
    own: (n-1)/n of the data each way.
    """
    n = len(ring)
    left, right = ring[me - 1], ring[(me + 1) % n]
    for step in range(n - 1):
        yield Step(
            sends=(Send(right, chunks[(me - step) % n]),),
            recvs=(Recv(left, chunks[(me - step - 1) % n]),),
        )


@algorithm("all_reduce", "ring", all_reduce_claims)
def ring_all_reduce(ring: Sequence[int], me: int, chunks: Sequence[Chunks]) -> Steps:
    """Reduce-scatter ("scatter-reduce"), then all-gather, both round the same ring.

    2(n-1) steps; each rank sends 2(n-1)/n of the data, the least that any algorithm can.
    """
    yield from ring_reduce_scatter.steps(ring, me, chunks)
    yield from ring_all_gather.steps(ring, me, chunks)


@algorithm("broadcast", "ring", broadcast_claims, one)
def ring_broadcast(ring: Sequence[int], me: int, root: int, chunks: Sequence[Chunks]) -> Steps:
    """Pass all chunks from neighbour to neighbour, starting at place `root`.

    n-1 steps, of which a rank takes part in at most two; the last rank only receives.  Executed in
    slices it is a pipeline: the root sends its data once, for any number of ranks.
    """
    n, whole = len(ring), joined(chunks)
    place = (me - root) % n
    for step in range(n - 1):
        yield Step(
            sends=(Send(ring[(me + 1) % n], whole),) if step == place else (),
            recvs=(Recv(ring[me - 1], whole),) if step == place - 1 else (),
        )


@algorithm("reduce", "ring", reduce_claims, one)
def ring_reduce(ring: Sequence[int], me: int, root: int, chunks: Sequence[Chunks]) -> Steps:
    """Run `ring_broadcast` backwards: each rank adds its value and passes the sum on to `root`.

    n-1 steps, of which a rank takes part in at most two; the farthest only sends.  Executed in
    slices it is a pipeline as well.
    """
    n, whole = len(ring), joined(chunks)
    hops = (me - root) % n
    for step in range(n - 1):
        yield Step(
            sends=(Send(ring[me - 1], whole),) if step == n - 1 - hops else (),
            recvs=(Recv(ring[(me + 1) % n], whole, True),) if step == n - 2 - hops else (),
        )
