"""From a kill to the next step: ours and torchrun's, with the same steps on the same machine.

    python -m benchmarks.recovery_peers [--kills 10] [--only torchrun]

Needs torch in this environment.  Starts jobs of two ranks.  A step sleeps for 5 ms, all-reduces a
million float32, and counts 48 samples.  Every two to three seconds a rank is killed.

- ``ringreduce``: ``ringreduce run --elastic`` with an `rr.State`; with ``--replace``, so that as
  many ranks go on as with torchrun.  Under Open MPI also without it: the survivor goes on alone.
- ``torchrun``: ``torchrun --max-restarts``, which starts all workers again, over Gloo.  Rank 0
  writes a checkpoint after each step, or after 50, as a program must that wants to go on.

The samples that are computed again are counted, and no sample of a step that counts may be lost.
Writes rows to ``bench_results/recovery_peers.jsonl``.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.rows import replace

NAME = "recovery_peers"
_RANKS, _STEP_S, _NUMBERS, _SAMPLES = 2, 5e-3, 1_000_000, 48
_SILENCE_S = 120.0
CONTENDERS = {
    "ringreduce": ("--replace",),
    "ringreduce, the survivor alone": (),
    "torchrun, checkpoint each step": (1,),
    "torchrun, checkpoint each 50 steps": (50,),
}
"""Contender -> options of ours, or steps between torch's checkpoints."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--only", default="")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        _worker(Path(options.worker[0]), options.worker[1])
        return
    import torch

    from ringreduce.bench.environment import environment

    rows = []
    for name in CONTENDERS:
        if options.only in name:
            kills = options.kills if name != "ringreduce, the survivor alone" else 1
            found = [_job(name, kills) for _ in range(options.kills // kills)]
            rows.append(_row(name, [kill for job in found for kill in job]))
            print(*rows[-1].values(), flush=True)
    origin = environment(f"python -m benchmarks.{NAME} {' '.join(sys.argv[1:])}".strip())
    origin.pop("ranks")
    replace(
        NAME, [row | {"torch": torch.__version__} | origin for row in rows], ("contender", "mpi")
    )


def _row(name: str, kills: list[tuple[float, int]]) -> dict[str, Any]:
    seconds = sorted(kill[0] for kill in kills)
    row: dict[str, Any] = {"benchmark": NAME, "contender": name, "kills": len(kills)}
    row |= {"to_next_step_s_p50": round(median(seconds), 3)}
    row |= {"to_next_step_s_most": round(seconds[-1], 3)}
    repeated = [kill[1] * _SAMPLES for kill in kills]
    return row | {"samples_repeated_mean": round(sum(repeated) / len(repeated), 1)}


def _job(name: str, kills: int) -> list[tuple[float, int]]:
    """Run a job and kill its ranks; return the seconds and the repeated steps of each kill."""
    chosen = random.Random(5)
    with tempfile.TemporaryDirectory() as folder_name:
        folder = Path(folder_name)
        command = _torchrun(name, folder, kills) if "torch" in name else _ours(name, folder)
        job = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        found = []
        _await(folder, job, 0.0)
        for _ in range(kills):
            time.sleep(chosen.uniform(2, 3))
            before, at = _steps(folder)[-1][1], time.time()
            os.kill(chosen.choice(_present(folder)), signal.SIGKILL)
            _await(folder, job, at + 0.002)
            lines = _steps(folder)
            again = next(line for line in lines if line[0] > at and line[2] != lines[0][2])
            last = max(line[1] for line in lines if line[0] <= again[0] and line[2] != again[2])
            found.append((again[0] - at, max(0, max(last, before) - again[1] + 1)))
        (folder / "stop").touch()
        job.wait(_SILENCE_S)
        if job.returncode:
            sys.exit(f"{name} ended with {job.returncode}")
    return found


def _ours(name: str, folder: Path) -> list[str]:
    run = [sys.executable, "-m", "ringreduce", "run", "-n", str(_RANKS), "--elastic", "1"]
    run += [*CONTENDERS[name], "--max-failures", "1000"]  # type: ignore[list-item]
    return [*run, "-m", f"benchmarks.{NAME}", "--worker", str(folder), "ours"]


def _torchrun(name: str, folder: Path, kills: int) -> list[str]:
    (every,) = CONTENDERS[name]
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    run += ["--nproc-per-node", str(_RANKS), "--max-restarts", str(2 * kills)]
    return [*run, "-m", f"benchmarks.{NAME}", "--worker", str(folder), str(every)]


def _steps(folder: Path) -> list[tuple[float, int, str]]:
    """Return the time, the number and the generation of all steps that rank 0 has written."""
    text = (folder / "steps").read_text() if (folder / "steps").exists() else ""
    lines = [line.split() for line in text.split("\n")[:-1]]
    return [(float(at), int(step), generation) for at, step, generation in lines]


def _present(folder: Path) -> list[int]:
    """Return the process ids of the present ranks."""
    pids = [int(path.read_text()) for path in folder.glob("pid-*")]
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def _await(folder: Path, job: subprocess.Popen[bytes], after: float) -> None:
    """Wait for a step of another generation than those before a time."""
    end = time.monotonic() + _SILENCE_S
    while time.monotonic() < end:
        lines = _steps(folder)
        known = {line[2] for line in lines if line[0] <= after}
        if any(line[0] > after and line[2] not in known for line in lines):
            return
        if job.poll() is not None:
            sys.exit(f"the job has ended with {job.returncode}")
        time.sleep(0.01)
    sys.exit("no step any more")


def _worker(folder: Path, every: str) -> None:
    """Train as a rank of a job."""
    if every == "ours":
        _our_worker(folder)
    else:
        _torch_worker(folder, int(every))


def _wrote(folder: Path, rank: int, generation: object) -> Any:
    """Tell the process id of this rank, and return the file of steps."""
    (folder / f"pid-{rank}-{generation}").write_text(str(os.getpid()))
    return open(folder / "steps", "a", buffering=1)


def _our_worker(folder: Path) -> None:
    import ringreduce as rr

    gradient = np.ones(_NUMBERS, np.float32)

    def train(comm: rr.Communicator, state: rr.State) -> None:
        with _wrote(folder, comm.rank, state.generation) as file:
            while not state["stops"][0]:
                time.sleep(_STEP_S)
                comm.all_reduce(gradient)
                stops = comm.all_reduce(np.array([(folder / "stop").exists()], np.int64))
                with state.update():
                    state["samples"] += _SAMPLES
                    state["stops"] += stops
                if comm.rank == 0:
                    file.write(f"{time.time()} {state.step} {state.generation}\n")
        assert state["samples"][0] == state.step * _SAMPLES

    zero = np.zeros(1, np.int64)
    rr.elastic(train, rr.State({"samples": zero, "stops": zero}))


def _torch_worker(folder: Path, every: int) -> None:
    import torch
    import torch.distributed as distributed

    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    saved, generation = folder / "checkpoint.pt", os.environ["TORCHELASTIC_RESTART_COUNT"]
    state = {"step": 0, "samples": 0}
    if saved.exists():
        state = torch.load(saved)
    gradient, stops = torch.ones(_NUMBERS), torch.zeros(1)
    with _wrote(folder, rank, generation) as file:
        while not stops[0]:
            time.sleep(_STEP_S)
            distributed.all_reduce(gradient)
            stops[0] = (folder / "stop").exists()
            distributed.all_reduce(stops)
            state = {"step": state["step"] + 1, "samples": state["samples"] + _SAMPLES}
            if rank == 0:
                if state["step"] % every == 0:
                    torch.save(state, f"{saved}.new")
                    os.replace(f"{saved}.new", saved)
                file.write(f"{time.time()} {state['step']} {generation}\n")
    assert state["samples"] == state["step"] * _SAMPLES
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
