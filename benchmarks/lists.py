"""A list of arrays reduced as one, beside the same arrays one by one.

    mpirun -n 2 python -m benchmarks.lists

1,000 arrays of 4 KiB by default: ordinary ones, and ones from `comm.empty`; each with new results,
and with `out=` the same list every time, as calls one by one have it where nothing else is said.
Ours and MPI's calls one by one are interleaved with them; inputs are rewritten before every call,
and the results of the last are verified.  Writes rows to ``bench_results/lists.jsonl``.
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
from benchmarks.rows import environment, replace

_ROUNDS = 60


@dataclass(frozen=True)
class Contender:
    """One way to reduce `sources`; it returns the results."""

    name: str
    sources: list[np.ndarray]
    call: Callable[[], Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arrays", type=int, default=1000)
    parser.add_argument("--bytes", type=int, default=4096, help="of each")
    options = parser.parse_args()
    count = options.bytes // 4
    with rr.init() as comm:
        contenders = _contenders(comm, options.arrays, count)
        seconds = _measure(comm.rank, contenders)
        if comm.rank == 0:
            _report(contenders, seconds, options)
        comm.barrier(timeout_s=300)


def _contenders(comm: rr.Communicator, arrays: int, count: int) -> list[Contender]:
    def made(near: bool = False) -> list[np.ndarray]:
        make = comm.empty if near else np.empty
        return [make(count, np.float32) for _ in range(arrays)]

    x, y, near, far = made(), made(), made(near=True), made(near=True)
    world = MPI.COMM_WORLD

    def by_mpi() -> list[np.ndarray]:
        for source, target in zip(x, y, strict=True):
            world.Allreduce(source, target)
        return y

    def one_by_one(sources: list[np.ndarray], targets: list[np.ndarray]) -> list[np.ndarray]:
        for source, target in zip(sources, targets, strict=True):
            comm.all_reduce(source, out=target)
        return targets

    return [
        Contender("MPI one by one", x, by_mpi),
        Contender("one by one", x, lambda: one_by_one(x, y)),
        Contender("one by one, new results", x, lambda: [comm.all_reduce(each) for each in x]),
        Contender("list", x, lambda: comm.all_reduce(x)),
        Contender("list, out", x, lambda: comm.all_reduce(x, out=y)),
        Contender("registered one by one", near, lambda: one_by_one(near, far)),
        Contender("registered list", near, lambda: comm.all_reduce(near)),
        Contender("registered list, out", near, lambda: comm.all_reduce(near, out=far)),
        Contender("registered list in place", near, lambda: comm.all_reduce(near, out=near)),
    ]


def _measure(rank: int, contenders: list[Contender]) -> list[float]:
    """Median seconds of each, of the slowest rank."""
    world, turns = MPI.COMM_WORLD, np.random.default_rng(7)
    spans = np.zeros((len(contenders), _ROUNDS, 2))
    for number in range(-1, _ROUNDS):  # the first is not counted
        for index in turns.permutation(len(contenders)):
            contender = contenders[index]
            for place, source in enumerate(contender.sources):
                source.fill(rank + number + place)
            world.Barrier()
            begin = time.perf_counter()
            results = contender.call()
            if number >= 0:
                spans[index, number] = begin, time.perf_counter()
            world.Barrier()  # who is done prepares nothing while others, on the same core, are not
            if number in (-1, _ROUNDS - 1):
                _verify(contender.name, results, number)
    world.Allreduce(MPI.IN_PLACE, spans, MPI.MAX)
    return [float(np.median(series)) for series in spans[..., 1] - spans[..., 0]]


def _verify(name: str, results: list[np.ndarray], number: int) -> None:
    size = MPI.COMM_WORLD.size
    ranks = size * (size - 1) // 2
    for place, result in enumerate(results):
        if not (result == ranks + size * (number + place)).all():
            raise SystemExit(f"{name}: array {place} is wrong")


def _report(contenders: list[Contender], seconds: list[float], options: Any) -> None:
    where = environment("mpirun -n N python -m benchmarks.lists")
    single = dict(zip((c.name for c in contenders), seconds, strict=True))["one by one"]
    rows = []
    for contender, took in zip(contenders, seconds, strict=True):
        print(f"{contender.name:>26} {took * 1e3:9.3f} ms {single / took:6.2f}x")
        row = {"benchmark": "lists", "contender": contender.name, "arrays": options.arrays}
        row |= {"bytes": options.bytes, "median_ms": round(took * 1e3, 3)}
        rows.append({**row, **where})
    replace("lists", rows, ("mpi", "ranks", "arrays", "bytes"))


if __name__ == "__main__":
    main()
