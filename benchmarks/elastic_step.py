"""The time of a training step that no fault disturbs, with and without --elastic.

    python -m benchmarks.elastic_step

Starts jobs of ``ringreduce run`` in turns, with one rank for each core.  Each trains the digits:
with the trainer's default network, and with a wide one whose step takes more than 5 ms.

- ``elastic``: under ``--elastic``, with the arrays in an `rr.State`,
- ``state``: the same code, which writes into an `rr.State`, without ``--elastic``,
- ``in_place``: what ``ringreduce train`` does without ``--elastic``: steps change arrays in place.

Rank 0 times its steps.  Writes a row for each network to ``bench_results/elastic_step.jsonl``: the
medians over the turns of the median steps, and of the ratios in a turn.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from contextlib import closing
from typing import Any

import ringreduce as rr
from benchmarks.rows import environment, replace
from ringreduce.system.cores import cores

NAME = "elastic_step"
NETWORKS = {
    "digits": (rr.train.Settings(lr=1e-20), 4000),
    "wide": (rr.train.Settings(hidden=(1024, 1024), batch=128, lr=1e-20), 150),
}
"""Name -> settings, and steps that are timed in a job."""
KINDS = {"in_place": (), "state": (), "elastic": ("--elastic", "1")}
"""Kind -> options of `ringreduce run`."""
_TURNS, _TOGETHER = 10, 10


def main() -> None:
    if len(sys.argv) > 1:
        _of_job(*sys.argv[1:])
        return
    rows = []
    for network in NETWORKS:
        times: dict[str, list[float]] = {kind: [] for kind in KINDS}
        origin: dict[str, Any] = {}
        for turn in range(_TURNS):
            for kind in list(KINDS)[:: 1 if turn % 2 else -1]:
                command = [sys.executable, "-m", "ringreduce", "run", "-n", str(cores())]
                done = subprocess.run(
                    [*command, *KINDS[kind], "-m", f"benchmarks.{NAME}", network, kind],
                    stdout=subprocess.PIPE,
                    check=True,
                )
                found = json.loads(done.stdout)
                times[kind].append(found["median_ms"])
                origin = found["environment"]
        row: dict[str, Any] = {"benchmark": NAME, "network": network, "turns": _TURNS}
        row |= {f"{kind}_ms": round(statistics.median(times[kind]), 4) for kind in KINDS}
        for other in ("state", "in_place"):
            pairs = zip(times["elastic"], times[other], strict=True)
            row[f"to_{other}"] = round(statistics.median(ours / its for ours, its in pairs), 4)
        rows.append(row | origin)
        print(*list(row.values())[1:], flush=True)
    replace(NAME, rows, same=("mpi", "ranks", "cpu"))


def _of_job(network: str, kind: str) -> None:
    """Time the steps of a trainer on this rank; rank 0 prints their median."""
    settings, count = NETWORKS[network]
    trainers: list[rr.train.Trainer] = []

    def make(comm: rr.Communicator) -> rr.State:
        split, elastic = rr.train.load(settings), kind != "in_place"
        trainers.append(rr.train.Trainer(comm, split, settings, elastic=elastic))
        store = trainers[0].store
        return store if isinstance(store, rr.State) else rr.State({"unused": 0})

    def train(comm: rr.Communicator, state: rr.State) -> None:
        with closing(trainers[0]) as trainer:
            trainer.time_steps(count // 10)
            seconds = []
            for _ in range(count // _TOGETHER):
                begin = time.perf_counter()
                trainer.time_steps(_TOGETHER)
                seconds.append((time.perf_counter() - begin) / _TOGETHER)
        if comm.rank == 0:
            where = environment(f"python -m benchmarks.{NAME}")
            print(json.dumps({"median_ms": 1e3 * statistics.median(seconds), "environment": where}))

    rr.elastic(train, make)


if __name__ == "__main__":
    main()
