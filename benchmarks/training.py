"""A training step's exposed communication, ours and that of torch's DDP over Gloo.

    OMP_NUM_THREADS=1 mpirun -n 2 python -m benchmarks.training [--batches 64 512]

One network, 1024-4096-4096-10, SGD with momentum, float32, one BLAS thread a rank.  Four programs
take turns, step by step: ours and torch's, each with communication and the same without it.  A step
lasts from when the last rank begins it until the last one ends it; what counts is the median.
Exposed communication is a program's step less that of the same without communication.  After a
step from the same start, ours and torch's parameters are compared.
"""

from __future__ import annotations

import argparse
import datetime
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as distributed
from mpi4py import MPI

import ringreduce as rr
from benchmarks.rows import command_line, environment, replace
from ringreduce.bench.gloo import address
from ringreduce.train import mlp, optimizers

SIZES = (1024, 4096, 4096, 10)
LR, MOMENTUM = 0.01, 0.9
ROUNDS = {64: 40, 512: 12}
"""Batch a rank -> steps of each program that are timed."""
OURS, OURS_ALONE, DDP, DDP_ALONE = "ringreduce", "ringreduce alone", "DDP", "DDP alone"


class Ours:
    """A replica of ours; alone without a communicator."""

    def __init__(self, comm: rr.Communicator | None) -> None:
        self.flat = mlp.init_params(SIZES, seed=0)
        layers = mlp.views(self.flat, SIZES)
        self._network, self._params = mlp.layers(layers), mlp.named(layers)
        self._velocity = mlp.named(mlp.views(np.zeros_like(self.flat), SIZES))
        if comm is not None:
            self._dp = rr.train.DataParallel(comm, self._params, algorithm="ring")
            self._buffers = {name: self._dp.buffer(name) for name in self._params}
        else:
            self._dp = None
            self._buffers = mlp.named(mlp.views(np.zeros_like(self.flat), SIZES))

    def step(self, x: np.ndarray, labels: np.ndarray) -> None:
        _, _, pairs = mlp.step(self._network, x, labels, len(x), self._buffers)
        for name, gradient in pairs:
            if self._dp is not None:
                self._dp.ready(name, gradient)
        gradients = self._buffers if self._dp is None else self._dp.finish()
        for name, gradient in gradients.items():
            arrays = self._params[name], self._velocity[name]
            optimizers.in_blocks(_update, arrays, gradient, LR, 0)


def _update(
    arrays: tuple[Any, ...], gradient: Any, lr: float, _: int, out: tuple[Any, ...]
) -> None:
    optimizers.sgd(arrays, gradient, lr, MOMENTUM, out=out)


class Torch:
    """The same in torch."""

    def __init__(self, parallel: bool) -> None:
        layers: list[torch.nn.Module] = []
        with torch.no_grad():
            start = mlp.views(mlp.init_params(SIZES, seed=0), SIZES)
            for weight, bias in start:
                layer = torch.nn.Linear(*weight.shape)
                layer.weight.copy_(torch.from_numpy(weight.T.copy()))
                layer.bias.copy_(torch.from_numpy(bias.copy()))
                layers += [layer, torch.nn.ReLU()]
        self.module = torch.nn.Sequential(*layers[:-1])
        self._model = torch.nn.parallel.DistributedDataParallel(self.module) if parallel else (
            self.module
        )  # fmt: skip
        self._loss = torch.nn.CrossEntropyLoss()
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=LR, momentum=MOMENTUM)

    def step(self, x: np.ndarray, labels: np.ndarray) -> None:
        self._optimizer.zero_grad()
        loss = self._loss(self._model(torch.from_numpy(x)), torch.from_numpy(labels))
        loss.backward()
        self._optimizer.step()

    def flat(self) -> np.ndarray:
        arrays = [p.detach().numpy() for p in self.module.parameters()]
        return np.concatenate([a.T.reshape(-1) for a in arrays])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, nargs="+", default=list(ROUNDS))
    options = parser.parse_args()
    world = MPI.COMM_WORLD
    torch.set_num_threads(1)
    store = distributed.TCPStore(
        *address(world), world.size, world.rank == 0, datetime.timedelta(seconds=60)
    )
    distributed.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size)
    rows = []
    with rr.init() as comm:
        for batch in options.batches:
            programs = {
                OURS: Ours(comm),
                OURS_ALONE: Ours(None),
                DDP: Torch(parallel=True),
                DDP_ALONE: Torch(parallel=False),
            }
            rows.append(_row(world, batch, {n: p.step for n, p in programs.items()}, programs))
            if world.rank == 0:
                print({k: rows[-1][k] for k in ("batch", "milliseconds", "exposed_ms")}, flush=True)
                print(f"  {rows[-1]['of_alone']:.3f} of the speed without communication")
    if world.rank == 0:
        replace("training", rows, same=("mpi", "ranks", "batch"))
    distributed.destroy_process_group()


def _row(
    world: MPI.Intracomm, batch: int, steps: dict[str, Callable[..., None]], programs: Any
) -> dict[str, Any]:
    inputs = _inputs(world.rank, batch)
    first = next(inputs)
    for step in steps.values():
        step(*first)
    # float32: each number is a sum of `batch` products of about the same size.
    assert np.allclose(programs[OURS].flat, programs[DDP].flat(), rtol=1e-3, atol=1e-5)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    order = np.random.default_rng(batch)
    for _ in range(ROUNDS.get(batch, 20)):
        given = next(inputs)
        for name in order.permutation(list(steps)):
            world.Barrier()
            begin = time.perf_counter()
            steps[name](*given)
            # Ranks of one host have one clock.
            end = world.allreduce(time.perf_counter(), MPI.MAX)
            seconds[name].append(end - world.allreduce(begin, MPI.MAX))
    medians = {name: statistics.median(series) for name, series in seconds.items()}
    exposed = {OURS: medians[OURS] - medians[OURS_ALONE], DDP: medians[DDP] - medians[DDP_ALONE]}
    digests = world.allgather(programs[OURS].flat.tobytes())
    assert all(digest == digests[0] for digest in digests), "ranks have different parameters"
    return {
        "benchmark": "training",
        "batch": batch,
        "milliseconds": {name: round(1e3 * s, 2) for name, s in medians.items()},
        "exposed_ms": {name: round(1e3 * s, 2) for name, s in exposed.items()},
        "exposed_of_ddp": round(exposed[OURS] / exposed[DDP], 3),
        "of_alone": round(medians[OURS_ALONE] / medians[OURS], 4),
        "steps": ROUNDS.get(batch, 20),
        "torch": torch.__version__,
        **environment(command_line("training")),
    }


def _inputs(rank: int, batch: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng((rank, batch))
    while True:
        x = rng.standard_normal((batch, SIZES[0]), np.float32)
        yield x, rng.integers(0, SIZES[-1], batch)


if __name__ == "__main__":
    main()
