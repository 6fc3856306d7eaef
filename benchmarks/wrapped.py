"""All-reduces of mpi4py on MPI's communicator and on a wrapped one, in turns in one job.

    ringreduce run -n 2 -m benchmarks.wrapped

``Allreduce`` of an array of float64, beside `Communicator.all_reduce`, and ``allreduce`` of the
array.  Each contender makes a loop of calls after a barrier; a figure is the median of the loops of
the slowest rank.  Writes ``bench_results/wrapped.jsonl``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

import ringreduce as rr
from benchmarks import rows
from ringreduce.picture.scales import size_text

NAME = "wrapped"
SIZES = [8, 1 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20]
"""Bytes."""
_LOOPS = 31
_BYTES, _MOST_CALLS, _FEWEST_CALLS = 4 << 20, 200, 2
"""Calls of a loop: as many as move so many bytes."""


def main() -> None:
    world = MPI.COMM_WORLD
    wrapped = rr.wrap(world)
    with rr.init() as comm:
        found = [_measure(world, wrapped, comm, nbytes) for nbytes in SIZES]
    if world.rank == 0:
        where = rows.environment(rows.command_line(NAME))
        same = ("mpi", "ranks", "bytes", "cpu")
        rows.replace(NAME, [row | where for row in found], same=same)
        for row in found:
            print(size_text(row["bytes"]), row["median_us"], "wrong:", row["wrong"])


def _measure(world: MPI.Intracomm, wrapped: Any, comm: rr.Communicator, nbytes: int) -> Any:
    x = np.arange(nbytes / 8) + world.rank
    y = np.empty_like(x)
    contenders: dict[str, Callable[[], Any]] = {
        "Allreduce of MPI": lambda: world.Allreduce(x, y),
        "Allreduce wrapped": lambda: wrapped.Allreduce(x, y),
        "all_reduce": lambda: comm.all_reduce(x, out=y),
        "allreduce of MPI": lambda: world.allreduce(x),
        "allreduce wrapped": lambda: wrapped.allreduce(x),
    }
    wanted = np.arange(nbytes / 8) * world.size + sum(range(world.size))
    wrong = 0
    for call in contenders.values():
        y[...] = -1
        result = call()
        wrong += not np.array_equal(y if result is None else result, wanted)
    calls = max(_FEWEST_CALLS, min(_MOST_CALLS, _BYTES // nbytes))
    seconds = np.zeros((len(contenders), _LOOPS))
    turns = np.random.default_rng(nbytes)
    for loop in range(_LOOPS):
        for index in turns.permutation(len(contenders)):
            call = list(contenders.values())[index]
            world.Barrier()
            begin = time.perf_counter()
            for _ in range(calls):
                call()
            seconds[index, loop] = (time.perf_counter() - begin) / calls
    world.Allreduce(MPI.IN_PLACE, seconds, MPI.MAX)
    us = np.round(np.median(seconds, axis=1) * 1e6, 2).tolist()
    row = {"benchmark": NAME, "ranks": world.size, "bytes": nbytes, "dtype": "float64"}
    return row | {"median_us": dict(zip(contenders, us, strict=True)), "wrong": int(wrong)}


if __name__ == "__main__":
    main()
