"""Kill each rank at each point of a training step, and in each state of the recovery.

By relaunch one job goes through all deaths, for each lost rank is replaced.  Live, each death of a
step has a job, and each death in a recovery has one after the death of another rank.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.long_recovery.deaths import (
    OF_A_STEP,
    OF_LIVE_RECOVERY,
    OF_RANK_0,
    OF_RECOVERY,
    OF_THE_FIRST,
)
from tests.long_recovery.jobs import SILENCE_S, Job, check_counts

_RANKS = 3
_RELAUNCH = ("--recovery", "relaunch", "--replace", "--max-failures", "1000000")
Plan = list[tuple[int, str]]


def prove_live(chosen: random.Random, times: int) -> dict[str, Any]:
    """Make deaths at `times` points, all if there are fewer; return what the row has."""
    points = _points((*OF_A_STEP, *OF_LIVE_RECOVERY))
    chosen.shuffle(points)
    found: dict[str, Any] = {}
    for rank, point in points[:times]:
        plan = [(rank, point)]
        if point in OF_LIVE_RECOVERY:  # which needs a loss before
            other = chosen.choice([each for each in range(_RANKS) if each != rank])
            plan.insert(0, (other, "before barrier"))
        with tempfile.TemporaryDirectory() as name:
            found = _job(Path(name), plan, ("--recovery", "live"))
    count = min(times, len(points))
    return {"points": count, "survived": count, "environment": found["environment"]}


def prove(chosen: random.Random, times: int) -> dict[str, Any]:
    """Make deaths at `times` points, all if there are fewer; return what the row has."""
    deaths = _points((*OF_A_STEP, *OF_RECOVERY))
    chosen.shuffle(deaths)
    plan: Plan = [(0, OF_THE_FIRST)]
    for rank, point in deaths[:times]:
        if point in OF_RECOVERY:  # which needs a loss before
            plan.append((chosen.randrange(_RANKS), "before barrier"))
        plan.append((rank, point))
    with tempfile.TemporaryDirectory() as name:
        found = _job(Path(name), plan, _RELAUNCH)
    points = min(times, len(deaths)) + 1
    return {
        "points": points,
        "survived": points,
        "kills": len(plan),
        "environment": found["environment"],
    }


def _points(points: Sequence[str]) -> Plan:
    """Return each rank with each of the points that it comes to."""
    every = [(rank, point) for rank in range(_RANKS) for point in points]
    return [(rank, point) for rank, point in every if rank == 0 or point not in OF_RANK_0]


def _job(folder: Path, plan: Plan, options: Sequence[str]) -> dict[str, Any]:
    """Run a job whose ranks die as planned; return what its last generation has printed."""
    (folder / "plan").write_text(json.dumps(plan))
    deaths = folder / "deaths"
    deaths.mkdir()
    words = ("--elastic", "1", *options)
    program = ("-m", "tests.long_recovery.counting", folder / "stop", folder / "plan")
    with Job(folder, _RANKS, *words, program=program) as job:
        made, since = 0, time.monotonic()
        while made < len(plan):
            if len(list(deaths.iterdir())) > made:
                made, since = made + 1, time.monotonic()
            elif job.process.poll() is not None:
                sys.exit(f"the job ended after {plan[made - 1]}: {job.process.returncode}")
            elif time.monotonic() - since > SILENCE_S:
                sys.exit(f"rank {plan[made][0]} has not come to {plan[made][1]!r}")
            time.sleep(0.01)
        (folder / "stop").touch()
        return check_counts(job.end())
