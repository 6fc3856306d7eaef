"""How much of an asynchronous all-reduce hides behind a matrix product.

    OPENBLAS_NUM_THREADS=1 mpirun -n 2 python -m benchmarks.overlap

A product is made as long as the all-reduce.  Then both run at once: what the pair takes longer than
the product alone is the exposed communication.  Besides all ranks computing, the first alone does:
where there are no more cores than ranks, that leaves its progress thread a core to run on.
Across a network, as `benchmarks.hosts` makes one, most of an all-reduce is waiting, on no core.
Interleaved in one run; inputs are rewritten before each call and sums are verified.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
from mpi4py import MPI

import ringreduce as rr
from benchmarks.ring_and_mpi import medians_s
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


def measure(comm: rr.Communicator, nbytes: int, all_compute: bool) -> dict:
    computes = all_compute or comm.rank == 0

    def all_reduce(x: np.ndarray) -> None:
        comm.all_reduce(x, out=x)

    def product(_: np.ndarray) -> None:
        if computes:
            multiply()

    def both(x: np.ndarray) -> None:
        work = comm.all_reduce(x, out=x, async_op=True)
        product(x)
        work.wait()

    alone_s = medians_s(nbytes, REPEATS, {"all_reduce": all_reduce})["all_reduce"]
    multiply = products(256, alone_s)
    medians = medians_s(nbytes, REPEATS, {f.__name__: f for f in (all_reduce, product, both)})
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
                rows.append(row | measure(comm, nbytes, computing == "all"))
                if world.rank == 0:
                    print(
                        nbytes >> 20, "MiB", computing, rows[-1]["milliseconds"], rows[-1]["hidden"]
                    )
    if world.rank == 0:
        replace("overlap", rows, same=("mpi", "ranks", "bytes", "computing", "cores", "hosts"))


if __name__ == "__main__":
    main()
