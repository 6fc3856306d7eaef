"""The claims of each algorithm: steps, chunks sent and chunks received of one rank, as formulas.

These are the figures of the algorithms' docstrings, for any number of ranks.
`ringreduce.schedules.check` counts the steps that the generators yield, and compares.

`group` lists the ranks, `me` is this rank's place in it, and ``sizes[i]`` is the number of chunks
of part i.  In rooted algorithms, of n ranks, every part is one chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ringreduce.algorithms.hierarchical import Nodes, cut_points, owned_shards, rails
from ringreduce.algorithms.non_power_of_two import teams
from ringreduce.algorithms.torus import torus_shape
from ringreduce.schedules.schedule import Claim

Sizes = Sequence[int]
GroupClaim = Callable[[Sequence[int], int, Sizes], Claim]
"""(group, me, sizes) -> claim."""
RootedClaim = Callable[[int, int, int], Claim]
"""(n, me, root) -> claim."""


def floor_log2(n: int) -> int:
    """Return log2 of the largest power of two that is at most n; n is at least 1."""
    return n.bit_length() - 1


def ceil_log2(n: int) -> int:
    """Return log2 of the smallest power of two that is at least n; n is at least 1."""
    return (n - 1).bit_length()


# --- ring and torus -------------------------------------------------------------------------------


def ring_reduce_scatter(group: Sequence[int], me: int, sizes: Sizes) -> Claim:
    total = sum(sizes)
    return Claim(len(group) - 1, sent=total - sizes[me], received=total - sizes[me - 1])


def ring_all_gather(group: Sequence[int], me: int, sizes: Sizes) -> Claim:
    total, right = sum(sizes), (me + 1) % len(group)
    return Claim(len(group) - 1, sent=total - sizes[right], received=total - sizes[me])


def ring_all_reduce(group: Sequence[int], me: int, sizes: Sizes) -> Claim:
    return ring_reduce_scatter(group, me, sizes) + ring_all_gather(group, me, sizes)


def ring_broadcast(n: int, me: int, root: int) -> Claim:
    place = (me - root) % n
    return Claim(n - 1, sent=int(place != n - 1), received=int(place != 0))


def ring_reduce(n: int, me: int, root: int) -> Claim:
    return _backwards(ring_broadcast(n, me, root))


def torus_all_reduce(group: Sequence[int], me: int, sizes: Sizes) -> Claim:
    rows, columns = torus_shape(len(group))
    moved = 2 * (len(group) - 1)
    return Claim(2 * (columns - 1) + 2 * (rows - 1), sent=moved, received=moved)


# --- halving and doubling -------------------------------------------------------------------------


def halving_reduce_scatter(group: Sequence[int], me: int, sizes: Sizes) -> Claim:
    return _backwards(doubling_all_gather(group, me, sizes))


def doubling_all_gather(group: Sequence[int], me: int, sizes: Sizes) -> Claim:
    """Before step k a team holds one aligned block of the parts of 2^k teams, and sends it."""
    all_teams, total = teams(range(len(group))), sum(sizes)
    team = next(i for i, places in enumerate(all_teams) if me in places)
    first, last = all_teams[team][0], all_teams[team][-1]
    steps = floor_log2(len(group)) + _extra_steps(len(group))
    to_first = 0 if first == last else total - sizes[first]
    if me != last:
        return Claim(steps, sent=sizes[first], received=to_first)
    starts = [(team >> k << k, 1 << k) for k in range(floor_log2(len(all_teams)))]
    blocks = [all_teams[at : at + length] for at, length in starts]
    sent = sum(sizes[place] for block in blocks for places in block for place in places)
    return Claim(steps, sent + to_first, received=total - sizes[last])


def halving_doubling_all_reduce(group: Sequence[int], me: int, sizes: Sizes) -> Claim:
    return _in_pairs(
        len(group),
        me,
        sum(sizes),
        Claim(2 * floor_log2(len(group)), 2 * (len(sizes) - 1), 2 * (len(sizes) - 1)),
    )


def doubling_all_reduce(group: Sequence[int], me: int, sizes: Sizes) -> Claim:
    steps, total = floor_log2(len(group)), sum(sizes)
    place = sorted(group).index(group[me])
    return _in_pairs(len(group), place, total, Claim(steps, steps * total, steps * total))


def _in_pairs(n: int, me: int, total: int, core: Claim) -> Claim:
    """One rank of a pair sends all its data and receives the result; the other runs the core."""
    steps, paired = core.steps + _extra_steps(n), me < 2 * (n - (1 << floor_log2(n)))
    if paired and me % 2 == 0:
        return Claim(steps, total, total)
    return Claim(steps, core.sent + paired * total, core.received + paired * total)


def _extra_steps(n: int) -> int:
    return 0 if n == 1 << floor_log2(n) else 2


# --- direct and Bruck -----------------------------------------------------------------------------


def allgather_reduce(group: Sequence[int], me: int, sizes: Sizes) -> Claim:
    moved = (len(group) - 1) * sum(sizes)
    return Claim(ceil_log2(len(group)), moved, moved)


def one_shot_all_reduce(group: Sequence[int], me: int, sizes: Sizes) -> Claim:
    others, total = len(group) - 1, sum(sizes)
    return Claim(int(others > 0), others * total, others * total)


def direct_reduce_scatter(group: Sequence[int], me: int, sizes: Sizes) -> Claim:
    others = len(group) - 1
    return Claim(int(others > 0), sent=sum(sizes) - sizes[me], received=others * sizes[me])


def direct_all_gather(group: Sequence[int], me: int, sizes: Sizes) -> Claim:
    return _backwards(direct_reduce_scatter(group, me, sizes))


def two_shot_all_reduce(group: Sequence[int], me: int, sizes: Sizes) -> Claim:
    return direct_reduce_scatter(group, me, sizes) + direct_all_gather(group, me, sizes)


def direct_all_to_all(group: Sequence[int], me: int, sizes: Sizes) -> Claim:
    others = len(group) - 1
    return Claim(int(others > 0), others, others)


def pairwise_all_to_all(group: Sequence[int], me: int, sizes: Sizes) -> Claim:
    others = len(group) - 1
    return Claim(others, others, others)


def bruck_all_gather(group: Sequence[int], me: int, sizes: Sizes) -> Claim:
    others = len(group) - 1
    return Claim(ceil_log2(len(group)), others, others)


def bruck_all_to_all(group: Sequence[int], me: int, sizes: Sizes) -> Claim:
    hops = sum(way.bit_count() for way in range(len(group)))
    return Claim(ceil_log2(len(group)), hops, hops)


# --- trees and stars ------------------------------------------------------------------------------


def tree_broadcast(n: int, me: int, root: int) -> Claim:
    children = ceil_log2(_tree_part(n, me, root))
    return Claim(ceil_log2(n), sent=children, received=int(me != root))


def tree_reduce(n: int, me: int, root: int) -> Claim:
    return _backwards(tree_broadcast(n, me, root))


def tree_all_reduce(group: Sequence[int], me: int, sizes: Sizes) -> Claim:
    return tree_reduce(len(group), me, root=0) + tree_broadcast(len(group), me, root=0)


def tree_scatter(n: int, me: int, root: int) -> Claim:
    part = _tree_part(n, me, root)
    return Claim(ceil_log2(n), sent=part - 1, received=0 if me == root else part)


def tree_gather(n: int, me: int, root: int) -> Claim:
    return _backwards(tree_scatter(n, me, root))


def _tree_part(n: int, me: int, root: int) -> int:
    """Return for how many places this place is responsible: its lowest bit, at most to the end."""
    place = (me - root) % n
    return min(place & -place, n - place) if place else n


def double_tree_all_reduce(group: Sequence[int], me: int, sizes: Sizes) -> Claim:
    n = len(group)
    edges = sum(_children(n, number) + _has_parent(n, number) for number in _numbers(n, me))
    return Claim(2 * floor_log2(n), edges, edges)


def double_tree_broadcast(n: int, me: int, root: int) -> Claim:
    others = n - 1
    steps = 1 + floor_log2(others) if others else 0
    if me == root:
        return Claim(steps, sent=2 if others else 0, received=0)
    numbers = _numbers(others, (me - root) % n - 1)
    return Claim(steps, sent=sum(_children(others, number) for number in numbers), received=2)


def double_tree_reduce(n: int, me: int, root: int) -> Claim:
    return _backwards(double_tree_broadcast(n, me, root))


def _numbers(n: int, place: int) -> tuple[int, int]:
    """Return a place's numbers in the two trees of n ranks; numbers begin with 1."""
    return place + 1, place or n


def _children(n: int, number: int) -> int:
    """Odd numbers are leaves; even numbers have two children, but n itself only one."""
    return 0 if number % 2 else 1 + (number < n)


def _has_parent(n: int, number: int) -> bool:
    return number != 1 << floor_log2(n)


def star_broadcast(n: int, me: int, root: int) -> Claim:
    return Claim(int(n > 1), sent=n - 1 if me == root else 0, received=int(me != root))


def star_reduce(n: int, me: int, root: int) -> Claim:
    return _backwards(star_broadcast(n, me, root))


def star_all_reduce(group: Sequence[int], me: int, sizes: Sizes) -> Claim:
    n, servers = len(group), len(sizes)
    serves = me in (server * n // servers for server in range(servers))
    moved = servers - serves + serves * (n - 1)
    return Claim(2 * (n > 1), moved, moved)


def two_shot_reduce(n: int, me: int, root: int) -> Claim:
    each, of_root = (2, 3) if n == 2 else (1, 1)
    if me == root:
        return Claim(2 * (n > 1), each * (n - 1), (of_root + each) * (n - 1))
    return Claim(2, of_root + each * (n - 2) + each, each * (n - 1))


# --- barriers -------------------------------------------------------------------------------------


def dissemination_barrier(group: Sequence[int], me: int, sizes: Sizes) -> Claim:
    return Claim(ceil_log2(len(group)), sent=0, received=0)


def direct_barrier(group: Sequence[int], me: int, sizes: Sizes) -> Claim:
    return Claim(int(len(group) > 1), sent=0, received=0)


# --- composed of other algorithms -----------------------------------------------------------------


def scatter_all_gather_broadcast(n: int, me: int, root: int) -> Claim:
    return Claim(n - 1, sent=n - 1 if me == root else n - 2, received=0 if me == root else n - 1)


def reduce_scatter_gather_reduce(n: int, me: int, root: int) -> Claim:
    return _backwards(scatter_all_gather_broadcast(n, me, root))


def hierarchical_all_reduce(
    nodes: Nodes,
    rank: int,
    parts: int,
    reduce_scatter: GroupClaim,
    rail_all_reduce: GroupClaim,
    all_gather: GroupClaim,
) -> Claim:
    """In the node every shard is `parts` chunks; all rails of a rank step together."""
    here, node = next((i, node) for i, node in enumerate(nodes) if rank in node)
    me, cuts = list(node).index(rank), cut_points(nodes)
    sizes = [len(owned_shards(cuts, len(node), local)) * parts for local in range(len(node))]
    along_rails = [
        rail_all_reduce(rail, here, (1,) * parts) for _, rail in rails(nodes) if rail[here] == rank
    ]
    crossing = Claim(
        along_rails[0].steps,
        sent=sum(claim.sent for claim in along_rails),
        received=sum(claim.received for claim in along_rails),
    )
    return reduce_scatter(node, me, sizes) + crossing + all_gather(node, me, sizes)


def _backwards(claim: Claim) -> Claim:
    """Return the claim of the algorithm run backwards in time: it sends what was received."""
    return Claim(claim.steps, claim.received, claim.sent)
