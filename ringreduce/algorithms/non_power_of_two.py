"""Ranks that are no power of two: neighbours pair up, and one of each pair acts for both.

Source: Thakur, Rabenseifner & Gropp, "Optimization of collective communication operations in
MPICH", IJHPCA 19(1), 2005.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from ringreduce.schedules.schedule import Chunks, Recv, Send, Step, Steps

Member = TypeVar("Member")


def teams(members: Sequence[Member]) -> list[Sequence[Member]]:
    """The members as 2^k teams, in order: as few pairs as it takes first, then single ones.

    >>> teams([0, 1, 2, 3, 4, 5, 6])
    [[0, 1], [2, 3], [4, 5], [6]]
    """
    n = len(members)
    pairs = n - (1 << n.bit_length() - 1)
    return [members[i : i + 2] for i in range(0, 2 * pairs, 2)] + [
        members[i : i + 1] for i in range(2 * pairs, n)
    ]


def in_pairs(
    group: Sequence[int],
    me: int,
    core: Callable[[Sequence[int], int], Steps],
    lends: Callable[[int], Chunks],
    gets_back: Callable[[int], Chunks],
    reduce: tuple[bool, bool],
) -> Steps:
    """Run ``core(ranks, place)`` on the last rank of each team, for the team's first rank too.

    The first of a pair, at place i, hands the chunks ``lends(i)`` to its partner, waits, and gets
    ``gets_back(i)`` in the end; `reduce` says whether these two messages are added to what is
    there.  Two steps more than the core takes, none where the ranks are a power of two.
    """
    everybody = teams(range(len(group)))
    team = next(i for i, places in enumerate(everybody) if me in places)
    first, last = everybody[team][0], everybody[team][-1]
    acting = core([group[places[-1]] for places in everybody], team)
    if len(everybody) < len(group):
        yield _handed_over(group, me, first, last, lends(first), reduce[0])
    yield from acting if me == last else (Step() for _ in acting)
    if len(everybody) < len(group):
        yield _handed_over(group, me, last, first, gets_back(first), reduce[1])


def _handed_over(
    group: Sequence[int], me: int, giver: int, taker: int, chunks: Chunks, reduce: bool
) -> Step:
    """The step in which one of a pair gives the other something; no messages if it is alone."""
    if giver == taker:
        return Step()
    if me == giver:
        return Step(sends=(Send(group[taker], chunks),))
    return Step(recvs=(Recv(group[giver], chunks, reduce),))
