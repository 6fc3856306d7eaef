"""Figures of the strategies of training, a case each.

    ringreduce run -n 4 -m benchmarks.strategies local_sgd [--seeds 10]

``local_sgd`` trains the digits with several seeds: by replicas that add up their gradients in every
step, and by replicas that average their weights every 8 steps and every 32.  A row has the mean,
the lowest and the highest accuracy on the held-out digits, and the bytes that a rank sends.

Writes rows to ``bench_results/strategies.jsonl``.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import ringreduce as rr
from benchmarks import rows
from ringreduce.train.strategies import LocalSGD, Mirrored, to_plain

NAME = "strategies"


def local_sgd(comm: rr.Communicator, seeds: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each strategy.  Collective."""
    settings = rr.train.Settings()
    split = rr.train.load(settings)
    steps = -(-len(split.train_labels) // settings.batch)
    base: dict[str, Any] = {}
    for strategy in (Mirrored(), LocalSGD(every=8), LocalSGD(every=32)):
        results = [
            rr.train.train(comm, split, replace(settings, seed=seed), strategy=strategy)
            for seed in range(seeds)
        ]
        percent = [100 * result.accuracy for result in results]
        every = strategy.every if isinstance(strategy, LocalSGD) else 1
        row: dict[str, Any] = {**to_plain(strategy), "every": every, "data": settings.data}
        row |= {"seeds": seeds, "accuracy_percent": round(statistics.fmean(percent), 2)}
        row |= {"lowest": round(min(percent), 2), "highest": round(max(percent), 2)}
        row["sent_bytes"] = results[0].sent_bytes
        base = base or row
        points = row["accuracy_percent"] - base["accuracy_percent"]
        row["points_above_synchronous"] = round(points, 2)
        row["sent_of_synchronous"] = row["sent_bytes"] / base["sent_bytes"]
        # The last average of an epoch may be after fewer steps.
        row["all_reduces_a_step"] = round(-(-steps // every) / steps, 4)
        yield row


CASES: dict[str, Callable[[rr.Communicator, int], Iterator[dict[str, Any]]]] = {
    "local_sgd": local_sgd,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--seeds", type=int, default=10)
    options = parser.parse_args()
    with rr.init() as comm:
        found = []
        for row in CASES[options.case](comm, options.seeds):
            found.append({"benchmark": NAME, "case": options.case, **row})
            if comm.rank == 0:
                print(row, flush=True)
        if comm.rank == 0:
            origin = rows.environment(rows.command_line(NAME))
            same = ("mpi", "ranks", "cpu", "case", "strategy", "every")
            rows.replace(NAME, [row | origin for row in found], same)


if __name__ == "__main__":
    main()
