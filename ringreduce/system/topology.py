"""The ranks of each node; a rank's index in its node and across nodes."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ringreduce.errors import counted, shown

Nodes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Topology:
    """The ranks of each node, and this rank's indices among them."""

    nodes: Nodes
    rank: int

    @property
    def local_rank(self) -> int:
        """Index among the ranks of this node."""
        return self._node.index(self.rank)

    @property
    def local_size(self) -> int:
        """Number of ranks on this node."""
        return len(self._node)

    @property
    def cross_rank(self) -> int:
        """Index among the ranks that have this `local_rank` on their nodes."""
        return self._peers_across.index(self.rank)

    @property
    def cross_size(self) -> int:
        """Number of nodes that have a rank of this `local_rank`."""
        return len(self._peers_across)

    @property
    def _node(self) -> tuple[int, ...]:
        return next(node for node in self.nodes if self.rank in node)

    @property
    def _peers_across(self) -> list[int]:
        local = self.local_rank
        return [node[local] for node in self.nodes if local < len(node)]


def parse_nodes(
    nodes: Sequence[int] | Sequence[Sequence[int]], size: int, where: str = "init"
) -> Nodes:
    """Return the ranks of each node, from sizes ``(3, 1, 2)`` or ranks ``((0, 2), (1, 3))``.

    Sizes place consecutive ranks on each node.  Raises ValueError unless each of the `size` ranks
    is on exactly one node; its text begins with `where`.
    """
    groups: list[tuple[int, ...]] = []
    start = 0
    try:
        for node in nodes:
            if isinstance(node, Iterable):
                groups.append(tuple(map(operator.index, node)))
            else:
                groups.append(tuple(range(start, start + operator.index(node))))
            start += len(groups[-1])
    except TypeError:  # not whole numbers, or no sequence: no rank is placed
        groups.clear()
    if sorted(rank for group in groups for rank in group) != list(range(size)) or not all(groups):
        raise ValueError(
            f"{where}: nodes={shown(nodes)} does not place each of the {counted(size, 'rank')} on "
            "exactly one node; pass how many ranks each node has, such as (3, 1, 2), or "
            "the ranks themselves"
        )
    return tuple(groups)
