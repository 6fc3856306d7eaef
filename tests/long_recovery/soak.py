"""Kill a rank every ten seconds and change the number of ranks every minute, for an hour.

The memory of the launcher and of the ranks must stay within 5 % of what it was after a tenth of the
time.  The launcher may not have more open files or mappings in the end than it had then.  No sample
may be lost or counted twice.
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
from statistics import median
from typing import Any

from tests.long_recovery.jobs import SILENCE_S, Job, check_counts

_KILL_S, _SCALE_S = 10.0, 60.0
_SIZES = (2, 3)
_MOST = 4
_GROWTH = 0.05
_AGE_S = 5.0
"""Seconds after a change in which memory is not looked at: the ranks begin."""


def prove(chosen: random.Random, times: int) -> dict[str, Any]:
    """Run a job for so many minutes; return what the row has."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        limits = ["--elastic", f"1:{_MOST}", "--max-failures", "1000000"]
        program = ["-m", "tests.long_recovery.counting", folder / "stop"]
        with Job(folder, _SIZES[0], *limits, program=program) as job:
            job.ranks_of(1)
            row = _disturbed(chosen, job, 60.0 * times)
            if job.events("started")[-1]["size"] != 2:
                job.scale(2).wait(SILENCE_S)
            job.check_held((row["launcher_files_first"], row["launcher_mappings_first"]))
            (folder / "stop").touch()
            found = check_counts(job.end())
    for who in ("launcher", "ranks"):
        first, last = row[f"{who}_mib_first"], row[f"{who}_mib_last"]
        if last > (1 + _GROWTH) * first:
            sys.exit(f"the memory of the {who} grows: {first} MiB, {last} MiB at the end")
    return {"minutes": times, **row, "environment": found["environment"]}


def _disturbed(chosen: random.Random, job: Job, seconds: float) -> dict[str, Any]:
    """Disturb a job for so long; return the faults, and the memory and files at both ends."""
    begin = time.monotonic()
    kill_at, scale_at, quiet_at = begin + _KILL_S, begin + _SCALE_S, begin + _AGE_S
    kills = scales = 0
    seen: list[tuple[float, ...]] = []
    while (now := time.monotonic()) < begin + seconds:
        started = job.events("started")[-1]
        if now >= scale_at:
            others = [size for size in _SIZES if size != started["size"]]
            if job.scale(chosen.choice(others)).wait(SILENCE_S) == 0:
                scales += 1
            scale_at, quiet_at = now + _SCALE_S, time.monotonic() + _AGE_S
        elif now >= kill_at:
            victim = chosen.choice(started["pids"])
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)
                kills += 1
            job.recovered(started["generation"], [victim])
            if job.events("started")[-1]["size"] == 1:  # the others were killed: two again
                scales += job.scale(2).wait(SILENCE_S) == 0
            kill_at, quiet_at = now + _KILL_S, time.monotonic() + _AGE_S
        elif now >= quiet_at:
            ranks = [mib for pid in started["pids"] if (mib := _mib(pid))]
            if len(ranks) == 2:  # the launcher has a socket and a descriptor of each rank
                seen.append((now - begin, _mib(job.process.pid), max(ranks), *job.held()))
        time.sleep(0.2)
    early = [each for each in seen if each[0] < seconds / 5 and each[0] > seconds / 10]
    late = [each for each in seen if each[0] > 0.9 * seconds]
    row: dict[str, Any] = {"kills": kills, "scales": scales}
    names = ("launcher_mib", "ranks_mib", "launcher_files", "launcher_mappings")
    for place, name in enumerate(names, 1):
        row[f"{name}_first"] = round(median(each[place] for each in early), 1)
        row[f"{name}_last"] = round(median(each[place] for each in late), 1)
    return row


def _mib(pid: int) -> float:
    """Return the memory of a process, its own and shared, in MiB; 0 if it is gone."""
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        own = [line.split()[1] for line in lines if line.startswith(("RssAnon:", "RssShmem:"))]
        return sum(map(int, own)) / 1024
    return 0.0
