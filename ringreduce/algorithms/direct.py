"""Direct: every rank sends to every other rank itself, and no rank passes data on.

Sources: one-shot and two-shot are the names of NVIDIA's custom all-reduce kernels in TensorRT-LLM;
the all-to-alls are in Thakur, Rabenseifner & Gropp, "Optimization of collective communication
operations in MPICH", IJHPCA 19(1), 2005.

Peers are listed from the next place on, so that no two ranks start with the same one.
"""

from __future__ import annotations

from collections.abc import Sequence

from ringreduce.algorithms.definition import Sizes, algorithm, backwards, in_turn, one
from ringreduce.algorithms.star import star_gather
from ringreduce.schedules.schedule import Chunks, Claim, Recv, Send, Step, Steps, joined


def one_shot_claims(group: Sequence[int], sizes: Sizes) -> list[Claim]:
    others, total = len(group) - 1, sum(sizes)
    return [Claim(int(others > 0), others * total, others * total)] * len(group)


def reduce_scatter_claims(group: Sequence[int], sizes: Sizes) -> list[Claim]:
    others, total = len(group) - 1, sum(sizes)
    return [Claim(int(others > 0), sent=total - size, received=others * size) for size in sizes]


def all_gather_claims(group: Sequence[int], sizes: Sizes) -> list[Claim]:
    return backwards(reduce_scatter_claims(group, sizes))


def two_shot_claims(group: Sequence[int], sizes: Sizes) -> list[Claim]:
    return in_turn(reduce_scatter_claims(group, sizes), all_gather_claims(group, sizes))


def two_shot_reduce_claims(group: Sequence[int], root: int, sizes: Sizes) -> list[Claim]:
    n = len(group)
    each, of_root = (2, 3) if n == 2 else (1, 1)
    claims = [Claim(2, of_root + each * (n - 2) + each, each * (n - 1))] * n
    claims[root] = Claim(2 * (n > 1), each * (n - 1), (of_root + each) * (n - 1))
    return claims


def barrier_claims(group: Sequence[int], sizes: Sizes) -> list[Claim]:
    return [Claim(int(len(group) > 1), sent=0, received=0)] * len(group)


def all_to_all_claims(group: Sequence[int], sizes: Sizes) -> list[Claim]:
    others = len(group) - 1
    return [Claim(int(others > 0), others, others)] * len(group)


def pairwise_claims(group: Sequence[int], sizes: Sizes) -> list[Claim]:
    others = len(group) - 1
    return [Claim(others, others, others)] * len(group)


@algorithm("all_reduce", "one_shot", one_shot_claims, one)
def one_shot_all_reduce(group: Sequence[int], me: int, chunks: Sequence[Chunks]) -> Steps:
    """Send all data to every rank, and fold the received values in rank order.

    One step; each rank sends the data n-1 times and folds n values at once.
    """
    others, whole = [group[i] for i in _others(group, me)], joined(chunks)
    if others:
        yield Step(
            sends=tuple(Send(peer, whole) for peer in others),
            recvs=tuple(Recv(peer, whole, reduce=True) for peer in others),
        )


@algorithm("reduce_scatter", "direct", reduce_scatter_claims)
def direct_reduce_scatter(group: Sequence[int], me: int, chunks: Sequence[Chunks]) -> Steps:
    """Send each rank its part; ``group[me]`` folds all n values of ``chunks[me]`` at once.

    One step; each rank sends (n-1)/n of the data.
    """
    others = _others(group, me)
    if others:
        yield Step(
            sends=tuple(Send(group[i], chunks[i]) for i in others),
            recvs=tuple(Recv(group[i], chunks[me], reduce=True) for i in others),
        )


@algorithm("all_gather", "direct", all_gather_claims)
def direct_all_gather(group: Sequence[int], me: int, chunks: Sequence[Chunks]) -> Steps:
    """Send the own part to every rank.  One step; each rank receives (n-1)/n of the data."""
    others = _others(group, me)
    if others:
        yield Step(
            sends=tuple(Send(group[i], chunks[me]) for i in others),
            recvs=tuple(Recv(group[i], chunks[i]) for i in others),
        )


@algorithm("all_reduce", "two_shot", two_shot_claims)
def two_shot_all_reduce(group: Sequence[int], me: int, chunks: Sequence[Chunks]) -> Steps:
    """Direct reduce-scatter, then direct all-gather.

    Two steps; each rank sends 2(n-1)/n of the data, the least that any algorithm can.
    """
    yield from direct_reduce_scatter.steps(group, me, chunks)
    yield from direct_all_gather.steps(group, me, chunks)


@algorithm("reduce", "two_shot", two_shot_reduce_claims, lambda n: 5 if n == 2 else n)
def two_shot_reduce(group: Sequence[int], me: int, root: int, chunks: Sequence[Chunks]) -> Steps:
    """Direct reduce-scatter, then a gather of the parts at the root.

    Two steps; all ranks fold at once.  Of two ranks the root folds 3 of 5 parts, since it receives
    the other 2.
    """
    each = 2 if len(group) == 2 else 1
    parts = [joined(chunks[i : i + each]) for i in range(0, each * (len(group) - 1), each)]
    parts.insert(root, joined(chunks[each * (len(group) - 1) :]))
    yield from direct_reduce_scatter.steps(group, me, parts)
    yield from star_gather.steps(group, me, root, parts)


@algorithm("barrier", "direct", barrier_claims, lambda n: 0)
def direct_barrier(group: Sequence[int], me: int, chunks: Sequence[Chunks]) -> Steps:
    """Send every rank an empty message, and wait for one of each.  One step; n-1 messages."""
    yield from direct_all_gather.steps(group, me, [()] * len(group))


@algorithm("all_to_all", "direct", all_to_all_claims)
def direct_all_to_all(group: Sequence[int], me: int, chunks: Sequence[Chunks]) -> Steps:
    """Move ``chunks[i * n + j]`` from place i to place j, all at once.

    One step of n-1 messages each way.
    """
    n = len(group)
    others = _others(group, me)
    if others:
        yield Step(
            sends=tuple(Send(group[i], chunks[me * n + i]) for i in others),
            recvs=tuple(Recv(group[i], chunks[i * n + me]) for i in others),
        )


@algorithm("all_to_all", "pairwise", pairwise_claims)
def pairwise_all_to_all(group: Sequence[int], me: int, chunks: Sequence[Chunks]) -> Steps:
    """Move ``chunks[i * n + j]`` from place i to place j, one message each way at a time.

    n-1 steps; step k sends to the place k+1 to the right, and receives from k+1 to the left.
    """
    n = len(group)
    for distance in range(1, n):
        to, source = (me + distance) % n, (me - distance) % n
        yield Step(
            sends=(Send(group[to], chunks[me * n + to]),),
            recvs=(Recv(group[source], chunks[source * n + me]),),
        )


def _others(group: Sequence[int], me: int) -> list[int]:
    return [(me + i) % len(group) for i in range(1, len(group))]
