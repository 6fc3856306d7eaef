"""Kill each rank at each point of a handover: of the ranks that leave, and of those that join."""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from tests.long_recovery.deaths import OF_RANK_0, OF_RECOVERY
from tests.long_recovery.jobs import SILENCE_S, Job, check_counts

_OF_LEAVING = ("before paused", "after paused")
_OF_JOINING = (*OF_RECOVERY, "before ready", "after ready")
_OF_STAYING = (
    *("before paused", "after paused", "before suspect", "before shrink", "after shrink"),
    *("before shrunk", "before catching up", "before stepped", "after stepped"),
)


class _Case(NamedTuple):
    """A death: `rank` dies at `point` when the job goes from one number of ranks to another."""

    before: int
    after: int
    rank: int
    point: str
    joins: bool
    """Whether it is a rank that joins."""


def prove(chosen: random.Random, times: int) -> dict[str, Any]:
    """Make deaths at `times` points, all if there are fewer; return what the row has."""
    cases = [_Case(2, 3, rank, point, False) for rank in range(2) for point in _OF_LEAVING]
    cases += [
        _Case(2, 3, rank, point, True)
        for rank in range(3)
        for point in _OF_JOINING
        if rank == 0 or point not in OF_RANK_0
    ]
    return _prove(chosen, cases, times, "relaunch")


def prove_live(chosen: random.Random, times: int) -> dict[str, Any]:
    """Do the same where ranks only leave, and others stay."""
    cases = [_Case(3, 2, rank, point, False) for rank in range(2) for point in _OF_STAYING]
    cases += [_Case(3, 2, 2, point, False) for point in _OF_LEAVING]
    return _prove(chosen, cases, times, "live")


def _prove(chosen: random.Random, cases: list[_Case], times: int, recovery: str) -> dict[str, Any]:
    chosen.shuffle(cases)
    found: dict[str, Any] = {}
    for case in cases[:times]:
        with tempfile.TemporaryDirectory() as name:
            found = _job(Path(name), case, recovery)
        print(f"{case} survived", flush=True)
    count = min(times, len(cases))
    return {"points": count, "survived": count, "environment": found["environment"]}


def _job(folder: Path, case: _Case, recovery: str) -> dict[str, Any]:
    """Run a job that changes its number of ranks, and a rank that dies meanwhile."""
    plan, deaths = folder / "plan", folder / "deaths"
    planned = json.dumps([(case.rank, case.point)])
    plan.write_text("[]" if case.joins else planned)
    deaths.mkdir()
    words = ("--elastic", "1:3", "--recovery", recovery)
    program = ("-m", "tests.long_recovery.counting", folder / "stop", plan)
    with Job(folder, case.before, *words, program=program) as job:
        job.ranks_of(1)
        time.sleep(0.05)
        plan.write_text(planned)
        job.scale(case.after).wait(SILENCE_S)  # it may be refused: those that join have failed
        since = time.monotonic()
        while not any(deaths.iterdir()):
            if job.process.poll() is not None or time.monotonic() - since > SILENCE_S:
                sys.exit(f"no death: {case}")
            time.sleep(0.01)
        (folder / "stop").touch()
        return check_counts(job.end())
