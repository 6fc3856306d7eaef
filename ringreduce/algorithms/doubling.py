"""Recursive doubling: exchange all data with a partner, at twice the distance in each step.

Source: Thakur, Rabenseifner & Gropp, "Optimization of collective communication operations in
MPICH", IJHPCA 19(1), 2005.
"""

from __future__ import annotations

from collections.abc import Sequence

from ringreduce.algorithms.definition import Sizes, algorithm, one
from ringreduce.algorithms.non_power_of_two import floor_log2, in_pairs, in_pairs_claims
from ringreduce.schedules.schedule import Chunks, Claim, Recv, Send, Step, Steps, joined


def all_reduce_claims(group: Sequence[int], sizes: Sizes) -> list[Claim]:
    n, steps, total = len(group), floor_log2(len(group)), sum(sizes)
    claims = in_pairs_claims(n, total, Claim(steps, steps * total, steps * total))
    of_rank = dict(zip(sorted(group), claims, strict=True))
    return [of_rank[rank] for rank in group]


@algorithm("all_reduce", "doubling", all_reduce_claims, one)
def doubling_all_reduce(group: Sequence[int], me: int, chunks: Sequence[Chunks]) -> Steps:
    """In step k exchange sums with the rank whose place differs in bit k alone, and add.

    log2 p steps, where p is the largest power of two that is at most n, and two more if p is not n
    (see `non_power_of_two`).  Each step moves all of the data each way.  The ranks take their
    places in ascending order: then the ranks of one partner's sum are all below those of the
    other's, and both partners add in the same order.
    """
    ascending, whole = sorted(group), joined(chunks)

    def core(ranks: Sequence[int], place: int) -> Steps:
        distance = 1
        while distance < len(ranks):
            partner = ranks[place ^ distance]
            yield Step((Send(partner, whole),), (Recv(partner, whole, reduce=True),))
            distance *= 2

    me = ascending.index(group[me])
    yield from in_pairs(ascending, me, core, lambda i: whole, lambda i: whole, reduce=(True, False))
