"""The cores of this process, and the one that a rank keeps where ranks outnumber them."""

from __future__ import annotations

import os
from collections.abc import Mapping

SHARED_CORES = "RINGREDUCE_SHARED_CORES"
"""The environment variable with the number of cores that the ranks of a host share.

The launcher sets it where there are more ranks than cores, and each rank then keeps one core.  With
0, ranks may run on every core.
"""
_LOCAL_RANK_AND_SIZE = (
    ("MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
)
"""The variables in which MPICH, Intel MPI and Open MPI give a process its index on its host, and
the number of ranks there."""


def cores() -> int:
    """Return the number of cores that this process and the ranks beside it may use.

    A rank that keeps one core counts all those that it shares with others.
    """
    return max(len(os.sched_getaffinity(0)), shared_cores(os.environ))


def shared_cores(variables: Mapping[str, str]) -> int:
    """Return the number of cores that the ranks share; 0 if ranks may run on every core.

    Raises ValueError if the variable is not a whole number of at least 0.
    """
    text = variables.get(SHARED_CORES) or "0"
    if not text.isdecimal():
        raise ValueError(
            f"environment variable {SHARED_CORES} is {text!r}; wanted a whole number of at least 0"
        )
    return int(text)


def keep_one(variables: Mapping[str, str]) -> None:
    """Keep this rank on one core, if ranks share cores.

    Does nothing if the rank may not run on just as many cores as the variable says: then its MPI or
    the user has bound it.
    """
    own = sorted(os.sched_getaffinity(0))
    if len(own) != shared_cores(variables):
        return
    for rank, size in _LOCAL_RANK_AND_SIZE:
        if rank in variables and int(variables.get(size, 0)) > len(own):
            os.sched_setaffinity(0, {own[core_of(int(variables[rank]), len(own))]})
            return


def core_of(local_rank: int, count: int) -> int:
    """Return which of `count` cores a rank keeps: forth over the cores, then back, then forth.

    The first and the last rank of two rounds share a core.  In a pipeline these two wait at
    different times.

    >>> [core_of(rank, 3) for rank in range(8)]
    [0, 1, 2, 2, 1, 0, 0, 1]
    """
    place = local_rank % (2 * count)
    return min(place, 2 * count - 1 - place)
