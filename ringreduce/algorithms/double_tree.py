"""Double binary tree: a tree for each half of the data; leaves of one are inner in the other.

Source: Sanders, Speck & Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and
scan", Parallel Computing 35(12), 2009.

The trees are in order: if places are counted from 1, the odd places are leaves, and the root is the
largest power of two.  The second tree is the first with all ranks shifted by one place, so that odd
and even places change roles.  All ranks take the same number of steps; some steps of a rank are
empty.  Executed in slices the algorithm is a pipeline, in which each rank sends and receives about
the data once.

`group` lists the ranks, `me` is this rank's place in it, and ``chunks`` are the two halves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from ringreduce.algorithms.definition import Sizes, algorithm, backwards
from ringreduce.algorithms.non_power_of_two import floor_log2
from ringreduce.schedules.schedule import Chunks, Claim, Recv, Send, Step, Steps, in_parallel


def all_reduce_claims(group: Sequence[int], sizes: Sizes) -> list[Claim]:
    n = len(group)
    edges = [_child_count(n, number) + _has_parent(n, number) for number in range(1, n + 1)]
    both = [edges[me] + edges[me - 1] for me in range(n)]
    return [Claim(2 * floor_log2(n), moved, moved) for moved in both]


def broadcast_claims(group: Sequence[int], root: int, sizes: Sizes) -> list[Claim]:
    others = len(group) - 1
    steps = 1 + floor_log2(others) if others else 0
    children = [_child_count(others, number) for number in range(1, others + 1)]
    claims = [
        Claim(steps, sent=children[place] + children[place - 1], received=2)
        for place in range(others)
    ]
    claims.insert(0, Claim(steps, sent=2 if others else 0, received=0))
    return [claims[(me - root) % len(group)] for me in range(len(group))]


def reduce_claims(group: Sequence[int], root: int, sizes: Sizes) -> list[Claim]:
    return backwards(broadcast_claims(group, root, sizes))


def _child_count(n: int, number: int) -> int:
    """Return the children of a place's number in a tree; numbers begin with 1.

    Odd numbers are leaves; even numbers have two children, but n itself only one.  In the second
    tree a place has the number before.
    """
    return 0 if number % 2 else 1 + (number < n)


def _has_parent(n: int, number: int) -> bool:
    return number != 1 << floor_log2(n)


def two(n: int) -> int:
    return 2


@algorithm("all_reduce", "double_tree", all_reduce_claims, two)
def double_tree_all_reduce(group: Sequence[int], me: int, chunks: Sequence[Chunks]) -> Steps:
    """Reduce each half up its tree to the root, then broadcast the sum down the same tree.

    2 floor(log2 n) steps.  A rank sends and receives half of the data over each of its edges, which
    are four in both trees together, and fewer at the roots and at the last place.
    """
    halves = zip(_two_trees(group), chunks, strict=True)
    yield from in_parallel(
        *(chain(_up(tree, group[me], half), _down(tree, group[me], half)) for tree, half in halves)
    )


@algorithm("broadcast", "double_tree", broadcast_claims, two)
def double_tree_broadcast(
    group: Sequence[int], me: int, root: int, chunks: Sequence[Chunks]
) -> Steps:
    """Broadcast each half down its tree; both trees span all ranks but the root, their parent.

    1 + floor(log2(n-1)) steps.  The root sends the data once; a rank sends half of the data to each
    of its children.
    """
    halves = zip(_two_trees(group, root), chunks, strict=True)
    yield from in_parallel(*(_down(tree, group[me], half) for tree, half in halves))


@algorithm("reduce", "double_tree", reduce_claims, two)
def double_tree_reduce(group: Sequence[int], me: int, root: int, chunks: Sequence[Chunks]) -> Steps:
    """Run `double_tree_broadcast` backwards: a rank adds its own value and its two children's.

    1 + floor(log2(n-1)) steps.  The root receives the data once; a rank receives half of the data
    from each of its children.
    """
    halves = zip(_two_trees(group, root), chunks, strict=True)
    yield from in_parallel(*(_up(tree, group[me], half) for tree, half in halves))


@dataclass(frozen=True)
class _Tree:
    """A binary tree of `ranks`, in order."""

    ranks: Sequence[int]
    above: tuple[int, ...] = ()
    """The parent of the tree's root, if it has one."""

    @property
    def levels(self) -> int:
        """Edges from the top to the deepest leaf."""
        return len(self.ranks).bit_length() - 1 + len(self.above) if self.ranks else 0

    def find(self, rank: int) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
        """Return the rank's depth in edges below the top, its parent, and its children."""
        low, high = 0, len(self.ranks)
        if rank in self.above:
            return 0, (), self._roots((low, high))
        depth, parent, place = len(self.above), self.above, self.ranks.index(rank)
        while (root := _root(low, high)) != place:
            low, high = (low, root) if place < root else (root + 1, high)
            depth, parent = depth + 1, (self.ranks[root],)
        return depth, parent, self._roots((low, root), (root + 1, high))

    def _roots(self, *parts: tuple[int, int]) -> tuple[int, ...]:
        return tuple(self.ranks[_root(low, high)] for low, high in parts if low < high)


def _root(low: int, high: int) -> int:
    """Return the root of places `low` to ``high - 1``: `low` + the largest power of two - 1."""
    return low + (1 << (high - low).bit_length() - 1) - 1


def _two_trees(group: Sequence[int], root: int | None = None) -> tuple[_Tree, _Tree]:
    """Return two trees over all ranks; with a `root`, over all others, with the root above."""
    above = () if root is None else (group[root],)
    ranks = group if root is None else [*group[root + 1 :], *group[:root]]
    return _Tree(ranks, above), _Tree([*ranks[1:], *ranks[:1]], above)


def _up(tree: _Tree, rank: int, chunks: Chunks) -> Steps:
    """Yield steps in which all ranks of one depth send to their parents, the deepest first."""
    depth, parent, children = tree.find(rank)
    for level in range(tree.levels, 0, -1):
        yield Step(
            sends=tuple(Send(peer, chunks) for peer in parent if level == depth),
            recvs=tuple(Recv(peer, chunks, True) for peer in children if level == depth + 1),
        )


def _down(tree: _Tree, rank: int, chunks: Chunks) -> Steps:
    """Yield steps in which all ranks of one depth send to their children, the top first."""
    depth, parent, children = tree.find(rank)
    for level in range(1, tree.levels + 1):
        yield Step(
            sends=tuple(Send(peer, chunks) for peer in children if level == depth + 1),
            recvs=tuple(Recv(peer, chunks) for peer in parent if level == depth),
        )
