"""What the same bits on any number of ranks cost: a training step with and without batch_shards.

    ringreduce run -n 2 -m benchmarks.batch_shards

Trains the digits with the trainer's default network, and with a wide one, in turns: without
``batch_shards``, with one shard for each rank, and with 12 in all.  Beside it the sum alone: an
all-reduce of as many float32 as the network has parameters, and `rr.ExactSum` of one addend for
each rank.  Checks that both sums agree.  Writes a row for each network to
``bench_results/batch_shards.jsonl``: the medians over the turns.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

import numpy as np

import ringreduce as rr
from benchmarks.rows import environment, replace

NAME = "batch_shards"
NETWORKS = {
    "digits": (rr.train.Settings(lr=1e-20), 200),
    "wide": (rr.train.Settings(hidden=(1024, 1024), batch=120, lr=1e-20), 10),
}
"""Name -> settings, and steps that are timed in a turn."""
_SHARDS, _TURNS = 12, 15


def main() -> None:
    with rr.init() as comm:
        rows = [_row(comm, name, *NETWORKS[name]) for name in NETWORKS]
        if comm.rank == 0:
            origin = environment(f"ringreduce run -n {comm.size} -m benchmarks.{NAME}")
            replace(NAME, [row | origin for row in rows], same=("mpi", "ranks", "cpu"))


def _row(
    comm: rr.Communicator, network: str, settings: rr.train.Settings, count: int
) -> dict[str, Any]:
    split = rr.train.load(settings)
    shards = {"plain": 0, "as_ranks": comm.size, "shards": _SHARDS}
    trainers = {
        kind: rr.train.Trainer(comm, split, dataclasses.replace(settings, batch_shards=number))
        for kind, number in shards.items()
    }
    size = trainers["plain"].flat.size
    mine = np.random.default_rng(comm.rank).normal(size=(1, size)).astype(np.float32)
    exact = rr.ExactSum(comm)
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: comm.all_reduce(mine[0]),
        "exact_sum": lambda: exact.sum([mine])[0],
    }
    np.testing.assert_allclose(calls["exact_sum"](), calls["all_reduce"](), rtol=1e-5, atol=1e-5)
    times: dict[str, list[float]] = {kind: [] for kind in (*trainers, *calls)}
    for turn in range(_TURNS + 1):
        for kind, trainer in trainers.items():
            seconds = statistics.median(trainer.time_steps(count))
            times[kind] += [seconds] * bool(turn)  # the first turn is not counted
        for kind, call in calls.items():
            times[kind] += [_seconds(comm, call, count)] * bool(turn)
    for trainer in trainers.values():
        with closing(trainer):
            pass
    row: dict[str, Any] = {"benchmark": NAME, "network": network, "parameters": size}
    row |= {"shards": _SHARDS, "turns": _TURNS}
    row |= {f"{kind}_ms": round(1e3 * statistics.median(times[kind]), 4) for kind in times}
    for ours, its in (("shards", "plain"), ("as_ranks", "plain"), ("exact_sum", "all_reduce")):
        pairs = zip(times[ours], times[its], strict=True)
        row[f"{ours}_to_{its}"] = round(statistics.median(one / other for one, other in pairs), 3)
    if comm.rank == 0:
        print(*list(row.values())[1:], flush=True)
    return row


def _seconds(comm: rr.Communicator, call: Callable[[], Any], count: int) -> float:
    """Return the median time of a call, as long as it takes on all ranks."""
    found = []
    for _ in range(count):
        comm.barrier()
        begin = time.perf_counter()
        call()
        comm.barrier()
        found.append(time.perf_counter() - begin)
    return statistics.median(found)


if __name__ == "__main__":
    main()
