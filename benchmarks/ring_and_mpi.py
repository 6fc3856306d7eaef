"""Our ring over MPI's point-to-point messages beside the same MPI's own Allreduce, large arrays.

    mpirun -n 2 python -m benchmarks.ring_and_mpi [--serialized]

Both in place, float32, interleaved in one run; inputs are rewritten before each call and results
are verified against sums that are exact.  ``--serialized`` asks MPI for a lower thread level, at
which some MPIs are faster.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Mapping

import mpi4py
import numpy as np

if "--serialized" in sys.argv:
    mpi4py.rc.thread_level = "serialized"
from mpi4py import MPI

import ringreduce as rr
from benchmarks.rows import command_line, environment, replace

SIZES = [1 << 20, 2 << 20, 4 << 20, 8 << 20, 16 << 20, 32 << 20, 64 << 20, 128 << 20, 256 << 20]


def main() -> None:
    world = MPI.COMM_WORLD
    comm = rr.init()
    rows = []
    for nbytes in SIZES:
        most = 60 if nbytes >= 1 << 20 else 2000
        repeats = max(7, min(most, (1 << 30) // nbytes))
        calls = {
            "ring": lambda x: comm.all_reduce(x, out=x, algorithm="ring"),
            "Allreduce": of_mpi,
        }
        medians = medians_s(nbytes, repeats, calls)
        row = {
            "benchmark": "ring_and_mpi",
            "bytes": nbytes,
            **environment(command_line("ring_and_mpi")),
        }
        row["milliseconds"] = {name: round(1e3 * t, 4) for name, t in medians.items()}
        row["times_faster"] = round(medians["Allreduce"] / medians["ring"], 3)
        rows.append(row)
        if world.rank == 0:
            print(nbytes, "B", row["milliseconds"], row["times_faster"], flush=True)
    if world.rank == 0:
        replace("ring_and_mpi", rows, same=("mpi", "ranks", "bytes", "thread_level"))
    comm.close()


def of_mpi(x: np.ndarray) -> None:
    MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, x)


def medians_s(
    nbytes: int, repeats: int, calls: Mapping[str, Callable[[np.ndarray], object]]
) -> dict[str, float]:
    """The median seconds of all-reduces in place, and of a call with the name "product"."""
    world, x = MPI.COMM_WORLD, np.empty(nbytes // 4, np.float32)
    pattern = np.arange(x.size, dtype=np.float32) % 1000
    wanted = pattern * (world.size * (world.size + 1) / 2)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in range(2 + repeats):
        for name, call in calls.items():
            np.multiply(pattern, world.rank + 1, out=x)
            world.Barrier()
            start = time.perf_counter()
            call(x)
            seconds = world.allreduce(time.perf_counter() - start, MPI.MAX)
            if repeat >= 2:
                times[name].append(seconds)
            if repeat % 4 == 0 and name != "product":
                assert np.array_equal(x, wanted), f"{name} gives a wrong sum"
    return {name: statistics.median(series) for name, series in times.items()}


if __name__ == "__main__":
    main()
