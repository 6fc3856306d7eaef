"""Stop ranks by SIGSTOP: the others time out, and the launcher kills the stopped rank.

By relaunch each lost rank is replaced.  Live, each job of 3 or 4 ranks loses all but one or two.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from tests.long_recovery.jobs import Job, check_counts, quantile

TIMEOUTS_S = (1, 2, 5)


class _Stopped(NamedTuple):
    """A rank that was stopped and removed."""

    late_s: float
    """Seconds from the end of the timeout to the removal."""
    level: int
    """Level of the recovery."""


def prove(chosen: random.Random, times: int) -> dict[str, Any]:
    """Stop ranks so often, with each timeout about as often; return what the row has."""
    stopped: list[_Stopped] = []
    found: dict[str, Any] = {}
    for timeout_s, count in _counts(times):
        found = _job(chosen, 3, timeout_s, count, stopped, "relaunch", "--replace")
    return _row(stopped, found)


def prove_live(chosen: random.Random, times: int) -> dict[str, Any]:
    """Do the same where the survivors go on in their processes."""
    stopped: list[_Stopped] = []
    found: dict[str, Any] = {}
    for timeout_s, count in _counts(times):
        until = len(stopped) + count
        while len(stopped) < until:
            ranks, left = chosen.choice((3, 4)), chosen.choice((1, 2))
            losses = min(ranks - left, until - len(stopped))
            found = _job(chosen, ranks, timeout_s, losses, stopped, "live")
    relaunched = sum(each.level == 2 for each in stopped)
    return _row(stopped, found) | {"relaunched": relaunched}


def _counts(times: int) -> list[tuple[int, int]]:
    """Return each timeout in seconds, with how many ranks of all are stopped under it."""
    every = len(TIMEOUTS_S)
    counts = [len(range(index, times, every)) for index in range(every)]
    return [(each, count) for each, count in zip(TIMEOUTS_S, counts, strict=True) if count]


def _row(stopped: list[_Stopped], found: dict[str, Any]) -> dict[str, Any]:
    late = [each.late_s for each in stopped]
    within = sum(seconds <= 1 for seconds in late)
    row = {"stopped": len(late), "removed_within_1_s": within, "timeouts_s": TIMEOUTS_S}
    for place, share in (("p50", 0.5), ("most", 1.0)):
        row[f"after_timeout_s_{place}"] = quantile(late, share)
    return row | {"environment": found["environment"]}


def _job(
    chosen: random.Random,
    ranks: int,
    timeout_s: int,
    count: int,
    stopped: list[_Stopped],
    *recovery: str,
) -> dict[str, Any]:
    """Stop so many ranks of a job; return what its last generation has printed."""
    words = ["--elastic", "1", "--max-failures", "1000000", "--timeout-s", str(timeout_s)]
    words += ["--recovery", *recovery]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        program = ["-m", "tests.long_recovery.counting", folder / "stop"]
        with Job(folder, ranks, *words, program=program) as job:
            for generation in range(1, count + 1):
                pids = job.ranks_of(generation)
                time.sleep(chosen.uniform(0.1, 0.5))
                at = time.time()
                os.kill(chosen.choice(pids), signal.SIGSTOP)
                event = job.event("resized", generation + 1)
                if (event["cause"], len(event["lost"])) != ("stopped", 1):
                    sys.exit(f"a stopped rank was not removed alone: {event}")
                late_s = event["time"] - event["recovered_s"] - at - timeout_s
                stopped.append(_Stopped(late_s, event["level"]))
            job.ranks_of(count + 1)
            (folder / "stop").touch()
            found = check_counts(job.end())
    print(f"{len(stopped)} stopped ranks removed", flush=True)
    return found
