"""How much of an asynchronous all-reduce hides behind a matrix product.

    OPENBLAS_NUM_THREADS=1 mpirun -n 2 python -m benchmarks.overlap

A product is made as long as the all-reduce.  Then both run at once: what the pair takes longer than
the product alone is the exposed communication.  Besides all ranks computing, the first alone does:
where there are no more cores than ranks, that leaves its progress thread a core to run on.
Across a network, as `benchmarks.hosts` makes one, most of an all-reduce is waiting, on no core.
Interleaved in one run; inputs are rewritten before each call and sums are verified.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import numpy as np
from mpi4py import MPI

import ringreduce as rr
from benchmarks.rows import command_line, environment, replace

SIZES = [1 << 20, 16 << 20, 64 << 20]
REPEATS = 15


def products(size: int, seconds: float) -> Callable[[], None]:
    """A function that multiplies matrices for about so many seconds."""
    a, b, out = (np.random.default_rng(seed).random((size, size), np.float32) for seed in range(3))
    np.matmul(a, b, out)
    start = time.perf_counter()
    np.matmul(a, b, out)
    count = max(1, round(seconds / (time.perf_counter() - start)))

    def multiply() -> None:
        for _ in range(count):
            np.matmul(a, b, out)

    return multiply


def measure(comm: rr.Communicator, world: MPI.Intracomm, nbytes: int, all_compute: bool) -> dict:
    x = np.empty(nbytes // 4, np.float32)
    pattern = np.arange(x.size, dtype=np.float32) % 1000
    wanted = pattern * (world.size * (world.size + 1) / 2)
    computes = all_compute or world.rank == 0

    def together() -> None:
        work = comm.all_reduce(x, out=x, async_op=True)
        if computes:
            multiply()
        work.wait()

    calls: dict[str, Callable[[], object]] = {"all_reduce": lambda: comm.all_reduce(x, out=x)}
    times: dict[str, list[float]] = {}
    multiply = products(256, 1e-3)

    def run(name: str, call: Callable[[], object]) -> None:
        np.multiply(pattern, world.rank + 1, out=x)
        world.Barrier()
        start = time.perf_counter()
        call()
        seconds = world.allreduce(time.perf_counter() - start, MPI.MAX)
        times.setdefault(name, []).append(seconds)
        assert name == "product" or np.array_equal(x, wanted), f"{name} gives a wrong sum"

    for _ in range(REPEATS):
        run("all_reduce", calls["all_reduce"])
    multiply = products(256, statistics.median(times["all_reduce"]))
    calls |= {"product": lambda: multiply() if computes else None, "both": together}
    times.clear()
    for _ in range(REPEATS):
        for name, call in calls.items():
            run(name, call)
    medians = {name: statistics.median(series) for name, series in times.items()}
    exposed = medians["both"] - medians["product"]
    return {
        "milliseconds": {name: round(1e3 * t, 3) for name, t in medians.items()},
        "hidden": round(1 - exposed / medians["all_reduce"], 3),
    }


def main() -> None:
    world, rows = MPI.COMM_WORLD, []
    with rr.init() as comm:
        for nbytes in SIZES:
            for computing in ("all", "first"):
                row = {"benchmark": "overlap", "bytes": nbytes, "computing": computing}
                row |= environment(command_line("overlap"))
                rows.append(row | measure(comm, world, nbytes, computing == "all"))
                if world.rank == 0:
                    print(
                        nbytes >> 20, "MiB", computing, rows[-1]["milliseconds"], rows[-1]["hidden"]
                    )
    if world.rank == 0:
        replace("overlap", rows, same=("mpi", "ranks", "bytes", "computing", "cores", "hosts"))


if __name__ == "__main__":
    main()
