"""The programs of `benchmarks.recovery_peers`: the same steps over ours, torch and Horovod.

    python -m benchmarks.recovery_peers_run FOLDER ringreduce
    python -m benchmarks.recovery_peers_run FOLDER torch|horovod STEPS-BETWEEN-SAVES

A step sleeps for 5 ms and all-reduces a million float32.  Rank 0 appends a line to FOLDER/steps
after each.  The job ends when the file FOLDER/stop exists.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

BATCH = 48
"""Samples that a step stands for."""
PIDS, STEPS, STOP = "pids", "steps", "stop"
_STEP_S, _NUMBERS = 5e-3, 1_000_000


class Job:
    """The folder through which a program and `benchmarks.recovery_peers` talk."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._generations = 0
        _append(folder / PIDS, f"{os.getpid()}\n")

    def begin(self) -> None:
        """Begin a generation."""
        self._generations += 1

    def stops(self) -> bool:
        return (self._folder / STOP).exists()

    def done(self, step: int, rank: int, ranks: int) -> None:
        """Write that a step is complete."""
        if rank == 0:
            line = f"{time.time()} {step} {os.getpid()}.{self._generations} {ranks}\n"
            _append(self._folder / STEPS, line)

    def compute(self, gradient: Any, all_reduce: Callable[[Any], Any], size: int) -> None:
        """Do what a step does; check the sum."""
        time.sleep(_STEP_S)
        gradient[:] = 1
        total = all_reduce(gradient)
        if not total[0] == total[-1] == size:
            raise AssertionError(f"the sum of {size} ones is {total[0]}, {total[-1]}")


def _append(path: Path, line: str) -> None:
    with path.open("a") as file:
        file.write(line)


def ringreduce(folder: Path) -> None:
    import ringreduce as rr

    job, gradient = Job(folder), np.ones(_NUMBERS, np.float32)

    def train(comm: rr.Communicator, state: rr.State) -> None:
        job.begin()
        while not state["stops"][0]:
            job.compute(gradient, lambda x: comm.all_reduce(x, out=x), comm.size)
            stops = comm.all_reduce(np.array([job.stops()], np.int64))
            with state.update():
                state["stops"] += stops
            job.done(state.step, comm.rank, comm.size)

    rr.elastic(train, rr.State({"stops": np.zeros(1, np.int64)}))


def torch(folder: Path, every: int) -> None:
    import torch
    import torch.distributed as distributed

    distributed.init_process_group("gloo")
    rank, size = distributed.get_rank(), distributed.get_world_size()
    saved = folder / "checkpoint.pt"
    state = torch.load(saved) if saved.exists() else {"step": 0}
    job, gradient, stops = Job(folder), torch.ones(_NUMBERS), torch.zeros(1)

    def all_reduce(x: torch.Tensor) -> torch.Tensor:
        distributed.all_reduce(x)
        return x

    job.begin()
    while not stops[0]:
        job.compute(gradient, all_reduce, size)
        stops[0] = job.stops()
        distributed.all_reduce(stops)
        state = {"step": state["step"] + 1}
        if rank == 0 and state["step"] % every == 0:
            torch.save(state, f"{saved}.new")
            os.replace(f"{saved}.new", saved)
        job.done(state["step"], rank, size)
    distributed.destroy_process_group()


def horovod(folder: Path, every: int) -> None:
    import horovod.torch as hvd
    import torch

    hvd.init()
    job, gradient = Job(folder), torch.ones(_NUMBERS)

    @hvd.elastic.run
    def train(state: Any) -> None:
        job.begin()
        while not state.stops:
            job.compute(
                gradient, lambda x: hvd.allreduce_(x, op=hvd.Sum, name="gradient"), hvd.size()
            )
            state.stops = float(
                hvd.allreduce(torch.tensor([float(job.stops())]), op=hvd.Sum, name="stops")
            )
            state.step += 1
            if state.step % every == 0:
                state.commit()
            job.done(state.step, hvd.rank(), hvd.size())

    train(hvd.elastic.TorchState(step=0, stops=0.0))


PROGRAMS: dict[str, Callable[..., None]] = {
    "ringreduce": ringreduce,
    "torch": torch,
    "horovod": horovod,
}


if __name__ == "__main__":
    PROGRAMS[sys.argv[2]](Path(sys.argv[1]), *map(int, sys.argv[3:]))
