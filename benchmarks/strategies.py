"""Figures of the strategies of training, a case each.

    ringreduce run -n 4 -m benchmarks.strategies local_sgd [--seeds 10]
    ringreduce run -n 5 -m benchmarks.strategies (equal | machines | slow | jitter | stale)
    ringreduce run -n 2 -m benchmarks.strategies push_pull
    ringreduce run -n 3 -m benchmarks.strategies probe
    python -m benchmarks.hosts --ranks 1,1,1,1,1,1,1,1 --rate 200mbit -- \\
        python -m benchmarks.strategies hosts

``local_sgd`` trains the digits with several seeds: by replicas that add up their gradients in every
step, and by replicas that average their weights every 8 steps and every 32.  A row has the mean,
the lowest and the highest accuracy on the held-out digits, and the bytes that a rank sends.

The other cases are comparisons on four ranks and a server.  ``equal`` has synchronous strategies
beside one device, in float64.  In ``machines``, ``slow`` and ``jitter`` one device needs 32 ms for
a batch, and four ranks compute their shares: alike, one four times slower, or all unevenly.
``stale`` has the accuracy of workers that do not wait, over several seeds.  One device needs 16 ms
for a batch there, so that four ranks on two cores compute at the same time.

``push_pull`` is one worker that pushes all parameters to a server and pulls them, beside MPI's
Accumulate and Get, in turns.  ``probe`` is two workers and a server, beside the same store with a
`probe` that has no compiled code and marks every pair as busy, in turns.  Times are the least of
ten turns.  ``hosts`` is four workers and four servers, each on a host of its own, beside a ring
all-reduce of the four workers; the least of three turns.

Writes rows to ``bench_results/strategies.jsonl``.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

import ringreduce as rr
from benchmarks import rows
from ringreduce.train.compare.__main__ import compare
from ringreduce.train.compare.options import CompareOptions
from ringreduce.train.compare.report import StrategyRow
from ringreduce.train.configuration import Given
from ringreduce.train.strategies import LocalSGD, Mirrored, ParameterServer, Strategy, to_plain

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


SERVED = [
    ParameterServer(),
    ParameterServer(backup_workers=1),
    ParameterServer(staleness=2),
    ParameterServer(staleness=None),
]


def compared(
    comm: rr.Communicator, strategies: list[Strategy], how: dict[str, Any], **values: Any
) -> dict[str, StrategyRow]:
    """Return the rows of a comparison, by name; `values` are settings.  Collective."""
    request = CompareOptions(Given(values), tuple(strategies), ranks=comm.size - 1, **how)
    found = compare(comm, request)
    assert not any(row.error for row in found), [row.error for row in found]
    return {row.name: row for row in found}


def equal(comm: rr.Communicator, seeds: int) -> Iterator[dict[str, Any]]:
    """Yield how far each synchronous strategy is from one device."""
    for hidden in ((128,), (64, 64, 64)):
        found = compared(comm, [], {}, dtype="float64", epochs=3, hidden=hidden)
        alone = found["one_device"]
        for name, row in found.items():
            if comm.rank or "staleness" in row.options or row.strategy.name == "local_sgd":
                continue
            away = float(np.abs(row.parameters - alone.parameters).max())
            same = row.record["accuracy"] == alone.record["accuracy"]
            yield {"name": f"{name} {hidden}", "parameters_within": away, "same_accuracy": same}


def _speeds(
    comm: rr.Communicator, strategies: list[Strategy], base: str, runs: int, **how: Any
) -> Iterator[dict[str, Any]]:
    """Yield the median speed of each strategy over several runs, beside that of `base`."""
    epochs = 5 if runs == 1 else 2
    found = [
        compared(comm, strategies, {"compute_ms": 32.0, **how}, epochs=epochs, seed=seed)
        for seed in range(runs)
    ]
    for name in found[0] if not comm.rank else ():
        records = [run[name].record for run in found]
        bases = [run[base].record["samples_per_s"] for run in found]
        speeds = [record["samples_per_s"] for record in records]
        row = {"name": name, "runs": runs, "samples_per_s": round(statistics.median(speeds), 1)}
        ratio = statistics.median(a / b for a, b in zip(speeds, bases, strict=True))
        row |= {"times": round(ratio, 3), "of": base}
        row["idle"] = round(statistics.median(record["idle"] for record in records), 3)
        if runs == 1:  # docs/strategies.py draws this run
            points = [(round(s, 3), a) for s, a in found[0][name].runs[0]["points"]]
            row["figures"] = {**records[0], "points": points}
        yield row


def machines(comm: rr.Communicator, seeds: int) -> Iterator[dict[str, Any]]:
    yield from _speeds(comm, [Mirrored(), SERVED[0]], "one_device", 1)


def slow(comm: rr.Communicator, seeds: int) -> Iterator[dict[str, Any]]:
    yield from _speeds(comm, [Mirrored(), *SERVED], "parameter_server", 1, slowdown=(1, 4.0))


def jitter(comm: rr.Communicator, seeds: int) -> Iterator[dict[str, Any]]:
    served = [SERVED[0], *SERVED[2:]]
    yield from _speeds(comm, [*served], "parameter_server", 5, jitter=0.3)


def stale(comm: rr.Communicator, seeds: int) -> Iterator[dict[str, Any]]:
    found = compared(comm, [Mirrored(), SERVED[-1]], {"compute_ms": 16.0}, seeds=seeds)
    for name, row in found.items() if not comm.rank else ():
        record = row.record
        facts = {"seeds": seeds, "accuracy_percent": round(100 * record["accuracy"], 2)}
        yield {"name": name, **facts, "staleness_mean": record["staleness_mean"]}


def push_pull(comm: rr.Communicator, seeds: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each size.  Collective, on two ranks."""
    for kib, times in ((38, 1000), (1024, 100), (16384, 10)):
        count, found = kib * 256, []
        for _ in range(10):
            found.append((_by_store(comm, count, times)[0], _by_mpi(comm, count, times)))
        ours, theirs = (min(each) for each in zip(*found, strict=True))
        row = {"name": f"push_pull {kib} KiB", "us": round(1e6 * ours, 1)}
        yield row | {"mpi_us": round(1e6 * theirs, 1), "of_mpi": round(theirs / max(ours, 1e-9), 3)}


def probe(comm: rr.Communicator, seeds: int) -> Iterator[dict[str, Any]]:
    """Yield the row of two workers and a server.  Collective, on three ranks."""
    new, old = comm.split(0), comm.split(0)
    assert new is not None
    assert old is not None
    del old.__dict__["probe"]  # leaves the method in Python
    old._engine.endpoint.road.offers = lambda peer, tag: None  # so it takes all messages itself
    found = [[_by_store(each, 38 * 256, 1000)[0] for each in (new, old)] for _ in range(10)]
    ours, before = (1e6 * min(each) for each in zip(*found, strict=True))
    row = {"name": "probe 38 KiB", "us": round(ours, 1), "python_us": round(before, 1)}
    yield row | {"times": round(before / max(ours, 1e-9), 2)}


def hosts(comm: rr.Communicator, seeds: int) -> Iterator[dict[str, Any]]:
    """Yield the row of as many servers as workers.  Collective, each rank on a host."""
    count, times, servers = 1 << 22, 3, comm.size // 2
    x, ring = np.ones(count, np.float32), comm.split(int(comm.rank < servers))
    assert ring is not None
    by_store, by_ring = [], []
    for _ in range(3):
        by_store.append(_by_store(comm, count, times, servers=servers, staleness=0))
        begin = time.perf_counter()
        for made in range(2 * times if comm.rank < servers else 0):
            if made == times:
                begin = time.perf_counter()
            ring.all_reduce(x, out=x, op="mean", algorithm="ring")
        by_ring.append((time.perf_counter() - begin) / times)
    (seconds, sent), ring_s = min(by_store), min(by_ring)
    ring_sent = ring.sent_bytes("all_reduce", x, algorithm="ring")
    row = {"name": f"{servers} workers and servers", "bytes": x.nbytes}
    row |= {"sent": round(sent / x.nbytes, 4), "ring_sent": round(ring_sent / x.nbytes, 4)}
    row |= {"ms": round(1e3 * seconds, 1), "ring_ms": round(1e3 * ring_s, 1)}
    yield row | {"times_the_ring": round(seconds / ring_s, 3)}


def _by_store(comm: rr.Communicator, count: int, times: int, **options: Any) -> tuple[float, float]:
    """Return a worker's seconds and sent bytes of a push and a pull; (0, 0) on a server."""

    def update(parameters: Any, slots: Any, gradient: Any, staleness: int, number: int) -> None:
        parameters += gradient

    params, gradients = {"w": np.zeros(count, np.float32)}, {"w": np.ones(count, np.float32)}
    options = {"staleness": None} | options
    with rr.train.ParameterStore(comm, params, update, **options) as store:
        if store.is_server:
            store.serve()
            return 0.0, 0.0
        for made in range(2 * times):
            if made == times:  # the memory is warm
                begin = time.perf_counter()
            store.push(gradients)
            pulled = store.pull()["w"]
        seconds = (time.perf_counter() - begin) / times
        least, most, wanted = pulled.min(), pulled.max(), 2 * times
        assert wanted <= least == most <= wanted * store.workers, (least, most)
        return seconds, store.stats.sent_bytes / wanted


def _by_mpi(comm: rr.Communicator, count: int, times: int) -> float:
    """Return the seconds of an Accumulate and a Get; 0 on rank 1, which has the memory."""
    from mpi4py import MPI

    window = MPI.Win.Allocate(4 * count * (comm.rank == 1), 4, comm=MPI.COMM_WORLD)
    if comm.rank == 1:
        np.frombuffer(window.tomemory(), np.float32)[:] = 0
    comm.barrier()
    seconds = 0.0
    if comm.rank == 0:
        gradient, pulled = np.ones(count, np.float32), np.empty(count, np.float32)
        window.Lock(1)
        for made in range(2 * times):
            if made == times:
                begin = time.perf_counter()
            window.Accumulate(gradient, 1, op=MPI.SUM)
            window.Flush(1)
            window.Get(pulled, 1)
            window.Flush(1)
        seconds = (time.perf_counter() - begin) / times
        window.Unlock(1)
        assert (pulled == 2 * times).all()
    comm.barrier()
    window.Free()
    return seconds


CASES: dict[str, Callable[[rr.Communicator, int], Iterator[dict[str, Any]]]] = {
    "local_sgd": local_sgd,
    "equal": equal,
    "machines": machines,
    "slow": slow,
    "jitter": jitter,
    "stale": stale,
    "push_pull": push_pull,
    "probe": probe,
    "hosts": hosts,
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
            same = ("mpi", "ranks", "cpu", "case", "strategy", "every", "name")
            rows.replace(NAME, [row | origin for row in found], same)


if __name__ == "__main__":
    main()
