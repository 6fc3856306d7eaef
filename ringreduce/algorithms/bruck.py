"""Bruck: ceil(log2 n) steps, for any number of ranks.

Source: Bruck, Ho, Kipnis, Upfal & Weathersby, "Efficient algorithms for all-to-all communications
in multiport message-passing systems", IEEE TPDS 8(11), 1997.
"""

from __future__ import annotations

from collections.abc import Sequence

from ringreduce.algorithms.definition import Sizes, algorithm
from ringreduce.algorithms.non_power_of_two import ceil_log2
from ringreduce.schedules.schedule import Chunks, Claim, Recv, Send, Step, Steps, joined


def all_gather_claims(group: Sequence[int], sizes: Sizes) -> list[Claim]:
    n = len(group)
    return [Claim(ceil_log2(n), n - 1, n - 1)] * n


def all_to_all_claims(group: Sequence[int], sizes: Sizes) -> list[Claim]:
    n, hops = len(group), sum(way.bit_count() for way in range(len(group)))
    return [Claim(ceil_log2(n), hops, hops)] * n


@algorithm("all_gather", "bruck", all_gather_claims)
def bruck_all_gather(group: Sequence[int], me: int, chunks: Sequence[Chunks]) -> Steps:
    """In step k send to the rank 2^k places to the left all parts that are new to it.

    ceil(log2 n) steps; each rank sends and receives (n-1)/n of the data.
    """
    n, distance = len(group), 1
    while distance < n:
        new = range(min(distance, n - distance))
        left, right = (me - distance) % n, (me + distance) % n
        yield Step(
            sends=(Send(group[left], joined(chunks[(me + i) % n] for i in new)),),
            recvs=(Recv(group[right], joined(chunks[(right + i) % n] for i in new)),),
        )
        distance *= 2


@algorithm("all_to_all", "bruck", all_to_all_claims)
def bruck_all_to_all(group: Sequence[int], me: int, chunks: Sequence[Chunks]) -> Steps:
    """Move ``chunks[i * n + j]`` from place i to place j by hops: in step k, of 2^k places.

    A chunk that has w places to go makes one hop for each bit that is set in w.  ceil(log2 n)
    steps; each rank sends one chunk for each bit set in each number below n, about (n/2) log2 n.
    """
    n, distance = len(group), 1

    def due(place: int) -> Chunks:
        """Return the chunks at this place that make this step's hop.

        A chunk with `way` places to go has made ``way % distance`` of them.
        """
        ways = [way for way in range(n) if way & distance]
        starts = [(place - way % distance) % n for way in ways]
        return joined(chunks[i * n + (i + way) % n] for i, way in zip(starts, ways, strict=True))

    while distance < n:
        left, right = (me - distance) % n, (me + distance) % n
        yield Step(sends=(Send(group[right], due(me)),), recvs=(Recv(group[left], due(left)),))
        distance *= 2
