"""Adds of all ranks to one array at the same time, beside two ways of MPI.

    mpirun -n 2 python -m benchmarks.shared_adds [--bytes 8 1048576 ...]

Every rank adds float32 to an array of one rank: by `comm.shared`; by `numpy.add` to memory of an
MPI window, under the window's exclusive lock; and by `MPI_Accumulate`, under its shared lock.
`numpy.add` to an array of each rank's own shows what an add takes that shares nothing.  Contenders
take turns, and the sums of every turn are verified.  Writes rows to
``bench_results/shared_adds.jsonl``.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from mpi4py import MPI

import ringreduce as rr
from benchmarks.rows import command_line, environment, replace

NAME = "shared_adds"
_SIZES = (8, 64, 1 << 10, 8 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20)
_TURNS = 40
_BYTES_A_TURN = 8 << 20
_MOST_ADDS = 1000
"""In a turn of a rank; the sums of 64 ranks are exact in float32."""


@dataclass(frozen=True)
class Contender:
    """One way to add."""

    name: str
    add: Callable[[], Any]
    sums: np.ndarray
    """What all ranks add to; each rank its own array if it shares none."""
    shares: bool = True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bytes", type=int, nargs="+", default=_SIZES, metavar="N")
    options = parser.parse_args()
    rows = []
    with rr.init() as comm:
        where = environment(command_line(NAME))
        for nbytes in options.bytes:
            for name, microseconds in _of_size(comm, nbytes).items():
                row = {"benchmark": NAME, "contender": name, "bytes": nbytes}
                rows.append({**row, "median_us": round(microseconds, 3), **where})
        if comm.rank == 0:
            _report(rows)
            replace(NAME, rows, same=("mpi", "ranks", "bytes", "contender"))
        comm.barrier(timeout_s=300)


def _of_size(comm: rr.Communicator, nbytes: int) -> dict[str, float]:
    """Contender -> median microseconds of an add while all ranks add."""
    world, count = MPI.COMM_WORLD, nbytes // 4
    x = (np.arange(count) % 3 + 1).astype(np.float32)
    shared, own = comm.shared(count, np.float32), np.zeros(count, np.float32)
    window = MPI.Win.Allocate_shared(nbytes if world.rank == 0 else 0, 4, comm=world)
    there = np.frombuffer(window.Shared_query(0)[0], np.float32)

    def add_under_lock() -> None:
        window.Lock(0, MPI.LOCK_EXCLUSIVE)
        np.add(there, x, out=there)
        window.Unlock(0)

    def accumulate() -> None:
        window.Lock(0, MPI.LOCK_SHARED)
        window.Accumulate(x, 0, op=MPI.SUM)
        window.Unlock(0)

    contenders = [
        Contender("comm.shared", lambda: shared.add(x), shared.array),
        Contender("MPI lock and np.add", add_under_lock, there),
        Contender("MPI_Accumulate", accumulate, there),
        Contender("np.add, not shared", lambda: np.add(own, x, out=own), own, shares=False),
    ]
    medians = _measure(contenders, x, max(1, min(_MOST_ADDS, _BYTES_A_TURN // nbytes)))
    window.Free()  # no contender is called after this
    return medians


def _measure(contenders: list[Contender], x: np.ndarray, adds: int) -> dict[str, float]:
    """Contender -> median over the turns of the slowest rank's microseconds an add."""
    world, order = MPI.COMM_WORLD, np.random.default_rng(7)
    took = np.zeros((len(contenders), _TURNS))
    for turn in range(-1, _TURNS):  # the first is not counted
        for index in order.permutation(len(contenders)):
            contender = contenders[index]
            if world.rank == 0 or not contender.shares:
                contender.sums[:] = 0
            world.Barrier()
            begin = time.perf_counter()
            for _ in range(adds):
                contender.add()
            end = time.perf_counter()
            world.Barrier()
            if turn >= 0:
                took[index, turn] = (end - begin) / adds
            times = adds * (world.size if contender.shares else 1)
            if not np.array_equal(contender.sums, x * np.float32(times)):
                raise SystemExit(f"{contender.name}: wrong sums of {x.nbytes} bytes")
            world.Barrier()
    world.Allreduce(MPI.IN_PLACE, took, MPI.MAX)
    medians = np.median(took, axis=1) * 1e6
    return {each.name: float(us) for each, us in zip(contenders, medians, strict=True)}


def _report(rows: list[dict[str, Any]]) -> None:
    ours = {row["bytes"]: row["median_us"] for row in rows if row["contender"] == "comm.shared"}
    for row in rows:
        nbytes, took = row["bytes"], row["median_us"]
        print(
            f"{nbytes:>9} bytes {row['contender']:>20} {took:12.2f} us {nbytes / took / 1e3:8.2f} "
            f"GB/s {took / ours[nbytes]:7.2f}x"
        )


if __name__ == "__main__":
    main()
