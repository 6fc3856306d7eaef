"""One run of `benchmarks.one_host`: ours and the baselines of one environment, interleaved.

    mpirun -n 2 python -m benchmarks.one_host_run FILE DTYPE SIZE...

All contenders work on the same arrays, so that the largest sizes fit; only registered ones have two
of their own.  With floats of 16 bits, calls on the same bytes as float32 are among them, which are
not verified.  Rank 0 writes a row for each contender and size to FILE.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

import ringreduce as rr
from benchmarks.one_host import SAME_BYTES
from ringreduce.bench.contenders import BenchArguments
from ringreduce.bench.environment import environment
from ringreduce.bench.gloo import Gloo
from ringreduce.bench.inputs import Inputs

IN_PLACE, OUT_OF_PLACE = "in place", "out of place"
_MOST_CALLS, _FEWEST_CALLS, _BYTES = 60, 7, 1 << 30
"""Calls of each contender at one size: as many as come to so many bytes."""
_SHORT_BYTES = 1 << 20
"""Up to here an untimed call goes first, so that no contender pays for what another left behind."""


@dataclass(frozen=True)
class Contender:
    """A call that reads `source` and leaves its result in `result`."""

    name: str
    place: str
    call: Callable[[], Any]
    source: np.ndarray
    result: np.ndarray
    checked: bool = True


class _OneArray(BenchArguments):
    """Arguments whose contenders all get the same buffer."""

    array: np.ndarray

    def buffer(self, divided: bool = False) -> np.ndarray:
        return self.array


def main(file: Path, dtype: Any, sizes: list[int]) -> None:
    """Measure all sizes, on every rank."""
    world = MPI.COMM_WORLD
    rows = []
    with rr.init() as comm:
        gloo = Gloo.start(world)
        for nbytes in sizes:
            count = max(1, nbytes // dtype.itemsize)
            rows += _measure(comm, world, gloo, count, dtype)
        if gloo is not None:
            gloo.close()
    if world.rank == 0:
        where = environment(f"python -m benchmarks.one_host {dtype}")
        file.write_text("".join(json.dumps(row | where) + "\n" for row in rows))


def _contenders(
    comm: rr.Communicator, world: MPI.Intracomm, gloo: Gloo | None, count: int, dtype: Any
) -> list[Contender]:
    x, y = np.zeros(count, dtype), np.zeros(count, dtype)
    near, far = comm.empty(count, dtype), comm.empty(count, dtype)
    near[...], far[...] = 0, 0
    found = [Contender("memcpy", OUT_OF_PLACE, lambda: np.copyto(y, x), x, y, checked=False)]
    for name, a, b in (("ringreduce", x, y), ("registered", near, far)):
        for place, out in ((IN_PLACE, a), (OUT_OF_PLACE, b)):
            call = _bound(comm.all_reduce, a, out)
            planned = comm.plan("all_reduce", a, out=out)
            found += [
                Contender(name, place, call, a, out),
                Contender(f"{name} planned", place, planned, a, out),
            ]
    if dtype.itemsize == np.dtype(np.float16).itemsize:
        for name, a, b in ((SAME_BYTES, x, y), (f"registered {SAME_BYTES}", near, far)):
            for place, out in ((IN_PLACE, a), (OUT_OF_PLACE, b)):
                call = _bound(comm.all_reduce, _as_float32(a), _as_float32(out))
                found.append(Contender(name, place, call, a, out, checked=False))
    at = _OneArray(comm, world, count, "sum", dtype, "auto")
    object.__setattr__(at, "array", x)
    if at.mpi_op is not None:
        found += [
            Contender("MPI", IN_PLACE, lambda: world.Allreduce(MPI.IN_PLACE, x), x, x),
            Contender("MPI", OUT_OF_PLACE, lambda: world.Allreduce(x, y), x, y),
        ]
    if gloo is not None:
        found += [Contender(c.name, c.place, c.call, x, x) for c in gloo.contenders(at)]
    return found


def _as_float32(array: np.ndarray) -> np.ndarray:
    return array[: array.size // 2 * 2].view(np.float32)


def _bound(all_reduce: Callable[..., Any], x: np.ndarray, out: np.ndarray) -> Callable[[], Any]:
    return lambda: all_reduce(x, out=out)


def _measure(
    comm: rr.Communicator, world: MPI.Intracomm, gloo: Gloo | None, count: int, dtype: Any
) -> list[dict[str, Any]]:
    contenders = _contenders(comm, world, gloo, count, dtype)
    nbytes = count * dtype.itemsize
    calls = max(_FEWEST_CALLS, min(_MOST_CALLS, _BYTES // nbytes))
    inputs, turns = Inputs(world.size, count, "sum", dtype), np.random.default_rng(count)
    spans, wrong = np.zeros((len(contenders), calls, 2)), np.zeros(len(contenders), np.int64)
    for number in range(calls + 1):  # the first is not counted
        right = inputs.result(number) if number in (0, calls) else None
        for index in turns.permutation(len(contenders)):
            contender = contenders[index]
            if nbytes <= _SHORT_BYTES:
                contender.call()
            inputs.fill(contender.source, world.rank, number)
            world.Barrier()
            begin = time.perf_counter()
            contender.call()
            end = time.perf_counter()
            world.Barrier()  # who shares this core has left, too, before what comes next takes it
            if number:
                spans[index, number - 1] = begin, end
            if right is not None and contender.checked:
                wrong[index] += int((contender.result != right).sum())
    world.Allreduce(MPI.IN_PLACE, spans, MPI.MAX)
    world.Allreduce(MPI.IN_PLACE, wrong)
    seconds = spans[..., 1] - spans[..., 0]
    return [
        {
            "benchmark": "one_host",
            "contender": contender.name,
            "place": contender.place,
            "dtype": str(dtype),
            "bytes": nbytes,
            "calls": calls,
            "median_us": round(float(np.median(series)) * 1e6, 3),
            "min_us": round(float(series.min()) * 1e6, 3),
            "wrong": int(mistakes) if contender.checked else None,
        }
        for contender, series, mistakes in zip(contenders, seconds, wrong, strict=True)
    ]


if __name__ == "__main__":
    main(Path(sys.argv[1]), np.dtype(sys.argv[2]), list(map(int, sys.argv[3:])))
