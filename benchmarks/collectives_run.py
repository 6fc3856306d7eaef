"""One run of `benchmarks.collectives`: our call and the MPI's own of one environment, interleaved.

    mpirun -n 2 python -m benchmarks.collectives_run FILE COLLECTIVE SIZE...

Rank 0 writes a row for each size, contender and way to FILE.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

import ringreduce as rr
from benchmarks.collectives import IN_LOOPS, WAYS
from ringreduce.bench.collectives import COLLECTIVES, IN_PLACE
from ringreduce.bench.contenders import BenchArguments, Contender, contenders_of, wanted
from ringreduce.bench.environment import environment
from ringreduce.bench.inputs import Inputs

DTYPE = np.dtype(np.float32)
_MOST_CALLS, _FEWEST_CALLS, _BYTES = 200, 15, 1 << 29
"""Timed calls of each contender at one size: as many as move so many bytes."""
_LOOP = 100
"""Calls of one loop."""
_MOST_LOOPS, _FEWEST_LOOPS, _BYTES_OF_LOOPS = 15, 5, 1 << 30
"""Timed loops of each contender at one size: as many as move so many bytes."""
_SHORT_BYTES = 1 << 20
"""Up to this size an untimed call goes before each timed one, so that no contender pays for what
another one left behind in caches."""


def main(file: Path, collective: str, sizes: Sequence[int]) -> None:
    """Measure all sizes, on every rank."""
    world, rows = MPI.COMM_WORLD, []
    with rr.init() as comm:
        for count in _counts(collective, world.size, sizes):
            rows += _measure(comm, world, collective, count)
    if world.rank == 0:
        where = environment("python -m benchmarks.collectives")
        file.write_text("".join(json.dumps(row | where) + "\n" for row in rows))


def _counts(collective: str, ranks: int, sizes: Sequence[int]) -> Iterator[int]:
    """Lengths in elements: each a whole number for every rank, none twice."""
    if not COLLECTIVES[collective].moves:
        yield 1
        return
    step = ranks if COLLECTIVES[collective].divided else 1
    counts = (max(step, nbytes // DTYPE.itemsize // step * step) for nbytes in sizes)
    yield from dict.fromkeys(counts)


def _measure(
    comm: rr.Communicator, world: MPI.Intracomm, collective: str, count: int
) -> list[dict[str, Any]]:
    at = BenchArguments(comm, world, count, "sum", DTYPE, "auto")
    contenders = contenders_of(collective, at)
    # A loop repeats a call on the same input: a sum in place would grow with each repetition.
    repeatable = [
        c for c in contenders if c.place != IN_PLACE or not COLLECTIVES[collective].reduces
    ]
    nbytes, rows = count * DTYPE.itemsize, []
    for way, of in zip(WAYS, (contenders, repeatable), strict=True):
        seconds, from_first, wrong = timed(at, collective, of, way)
        for contender, series, longer, mistakes in zip(of, seconds, from_first, wrong, strict=True):
            row: dict[str, Any] = {"benchmark": "collectives", "collective": collective}
            row |= {"way": way, "contender": contender.name, "place": contender.place}
            row |= {"dtype": str(DTYPE), "bytes": nbytes, "calls": len(series)}
            row["median_us"] = round(float(np.median(series)) * 1e6, 3)
            row["min_us"] = round(float(series.min()) * 1e6, 3)
            row["from_first_us"] = round(float(np.median(longer)) * 1e6, 3)
            rows.append(row | {"wrong": None if contender.result is None else int(mistakes)})
    return rows


def timed(
    at: BenchArguments, collective: str, contenders: Sequence[Contender], way: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the seconds of each call twice, and the wrong elements of each contender.

    The seconds are arrays (contender, repetition), to the exit of the last rank: from the entry of
    the last rank, and from the entry of the first one.
    """
    world, nbytes = at.world, at.count * DTYPE.itemsize
    if way == IN_LOOPS:
        length, most = _LOOP, _BYTES_OF_LOOPS // (_LOOP * nbytes)
        repetitions = max(_FEWEST_LOOPS, min(_MOST_LOOPS, most))
    else:
        length, repetitions = 1, max(_FEWEST_CALLS, min(_MOST_CALLS, _BYTES // nbytes))
    inputs, turns = Inputs(world.size, at.count, "sum", DTYPE), np.random.default_rng(at.count)
    spans = np.zeros((len(contenders), repetitions, 2))
    wrong = np.zeros(len(contenders), np.int64)
    for number in range(repetitions + 1):  # the first is not counted
        right = wanted(collective, inputs, at, number) if number in (0, repetitions) else None
        # The order is drawn alike on all ranks: each contender follows each other one.
        for index in turns.permutation(len(contenders)):
            contender = contenders[index]
            if nbytes <= _SHORT_BYTES:
                contender.call()
            inputs.fill(contender.source, world.rank, number)
            # A barrier follows the other contender's: neither finds its own flags in the cache.
            before = contenders[1 - index].call if collective == "barrier" else world.Barrier
            span = _span(world, before, contender, length)
            if number:
                spans[index, number - 1] = span
            if right is not None and contender.result is not None:
                wrong[index] += int((contender.result != contender.wanted(right)).sum())
    first = spans[..., 0].copy()
    world.Allreduce(MPI.IN_PLACE, first, MPI.MIN)  # ranks of one host have one clock
    world.Allreduce(MPI.IN_PLACE, spans, MPI.MAX)
    world.Allreduce(MPI.IN_PLACE, wrong)
    last, left = spans[..., 0], spans[..., 1]
    return (left - last) / length, (left - first) / length, wrong


def _span(
    world: MPI.Intracomm, before: Callable[[], object], contender: Contender, length: int
) -> tuple[float, float]:
    """Call `before`, then time `length` calls.

    Returns when this rank enters the first timed call, and when it leaves the last one.
    """
    call = contender.call
    before()
    if length == 1:  # without a loop's own time
        begin = time.perf_counter()
        call()
        end = time.perf_counter()
    else:
        begin = time.perf_counter()
        for _ in range(length):
            call()
        end = time.perf_counter()
    world.Barrier()  # a rank that shares this core leaves before the next input is written
    return begin, end


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], list(map(int, sys.argv[3:])))
