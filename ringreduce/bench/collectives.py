"""The collectives that can be measured: their properties, without MPI."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

OURS = "ringreduce"
"""The name of our contenders; every other contender is a baseline."""
OUT_OF_PLACE, IN_PLACE = "out of place", "in place"


@dataclass(frozen=True)
class Collective:
    busbw: Callable[[int], float]
    """ranks -> bus bandwidth as a multiple of size / time."""
    divided: bool = False
    """Whether every rank has a share: the length is a multiple of the ranks."""
    reduces: bool = True
    moves: bool = True
    """Whether the collective moves data, so that the size matters."""


COLLECTIVES = {
    "all_reduce": Collective(lambda n: 2 * (n - 1) / n),
    "reduce_scatter": Collective(lambda n: (n - 1) / n, divided=True),
    "all_gather": Collective(lambda n: (n - 1) / n, divided=True, reduces=False),
    "gather": Collective(lambda n: (n - 1) / n, divided=True, reduces=False),
    "scatter": Collective(lambda n: (n - 1) / n, divided=True, reduces=False),
    "broadcast": Collective(lambda n: 1.0, reduces=False),
    "reduce": Collective(lambda n: 1.0),
    "all_to_all": Collective(lambda n: (n - 1) / n, divided=True, reduces=False),
    "barrier": Collective(lambda n: 0.0, reduces=False, moves=False),
}
"""The factors of busbw are those of nccl-tests' PERFORMANCE.md."""
