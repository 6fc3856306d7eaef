"""The cores of this process, and the one that a rank keeps where ranks share cores."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from ringreduce.system.place import MPIS, OURS
from ringreduce.system.proc import CONTROL_GROUPS

SHARED_CORES = "RINGREDUCE_SHARED_CORES"
"""The environment variable with the number of cores that the ranks of a host share.

The launcher sets it where each core gets the same number of ranks, of at least 2.  Each rank then
keeps one core.  With 0, ranks may run on every core.
"""


def usable() -> int:
    """Return the number of cores that this process may use, and whose time its quota allows."""
    return min(len(os.sched_getaffinity(0)), allowed())


def allowed() -> int:
    """Return how many whole cores' time the quota allows, at least 1; without one, 2**30."""
    return max(1, int(min(quota(), 1 << 30)))


def quota(groups: Path = Path("/sys/fs/cgroup"), own: Path = CONTROL_GROUPS) -> float:
    """Return how many cores' time the control groups of this process allow; inf without a limit.

    Control groups are nested, and the smallest quota holds.  `groups` is where they are mounted, in
    version 2 or 1; `own` names the groups of this process.
    """
    limits = [math.inf]
    with contextlib.suppress(OSError):
        for line in os.fsdecode(own.read_bytes()).splitlines():
            _, controllers, path = line.split(":", 2)
            of_cpu = ("cpu", controllers) if "cpu" in controllers.split(",") else ()
            names = [name for name in path.split("/") if name not in ("", "..")]
            for root in of_cpu if controllers else ("", "unified"):
                group = groups.joinpath(root, *names)
                limits += map(_limit, (group, *group.parents))
    return min(limits)


def _limit(group: Path) -> float:
    """Return how many cores' time one control group allows; inf if it sets no limit."""
    for files in (["cpu.max"], ["cpu.cfs_quota_us", "cpu.cfs_period_us"]):
        with contextlib.suppress(OSError, ValueError):
            time, period = " ".join((group / file).read_text() for file in files).split()
            if int(time) > 0:
                return int(time) / int(period)
    return math.inf


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

    Only forgets it if this rank may use another number of cores than the launcher saw: its MPI or
    the user has bound the rank, or its host is another one.
    """
    own = sorted(os.sched_getaffinity(0))
    if len(own) == shared_cores(variables):
        for names in (*MPIS, OURS):
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
