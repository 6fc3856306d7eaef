"""Kill ranks at random moments.

By relaunch half of the kills are in one job, the rest in jobs of 3 to 6 ranks.  Live, each job of 2
to 6 ranks loses all but one.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from ringreduce.cores import cores
from tests.long_recovery.jobs import Job, check_counts, quantile
from tests.support.mpi import is_alive

_KILLS_OF_A_JOB = 25
_SIZES = (3, 4, 5, 6)
_SETTLING_S = 5.0


def prove(chosen: random.Random, times: int) -> dict[str, Any]:
    """Kill ranks so often; return what the row has.

    Times are of jobs with one core for each rank.
    """
    kills: list[dict[str, float]] = []
    found: dict[str, Any] = {}
    while len(kills) < times:
        count = (times + 1) // 2 if not kills else min(_KILLS_OF_A_JOB, times - len(kills))
        ranks = chosen.choice(_SIZES) if kills else 2
        with tempfile.TemporaryDirectory() as name:
            found = _job(Path(name), chosen, ranks, count, kills)
        print(f"{len(kills)} kills survived, {ranks} ranks", flush=True)
    return _row(kills, found)


def prove_live(chosen: random.Random, times: int) -> dict[str, Any]:
    """Kill ranks so often; return what the row has.  The survivors go on in their processes."""
    kills: list[dict[str, float]] = []
    found: dict[str, Any] = {}
    while len(kills) < times:
        ranks = chosen.choice((2, *_SIZES))
        with tempfile.TemporaryDirectory() as name:
            found = _live_job(Path(name), chosen, ranks, times, kills)
        print(f"{len(kills)} kills survived", flush=True)
    row = _row(kills, found)
    row["relaunched"] = sum(int(kill["level"] == 2) for kill in kills)
    row["recovered_s_p50_of_all"] = quantile([kill["recovered_s"] for kill in kills], 0.5)
    row["recovered_s_p99_of_all"] = quantile([kill["recovered_s"] for kill in kills], 0.99)
    return row


def _live_job(
    folder: Path, chosen: random.Random, ranks: int, times: int, kills: list[dict[str, float]]
) -> dict[str, Any]:
    """Run a job and kill its ranks until one is left; return what that has printed."""
    words = ["--elastic", "1", "--recovery", "live"]
    program = ["-m", "tests.long_recovery.counting", folder / "stop"]
    with Job(folder, ranks, *words, program=program) as job:
        generation, pids = 1, job.ranks_of(1)
        while len(pids) > 1 and len(kills) < times:
            time.sleep(chosen.uniform(0.05, 0.4))
            kill = _kill(chosen, pids, job, generation)
            kills.append({"ranks": len(pids)} | kill)
            generation = int(kill["generation"])
            pids = job.ranks_of(generation)
        (folder / "stop").touch()
        return check_counts(job.end())


def _row(kills: list[dict[str, float]], found: dict[str, Any]) -> dict[str, Any]:
    row: dict[str, Any] = {"kills": len(kills), "survived": len(kills)}
    row["double_kills"] = sum(int(kill["double"]) for kill in kills)
    timed = [kill for kill in kills if kill["ranks"] <= cores()]
    row["timed_kills"] = len(timed)
    for name in ("detected_s", "recovered_s"):
        for place, share in (("p50", 0.5), ("p99", 0.99)):
            row[f"{name}_{place}"] = quantile([kill[name] for kill in timed], share)
    row["redone_most"] = max(kill["redone"] for kill in kills)
    return row | {"environment": found["environment"]}


def _job(
    folder: Path, chosen: random.Random, ranks: int, count: int, kills: list[dict[str, float]]
) -> dict[str, Any]:
    """Run a job and kill its ranks so often; return what its last generation has printed."""
    words = ["--elastic", "1", "--recovery", "relaunch", "--replace", "--max-failures", "1000000"]
    program = ["-m", "tests.long_recovery.counting", folder / "stop"]
    with Job(folder, ranks, *words, program=program) as job:
        pids, held = job.ranks_of(1), (0, 0)
        for number in range(count):
            time.sleep(chosen.uniform(0.02, 0.5))
            kills.append({"ranks": ranks} | _kill(chosen, pids, job, number + 1))
            pids = job.ranks_of(int(kills[-1]["generation"]))
            if number == 1:
                held = job.held()
        if count > 2:
            _check_held(job, held)
        (folder / "stop").touch()
        return check_counts(job.end())


def _kill(chosen: random.Random, pids: list[int], job: Job, generation: int) -> dict[str, float]:
    """Kill one rank or two of a generation; wait for the next step without them.

    Returns the times, since the last kill.
    """
    double = len(pids) > 2 and chosen.random() < 0.5
    victims = chosen.sample(pids, 2 if double else 1)
    at = time.time()
    os.kill(victims[0], signal.SIGKILL)
    if double:
        time.sleep(chosen.uniform(0, 0.05))
        if is_alive(victims[1]):  # not killed already, with its generation
            at = time.time()
            with contextlib.suppress(ProcessLookupError):
                os.kill(victims[1], signal.SIGKILL)
    event = job.recovered(generation, victims)
    recovered_s = event["time"] - at
    return {
        "detected_s": recovered_s - event["recovered_s"],
        "recovered_s": recovered_s,
        "redone": event["redone"],
        "level": event["level"],
        "generation": event["generation"],
        "double": float(double),
    }


def _check_held(job: Job, before: tuple[int, int]) -> None:
    """Exit if the launcher has more open files or mappings than before."""
    deadline = time.monotonic() + _SETTLING_S
    while any(now > then for now, then in zip(job.held(), before, strict=True)):
        if time.monotonic() > deadline:
            sys.exit(f"the launcher had {before} files and mappings, now {job.held()}")
        time.sleep(0.05)
