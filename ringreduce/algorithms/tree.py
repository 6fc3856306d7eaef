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

from ringreduce.schedules.schedule import Chunks, Recv, Send, Step, Steps, joined


def tree_broadcast(group: Sequence[int], me: int, root: int, chunks: Chunks) -> Steps:
    """Send all chunks to the rank half the group away; then repeat in both halves.

    ceil(log2 n) steps.  A rank sends the data once for each child, the root ceil(log2 n) times.
    """
    for edge in reversed(_edges(group, me, root)):
        yield Step(
            sends=tuple(Send(child, chunks) for child in edge.child),
            recvs=tuple(Recv(parent, chunks) for parent in edge.parent),
        )


def tree_reduce(group: Sequence[int], me: int, root: int, chunks: Chunks) -> Steps:
    """Run `tree_broadcast` backwards: add the values of the children, send the sum to the parent.

    ceil(log2 n) steps.  A rank receives the data once for each child, the root ceil(log2 n) times.
    """
    for edge in _edges(group, me, root):
        yield Step(
            sends=tuple(Send(parent, chunks) for parent in edge.parent),
            recvs=tuple(Recv(child, chunks, reduce=True) for child in edge.child),
        )


def tree_all_reduce(group: Sequence[int], me: int, chunks: Chunks) -> Steps:
    """Reduce to the first place, then broadcast from there.

    2 ceil(log2 n) steps; the first rank sends and receives the data ceil(log2 n) times.
    """
    yield from tree_reduce(group, me, 0, chunks)
    yield from tree_broadcast(group, me, 0, chunks)


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
    """The edge of one step, to a parent or to a child; some steps have none."""

    parent: tuple[int, ...]
    """At most one rank."""
    child: tuple[int, ...]
    """At most one rank; none if there is a parent."""
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
