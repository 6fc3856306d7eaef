"""What the proofs do to a job: they kill its ranks, tell ranks to end, and change their number."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import time
from typing import Any

from tests.long_recovery.jobs import SILENCE_S, Job
from tests.support.mpi import is_alive


def kill(
    chosen: random.Random, pids: list[int], job: Job, generation: int, *, most: int = 2
) -> dict[str, float]:
    """Kill one rank of a generation, or two if `most` is 2; wait for the next step without them.

    Two are killed only where one is left then.  Returns the times, since the last kill.
    """
    double = most > 1 and len(pids) > 2 and chosen.random() < 0.5
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


def notice(chosen: random.Random, started: dict[str, Any], job: Job) -> None:
    """Send SIGTERM to a rank of the generation with this event; wait until another trains."""
    os.kill(chosen.choice(started["pids"]), signal.SIGTERM)
    job.started_after(started["generation"])


def scale(job: Job, size: int) -> None:
    """Change the number of ranks by command.  Exits if the job cannot have so many."""
    asked = job.scale(size)
    said, _ = asked.communicate(timeout=SILENCE_S)
    if asked.returncode:
        sys.exit(f"the job cannot have {size} ranks: {said}")
