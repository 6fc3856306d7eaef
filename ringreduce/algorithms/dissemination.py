"""Dissemination: a barrier in as few steps as there are doublings.

Source: Hensgen, Finkel & Manber, "Two algorithms for barrier synchronization", IJPP 17(1), 1988.
"""

from __future__ import annotations

from collections.abc import Sequence

from ringreduce.schedules.schedule import Recv, Send, Step, Steps


def dissemination_barrier(group: Sequence[int], me: int) -> Steps:
    """In step k tell the rank 2^k places on that you, and all you have heard from, are here.

    ceil(log2 n) steps of one empty message each way.
    """
    n, distance = len(group), 1
    while distance < n:
        yield Step(
            sends=(Send(group[(me + distance) % n], ()),),
            recvs=(Recv(group[(me - distance) % n], ()),),
        )
        distance *= 2
