"""The time of a training step on the digits, with and without a trace.

    python -m benchmarks.traced_step

Starts jobs of ``ringreduce run`` in turns, with one rank for each core:

- ``plain``: without a trace,
- ``logged``: with ``Config(log_messages=True)``, which has no compiled path either,
- ``traced``: with ``--trace``.

Rank 0 times its steps.  Writes a row to ``bench_results/traced_step.jsonl``: for each kind the
median step of the fastest job, as other programs only slow jobs down; and the time of an empty
``with rr.span("name")`` without a trace.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import timeit
from typing import Any

import ringreduce as rr
from benchmarks.rows import environment, replace
from ringreduce.system.cores import cores

NAME = "traced_step"
KINDS = ("plain", "logged", "traced")
_TURNS, _STEPS = 15, 3000


def main() -> None:
    if len(sys.argv) > 1:
        _of_job(sys.argv[1])
        return
    times: dict[str, list[float]] = {kind: [] for kind in KINDS}
    origin: dict[str, Any] = {}
    spans: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(_TURNS):
            for kind in KINDS:
                command = [sys.executable, "-m", "ringreduce", "run", "-n", str(cores())]
                command += ["--trace", f"{folder}/trace.json"] * (kind == "traced")
                command += ["-m", f"benchmarks.{NAME}", kind]
                done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
                found = json.loads(done.stdout)
                times[kind].append(found["median_ms"])
                if kind == "plain":
                    spans.append(found["span_us"])
                origin = found["environment"]
    row: dict[str, Any] = {"benchmark": NAME, "turns": _TURNS}
    row |= {f"{kind}_ms": round(min(times[kind]), 4) for kind in KINDS}
    row["to_plain"] = round(row["traced_ms"] / row["plain_ms"], 3)
    row["span_us"] = round(min(spans), 3)
    print(*list(row.values())[1:])
    replace(NAME, [row | origin], same=("mpi", "ranks", "cpu"))


def _of_job(kind: str) -> None:
    """Time the steps of a trainer on this rank; rank 0 prints their median."""
    settings = rr.train.Settings(lr=1e-20)
    with rr.init(config=rr.Config(log_messages=kind == "logged")) as comm:
        trainer = rr.train.Trainer(comm, rr.train.load(settings), settings)
        trainer.time_steps(_STEPS // 10)
        seconds = trainer.time_steps(_STEPS)
        if comm.rank == 0:
            found = {"median_ms": 1e3 * statistics.median(seconds), "span_us": _span_us()}
            where = environment(f"python -m benchmarks.{NAME}")
            print(json.dumps(found | {"environment": where}))


def _span_us() -> float:
    def empty() -> None:
        with rr.span("empty"):
            pass

    return 1e6 * min(timeit.repeat(empty, number=10_000)) / 10_000


if __name__ == "__main__":
    main()
