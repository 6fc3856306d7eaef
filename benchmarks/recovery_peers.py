"""From a kill to the next step: ours beside torchrun and Horovod, on the same machine.

    python -m benchmarks.recovery_peers [--kills 10] [--only torchrun]

Needs torch in this environment; Horovod takes part if it is installed.  Starts jobs of two ranks,
which run `benchmarks.recovery_peers_run`.  When both ranks have worked for two to three seconds,
one of them is killed.

- ``ringreduce, replaced``: ``ringreduce run --elastic 1 --replace``, with an `rr.State`.  A new job
  starts, and goes on from the memory of the ranks.
- ``ringreduce, the survivor alone``: without ``--replace``.  Each kill has a job of its own.
- ``torchrun``: ``torchrun --max-restarts``, which starts all workers again.  They talk over Gloo,
  and go on from a checkpoint on disk.
- ``horovod``: ``horovodrun`` with a discovery script.  The survivor goes on from its own memory,
  and later a new worker joins.  Horovod 0.28.1 asks for C++14, and torch since 2.1 for C++17: it
  compiles if ``CMAKE_CXX_STANDARD`` is 17 in its two ``CMakeLists.txt``.

A step of torchrun's or Horovod's program is saved each time, or each 50 steps.  Steps that are
computed again are counted.  Writes rows to ``bench_results/recovery_peers.jsonl``.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.recovery_peers_run import BATCH, PIDS, STEPS, STOP
from benchmarks.rows import replace

NAME = "recovery_peers"
_RANKS = 2
_HOSTS = ("localhost", "127.0.0.1")
"""A host for each rank: Horovod gives up one on which a worker is killed, for a second or more."""
_SILENCE_S = 120.0
_WORKER = ("-m", "benchmarks.recovery_peers_run")


@dataclass(frozen=True)
class Step:
    """A line of rank 0: when a step was complete, its number, by which generation and ranks."""

    at: float
    number: int
    generation: str
    ranks: int


@dataclass(frozen=True)
class Recovery:
    """What followed a kill."""

    next_s: float
    """Seconds to the next step."""
    all_s: float | None
    """Seconds to the next step of as many ranks as before; None: there is none."""
    repeated: int
    """Steps that were made twice."""


def _ours(folder: Path, *words: str) -> list[str]:
    run = [sys.executable, "-m", "ringreduce", "run", "-n", str(_RANKS), "--elastic", "1"]
    return [*run, *words, "--max-failures", "1000", *_WORKER, str(folder), "ringreduce"]


def _torchrun(folder: Path, every: int) -> list[str]:
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    run += ["--nproc-per-node", str(_RANKS), "--max-restarts", "1000"]
    return [*run, *_WORKER, str(folder), "torch", str(every)]


def _horovodrun(folder: Path, every: int) -> list[str]:
    discover = folder / "discover"
    discover.write_text("#!/bin/sh\n" + "".join(f"echo {host}:1\n" for host in _HOSTS))
    discover.chmod(0o700)
    run = [str(Path(sys.executable).parent / "horovodrun"), "--gloo", "--network-interfaces", "lo"]
    run += [*f"-np {_RANKS} --min-np 1 --max-np {_RANKS} --reset-limit 1000".split()]
    run += ["--host-discovery-script", str(discover), "--blacklist-cooldown-range", "1", "2"]
    return [*run, sys.executable, *_WORKER, str(folder), "horovod", str(every)]


CONTENDERS: dict[str, Callable[[Path], list[str]]] = {
    "ringreduce, replaced": lambda folder: _ours(folder, "--replace"),
    "ringreduce, the survivor alone": _ours,
    "torchrun, a checkpoint each step": lambda folder: _torchrun(folder, 1),
    "torchrun, a checkpoint each 50 steps": lambda folder: _torchrun(folder, 50),
    "horovod, a commit each step": lambda folder: _horovodrun(folder, 1),
    "horovod, a commit each 50 steps": lambda folder: _horovodrun(folder, 50),
}
_ONE_KILL = "ringreduce, the survivor alone"
"""After a kill one rank is left, so that the job cannot be used again."""

_ENVIRONMENT = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Each start of torch's workers gets a store of its own.

In torch 2.13 they share the launcher's, and then read the addresses of killed ones: Gloo does not
connect.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--only", default="", help="contenders whose name has this in it")
    options = parser.parse_args()
    from ringreduce.bench.environment import environment

    origin = environment(f"python -m benchmarks.{NAME} {' '.join(sys.argv[1:])}".strip())
    origin.pop("ranks")
    for name in CONTENDERS:
        if options.only not in name:
            continue
        package = {"torchrun": "torch", "horovod": "horovod"}.get(name.split(",")[0])
        if package and importlib.util.find_spec(package) is None:
            print(f"{name}: {package} is not installed", flush=True)
            continue
        jobs = options.kills if name == _ONE_KILL else 1
        kills = [kill for _ in range(jobs) for kill in _job(name, options.kills // jobs)]
        row = _row(name, kills)
        print(*row.values(), flush=True)
        version = {package: importlib.metadata.version(package)} if package else {}
        replace(NAME, [row | version | origin], ("contender", "mpi", "cpu"))


def _row(name: str, kills: list[Recovery]) -> dict[str, Any]:
    seconds = sorted(kill.next_s for kill in kills)
    of_all = [kill.all_s for kill in kills if kill.all_s is not None]
    repeated = [kill.repeated * BATCH for kill in kills]
    return {
        "benchmark": NAME,
        "contender": name,
        "kills": len(kills),
        "to_next_step_s_p50": round(median(seconds), 3),
        "to_next_step_s_most": round(seconds[-1], 3),
        "to_all_ranks_s_p50": round(median(of_all), 3) if of_all else None,
        "samples_repeated_mean": round(sum(repeated) / len(repeated), 1),
        "samples_repeated_most": max(repeated),
    }


def _job(name: str, kills: int) -> list[Recovery]:
    """Run a job and kill its ranks; return what followed each kill."""
    chosen = random.Random(5)
    with tempfile.TemporaryDirectory() as folder_name:
        folder = Path(folder_name)
        errors = folder / "errors"
        with errors.open("w") as file:
            job = subprocess.Popen(
                CONTENDERS[name](folder),
                stdout=file,
                stderr=file,
                env={**os.environ, **_ENVIRONMENT},
                start_new_session=True,
            )
        try:
            found = [_kill(folder, job, chosen, name != _ONE_KILL) for _ in range(kills)]
            (folder / STOP).touch()
            if job.wait(_SILENCE_S) == 0:
                return found
        except (TimeoutError, subprocess.TimeoutExpired):
            pass  # it has ended too early, or does not end
        code = job.poll()
        if code is None:
            os.killpg(job.pid, signal.SIGKILL)
        print(errors.read_text()[-4000:], file=sys.stderr)
        sys.exit(f"{name}: no step any more" if code is None else f"{name} ended with {code}")


def _kill(
    folder: Path, job: subprocess.Popen[bytes], chosen: random.Random, comes_back: bool
) -> Recovery:
    """Kill a rank; return what follows."""
    _await(job, lambda: len(_present(folder)) == _RANKS)
    _await(job, lambda: _of_all(folder, time.time() - 1))
    time.sleep(chosen.uniform(2, 3))
    pids, at = _present(folder), time.time()
    os.kill(chosen.choice(pids), signal.SIGKILL)
    old = {step.generation for step in _steps(folder)}
    _await(job, lambda: any(step.generation not in old for step in _steps(folder)))
    if comes_back:
        _await(job, lambda: any(s.generation not in old for s in _of_all(folder, at)))
    steps = _steps(folder)
    new = [step for step in steps if step.generation not in old]
    last = max(step.number for step in steps if step.generation in old)
    full = next((step.at - at for step in new if step.ranks == _RANKS), None)
    return Recovery(new[0].at - at, full, max(0, last - new[0].number + 1))


def _await(job: subprocess.Popen[bytes], found: Callable[[], Any]) -> None:
    """Wait until something is found.

    Raises:
        TimeoutError: it is not found, or the job has ended.

    """
    end = time.monotonic() + _SILENCE_S
    while not found():
        if time.monotonic() > end or job.poll() is not None:
            raise TimeoutError
        time.sleep(0.01)


def _steps(folder: Path) -> list[Step]:
    """Return the steps that rank 0 has written."""
    text = (folder / STEPS).read_text() if (folder / STEPS).exists() else ""
    words = [line.split() for line in text.split("\n")[:-1]]
    return [Step(float(at), int(step), name, int(ranks)) for at, step, name, ranks in words]


def _of_all(folder: Path, after: float) -> list[Step]:
    """Return the steps of all ranks after a time."""
    return [step for step in _steps(folder) if step.at > after and step.ranks == _RANKS]


def _present(folder: Path) -> list[int]:
    """Return the process ids of the present ranks."""
    text = (folder / PIDS).read_text() if (folder / PIDS).exists() else ""
    pids = {int(line) for line in text.split("\n")[:-1]}
    return sorted(pid for pid in pids if Path(f"/proc/{pid}").exists())


if __name__ == "__main__":
    main()
