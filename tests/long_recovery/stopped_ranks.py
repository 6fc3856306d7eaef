"""Stop ranks by SIGSTOP: the others time out, and the launcher kills the stopped rank."""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.long_recovery.jobs import Job, check_counts, quantile

TIMEOUTS_S = (1, 2, 5)
_RANKS = 3


def prove(chosen: random.Random, times: int) -> dict[str, Any]:
    """Stop ranks so often, with each timeout about as often; return what the row has."""
    late: list[float] = []
    found: dict[str, Any] = {}
    for index, timeout_s in enumerate(TIMEOUTS_S):
        count = len(range(index, times, len(TIMEOUTS_S)))
        if count:
            with tempfile.TemporaryDirectory() as name:
                found = _job(Path(name), chosen, timeout_s, count, late)
            print(f"{len(late)} stopped ranks removed", flush=True)
    within = sum(seconds <= 1 for seconds in late)
    row = {"stopped": len(late), "removed_within_1_s": within, "timeouts_s": TIMEOUTS_S}
    for place, share in (("p50", 0.5), ("most", 1.0)):
        row[f"after_timeout_s_{place}"] = quantile(late, share)
    return row | {"environment": found["environment"]}


def _job(
    folder: Path, chosen: random.Random, timeout_s: int, count: int, late: list[float]
) -> dict[str, Any]:
    """Stop so many ranks of a job; return what its last generation has printed."""
    words = ["--elastic", "1", "--recovery", "relaunch", "--replace", "--max-failures", "1000000"]
    words += ["--timeout-s", str(timeout_s)]
    program = ["-m", "tests.long_recovery.counting", folder / "stop"]
    with Job(folder, _RANKS, *words, program=program) as job:
        for generation in range(1, count + 1):
            pids = job.ranks_of(generation)
            time.sleep(chosen.uniform(0.1, 0.5))
            at = time.time()
            os.kill(chosen.choice(pids), signal.SIGSTOP)
            event = job.event("resized", generation + 1)
            if (event["cause"], len(event["lost"])) != ("stopped", 1):
                sys.exit(f"a stopped rank was not removed alone: {event}")
            late.append(event["time"] - event["recovered_s"] - at - timeout_s)
        job.ranks_of(count + 1)
        (folder / "stop").touch()
        return check_counts(job.end())
