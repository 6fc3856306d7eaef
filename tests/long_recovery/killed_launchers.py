"""Kill launchers and mpiexecs of training runs, resume them, and compare the parameters' bits."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.rows import environment
from tests.long_recovery.jobs import SILENCE_S, Job, parameters
from tests.support.mpi import ROOT, alive_in_the_end

_RANKS = 2
_EPOCHS_OF_A_KILL = 40


def prove(chosen: random.Random, times: int) -> dict[str, Any]:
    """Kill so often, in turns a launcher and an mpiexec; return what the row has."""
    train = f"--epochs {_EPOCHS_OF_A_KILL * times} --checkpoint-every 40 --keep 3".split()
    killed = {"launchers": 0, "mpiexecs": 0}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        checkpoints = folder / "checkpoints"
        checkpoints.mkdir()
        words = ["--elastic", str(_RANKS), "--max-failures", "1000000", *train]
        words += ["--checkpoint-dir", str(checkpoints), "--resume"]
        output = ""
        while not output:
            with Job(folder, _RANKS, *words, command="train") as job:
                output = _killed_or_over(job, chosen, checkpoints, killed, times)
            (folder / "events").unlink()
    kills = sum(killed.values())
    if kills < times:
        sys.exit(f"the run was over after {kills} kills")
    command = [sys.executable, "-m", "ringreduce", "train", "-n", str(_RANKS), *train[:2]]
    plain = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    if parameters(output) != parameters(plain):
        sys.exit(f"{parameters(output)}, without kills {parameters(plain)}")
    return {"kills": kills, "same_bits": True, **killed, "environment": environment("")}


def _killed_or_over(
    job: Job, chosen: random.Random, checkpoints: Path, killed: dict[str, int], times: int
) -> str:
    """Kill the job's mpiexec or launcher, or let it end after so many kills.

    Returns its output; "" if its launcher was killed.
    """
    generation = 1
    while True:
        pids = job.ranks_of(generation)
        if sum(killed.values()) >= times:
            return job.end()
        _await_checkpoint(job, checkpoints)
        time.sleep(chosen.uniform(0, 0.3))
        if killed["launchers"] <= killed["mpiexecs"]:
            killed["launchers"] += 1
            job.process.kill()
            job.process.wait()
            if left := alive_in_the_end(pids):
                sys.exit(f"processes are left: {left}")
            return ""
        children = Path(f"/proc/{job.process.pid}/task/{job.process.pid}/children")
        (mpiexec,) = map(int, children.read_text().split())
        os.kill(mpiexec, signal.SIGKILL)
        killed["mpiexecs"] += 1
        generation += 1


def _await_checkpoint(job: Job, checkpoints: Path) -> None:
    """Wait for a checkpoint that was not there yet."""
    before = max(checkpoints.glob("*.json"), default=None)
    deadline = time.monotonic() + SILENCE_S
    while max(checkpoints.glob("*.json"), default=None) == before:
        if job.process.poll() is not None or time.monotonic() > deadline:
            sys.exit(f"no further checkpoint; the launcher's exit code: {job.process.poll()}")
        time.sleep(0.003)
