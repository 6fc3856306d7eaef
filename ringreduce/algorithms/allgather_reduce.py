"""All-gather the values of all ranks, then reduce them all at once.

For few ranks and little data.  It takes ceil(log2 n) steps for any number of ranks, where recursive
doubling takes two more steps unless n is a power of two.  It rounds once, instead of at every step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ringreduce.algorithms.bruck import bruck_all_gather
from ringreduce.algorithms.definition import Sizes, algorithm, one
from ringreduce.algorithms.non_power_of_two import ceil_log2
from ringreduce.schedules.schedule import Chunks, Claim, Steps, copy_of, joined


def all_reduce_claims(group: Sequence[int], sizes: Sizes) -> list[Claim]:
    n, moved = len(group), (len(group) - 1) * sum(sizes)
    return [Claim(ceil_log2(n), moved, moved)] * n


@algorithm("all_reduce", "allgather_reduce", all_reduce_claims, one)
def allgather_reduce(group: Sequence[int], me: int, chunks: Sequence[Chunks]) -> Steps:
    """Run Bruck's all-gather of every rank's copy of `chunks`, and fold all copies at its end.

    ceil(log2 n) steps; each rank sends the data n-1 times and folds n values at once.
    """
    whole = joined(chunks)
    copies = [tuple(copy_of(chunk, rank) for chunk in whole) for rank in group]
    steps = list(bruck_all_gather.steps(group, me, copies))
    yield from steps[:-1]
    yield from (replace(last, folds=whole) for last in steps[-1:])
