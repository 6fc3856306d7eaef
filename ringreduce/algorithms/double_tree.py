"""Double binary tree: two trees for half of the data each; a leaf of one is inside in the other.

Source: Sanders, Speck & Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and
scan", Parallel Computing 35(12), 2009.

The trees are in order: counting the ranks from 1, odd ones are leaves, and the root is the largest
power of two.  The second tree is the first one over ranks shifted by a place, so that odd and even
change roles.  All ranks take the same number of steps, empty ones while others are at work.  Run in
slices it is a pipeline, in which each rank sends about as much as it receives: the data once.

`group` lists the ranks, `me` is this rank's place in it, and ``chunks`` are the two halves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from ringreduce.schedules.schedule import Chunks, Recv, Send, Step, Steps, in_parallel


def double_tree_all_reduce(group: Sequence[int], me: int, chunks: Sequence[Chunks]) -> Steps:
    """Up each tree, adding, to its own root; down again with the sum.

    2 floor(log2 n) steps.  A rank sends, and receives, half of the data for each edge that it has:
    four in all, fewer at the roots and at the end of the line.
    """
    halves = zip(_two_trees(group), chunks, strict=True)
    yield from in_parallel(
        *(chain(_up(tree, group[me], half), _down(tree, group[me], half)) for tree, half in halves)
    )


def double_tree_broadcast(
    group: Sequence[int], me: int, root: int, chunks: Sequence[Chunks]
) -> Steps:
    """The root feeds both trees, which span all the others.

    1 + floor(log2(n-1)) steps.  The root sends the data once, a rank half of it to each child.
    """
    halves = zip(_two_trees(group, root), chunks, strict=True)
    yield from in_parallel(*(_down(tree, group[me], half) for tree, half in halves))


def double_tree_reduce(group: Sequence[int], me: int, root: int, chunks: Sequence[Chunks]) -> Steps:
    """`double_tree_broadcast` backwards: three are added at once, two children and their parent.

    1 + floor(log2(n-1)) steps.  The root receives the data once, a rank half of it from each child.
    """
    halves = zip(_two_trees(group, root), chunks, strict=True)
    yield from in_parallel(*(_up(tree, group[me], half) for tree, half in halves))


@dataclass(frozen=True)
class _Tree:
    """A binary tree of these ranks, in order; `above`, if any, is the parent of its root."""

    ranks: Sequence[int]
    above: tuple[int, ...] = ()

    @property
    def levels(self) -> int:
        """Edges on the way from the top to the lowest leaf."""
        return len(self.ranks).bit_length() - 1 + len(self.above) if self.ranks else 0

    def find(self, rank: int) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
        """How many edges below the top this rank is, its parent and its children."""
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
    """The place in ``low`` to ``high - 1`` that, counted from `low` and 1, is a power of two."""
    return low + (1 << (high - low).bit_length() - 1) - 1


def _two_trees(group: Sequence[int], root: int | None = None) -> tuple[_Tree, _Tree]:
    """Two trees over all ranks, or over all but the root and hanging from it."""
    above = () if root is None else (group[root],)
    ranks = group if root is None else [*group[root + 1 :], *group[:root]]
    return _Tree(ranks, above), _Tree([*ranks[1:], *ranks[:1]], above)


def _up(tree: _Tree, rank: int, chunks: Chunks) -> Steps:
    """All ranks at one depth send to their parents, the lowest first."""
    depth, parent, children = tree.find(rank)
    for level in range(tree.levels, 0, -1):
        yield Step(
            sends=tuple(Send(peer, chunks) for peer in parent if level == depth),
            recvs=tuple(Recv(peer, chunks, True) for peer in children if level == depth + 1),
        )


def _down(tree: _Tree, rank: int, chunks: Chunks) -> Steps:
    """All ranks at one depth send to their children, the top first."""
    depth, parent, children = tree.find(rank)
    for level in range(1, tree.levels + 1):
        yield Step(
            sends=tuple(Send(peer, chunks) for peer in children if level == depth + 1),
            recvs=tuple(Recv(peer, chunks) for peer in parent if level == depth),
        )
