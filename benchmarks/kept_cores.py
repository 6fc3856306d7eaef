"""The time of a training step where each core has two ranks, on one core each and on every core.

    python -m benchmarks.kept_cores

Starts jobs of `ringreduce run` in turns.  In one of each pair RINGREDUCE_SHARED_CORES=0 leaves the
cores to the kernel.  The network has eight layers of 256, and a batch has 128 samples.  Pipelines
have two microbatches.  Rank 0 times its steps.  Writes a row for each strategy and placement to
``bench_results/kept_cores.jsonl``.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from contextlib import closing

import ringreduce as rr
from benchmarks.rows import environment, replace
from ringreduce.system.cores import SHARED_CORES, cores
from ringreduce.train import strategies

NAME = "kept_cores"
STRATEGIES = {
    "zero_bubble": strategies.Pipeline(splits=2, schedule="zero_bubble"),
    "1f1b": strategies.Pipeline(splits=2, schedule="1f1b"),
    "gpipe": strategies.Pipeline(splits=2, schedule="gpipe"),
    "mirrored": strategies.Mirrored(),
}
PLACEMENTS = {"one core each": {}, "every core": {SHARED_CORES: "0"}}
"""Placement of the ranks -> variables for `ringreduce run`."""
_TURNS, _STEPS = 5, 100
_SETTINGS = rr.train.Settings(hidden=(256,) * 7, batch=128, lr=1e-20)


def main() -> None:
    if len(sys.argv) > 1:
        _of_job(sys.argv[1])
        return
    ranks = 2 * cores()
    times: dict[tuple[str, str], list[float]] = {}
    origin = {}
    for _ in range(_TURNS):
        for name in STRATEGIES:
            for placement, variables in PLACEMENTS.items():
                command = [sys.executable, "-m", "ringreduce", "run", "-n", str(ranks)]
                done = subprocess.run(
                    [*command, "-m", f"benchmarks.{NAME}", name],
                    env={**os.environ, **variables},
                    stdout=subprocess.PIPE,
                    check=True,
                )
                found = json.loads(done.stdout)
                times.setdefault((name, placement), []).extend(found["milliseconds"])
                origin = found["environment"]
    rows = []
    for (name, placement), of_steps in times.items():
        tenths = statistics.quantiles(of_steps, n=10)
        row = {
            "benchmark": NAME,
            "strategy": name,
            "placement": placement,
            "median_ms": round(statistics.median(of_steps), 3),
            "tenth_ms": round(tenths[0], 3),
            "nine_tenths_ms": round(tenths[-1], 3),
            "steps": len(of_steps),
        }
        rows.append(row | origin)
        print(*list(row.values())[1:], flush=True)
    replace(NAME, rows, same=("mpi", "ranks"))


def _of_job(name: str) -> None:
    """Time the steps of a strategy on this rank; rank 0 prints them."""
    with rr.init() as comm:
        split = rr.train.load(_SETTINGS)
        trainer = rr.train.Trainer(comm, split, _SETTINGS, strategy=STRATEGIES[name])
        with closing(trainer):
            trainer.time_steps(_STEPS // 10)
            seconds = trainer.time_steps(_STEPS)
        if comm.rank == 0:
            where = environment(f"python -m benchmarks.{NAME}")
            print(json.dumps({"milliseconds": [1e3 * s for s in seconds], "environment": where}))


if __name__ == "__main__":
    main()
