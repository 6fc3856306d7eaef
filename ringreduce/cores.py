"""The cores of this process, and the one that a rank keeps where ranks share cores."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping

from ringreduce.place import MPIS

SHARED_CORES = "RINGREDUCE_SHARED_CORES"
"""The environment variable with the number of cores that the ranks of a host share.

The launcher sets it where each core gets the same number of ranks, of at least 2.  Each rank then
keeps one core.  With 0, ranks may run on every core.
"""


def usable() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def cores() -> int:
    """Return the number of cores that this rank and those beside it may use.

    For a rank that keeps one core, that is the number of cores that the ranks share.
    """
    return max(usable(), shared_cores(os.environ))


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


def keep_one(variables: MutableMapping[str, str]) -> None:
    """Keep this rank on one core, if ranks share cores; otherwise forget the variable.

    Does nothing else if the number of cores of this rank differs from the variable: its MPI or the
    user has bound the rank, or its host is another one.
    """
    own = sorted(os.sched_getaffinity(0))
    if len(own) == shared_cores(variables):
        for names in MPIS:
            rank, size = names.local_rank, names.local_size
            if rank in variables and int(variables.get(size, 0)) > len(own):
                os.sched_setaffinity(0, {own[core_of(int(variables[rank]), len(own))]})
                return
    variables.pop(SHARED_CORES, None)


def core_of(local_rank: int, count: int) -> int:
    """Return the index of the core that a rank keeps, of `count` cores.

    Ranks are placed from the first core to the last, then back, then forth again.  The first and
    the last rank of two rounds share a core.  In a pipeline these two wait at different times.

    >>> [core_of(rank, 3) for rank in range(8)]
    [0, 1, 2, 2, 1, 0, 0, 1]
    """
    place = local_rank % (2 * count)
    return min(place, 2 * count - 1 - place)
