"""Disturb runs of the trainer with ``--batch-shards``, and compare the bits of the parameters.

Ranks are killed and told to end, and commands change their number.  The parameters must have the
bits of a run on one rank to which nothing happened, and each step must be reported once.  The
launcher decides about the threads of NumPy.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.rows import environment
from tests.long_recovery.disturbances import kill, notice, scale
from tests.long_recovery.jobs import Job, parameters
from tests.support.mpi import ROOT

_SIZES = (1, 2, 3, 4)
_TRAIN = ("--epochs", "360", "--batch", "128", "--hidden", "256", "256", "--batch-shards", "12")
"""Matrices so large that NumPy multiplies them with several threads, if it may."""
_FEWEST, _MOST = 3, 5
"""Disturbances of a run."""


def prove(chosen: random.Random, times: int) -> dict[str, Any]:
    """Disturb so many runs; return what the row has."""
    os.environ.pop("OMP_NUM_THREADS", None)
    with tempfile.TemporaryDirectory() as name:
        alone = _alone(Path(name) / "steps")
    made: Counter[str] = Counter()
    for number in range(1, times + 1):
        with tempfile.TemporaryDirectory() as name:
            run = _disturbed(Path(name), chosen, made)
        if run[0] != alone[0]:
            sys.exit(f"{run[0]}, on one rank to which nothing happened {alone[0]}")
        if run[1] != alone[1]:
            sys.exit(f"not each step is reported once: {len(run[1])} steps of {len(alone[1])}")
        print(f"{number} runs with the same bits; {dict(made)}", flush=True)
    row: dict[str, Any] = {"runs": times, "disturbances": made.total()}
    row |= {each: made[each] for each in ("kills", "scales", "notices")}
    return row | {"environment": environment("")}


def _alone(metrics: Path) -> tuple[str, list[int]]:
    """Train on one rank; return the line with the parameters' hash, and the reported steps."""
    command = [sys.executable, "-m", "ringreduce", "train", "-n", "1", *_TRAIN]
    command += ["--metrics", str(metrics)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return parameters(done.stdout), _steps(metrics)


def _disturbed(folder: Path, chosen: random.Random, made: Counter[str]) -> tuple[str, list[int]]:
    """Train while ranks are lost and added; return the same."""
    metrics = folder / "steps"
    metrics.touch()
    words = ["--elastic", f"1:{max(_SIZES)}", "--max-failures", "1000000"]
    words += ["--recovery", chosen.choice(("auto", "relaunch"))]
    words += ["--replace"] if chosen.random() < 0.5 else []
    words += [*_TRAIN, "--metrics", str(metrics)]
    with Job(folder, chosen.choice(_SIZES[1:]), *words, command="train") as job:
        job.ranks_of(1)
        for _ in range(chosen.randint(_FEWEST, _MOST)):
            made[_disturb(chosen, job)] += 1
        output = job.end()
    return parameters(output), _steps(metrics)


def _disturb(chosen: random.Random, job: Job) -> str:
    """Kill ranks, tell one to end, or change their number; wait for the next step.

    Returns what was done.
    """
    time.sleep(chosen.uniform(0.02, 0.4))
    started = job.events("started")[-1]
    kind = chosen.choice(("kills", "scales", "notices"))
    if kind == "scales" or started["size"] == 1:
        scale(job, chosen.choice([each for each in _SIZES if each != started["size"]]))
        return "scales"
    if kind == "kills":
        kill(chosen, started["pids"], job, started["generation"])
    else:
        notice(chosen, started, job)
        job.settle()
    return kind


def _steps(metrics: Path) -> list[int]:
    """Return the numbers of the steps in a file of metrics."""
    lines = map(json.loads, metrics.read_text().splitlines())
    return [line["step"] for line in lines if "step" in line]
