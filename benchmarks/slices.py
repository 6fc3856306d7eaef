"""Collectives of long arrays by other slices, and by single copy, in turns in one job.

    ringreduce run -n 2 -m benchmarks.slices [--collectives all_reduce ...] [--bytes 4194304 ...]

Ordinary arrays, after a barrier, as in `benchmarks.collectives_run`.  ``auto`` is a communicator
without settings.  In the other ways arrays are copied in and out in slices of a given length, or
read and written by the kernel, at every size.  Writes ``bench_results/slices.jsonl``.
"""

from __future__ import annotations

import argparse
from dataclasses import replace as changed

import numpy as np
from mpi4py import MPI

import ringreduce as rr
from benchmarks import rows
from benchmarks.collectives import AFTER_A_BARRIER
from benchmarks.collectives_run import DTYPE, timed
from ringreduce.bench.collectives import COLLECTIVES, OURS
from ringreduce.bench.contenders import BenchArguments, contenders_of

NAME = "slices"
_NEVER = 1 << 50
WAYS = {
    "auto": rr.Config(),
    "slices of 4 MiB": rr.Config(pull_bytes=_NEVER, slice_bytes=4 << 20),
    "slices of 1 MiB": rr.Config(pull_bytes=_NEVER, slice_bytes=1 << 20),
    "slices of 256 KiB": rr.Config(pull_bytes=_NEVER, slice_bytes=256 << 10),
    "single copy": rr.Config(pull_bytes=1),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    moving = [name for name, each in COLLECTIVES.items() if each.moves]
    parser.add_argument("--collectives", nargs="+", choices=moving, default=moving)
    sizes = [(256 << 10) << shift for shift in range(0, 9, 2)]
    parser.add_argument("--bytes", nargs="+", type=int, default=sizes)
    options = parser.parse_args()
    world, comms = MPI.COMM_WORLD, {way: rr.init(config=config) for way, config in WAYS.items()}
    found = []
    for collective in options.collectives:
        for nbytes in options.bytes:
            count = nbytes // DTYPE.itemsize // world.size * world.size
            contenders = []
            for way, comm in comms.items():
                at = BenchArguments(comm, world, count, "sum", DTYPE, "auto")
                ours = [each for each in contenders_of(collective, at) if each.name == OURS]
                contenders.append(changed(ours[-1], name=way))  # in place if there is that
            seconds, _, wrong = timed(at, collective, contenders, AFTER_A_BARRIER)
            row = {"benchmark": NAME, "collective": collective, "place": contenders[0].place}
            row |= {"ranks": world.size, "bytes": count * DTYPE.itemsize, "wrong": int(wrong.sum())}
            us = np.round(np.median(seconds, axis=1) * 1e6, 1).tolist()
            found.append(row | {"median_us": dict(zip(WAYS, us, strict=True))})
    if world.rank == 0:
        where = rows.environment(rows.command_line(NAME))
        rows.replace(
            NAME, [row | where for row in found], same=("collective", "ranks", "bytes", "cpu")
        )
        for row in found:
            print(row["collective"], row["place"], row["ranks"], row["bytes"], row["median_us"])


if __name__ == "__main__":
    main()
