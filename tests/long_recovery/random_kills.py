"""Kill ranks at random moments.

By relaunch half of the kills are in one job of 2 ranks, the rest in jobs of 3 to 6 ranks.  In every
second job no lost rank is replaced, and all ranks but one are lost.  Live, each job of 2 to 6 ranks
loses all but one.
"""

from __future__ import annotations

import random
import tempfile
import time
from pathlib import Path
from typing import Any

from ringreduce.system.cores import cores
from tests.long_recovery.disturbances import kill
from tests.long_recovery.jobs import Job, check_counts, quantile

_KILLS_OF_A_JOB = 25
_SIZES = (3, 4, 5, 6)
_RELAUNCH = ("--recovery", "relaunch")


def prove(chosen: random.Random, times: int) -> dict[str, Any]:
    """Kill ranks so often; return what the row has.

    Times are of jobs with one core for each rank, whose lost ranks are replaced.
    """
    kills: list[dict[str, float]] = []
    found: dict[str, Any] = {}
    replaces = True
    while len(kills) < times:
        count = (times + 1) // 2 if not kills else min(_KILLS_OF_A_JOB, times - len(kills))
        ranks = chosen.choice(_SIZES) if kills else 2
        with tempfile.TemporaryDirectory() as name:
            if replaces:
                found = _replacing_job(Path(name), chosen, ranks, count, kills)
            else:
                found = _shrinking_job(Path(name), chosen, ranks, count, kills, _RELAUNCH)
        print(f"{len(kills)} kills survived, {ranks} ranks at first", flush=True)
        replaces = not replaces
    return _row(kills, found)


def prove_live(chosen: random.Random, times: int) -> dict[str, Any]:
    """Kill ranks so often; return what the row has.  The survivors go on in their processes."""
    kills: list[dict[str, float]] = []
    found: dict[str, Any] = {}
    while len(kills) < times:
        ranks = chosen.choice((2, *_SIZES))
        with tempfile.TemporaryDirectory() as name:
            count = times - len(kills)
            found = _shrinking_job(Path(name), chosen, ranks, count, kills, ("--recovery", "live"))
        print(f"{len(kills)} kills survived", flush=True)
    row = _row(kills, found)
    row["relaunched"] = sum(int(kill["level"] == 2) for kill in kills)
    row["recovered_s_p50_of_all"] = quantile([kill["recovered_s"] for kill in kills], 0.5)
    row["recovered_s_p99_of_all"] = quantile([kill["recovered_s"] for kill in kills], 0.99)
    return row


def _shrinking_job(
    folder: Path,
    chosen: random.Random,
    ranks: int,
    most: int,
    kills: list[dict[str, float]],
    recovery: tuple[str, str],
) -> dict[str, Any]:
    """Run a job and kill its ranks, `most` times or until one is left.

    Kills by relaunch are not timed: fewer ranks start than in a job whose lost ranks are replaced.
    Returns what the job's last generation has printed.
    """
    words = ["--elastic", "1", *recovery]
    program = ["-m", "tests.long_recovery.counting", folder / "stop"]
    with Job(folder, ranks, *words, program=program) as job:
        generation, pids = 1, job.ranks_of(1)
        until = len(kills) + most
        while len(pids) > 1 and len(kills) < until:
            time.sleep(chosen.uniform(0.05, 0.4))
            timed = float(recovery != _RELAUNCH and len(pids) <= cores())
            kills.append({"timed": timed} | kill(chosen, pids, job, generation))
            generation = int(kills[-1]["generation"])
            pids = job.ranks_of(generation)
        (folder / "stop").touch()
        return check_counts(job.end())


def _row(kills: list[dict[str, float]], found: dict[str, Any]) -> dict[str, Any]:
    row: dict[str, Any] = {"kills": len(kills), "survived": len(kills)}
    row["double_kills"] = sum(int(kill["double"]) for kill in kills)
    timed = [kill for kill in kills if kill["timed"]]
    row["timed_kills"] = len(timed)
    for name in ("detected_s", "recovered_s"):
        for place, share in (("p50", 0.5), ("p99", 0.99)):
            row[f"{name}_{place}"] = quantile([kill[name] for kill in timed], share)
    row["redone_most"] = max(kill["redone"] for kill in kills)
    return row | {"environment": found["environment"]}


def _replacing_job(
    folder: Path, chosen: random.Random, ranks: int, count: int, kills: list[dict[str, float]]
) -> dict[str, Any]:
    """Run a job and kill its ranks so often; return what its last generation has printed."""
    words = ["--elastic", "1", *_RELAUNCH, "--replace", "--max-failures", "1000000"]
    program = ["-m", "tests.long_recovery.counting", folder / "stop"]
    with Job(folder, ranks, *words, program=program) as job:
        pids, held = job.ranks_of(1), job.held()
        for number in range(count):
            time.sleep(chosen.uniform(0.02, 0.5))
            timed = float(ranks <= cores())
            kills.append({"timed": timed} | kill(chosen, pids, job, number + 1))
            pids = job.ranks_of(int(kills[-1]["generation"]))
            if number == 1:
                held = job.held()
        if count > 2:
            job.check_held(held)
        (folder / "stop").touch()
        return check_counts(job.end())
