"""Kill ranks of one job 300 times, and compare its open files and mappings with those at first.

The job goes through 2, 3 and 4 ranks by command.  By relaunch some ranks are killed at each number,
and replaced.  Live, ranks are killed until one is left, and the command brings the lost ones back.
The launcher and the ranks are looked at after the first kill and after the last: both times a
generation of 4 ranks has lost one, and is equally old.
"""

from __future__ import annotations

import random
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.long_recovery.disturbances import kill, scale
from tests.long_recovery.jobs import HELD, Job, check_counts

_SIZES = (2, 3, 4)
_KILLS_OF_A_SIZE = 10
_AGE_S = 0.5
"""Seconds from the first step of a generation until it is looked at."""


def prove(chosen: random.Random, times: int) -> dict[str, Any]:
    """Kill ranks so often, which are replaced; return what the row has."""
    return _prove(chosen, times, 2, "relaunch", "--replace")


def prove_live(chosen: random.Random, times: int) -> dict[str, Any]:
    """Do the same where the survivors go on in their processes."""
    return _prove(chosen, times, 1, "live")


def _prove(chosen: random.Random, times: int, level: int, *recovery: str) -> dict[str, Any]:
    kills: list[dict[str, float]] = []
    words = ["--elastic", f"1:{max(_SIZES)}", "--max-failures", "1000000", "--recovery", *recovery]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        program = ["-m", "tests.long_recovery.counting", folder / "stop"]
        with Job(folder, max(_SIZES), *words, program=program) as job:
            job.ranks_of(1)
            first = job.held(_aged_ranks(chosen, job, level, kills))
            while len(kills) < times - 1:
                _kill_some(chosen, job, min(_KILLS_OF_A_SIZE, times - 1 - len(kills)), kills)
                print(f"{len(kills)} kills survived", flush=True)
            last = job.check_held(first, _aged_ranks(chosen, job, level, kills))
            (folder / "stop").touch()
            found = check_counts(job.end())
    row: dict[str, Any] = {"kills": len(kills)}
    row["double_kills"] = sum(int(each["double"]) for each in kills)
    for name, before, after in zip(HELD, first, last, strict=True):
        row |= {f"{name}_first": before, f"{name}_last": after}
    return row | {"environment": found["environment"]}


def _kill_some(chosen: random.Random, job: Job, most: int, kills: list[dict[str, float]]) -> None:
    """Go to another number of ranks; kill ranks at most so often, until one is left."""
    size = job.events("started")[-1]["size"]
    scale(job, chosen.choice([each for each in _SIZES if each != size]))
    for _ in range(most):
        if job.events("started")[-1]["size"] == 1:
            return
        time.sleep(chosen.uniform(0.02, 0.5))
        kills.append(_kill(chosen, job, most=2))


def _aged_ranks(
    chosen: random.Random, job: Job, level: int, kills: list[dict[str, float]]
) -> list[int]:
    """Kill one of 4 ranks; return the process ids of the next generation, once it is so old.

    If the job goes on at another level than this one, which is rare, another rank is killed.
    """
    while True:
        scale(job, max(_SIZES))
        kills.append(_kill(chosen, job, most=1))
        if kills[-1]["level"] == level:
            break
    time.sleep(_AGE_S)
    return job.ranks_of(int(kills[-1]["generation"]))


def _kill(chosen: random.Random, job: Job, *, most: int) -> dict[str, float]:
    """Kill one rank of the last generation, or two if `most` is 2."""
    started = job.events("started")[-1]
    return kill(chosen, started["pids"], job, started["generation"], most=most)
