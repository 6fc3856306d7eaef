"""Kill ranks at random moments, and prove that each sample counts once in every epoch.

    python -m tests.long_recovery --times 200 --record

Starts jobs of ``ringreduce run --elastic`` with 2 or 3 ranks that count samples, kills random ranks
at random moments, a quarter of them two at once, and has each killed rank replaced.  Measures the
seconds from a kill to its detection, and to the next step; ``--record`` writes them to
``bench_results/recovery.jsonl``.  Exits with 1 if a count is wrong, or if a job does not go on.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import ringreduce as rr
from benchmarks.rows import environment, replace
from tests.support.mpi import events_of

NAME = "recovery"
_SAMPLES, _BATCH, _STEP_S = 96, 32, 0.005
_KILLS_OF_A_JOB = 25
_COMMAND = f"python -m tests.long_recovery {' '.join(sys.argv[1:])}".strip()
_SILENCE_S = 60.0
"""Seconds without the next step after which a job counts as hanging."""


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--times", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--record", action="store_true", help="write to bench_results/")
    parser.add_argument("--count", type=Path, help=argparse.SUPPRESS)  # in a rank
    options = parser.parse_args()
    if options.count is not None:
        _count(options.count)
        return 0
    chosen = random.Random(options.seed)
    kills: list[dict[str, float]] = []
    origin: dict[str, Any] = {}
    while len(kills) < options.times:
        count = min(_KILLS_OF_A_JOB, options.times - len(kills))
        found, origin = _job(chosen, count)
        kills += found
        print(f"{len(kills)} kills survived", flush=True)
    row = {"benchmark": NAME, "level": 2, "kills": len(kills), "survived": len(kills)}
    row |= {"seed": options.seed, "double_kills": sum(int(kill["double"]) for kill in kills)}
    for name in ("detected_s", "recovered_s"):
        values = sorted(kill[name] for kill in kills)
        row[f"{name}_p50"] = round(statistics.median(values), 4)
        row[f"{name}_p99"] = round(values[min(len(values) - 1, int(0.99 * len(values)))], 4)
    row["redone_most"] = max(kill["redone"] for kill in kills)
    origin.pop("ranks")  # jobs of 2 and of 3 ranks
    if options.record:
        replace(NAME, [{**row, **origin, "command": _COMMAND}], same=("mpi", "level"))
    print(json.dumps(row))
    return 0


def _job(chosen: random.Random, count: int) -> tuple[list[dict[str, float]], dict[str, Any]]:
    """Run a job and kill its ranks so often; return the kills, and the environment."""
    ranks = chosen.choice((2, 3))
    with tempfile.TemporaryDirectory() as folder:
        events, stop = Path(folder, "events"), Path(folder, "stop")
        words = ["-n", str(ranks), "--elastic", "1", "--replace", "--max-failures", "1000000"]
        command = [sys.executable, "-m", "ringreduce", "run", *words, "--events", str(events)]
        process = subprocess.Popen(
            [*command, "-m", "tests.long_recovery", "--count", str(stop)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        try:
            pids, kills = _pids(events, 1), []
            for number in range(count):
                time.sleep(chosen.uniform(0.02, 0.5))
                kills.append(_kill(chosen, pids, events, number + 2))
                pids = _pids(events, number + 2)
            stop.touch()
            output, _ = process.communicate(timeout=_SILENCE_S)
        finally:
            process.kill()
        if process.returncode != 0:
            sys.exit(f"the job ended with {process.returncode}")
        found = json.loads(output.splitlines()[-1])
        if found["least"] != found["epochs"] or found["most"] != found["epochs"]:
            sys.exit(f"samples are lost or counted twice: {found}")
    return kills, found["environment"]


def _kill(
    chosen: random.Random, pids: list[int], events: Path, generation: int
) -> dict[str, float]:
    """Kill one rank or two; wait for the next step; return the times."""
    double = len(pids) > 2 and chosen.random() < 0.25
    victims = chosen.sample(pids, 2 if double else 1)
    at = time.time()
    os.kill(victims[0], signal.SIGKILL)
    if double:
        time.sleep(chosen.uniform(0, 0.05))
        with contextlib.suppress(ProcessLookupError):  # killed already, with its generation
            os.kill(victims[1], signal.SIGKILL)
    event = _await(events, "resized", generation)
    recovered_s = event["time"] - at
    return {
        "detected_s": recovered_s - event["recovered_s"],
        "recovered_s": recovered_s,
        "redone": event["redone"],
        "double": float(double),
    }


def _pids(events: Path, generation: int) -> list[int]:
    pids: list[int] = _await(events, "started", generation)["pids"]
    return pids


def _await(events: Path, kind: str, generation: int) -> dict[str, Any]:
    deadline = time.monotonic() + _SILENCE_S
    while time.monotonic() < deadline:
        for event in events_of(events, kind):
            if event["generation"] == generation:
                return event
        time.sleep(0.005)
    sys.exit(f"no {kind} of generation {generation} within {_SILENCE_S:g} s")


def _count(stop: Path) -> None:
    """Count samples until `stop` exists, and then to the end of the epoch; in a rank."""
    sampler = rr.train.Sampler(_SAMPLES, _BATCH, seed=1)

    def train(comm: rr.Communicator, state: rr.State) -> None:
        while not state["stops"][0] or state.step % sampler.epoch_steps:
            mine = np.zeros(_SAMPLES + 1, np.int64)
            mine[sampler.indices(state.step, comm)] = 1
            mine[-1] = stop.exists()
            time.sleep(_STEP_S)
            total = comm.all_reduce(mine)
            with state.update():
                state["counts"] += total[:-1]
                state["stops"] += total[-1:]
        if comm.rank == 0:
            counts = state["counts"]
            found = {"least": int(counts.min()), "most": int(counts.max())}
            found["epochs"] = state.step // sampler.epoch_steps
            print(json.dumps({**found, "environment": environment(_COMMAND)}), flush=True)

    zeros = np.zeros(_SAMPLES, np.int64)
    rr.elastic(train, rr.State({"counts": zeros, "stops": np.zeros(1, np.int64)}, sampler))


if __name__ == "__main__":
    sys.exit(main())
