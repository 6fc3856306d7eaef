"""Binomial tree: every rank that has the data passes it on, half as far in each step.

Source: Johnsson & Ho, "Optimum broadcasting and personalized communication in hypercubes", IEEE
Transactions on Computers 38(9), 1989.

`group` lists the ranks, `me` is this rank's place in it, `root` the root's.  Counted from the root,
place v is responsible for itself and the d-1 places that follow, at most to the last, where d is
the lowest bit that is set in v.  All ranks take ceil(log2 n) steps; some steps of a rank are empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ringreduce.algorithms.definition import Sizes, algorithm, backwards, in_turn, one
from ringreduce.algorithms.non_power_of_two import ceil_log2
from ringreduce.schedules.schedule import Chunks, Claim, Recv, Send, Step, Steps, joined


def broadcast_claims(group: Sequence[int], root: int, sizes: Sizes) -> list[Claim]:
    n = len(group)
    return [
        Claim(ceil_log2(n), sent=ceil_log2(places), received=int(places < n))
        for places in _responsible(n, root)
    ]


def reduce_claims(group: Sequence[int], root: int, sizes: Sizes) -> list[Claim]:
    return backwards(broadcast_claims(group, root, sizes))


def all_reduce_claims(group: Sequence[int], sizes: Sizes) -> list[Claim]:
    return in_turn(reduce_claims(group, 0, sizes), broadcast_claims(group, 0, sizes))


def scatter_claims(group: Sequence[int], root: int, sizes: Sizes) -> list[Claim]:
    n = len(group)
    return [
        Claim(ceil_log2(n), sent=places - 1, received=places if places < n else 0)
        for places in _responsible(n, root)
    ]


def gather_claims(group: Sequence[int], root: int, sizes: Sizes) -> list[Claim]:
    return backwards(scatter_claims(group, root, sizes))


def _responsible(n: int, root: int) -> list[int]:
    """Return for how many places each is responsible: its lowest bit, at most to the end."""
    counted = ((me - root) % n for me in range(n))
    return [min(place & -place, n - place) if place else n for place in counted]


@algorithm("broadcast", "tree", broadcast_claims, one)
def tree_broadcast(group: Sequence[int], me: int, root: int, chunks: Sequence[Chunks]) -> Steps:
    """Send all chunks to the rank half the group away; then repeat in both halves.

    ceil(log2 n) steps.  A rank sends the data once for each child, the root ceil(log2 n) times.
    """
    whole = joined(chunks)
    for edge in reversed(_edges(group, me, root)):
        yield Step(
            sends=tuple(Send(child, whole) for child in edge.child),
            recvs=tuple(Recv(parent, whole) for parent in edge.parent),
        )


@algorithm("reduce", "tree", reduce_claims, one)
def tree_reduce(group: Sequence[int], me: int, root: int, chunks: Sequence[Chunks]) -> Steps:
    """Run `tree_broadcast` backwards: add the values of the children, send the sum to the parent.

    ceil(log2 n) steps.  A rank receives the data once for each child, the root ceil(log2 n) times.
    """
    whole = joined(chunks)
    for edge in _edges(group, me, root):
        yield Step(
            sends=tuple(Send(parent, whole) for parent in edge.parent),
            recvs=tuple(Recv(child, whole, reduce=True) for child in edge.child),
        )


@algorithm("all_reduce", "tree", all_reduce_claims, one)
def tree_all_reduce(group: Sequence[int], me: int, chunks: Sequence[Chunks]) -> Steps:
    """Reduce to the first place, then broadcast from there.

    2 ceil(log2 n) steps; the first rank sends and receives the data ceil(log2 n) times.
    """
    yield from tree_reduce.steps(group, me, 0, chunks)
    yield from tree_broadcast.steps(group, me, 0, chunks)


@algorithm("scatter", "tree", scatter_claims)
def tree_scatter(group: Sequence[int], me: int, root: int, chunks: Sequence[Chunks]) -> Steps:
    """Move the root's ``chunks[i]`` to place i: a child receives those of all its places.

    ceil(log2 n) steps; the root sends (n-1)/n of the data, and no rank receives more than half.
    """
    for edge in reversed(_edges(group, me, root)):
        theirs = joined(chunks[i] for i in edge.below)
        yield Step(
            sends=tuple(Send(child, theirs) for child in edge.child),
            recvs=tuple(Recv(parent, theirs) for parent in edge.parent),
        )


@algorithm("gather", "tree", gather_claims)
def tree_gather(group: Sequence[int], me: int, root: int, chunks: Sequence[Chunks]) -> Steps:
    """Run `tree_scatter` backwards: ``chunks[i]`` of place i go to the root.

    ceil(log2 n) steps; the root receives (n-1)/n of the data, and no rank sends more than half.
    """
    for edge in _edges(group, me, root):
        theirs = joined(chunks[i] for i in edge.below)
        yield Step(
            sends=tuple(Send(parent, theirs) for parent in edge.parent),
            recvs=tuple(Recv(child, theirs) for child in edge.child),
        )


class _Edge(NamedTuple):
    """The edge of one step to a parent or to a child, or none."""

    parent: tuple[int, ...]
    child: tuple[int, ...]
    below: list[int]
    """The places for which the lower end of the edge is responsible."""


def _edges(group: Sequence[int], me: int, root: int) -> list[_Edge]:
    """Return this rank's edges, the shortest first, one for each step."""
    n, edges = len(group), []
    ranks = [*group[root:], *group[:root]]
    place = (me - root) % n
    for distance in (1 << k for k in range((n - 1).bit_length())):
        parent: tuple[int, ...] = ()
        child: tuple[int, ...] = ()
        lower = place
        if place % (2 * distance) == distance:
            parent = (ranks[place - distance],)
        elif place % (2 * distance) == 0 and place + distance < n:
            lower = place + distance
            child = (ranks[lower],)
        below = range(lower, min(lower + distance, n)) if parent or child else ()
        edges.append(_Edge(parent, child, [(root + v) % n for v in below]))
    return edges
