"""Jobs with a supervisor, for tests."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.mpi import ROOT, events_of

_PATIENCE_S = 300.0


@dataclass
class Job:
    """A running job, and the file of its events."""

    process: subprocess.Popen[str]
    path: Path

    def events(self, kind: str) -> list[dict[str, Any]]:
        return events_of(self.path, kind)

    def await_generation(self, number: int) -> list[int]:
        """Wait until a generation has begun to train; return the process ids of its ranks."""
        deadline = time.monotonic() + _PATIENCE_S
        while time.monotonic() < deadline and self.process.poll() is None:
            for event in self.events("started"):
                if event["generation"] == number:
                    return event["pids"]
            time.sleep(0.01)
        pytest.fail(f"generation {number} has not begun: {self.end()}")

    def await_step(self, generation: int) -> list[int]:
        """Wait until a generation has committed a step; return the process ids of its ranks."""
        pids = self.await_generation(generation)
        if generation == 1:
            time.sleep(0.1)  # no event tells of the first step
            return pids
        deadline = time.monotonic() + _PATIENCE_S
        while time.monotonic() < deadline and self.process.poll() is None:
            if any(event["generation"] == generation for event in self.events("resized")):
                return pids
            time.sleep(0.01)
        pytest.fail(f"generation {generation} has made no step: {self.end()}")

    def end(self) -> tuple[int, str]:
        """Wait for the end; return the exit code and all output."""
        output, _ = self.process.communicate(timeout=_PATIENCE_S)
        return self.process.returncode, output


@pytest.fixture
def start(tmp_path):
    jobs = []

    def started(*words: str, program: tuple[str, ...] = (), command: str = "run") -> Job:
        events = tmp_path / f"events{len(jobs)}.jsonl"
        ours = [sys.executable, "-m", "ringreduce", command, "--events", str(events), *words]
        process = subprocess.Popen(
            [*ours, *program],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "TMPDIR": str(tmp_path)},
        )
        jobs.append(Job(process, events))
        return jobs[-1]

    yield started
    for job in jobs:
        if job.process.poll() is None:
            job.process.kill()
        job.process.communicate()


@pytest.fixture
def finish(tmp_path):
    """End the program of a job after its step; return its output."""

    def finished(job) -> str:
        (tmp_path / "stop").touch()
        code, output = job.end()
        assert code == 0, output
        return output

    return finished
