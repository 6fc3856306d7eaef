"""A start at which one rank compiles and the other waits for it, by a clock that runs ahead."""

from __future__ import annotations

import time
from types import SimpleNamespace

import ringreduce as rr
from ringreduce.shm import segments


def init_while_rank_0_compiles() -> int:
    """By the clock of rank 1, rank 0 compiles for longer than the timeout of `init`."""
    from ringreduce.transports import mpi

    rank, asked = mpi.MPI.COMM_WORLD.rank, [0]

    def is_available() -> bool:
        asked[0] += 1
        if rank == 0:
            time.sleep(0.5)  # rank 1 looks at its clock meanwhile
        return True

    def monotonic() -> float:
        return time.monotonic() + 300.0 * (asked[0] == 2)  # rank 1 waits for rank 0

    segments.compiles = lambda: rank == 0
    segments.is_available = is_available
    mpi.time = SimpleNamespace(monotonic=monotonic, sleep=time.sleep)  # type: ignore[assignment]
    with rr.init(timeout_s=100) as comm:
        return int(comm.all_reduce(rank + 1))
