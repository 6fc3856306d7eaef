"""Numbers of ranks that are not powers of two: some ranks form pairs, and one acts for both.

Source: Thakur, Rabenseifner & Gropp, "Optimization of collective communication operations in
MPICH", IJHPCA 19(1), 2005.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from ringreduce.schedules.schedule import Chunks, Claim, Recv, Send, Step, Steps

Member = TypeVar("Member")


def floor_log2(n: int) -> int:
    """Return log2 of the largest power of two that is at most n; n is at least 1."""
    return n.bit_length() - 1


def ceil_log2(n: int) -> int:
    """Return log2 of the smallest power of two that is at least n; n is at least 1."""
    return (n - 1).bit_length()


def teams(members: Sequence[Member]) -> list[Sequence[Member]]:
    """Divide the members into 2^k teams, in order: as few pairs as possible, then single members.

    >>> teams([0, 1, 2, 3, 4, 5, 6])
    [[0, 1], [2, 3], [4, 5], [6]]
    """
    n = len(members)
    pairs = n - (1 << floor_log2(n))
    return [members[i : i + 2] for i in range(0, 2 * pairs, 2)] + [
        members[i : i + 1] for i in range(2 * pairs, n)
    ]


def in_pairs(
    group: Sequence[int],
    me: int,
    core: Callable[[Sequence[int], int], Steps],
    hands_over: Callable[[int], Chunks],
    gets_back: Callable[[int], Chunks],
    reduce: tuple[bool, bool],
) -> Steps:
    """Run ``core(ranks, place)`` on the last rank of each team, on behalf of the whole team.

    The first rank of a pair, at place i, sends the chunks ``hands_over(i)`` to its partner, and
    receives ``gets_back(i)`` after the core.  `reduce` tells, for each of these two messages,
    whether the receiver reduces it into its values.  Two steps more than the core takes, but no
    more if the number of ranks is a power of two.
    """
    pairs = len(group) - (1 << floor_log2(len(group)))
    team, first, last = me - pairs, me, me
    if me < 2 * pairs:
        team, first, last = me // 2, me - me % 2, me - me % 2 + 1
    acting = core([*group[1 : 2 * pairs : 2], *group[2 * pairs :]], team)
    if pairs:
        yield _transfer(group, me, first, last, hands_over(first), reduce[0])
    yield from acting if me == last else (Step() for _ in acting)
    if pairs:
        yield _transfer(group, me, last, first, gets_back(first), reduce[1])


def extra_steps(n: int) -> int:
    return 0 if n == 1 << floor_log2(n) else 2


def in_pairs_claims(n: int, total: int, core: Claim) -> list[Claim]:
    """Return the claims if a pair's first rank hands over all `total` chunks and gets all back."""
    steps, pairs = core.steps + extra_steps(n), n - (1 << floor_log2(n))
    first = Claim(steps, total, total)
    last = Claim(steps, core.sent + total, core.received + total)
    return [first, last] * pairs + [Claim(steps, core.sent, core.received)] * (n - 2 * pairs)


def _transfer(
    group: Sequence[int], me: int, sender: int, receiver: int, chunks: Chunks, reduce: bool
) -> Step:
    """Return the step in which one of a pair sends to the other; an empty step for a single."""
    if sender == receiver:
        return Step()
    if me == sender:
        return Step(sends=(Send(group[receiver], chunks),))
    return Step(recvs=(Recv(group[sender], chunks, reduce),))
