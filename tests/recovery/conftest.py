"""Jobs with a supervisor, for tests, and two programs for their ranks."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ringreduce.launch.cli import main
from tests.support.mpi import ROOT, events_of

_PATIENCE_S = 300.0
_LAUNCHER = "import sys; from ringreduce.launch.cli import main; sys.exit(main())"
_STEPS = """
import dataclasses, json, os, signal, sys, time
from pathlib import Path
import numpy as np, ringreduce as rr
here = Path(__file__).parent
def once(name):
    try:
        os.close(os.open(here / name, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True
{before}
def train(comm, state):
    try:
        steps(comm, state)
    finally:
        print(f"rank {{comm.rank}} of {{comm.size}} cleans up\\n", end="", flush=True)
def steps(comm, state):
    while not state["stops"][0]:
        time.sleep({step_s})
        ranks, stops = comm.all_reduce(np.array([1.0, (here / "stop").exists()]))
        with state.update():
            state["made"] += ranks / comm.size
            state["stops"] += stops
        if state.step == 1:
            (here / "stepped").touch()
    {at_end}
    if comm.rank == 0:
        made = "each step once" if state["made"][0] == state.step else "other steps"
        print(f"{{comm.size}} ranks made {{made}}\\n", end="", flush=True)
state = rr.State({{"made": np.zeros(1), "stops": np.zeros(1)}})
{first}
rr.elastic(train, state)
{then}
"""
_TRAINS = """
import os, sys, time
from pathlib import Path
import ringreduce as rr
from ringreduce.recovery.slots import _PAUSE_AT, NEVER
from ringreduce.train.__main__ import main
here, update = Path(__file__).parent, rr.State.update
{before}
def held(state):
    hold = here / f"hold {{state.step}}"
    if hold.exists():
        (here / f"at {{state.step}}").touch()
    while hold.exists() and state._slots._head[_PAUSE_AT] in (0, NEVER):
        time.sleep(0.005)
    return update(state)
rr.State.update = held
if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
"""


@dataclass
class Job:
    """A running job, and the file of its events."""

    process: subprocess.Popen[str]
    path: Path

    def events(self, kind: str) -> list[dict[str, Any]]:
        return events_of(self.path, kind)

    def wait_until(self, holds: Callable[[], Any], what: str = "what was waited for") -> Any:
        """Wait until something holds, while the job goes on; return what `holds` returns."""
        deadline = time.monotonic() + _PATIENCE_S
        while not (found := holds()):
            if time.monotonic() > deadline or self.process.poll() is not None:
                pytest.fail(f"{what} has not come: {self.end()}")
            time.sleep(0.01)
        return found

    def await_generation(self, number: int) -> list[int]:
        """Wait until a generation has begun to train; return the process ids of its ranks."""

        def pids() -> list[int]:
            started = [event for event in self.events("started") if event["generation"] == number]
            return started[0]["pids"] if started else []

        return self.wait_until(pids, f"generation {number}")

    def await_step(self, generation: int) -> list[int]:
        """Wait until a generation has committed a step; return the process ids of its ranks.

        The program of `steps` tells of the first step of all; an event, of those of others.
        """

        def stepped() -> bool:
            if generation == 1:
                return (self.path.parent / "stepped").exists()
            return any(event["generation"] == generation for event in self.events("resized"))

        pids = self.await_generation(generation)
        self.wait_until(stepped, f"a step of generation {generation}")
        return pids

    def end(self) -> tuple[int, str]:
        """Wait for the end; return the exit code and all output."""
        output, _ = self.process.communicate(timeout=_PATIENCE_S)
        return self.process.returncode, output


@pytest.fixture
def start(tmp_path):
    """Start a job; its launcher runs the code `first`."""
    jobs = []

    def started(
        *words: str, program: tuple[str, ...] = (), command: str = "run", first: str = ""
    ) -> Job:
        events = tmp_path / f"events{len(jobs)}.jsonl"
        launcher = ["-c", f"{first}; {_LAUNCHER}"] if first else ["-m", "ringreduce"]
        process = subprocess.Popen(
            [sys.executable, *launcher, command, "--events", str(events), *words, *program],
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
def steps(start, tmp_path):
    """Start a program that makes steps until `finish`.

    It has more code before `train`, at its end, first before the call of `elastic`, and then.
    """

    def started(
        *words: str,
        before: str = "",
        at_end: str = "pass",
        first: str = "",
        then: str = "",
        step_s: str = "0.005",
        launcher: str = "",
    ) -> Job:
        program = tmp_path / "steps.py"
        parts = {"before": before, "at_end": at_end, "first": first, "then": then}
        program.write_text(_STEPS.format(**parts, step_s=step_s))
        return start(*words, program=(str(program),), first=launcher)

    return started


@pytest.fixture
def finish(tmp_path):
    """End the program of a job after its step; return its output."""

    def finished(job: Job) -> str:
        (tmp_path / "stop").touch()
        code, output = job.end()
        assert code == 0, output
        return output

    return finished


@pytest.fixture
def trains(start, tmp_path):
    """Start the trainer, with some code before.

    Its ranks wait after step N, while there is a file "hold N", until the supervisor has chosen the
    step after which they pause.  A rank that waits makes a file "at N".
    """

    def started(*words: str, options: str, before: str = "") -> Job:
        program = tmp_path / "trains.py"
        program.write_text(_TRAINS.format(before=before))
        return start(*words, program=(str(program), *options.split()))

    return started


@pytest.fixture
def refused(capsys):
    """Run a wrong command; return what it says."""

    def said(command: str) -> str:
        with pytest.raises(SystemExit) as ended:
            main(shlex.split(command))
        assert ended.value.code == 2
        return capsys.readouterr().err

    return said


@pytest.fixture
def scale(capsys, monkeypatch, tmp_path):
    """Run `ringreduce scale` for a process, or without one; return the exit code and the text."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def scaled(pid: int | None = None, size: int = 0) -> tuple[int, str]:
        code = main(["scale", *([] if pid is None else [str(pid), str(size)])])
        said = capsys.readouterr()
        return code, said.out + said.err

    return scaled
