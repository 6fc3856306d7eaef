"""Dissemination: a barrier in ceil(log2 n) steps.

Source: Hensgen, Finkel & Manber, "Two algorithms for barrier synchronization", IJPP 17(1), 1988.
"""

from __future__ import annotations

from collections.abc import Sequence

from ringreduce.algorithms.definition import Sizes, algorithm
from ringreduce.algorithms.non_power_of_two import ceil_log2
from ringreduce.schedules.schedule import Chunks, Claim, Recv, Send, Step, Steps


def barrier_claims(group: Sequence[int], sizes: Sizes) -> list[Claim]:
    return [Claim(ceil_log2(len(group)), sent=0, received=0)] * len(group)


@algorithm("barrier", "dissemination", barrier_claims, lambda n: 0)
def dissemination_barrier(group: Sequence[int], me: int, chunks: Sequence[Chunks]) -> Steps:
    """In step k send an empty message to the rank 2^k places on; ceil(log2 n) steps.

    The message tells that its sender, and all ranks that it has heard from, are in the barrier.
    """
    n, distance = len(group), 1
    while distance < n:
        yield Step(
            sends=(Send(group[(me + distance) % n], ()),),
            recvs=(Recv(group[(me - distance) % n], ()),),
        )
        distance *= 2
