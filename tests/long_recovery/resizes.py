"""Change the number of ranks of jobs that train: by command, and by SIGTERM to ranks.

The first job goes 5 -> 3 -> 6 -> 1 -> 4.  The second one has at most as many ranks as cores: its
pauses are timed.  In further jobs a rank is now and then killed while others start.
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

from ringreduce.system.cores import cores
from tests.long_recovery.disturbances import notice, scale
from tests.long_recovery.jobs import SILENCE_S, Job, check_counts, quantile

_WALK = (5, 3, 6, 1, 4)
_MOST = 6
_OF_A_JOB = 20


def prove(chosen: random.Random, times: int) -> dict[str, Any]:
    """Change the number of ranks so often; return what the row has.  New processes take over."""
    return _prove(chosen, times, "relaunch")


def prove_live(chosen: random.Random, times: int) -> dict[str, Any]:
    """Do the same under an MPI where ranks that stay go on in their processes."""
    return _prove(chosen, times, "live")


def _prove(chosen: random.Random, times: int, recovery: str) -> dict[str, Any]:
    events: list[dict[str, Any]] = []
    found = _run(recovery, _WALK[0], _Walk(_WALK[1:]), events)
    walked = [event["after"] for event in events]
    if walked != list(_WALK[1:]):
        sys.exit(f"the job went {walked}")
    few = [size for size in (1, 2, 3, 4) if size <= cores()]
    timed: list[dict[str, Any]] = []
    while len(timed) < (times + 1) // 2:
        turns = _Turns(chosen, few, min(_OF_A_JOB, times // 2 + 1 - len(timed)), kills=False)
        found = _run(recovery, few[0], turns, timed)
        print(f"{len(timed)} changes of at most {max(few)} ranks", flush=True)
    events += timed
    kills = 0
    while len(events) < times:
        sizes = range(1, _MOST + 1)
        turns = _Turns(chosen, sizes, min(_OF_A_JOB, times - len(events)), kills=True)
        found = _run(recovery, chosen.choice((2, 3, 4)), turns, events)
        kills += turns.killed
        print(f"{len(events)} changes, {kills} ranks killed meanwhile", flush=True)
    return _row(events, timed, kills) | {"environment": found["environment"]}


def _row(events: list[dict[str, Any]], timed: list[dict[str, Any]], kills: int) -> dict[str, Any]:
    planned = [event for event in events if event["level"] == 3]
    row = {"changes": len(events), "planned": len(planned), "kills_meanwhile": kills}
    row["redone_most_of_planned"] = max(event["redone"] for event in planned)
    for name, some in (("", timed), ("_of_all", planned)):
        # A generation that ends before its first step has no pause.
        pauses = [event["recovered_s"] for event in some if event["recovered_s"] is not None]
        row[f"pause_s_p50{name}"] = quantile(pauses, 0.5)
        row[f"pause_s_p99{name}"] = quantile(pauses, 0.99)
    return row


def _run(
    recovery: str, ranks: int, turns: _Walk | _Turns, events: list[dict[str, Any]]
) -> dict[str, Any]:
    """Run a job to its end; add its changes to `events`, and return what it has printed."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        limits = ["--elastic", f"1:{_MOST}", "--max-failures", "1000000"]
        program = ["-m", "tests.long_recovery.counting", folder / "stop"]
        with Job(folder, ranks, *limits, "--recovery", recovery, program=program) as job:
            job.ranks_of(1)
            turns.make(job)
            (folder / "stop").touch()
            found = check_counts(job.end())
            events += job.events("resized")
            for event in job.events("resized"):
                if event["level"] == 3 and event["redone"]:
                    sys.exit(f"a planned change made a step twice: {event}")
    return found


class _Walk:
    """Go through numbers of ranks by command."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        self._sizes = sizes

    def make(self, job: Job) -> None:
        for size in self._sizes:
            time.sleep(0.2)
            scale(job, size)


class _Turns:
    """Change the number of ranks so often, to one of `sizes`."""

    def __init__(self, chosen: random.Random, sizes: Any, count: int, *, kills: bool) -> None:
        self._chosen, self._sizes, self._count, self._kills = chosen, list(sizes), count, kills
        self.killed = 0

    def make(self, job: Job) -> None:
        for _ in range(self._count):
            time.sleep(self._chosen.uniform(0.05, 0.3))
            started = job.events("started")[-1]
            size = started["size"]
            if size > 1 and size - 1 in self._sizes and self._chosen.random() < 0.3:
                notice(self._chosen, started, job)
                continue
            other = self._chosen.choice([each for each in self._sizes if each != size])
            asked = job.scale(other)
            if self._kills and size > 1 and self._chosen.random() < 0.4:
                time.sleep(self._chosen.uniform(0, 1.0))
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._chosen.choice(job.ranks()), signal.SIGKILL)
                    self.killed += 1
            code = asked.wait(SILENCE_S)
            if code and not self._kills:
                sys.exit(f"the job cannot have {other} ranks")
            job.settle()
