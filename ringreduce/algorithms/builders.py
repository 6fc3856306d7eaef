"""Make a Schedule of a generator: add the number of chunks, their holders, and the claims.

Ranks take their places in the order of the nodes, so that neighbours share a node where possible.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ringreduce.algorithms import claims
from ringreduce.algorithms.hierarchical import (
    GroupSteps,
    Nodes,
    cut_points,
    hierarchical_all_reduce,
)
from ringreduce.schedules.schedule import Chunks, Schedule, Steps, joined

Builder = Callable[[Nodes, int], Schedule]
"""(nodes, root) -> schedule.  The nodes list every rank once; only rooted collectives use root."""

RootedSteps = Callable[[Sequence[int], int, int, Sequence[Chunks]], Steps]
"""(group, me, root, chunks) -> the steps of ``group[me]``; `root` is a place in the group."""

Parts = Callable[[int], int]
"""Number of ranks -> number of parts that the data are divided into."""


@dataclass(frozen=True)
class Algorithm:
    """An algorithm for the ranks of any group."""

    steps: GroupSteps
    claim: claims.GroupClaim
    parts: Parts
    shape: Callable[[int], str] = lambda n: ""
    """Number of ranks -> text that is added to the algorithm's name."""


@dataclass(frozen=True)
class RootedAlgorithm:
    """An algorithm for the ranks of any group, with a root among them."""

    steps: RootedSteps
    claim: claims.RootedClaim
    parts: Parts


def none(n: int) -> int:
    """Return no parts: messages are empty."""
    return 0


def one(n: int) -> int:
    """Return one part: the data travel whole."""
    return 1


def two(n: int) -> int:
    return 2


def each(n: int) -> int:
    """Return one part for each rank."""
    return n


def each_or_five(n: int) -> int:
    """Return one part for each rank; five for two ranks."""
    return 5 if n == 2 else n


def each_other(n: int) -> int:
    """Return one part for each rank but the root, at least one."""
    return max(1, n - 1)


def each_power(n: int) -> int:
    """Return one part for each rank of the largest power of two that is at most n."""
    return 1 << claims.floor_log2(n)


def each_pair(n: int) -> int:
    """Return one part for each ordered pair of ranks, a rank with itself included."""
    return n * n


def whole(steps: Callable[[Sequence[int], int, Chunks], Steps]) -> GroupSteps:
    """Adapt an algorithm that moves all chunks together to take a list of parts."""
    return lambda group, me, chunks: steps(group, me, joined(chunks))


def without_data(steps: Callable[[Sequence[int], int], Steps]) -> GroupSteps:
    """Adapt an algorithm that sends empty messages to take a list of parts, which is empty."""
    return lambda group, me, chunks: steps(group, me)


def whole_rooted(steps: Callable[[Sequence[int], int, int, Chunks], Steps]) -> RootedSteps:
    """Adapt a rooted algorithm that moves all chunks together to take a list of parts."""
    return lambda group, me, root, chunks: steps(group, me, root, joined(chunks))


# --- schedules ------------------------------------------------------------------------------------


def among_all(collective: str, name: str, algorithm: Algorithm) -> Builder:
    """Return the builder of `collective` by an algorithm for all ranks."""

    def build_among_all(nodes: Nodes, root: int) -> Schedule:
        group = [rank for node in nodes for rank in node]
        parts = algorithm.parts(len(group))
        chunks, sizes = _chunks(collective, group, parts), (1,) * parts
        before, after = holders(collective, len(group), root, parts)
        return Schedule(
            collective=collective,
            algorithm=name + algorithm.shape(len(group)),
            size=len(group),
            weights=sizes,
            steps=lambda rank: algorithm.steps(group, group.index(rank), chunks),
            holds_before=before,
            holds_after=after,
            claim=lambda rank: algorithm.claim(group, group.index(rank), sizes),
        )

    return build_among_all


def from_root(collective: str, name: str, algorithm: RootedAlgorithm) -> Builder:
    """Return the builder of the rooted `collective` by an algorithm for all ranks."""

    def build_from_root(nodes: Nodes, root: int) -> Schedule:
        place = [rank for node in nodes for rank in node].index(root)
        here = Algorithm(
            steps=lambda group, me, chunks: algorithm.steps(group, me, place, chunks),
            claim=lambda group, me, sizes: algorithm.claim(len(group), me, place),
            parts=algorithm.parts,
        )
        return among_all(collective, name, here)(nodes, root)

    return build_from_root


def hierarchical_builder(
    name: str, reduce_scatter: Algorithm, rail_all_reduce: Algorithm, all_gather: Algorithm
) -> Builder:
    """Return the builder of an all-reduce: two algorithms in the node, one along the rails.

    Every shard is divided into the number of parts that `rail_all_reduce` requires.
    """

    def build_hierarchical(nodes: Nodes, root: int) -> Schedule:
        parts, cuts = rail_all_reduce.parts(len(nodes)), cut_points(nodes)
        lengths = [high - low for low, high in pairwise(cuts)]
        shards = [[(shard * parts + i,) for i in range(parts)] for shard in range(len(lengths))]
        every = tuple(range(len(lengths) * parts))

        return Schedule(
            collective="all_reduce",
            algorithm=name,
            size=sum(map(len, nodes)),
            weights=tuple(length for length in lengths for _ in range(parts)),
            steps=lambda rank: hierarchical_all_reduce(
                nodes, rank, shards, reduce_scatter.steps, rail_all_reduce.steps, all_gather.steps
            ),
            holds_before=lambda rank: every,
            holds_after=lambda rank: every,
            claim=lambda rank: claims.hierarchical_all_reduce(
                nodes, rank, parts, reduce_scatter.claim, rail_all_reduce.claim, all_gather.claim
            ),
        )

    return build_hierarchical


# --- holders of chunks ----------------------------------------------------------------------------


def default_parts(collective: str, n: int) -> int:
    """Return one chunk for each rank; in an all-to-all, for each ordered pair of ranks."""
    return each_pair(n) if collective == "all_to_all" else each(n)


def _chunks(collective: str, group: Sequence[int], parts: int) -> list[Chunks]:
    """Return one chunk for each part; a part that belongs to a place has its rank's chunk."""
    if collective in ("all_reduce", "broadcast", "reduce", "barrier"):
        return [(i,) for i in range(parts)]
    if collective == "all_to_all":
        return [(sender * len(group) + receiver,) for sender in group for receiver in group]
    return [(rank,) for rank in group]


def holders(
    collective: str, n: int, root: int, parts: int
) -> tuple[Callable[[int], Chunks], Callable[[int], Chunks]]:
    """Return the functions rank -> chunks that it holds before, and after, the collective."""
    every = tuple(range(parts))

    def all_of_them(rank: int) -> Chunks:
        return every

    def its_own(rank: int) -> Chunks:
        return (rank,)

    def at_the_root(rank: int) -> Chunks:
        return every if rank == root else ()

    return {
        "all_reduce": (all_of_them, all_of_them),
        "reduce_scatter": (all_of_them, its_own),
        "all_gather": (its_own, all_of_them),
        "broadcast": (at_the_root, all_of_them),
        "reduce": (all_of_them, at_the_root),
        "gather": (its_own, at_the_root),
        "scatter": (at_the_root, its_own),
        "all_to_all": (lambda rank: every[rank * n : (rank + 1) * n], lambda rank: every[rank::n]),
        "barrier": (all_of_them, all_of_them),
    }[collective]
