"""More elements than 31 bits count: 2^31 + 7 of int8, in place, on 2 ranks.

    python -m tests.long.large [--record]

Under the MPI of the interpreter; takes 5 GiB of memory.  ``--record`` puts the row into
bench_results/large.jsonl.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import ringreduce as rr
from benchmarks import rows
from tests.support.mpi import MpiJobs

COUNT = (1 << 31) + 7
RANKS = 2
_BLOCK = (1 << 24) + 43
"""No power of two, so that what is misplaced by one shows."""


def blocks(rank: int) -> Iterator[tuple[slice, np.ndarray]]:
    """The input of a rank, block by block: unlike everywhere and on every rank."""
    base = np.random.default_rng(5).integers(-128, 127, _BLOCK, np.int8, endpoint=True)
    for number, start in enumerate(range(0, COUNT, _BLOCK)):
        stop = min(start + _BLOCK, COUNT)
        yield slice(start, stop), base[: stop - start] + np.int8((3 * number + 29 * rank) % 128)


def fill(x: np.ndarray, rank: int) -> None:
    for place, values in blocks(rank):
        x[place] = values


def check_sum(x: np.ndarray) -> None:
    for (place, a), (_, b) in zip(blocks(0), blocks(1), strict=True):
        assert np.array_equal(x[place], a + b), f"wrong between {place.start} and {place.stop}"


def check_first(x: np.ndarray) -> None:
    for place, values in blocks(0):
        assert np.array_equal(x[place], values), f"wrong between {place.start} and {place.stop}"


def over_mpi(command: str) -> dict[str, Any]:
    """On each of 2 ranks: the row that says how long each call took."""
    x = np.empty(COUNT, np.int8)
    seconds = {}
    with rr.init() as comm:
        calls: dict[str, tuple[Callable[[], Any], Callable[[np.ndarray], None]]] = {
            "all_reduce": (lambda: comm.all_reduce(x, out=x), check_sum),
            "broadcast": (lambda: comm.broadcast(x, 0, out=x), check_first),
        }
        for name, (call, check) in calls.items():
            fill(x, comm.rank)
            comm.barrier()
            start = time.perf_counter()
            call()
            comm.barrier()
            seconds[name] = round(time.perf_counter() - start, 2)
            check(x)
    return {
        "test": "large",
        "elements": COUNT,
        "dtype": "int8",
        **rows.environment(command),
        "seconds": seconds,
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.long.large")
    parser.add_argument("--record", action="store_true", help="into bench_results/large.jsonl")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        jobs = MpiJobs(Path(folder))
        try:
            command = "python -m tests.long.large"
            row, _ = jobs.run_ok("call", RANKS, "tests.long.large:over_mpi", command, timeout_s=600)
        finally:
            jobs.sweep()
    print(json.dumps(row, indent=1))
    if options.record:
        rows.replace("large", [row], same=("test", "mpi"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
