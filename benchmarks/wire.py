"""What 16 bits on the wire do to the accuracy: the digits, several seeds, each wire.

    mpirun -n 2 python -m benchmarks.wire [--seeds 10]

Writes ``bench_results/wire.jsonl``: the mean accuracy on the held-out digits over the seeds, the
lowest and the highest, for each kind of wire.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics

from mpi4py import MPI

import ringreduce as rr
from benchmarks.rows import command_line, environment, replace
from ringreduce.train import Settings, load, train
from ringreduce.train.settings import WIRES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=10)
    options = parser.parse_args()
    split = load(Settings())
    rows = []
    with rr.init() as comm:
        for wire in WIRES:
            settings = Settings(wire=wire)
            percent = [
                100 * train(comm, split, dataclasses.replace(settings, seed=seed)).accuracy
                for seed in range(options.seeds)
            ]
            rows.append(
                {
                    "benchmark": "wire",
                    "wire": wire,
                    "seeds": options.seeds,
                    "accuracy_percent": round(statistics.fmean(percent), 2),
                    "lowest": round(min(percent), 2),
                    "highest": round(max(percent), 2),
                    **environment(command_line("wire")),
                }
            )
            if comm.rank == 0:
                print({k: rows[-1][k] for k in ("wire", "accuracy_percent", "lowest", "highest")})
    if MPI.COMM_WORLD.rank == 0:
        replace("wire", rows, same=("mpi", "ranks", "wire"))


if __name__ == "__main__":
    main()
