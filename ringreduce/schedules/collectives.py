"""The collectives as data: who holds each chunk before and after."""

from __future__ import annotations

from collections.abc import Mapping

from ringreduce.schedules.schedule import Chunks

COLLECTIVES: Mapping[str, tuple[str, str]] = {
    "all_reduce": ("every rank", "every rank"),
    "reduce_scatter": ("every rank", "its rank"),
    "all_gather": ("its rank", "every rank"),
    "broadcast": ("the root", "every rank"),
    "reduce": ("every rank", "the root"),
    "gather": ("its rank", "the root"),
    "scatter": ("the root", "its rank"),
    "all_to_all": ("its sender", "its receiver"),
    "barrier": ("every rank", "every rank"),
}
"""Collective -> holders of a chunk before, and after.

A chunk of "its rank" has the rank's number.  Of n ranks, chunk ``i * n + j`` goes from its sender i
to its receiver j.
"""

ROOTED = tuple(name for name, holders in COLLECTIVES.items() if "the root" in holders)
IN_PARTS = tuple(
    name for name, holders in COLLECTIVES.items() if {"its rank", "its sender"} & {*holders}
)
"""Collectives that cut the array into a chunk for each rank, or for each two ranks."""


def held(holder: str, rank: int, size: int, root: int, chunks: Chunks) -> Chunks:
    if holder == "every rank":
        return chunks
    if holder == "the root":
        return chunks if rank == root else ()
    if holder == "its rank":
        return (rank,)
    return chunks[rank * size : (rank + 1) * size] if holder == "its sender" else chunks[rank::size]
