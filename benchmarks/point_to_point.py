"""Messages between two ranks beside the same MPI's own `Ssend` and `Recv`.

    mpirun -n 2 python -m benchmarks.point_to_point [transport]

Half the time of a round trip: rank 0 sends and then receives, rank 1 receives and then sends.  The
contenders run in turns.  Every turn sends other numbers, and what arrived is compared at its end.
``registered`` are arrays of `Communicator.empty`.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

import ringreduce as rr
from benchmarks.rows import command_line, environment, replace

SIZES = [8 << i for i in range(24)]
"""Bytes of a message: 8 to 64 MiB."""
_TURNS = 12
_MOST_TRIPS, _BYTES_A_TURN = 1000, 128 << 20

Trips = Callable[[Any, Any, int], None]


def main() -> None:
    world = MPI.COMM_WORLD
    transport = sys.argv[1] if len(sys.argv) > 1 else "auto"
    comm = rr.init(transport=transport)
    ours, theirs = (
        _trips(comm.rank, comm.send, comm.recv),
        _trips(comm.rank, world.Ssend, world.Recv),
    )
    rows = []
    for nbytes in SIZES:
        count = nbytes // 4
        plain = np.empty(count, np.float32), np.empty(count, np.float32)
        registered = comm.empty(count, np.float32), comm.empty(count, np.float32)
        contenders = {
            "ours": (ours, *plain),
            "registered": (ours, *registered),
            "Ssend and Recv": (theirs, *plain),
        }
        row = {
            "benchmark": "point_to_point",
            "transport": transport,
            "bytes": nbytes,
            **_measured(world, contenders, nbytes),
            **environment(command_line("point_to_point")),
        }
        rows.append(row)
        if comm.rank == 0:
            print(nbytes, row["microseconds"], row["of_mpi"], flush=True)
    if comm.rank == 0:
        replace("point_to_point", rows, same=("mpi", "transport", "ranks", "bytes"))
    comm.close()


def _trips(rank: int, send: Callable[..., Any], recv: Callable[..., Any]) -> Trips:
    """Return a function that makes a number of round trips with one library."""

    def first(x: Any, out: Any, trips: int) -> None:
        for _ in range(trips):
            send(x, 1)
            recv(out, 1)

    def second(x: Any, out: Any, trips: int) -> None:
        for _ in range(trips):
            recv(out, 0)
            send(x, 0)

    return second if rank else first


def _measured(
    world: MPI.Intracomm, contenders: dict[str, tuple[Trips, Any, Any]], nbytes: int
) -> dict[str, Any]:
    """Time the contenders in turns; return their medians, and ours beside the MPI's."""
    count = max(2, min(_MOST_TRIPS, _BYTES_A_TURN // nbytes))
    times: dict[str, list[float]] = {name: [] for name in contenders}
    names = list(contenders)
    for turn in range(_TURNS):
        first = turn % len(names)  # each contender follows each other one
        for name in names[first:] + names[:first]:
            trips, x, out = contenders[name]
            x[:] = np.arange(x.size) % 1000 + turn + 10 * world.rank
            out[:] = -1
            trips(x, out, 1)
            world.Barrier()
            start = time.perf_counter()
            trips(x, out, count)
            times[name].append((time.perf_counter() - start) / count / 2)
            wanted = np.arange(x.size) % 1000 + turn + 10 * (1 - world.rank)
            assert np.array_equal(out, wanted), f"{name} gives wrong data"
    medians = {name: statistics.median(series) * 1e6 for name, series in times.items()}
    mpi = medians["Ssend and Recv"]
    return {
        "microseconds": {name: round(us, 3) for name, us in medians.items()},
        "of_mpi": {name: round(us / mpi, 3) for name, us in medians.items()},
    }


if __name__ == "__main__":
    main()
