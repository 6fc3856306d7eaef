"""Price a schedule among many ranks by a formula, from the steps of one node of each kind.

Nodes are of one kind if their ranks have the same claims; on one node, ranks are.  If the ranks
have few steps and chunks, more nodes of each kind are sampled.  The links, ports and cores are
those of `cost`, but all ranks enter a step together:

- A step takes as long as its busiest port, then the latency of that port's link, then the fold of
  the busiest core.  One slice takes the sum of all steps.  If nodes of one kind take fewer steps
  than others, they begin later and end earlier, alike.
- Slices overlap.  They take as long as the busiest resource works for all of them, and once the
  steps that do not use it.  But no more than `in_flight` slices are under way at once.
- In a node of more than 16 ranks, some stand for others that have the same claim.
- A resource is the port of a node, the port of a rank, or a core.  If kinds wait for each other in
  each step, a slice occupies it for the sum of the busiest of each step.  If kinds never wait, for
  the busiest sum of a kind.  The formula takes the geometric mean of both.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise
from math import ceil, sqrt
from typing import NamedTuple

from ringreduce.schedules.cost import Profile, bytes_of_chunks
from ringreduce.schedules.schedule import Claim, Schedule


class _Load(NamedTuple):
    """The seconds of one step for which resources are busy, the busiest of each sort."""

    crossing_s: float
    """A node's port out, or into it, between nodes."""
    inside_s: float
    """A rank's port out, or into it, inside its node."""
    fold_s: float
    """A core."""


_IDLE = _Load(0.0, 0.0, 0.0)
_MADE = 1 << 13
"""About the most steps and chunks that are made for nodes of one kind, unless one node has more.

Steps of a larger job take longer to make: for each rank that makes its steps, 64 ranks of the job
count as one more.
"""
_STAND_INS = 16
"""The ranks of a node whose steps are made, however many steps and chunks they have."""
_StandIns = list[tuple[int, int]]
"""Ranks whose steps are made, and how many ranks each of them stands for."""


def estimate(
    schedule: Schedule,
    nodes: Sequence[Sequence[int]],
    nbytes: float,
    profile: Profile,
    *,
    slices: int = 1,
    in_flight: int = 4,
) -> float:
    """Return about the seconds that `cost.price` returns for the same arguments.

    It takes time for the steps of few ranks alone.  The schedule must have claims, and no copies.
    """
    chunk_bytes = bytes_of_chunks(schedule, nbytes / slices)
    kinds = [
        _loads(schedule, ranks, inside, chunk_bytes, profile)
        for ranks, inside in _sampled(schedule, nodes)
    ]
    longest = max(map(len, kinds))
    steps = [
        _Load(*map(max, zip(*loads, strict=True)))
        for loads in zip(*(_centred(kind, longest) for kind in kinds), strict=True)
    ]
    seconds = [_step_s(load, profile) for load in steps]
    if slices == 1 or not steps:
        return sum(seconds)
    together = [sum(each) for each in zip(*steps, strict=True)]
    of_kinds = [[sum(each) for each in zip(*kind, strict=True)] for kind in kinds]
    alone = [max(each) for each in zip(*of_kinds, strict=True)]
    busy = [sqrt(most * least) for most, least in zip(together, alone, strict=True)]
    busiest = busy.index(max(busy))
    apart = sum(s for s, load in zip(seconds, steps, strict=True) if not load[busiest])
    return max(apart + slices * busy[busiest], ceil(slices / in_flight) * sum(seconds))


def at_least(
    schedule: Schedule,
    nodes: Sequence[Sequence[int]],
    nbytes: float,
    profile: Profile,
    *,
    slices: int = 1,
    in_flight: int = 4,
    of_steps: bool = False,
) -> float:
    """Return a lower bound of `estimate`, from what the first rank claims, or from its steps.

    With the claim all links are as fast as the fastest, and all chunks as short as the shortest.
    """
    first, chunk_bytes = nodes[0][0], bytes_of_chunks(schedule, nbytes / slices)
    rounds = ceil(slices / in_flight)
    if of_steps:
        loads = _loads(schedule, [(first, 1)], frozenset(nodes[0]), chunk_bytes, profile)
        return rounds * sum(_step_s(load, profile) for load in loads)
    links = [profile.in_node] * any(len(node) > 1 for node in nodes)
    links += [profile.between_nodes] * (len(nodes) > 1)
    alpha_s = min((link.alpha_s for link in links), default=0.0)
    beta_s = min((link.beta_s_per_byte for link in links), default=0.0)
    claim = schedule.claim(first)
    moved = max(claim.received, 0 if profile.in_node.receiver_copies else claim.sent)
    return rounds * (claim.steps * alpha_s + moved * min(chunk_bytes, default=0.0) * beta_s)


def _sampled(
    schedule: Schedule, nodes: Sequence[Sequence[int]]
) -> Iterator[tuple[_StandIns, Collection[int]]]:
    """Yield the ranks to make the steps of for one node, or for one rank of the only node.

    With them are all ranks inside the node.
    """
    everybody = range(schedule.size) if len(nodes) == 1 else None
    alike = defaultdict[object, list[Sequence[int]]](list)
    for node in nodes if everybody is None else ((rank,) for rank in nodes[0]):
        alike[tuple([schedule.claim(rank) for rank in node])].append(node)
    for kind in alike.values():
        claim = schedule.claim(kind[0][0])
        work = claim.steps + claim.sent + claim.received + schedule.size // 64
        most = _MADE // (1 + work)
        count = min(len(kind), max(1, most // len(kind[0])))
        for node in (kind[i * len(kind) // count] for i in range(count)):
            yield _stand_ins(schedule, node, max(most, _STAND_INS)), everybody or frozenset(node)


def _stand_ins(schedule: Schedule, node: Sequence[int], most: int) -> _StandIns:
    """Return about `most` ranks of the node, spread over those with the same claim."""
    if len(node) <= most:
        return [(rank, 1) for rank in node]
    alike = defaultdict[Claim, list[int]](list)
    for rank in node:
        alike[schedule.claim(rank)].append(rank)
    chosen: _StandIns = []
    for first, *inner in alike.values():
        last = inner[-1:]
        count = max(1, most * len(inner) // len(node) - 2)
        cuts = [(len(inner) - 1) * i // count for i in range(count + 1)]
        between = [(inner[start], stop - start) for start, stop in pairwise(cuts) if start < stop]
        chosen += [(first, 1), *between, *((rank, 1) for rank in last)]
    return chosen


def _loads(
    schedule: Schedule,
    ranks: _StandIns,
    inside: Collection[int],
    chunk_bytes: Sequence[float],
    profile: Profile,
) -> list[_Load]:
    """Return the load of each step of a node, or of a rank of the only node, by its stand-ins."""
    steps = [list(schedule.steps(rank)) for rank, _ in ranks]
    count, bytes_of = max(map(len, steps)), chunk_bytes.__getitem__
    out_s, in_s, inside_s, folded = ([0.0] * count for _ in range(4))
    link, between = profile.in_node, profile.between_nodes
    for (_, alike), of_rank in zip(ranks, steps, strict=True):
        for i, step in enumerate(of_rank):
            rank_out_s = rank_in_s = reduced = 0.0
            for send in step.sends:
                nbytes = sum(map(bytes_of, send.chunks))
                if send.peer not in inside:
                    out_s[i] += alike * (between.message_s + nbytes * between.beta_s_per_byte)
                elif not link.receiver_copies:
                    rank_out_s += link.message_s + nbytes * link.beta_s_per_byte
            for recv in step.recvs:
                nbytes = sum(map(bytes_of, recv.chunks))
                if recv.peer not in inside:
                    in_s[i] += alike * (between.message_s + nbytes * between.beta_s_per_byte)
                else:
                    rank_in_s += link.message_s + nbytes * link.beta_s_per_byte
                if recv.reduce:
                    reduced += nbytes
            inside_s[i] = max(inside_s[i], rank_out_s, rank_in_s)
            folded[i] = max(folded[i], reduced)
    gamma = profile.gamma_s_per_byte
    return [
        _Load(max(out, into), in_node, nbytes * gamma)
        for out, into, in_node, nbytes in zip(out_s, in_s, inside_s, folded, strict=True)
    ]


def _centred(loads: list[_Load], longest: int) -> list[_Load]:
    before = (longest - len(loads)) // 2
    return [_IDLE] * before + loads + [_IDLE] * (longest - len(loads) - before)


def _step_s(load: _Load, profile: Profile) -> float:
    crossing_s = load.crossing_s and load.crossing_s + profile.between_nodes.alpha_s
    return max(crossing_s, load.inside_s and load.inside_s + profile.in_node.alpha_s) + load.fold_s
