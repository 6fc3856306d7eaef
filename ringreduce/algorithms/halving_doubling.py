"""Halving-doubling: reduce half of the remaining data in each step, then gather by doubling.

Source: Rabenseifner, "Optimization of collective reduction operations", ICCS 2004, LNCS 3036.

`group` lists the ranks, `me` is this rank's place in it, and ``chunks[i]`` are the chunks that
place ``i`` is responsible for.  p is the largest power of two that is at most n; how the other n-p
ranks take part is in `non_power_of_two`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

from ringreduce.algorithms.definition import Sizes, algorithm, backwards
from ringreduce.algorithms.non_power_of_two import (
    extra_steps,
    floor_log2,
    in_pairs,
    in_pairs_claims,
    teams,
)
from ringreduce.schedules.schedule import Chunks, Claim, Recv, Send, Step, Steps, joined


def all_gather_claims(group: Sequence[int], sizes: Sizes) -> list[Claim]:
    """Before step k a team holds one aligned block of the parts of 2^k teams, and sends it."""
    all_teams, total = teams(range(len(group))), sum(sizes)
    before = [0, *accumulate(sum(sizes[place] for place in team) for team in all_teams)]
    steps = floor_log2(len(group)) + extra_steps(len(group))
    claims = []
    for i, (*firsts, last) in enumerate(all_teams):
        starts = [(i >> k << k, 1 << k) for k in range(floor_log2(len(all_teams)))]
        sent = sum(before[at + length] - before[at] for at, length in starts)
        for first in firsts:
            sent += total - sizes[first]
            claims.append(Claim(steps, sent=sizes[first], received=total - sizes[first]))
        claims.append(Claim(steps, sent, received=total - sizes[last]))
    return claims


def reduce_scatter_claims(group: Sequence[int], sizes: Sizes) -> list[Claim]:
    return backwards(all_gather_claims(group, sizes))


def all_reduce_claims(group: Sequence[int], sizes: Sizes) -> list[Claim]:
    n, moved = len(group), 2 * (len(sizes) - 1)
    return in_pairs_claims(n, sum(sizes), Claim(2 * floor_log2(n), moved, moved))


@algorithm("reduce_scatter", "halving_doubling", reduce_scatter_claims)
def halving_reduce_scatter(group: Sequence[int], me: int, chunks: Sequence[Chunks]) -> Steps:
    """Recursive halving: send half of the remaining parts, summing; end owning ``chunks[me]``.

    log2 p steps.  If n is a power of two, each rank sends (n-1)/n of the data.  Otherwise there are
    two more steps: n-p ranks send their neighbour all parts but their own, and in the end add the
    sum of the others to their own part.
    """
    parts = [joined(team) for team in teams(chunks)]
    yield from in_pairs(
        group,
        me,
        core=lambda ranks, place: _halve(ranks, place, parts),
        hands_over=lambda i: _all_but(chunks, i),
        gets_back=lambda i: chunks[i],
        reduce=(True, True),
    )


@algorithm("all_gather", "halving_doubling", all_gather_claims)
def doubling_all_gather(group: Sequence[int], me: int, chunks: Sequence[Chunks]) -> Steps:
    """Recursive doubling: exchange all parts held with a partner, in each step twice as many.

    log2 p steps.  If n is a power of two, each rank receives (n-1)/n of the data.  Otherwise there
    are two more steps: n-p ranks send their neighbour their own part, and in the end receive all
    other parts from it.
    """
    parts = [joined(team) for team in teams(chunks)]
    yield from in_pairs(
        group,
        me,
        core=lambda ranks, place: _double(ranks, place, parts),
        hands_over=lambda i: chunks[i],
        gets_back=lambda i: _all_but(chunks, i),
        reduce=(False, False),
    )


@algorithm("all_reduce", "halving_doubling", all_reduce_claims, lambda n: 1 << floor_log2(n))
def halving_doubling_all_reduce(group: Sequence[int], me: int, chunks: Sequence[Chunks]) -> Steps:
    """Halve down to one of the p parts ``chunks`` for each rank, then double to the whole again.

    2 log2 p steps; each rank sends 2(p-1)/p of the data.  If n is not a power of two, there are two
    more steps: n-p ranks send their data to a neighbour, and in the end receive the sum from it.
    """

    def core(ranks: Sequence[int], place: int) -> Steps:
        order = _nearest_first(len(ranks))
        ranks, place = [ranks[i] for i in order], order.index(place)
        yield from _halve(ranks, place, chunks)
        yield from _double(ranks, place, chunks)

    everything = joined(chunks)
    yield from in_pairs(
        group, me, core, lambda i: everything, lambda i: everything, reduce=(True, False)
    )


def _halve(ranks: Sequence[int], me: int, parts: Sequence[Chunks]) -> Steps:
    if len(ranks) > 1:
        partner, mine, theirs = _halves(ranks, me)
        yield Step(
            sends=(Send(partner, joined(parts[theirs])),),
            recvs=(Recv(partner, joined(parts[mine]), reduce=True),),
        )
        yield from _halve(ranks[mine], me % (len(ranks) // 2), parts[mine])


def _double(ranks: Sequence[int], me: int, parts: Sequence[Chunks]) -> Steps:
    if len(ranks) > 1:
        partner, mine, theirs = _halves(ranks, me)
        yield from _double(ranks[mine], me % (len(ranks) // 2), parts[mine])
        yield Step(
            sends=(Send(partner, joined(parts[mine])),),
            recvs=(Recv(partner, joined(parts[theirs])),),
        )


def _halves(ranks: Sequence[int], me: int) -> tuple[int, slice, slice]:
    half = len(ranks) // 2
    low, high = slice(half), slice(half, None)
    return (ranks[me + half], low, high) if me < half else (ranks[me - half], high, low)


def _all_but(chunks: Sequence[Chunks], i: int) -> Chunks:
    return joined((*chunks[:i], *chunks[i + 1 :]))


@lru_cache(4)
def _nearest_first(n: int) -> tuple[int, ...]:
    """Reorder n places: two that end up half a list apart were neighbours, and so on down.

    So the longest messages go to the nearest ranks, and the chunks of each message are contiguous.
    """
    order: tuple[int, ...] = (0,)
    while len(order) < n:
        order = (*(2 * place for place in order), *(2 * place + 1 for place in order))
    return order
