"""The step of a pipeline beside the time that its schedule predicts.

    mpirun -n 4 python -m benchmarks.pipeline waits [--draw FOLDER]
    OPENBLAS_NUM_THREADS=1 mpirun -n 2 python -m benchmarks.pipeline mlp [--draw FOLDER]

``waits``: every action waits in place of computing, 20 ms forward and 40 ms backward, so that ranks
may share cores.  The prediction is the time of `rr.pipeline.prove`.  ``mlp``: eight layers of 1024,
a batch of 512, float32.  In every turn each rank first executes its own actions while the other
waits.  The prediction of the turn takes the mean times of these.  It is a mean because a step is a
sum of actions, slow ones included.  Then both ranks execute their own actions at once, without
messages; a row has the time of this over that of the ranks in turns (``at_once_of_alone``).  The
gradients of every step are compared with those of one process, bit by bit.

Writes rows to ``bench_results/pipeline.jsonl``.  ``of_predicted`` is the median, over the turns, of
the time of a step over the prediction of the same turn: the machine may become slower between
turns.  ``--draw`` draws the predicted times beside those of the step, of the turn with this median.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

import ringreduce as rr
from benchmarks.rows import command_line, environment, replace
from ringreduce.parallel.layers import Layer, backward_all, cross_entropy, forward_all
from ringreduce.parallel.sampler import part
from ringreduce.train import PipelineParallel, mlp

NAME = "pipeline"
SCHEDULES = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zero_bubble": 1}
"""Name -> stages of each rank."""
_WAIT_S = 0.020
_WIDTH, _LAYERS, _BATCH = 1024, 8, 512
_COUNT = {"waits": 5, "mlp": 15}
"""Steps of each schedule that are timed."""
Times = Sequence[tuple[float, float]]
"""Begin and end of each action of a rank, in seconds."""


class Waits:
    """A layer ``y = weight * x`` that waits in each of its three passes."""

    def __init__(self, number: int) -> None:
        self.parameters = {f"{number}.weight": np.full(4, 1 + number / 8)}

    def forward(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        time.sleep(_WAIT_S)
        (weight,) = self.parameters.values()
        return weight * x, x

    def backward(
        self, kept: np.ndarray, gradient: np.ndarray, into: Mapping[str, np.ndarray]
    ) -> tuple[np.ndarray, Iterator[tuple[str, np.ndarray]]]:
        time.sleep(_WAIT_S)
        (weight,) = self.parameters.values()
        return weight * gradient, self._of_weight(kept, gradient)

    def _of_weight(self, x: np.ndarray, gradient: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
        time.sleep(_WAIT_S)
        (name,) = self.parameters
        yield name, (x * gradient).sum(axis=0)


@dataclasses.dataclass(frozen=True)
class Model:
    """A model, its batch and its loss."""

    layers: Sequence[Layer]
    x: np.ndarray
    labels: np.ndarray
    loss: Callable[..., Any]

    def gradients(self, splits: int) -> dict[str, bytes]:
        """The bits of the gradients that one process computes."""
        sums: dict[str, np.ndarray] = {}
        for number in range(splits):
            rows = part(len(self.x), number, splits)
            y, kept = forward_all(self.layers, self.x[rows])
            _, gradient = self.loss(y, self.labels[rows], len(self.x))
            for _, pairs in backward_all(self.layers, kept, gradient, {}):
                for name, array in pairs:
                    if number:
                        sums[name] += array
                    else:
                        sums[name] = array
        return {name: array.tobytes() for name, array in sums.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", choices=["waits", "mlp"])
    parser.add_argument("--schedules", nargs="+", default=[*SCHEDULES], choices=[*SCHEDULES])
    parser.add_argument("--splits", type=int, nargs="+", default=[8, 16], metavar="M")
    parser.add_argument("--draw", type=Path, metavar="FOLDER")
    options = parser.parse_args()
    rows = []
    with rr.init() as comm:
        where = environment(command_line(NAME))
        for name in options.schedules:
            for splits in options.splits:
                found = _measure(comm, options.model, name, splits)
                row = _row(options.model, found) | where
                rows.append(row)
                if comm.rank == 0:
                    print(*(row[key] for key in ("schedule", "splits", "predicted_ms")), end=" ")
                    print(row["median_ms"], f"{row['of_predicted']}x", flush=True)
                    if options.draw:
                        _draw(options.draw, options.model, found.median)
        if comm.rank == 0:
            replace(NAME, rows, same=("mpi", "ranks", "model", "schedule", "splits"))


@dataclasses.dataclass(frozen=True)
class Turn:
    """A step, and what was predicted for it."""

    predicted: rr.pipeline.Timeline
    measured: rr.pipeline.Timeline
    milliseconds: float
    """From the begin of the step to its end on the last rank."""

    @property
    def of_predicted(self) -> float:
        """The time of the step over the predicted time."""
        return self.milliseconds / self.predicted.time


@dataclasses.dataclass(frozen=True)
class Found:
    """The measurements of a schedule."""

    turns: Sequence[Turn]
    """In the order of `of_predicted`."""
    at_once_of_alone: float | None
    """Time of the actions that all ranks execute at once, over that while the others wait."""

    @property
    def median(self) -> Turn:
        """The turn in the middle."""
        return self.turns[len(self.turns) // 2]


def _measure(comm: rr.Communicator, kind: str, name: str, splits: int) -> Found:
    virtual = SCHEDULES[name]
    model = _waiting(comm.size * virtual) if kind == "waits" else _network()
    wanted = model.gradients(splits)
    make = partial(PipelineParallel, schedule=name, virtual=virtual, splits=splits)
    pipe = make(comm, model.layers, loss=model.loss)
    alone = make(comm.split(comm.rank), pipe.layers, loss=_loss_of(comm, model))
    turns: list[Turn] = []
    own: list[Times] = []
    at_once: list[Times] = []
    costs = _costs_of_waits(virtual)
    for _ in range(1 + _COUNT[kind]):
        if kind == "mlp":
            own.append(_in_turns(comm, alone, model))
            costs = _costs(pipe, alone, own[-1])
            MPI.COMM_WORLD.Barrier()
            alone.step(model.x, model.labels, len(model.x))
            at_once.append(alone.times)
        MPI.COMM_WORLD.Barrier()
        begin = time.perf_counter()
        pipe.step(model.x, model.labels, len(model.x))
        took = _slowest(time.perf_counter() - begin)
        for parameter, gradient in pipe.gradients.items():
            if gradient.tobytes() != wanted[parameter]:
                raise SystemExit(f"{name}: a wrong gradient of {parameter}")
        predicted = rr.pipeline.timeline(pipe.schedule, costs)
        measured = _timeline(pipe.schedule, MPI.COMM_WORLD.allgather(pipe.times))
        turns.append(Turn(predicted, measured, 1e3 * took))
    longer = _slowest(_busy_s(at_once[1:]) / _busy_s(own[1:])) if kind == "mlp" else None
    counted = turns[1:]  # the first step allocates memory
    return Found(sorted(counted, key=lambda turn: turn.of_predicted), longer)


# --- models ---------------------------------------------------------------------------------------


def _waiting(stages: int) -> Model:
    """One layer for each stage."""

    def loss(y: np.ndarray, labels: np.ndarray, count: int) -> tuple[float, np.ndarray]:
        return float(y.sum()) / count, np.full_like(y, 1 / count)

    rng = np.random.default_rng(1)
    layers = [Waits(number) for number in range(stages)]
    return Model(layers, rng.standard_normal((64, 4)), np.zeros(64, int), loss)


def _network() -> Model:
    rng, sizes = np.random.default_rng(1), (_WIDTH,) * (_LAYERS + 1)
    layers = mlp.layers(mlp.views(mlp.init_params(sizes, seed=1), sizes))
    x = rng.standard_normal((_BATCH, _WIDTH), np.float32)
    return Model(layers, x, rng.integers(0, _WIDTH, _BATCH), cross_entropy)


# --- predictions ----------------------------------------------------------------------------------


def _costs_of_waits(virtual: int) -> rr.pipeline.Costs:
    """In milliseconds; a rank's layers are those of all its stages."""
    wait = 1e3 * _WAIT_S * virtual
    return rr.pipeline.Costs(forward=wait, backward=2 * wait)


def _loss_of(comm: rr.Communicator, model: Model) -> Callable[..., Any]:
    """The model's loss on the last rank; on the others, a gradient that costs nothing."""
    if comm.rank == comm.size - 1:
        return model.loss
    return lambda y, labels, count: (0.0, np.ones_like(y))


def _in_turns(comm: rr.Communicator, alone: PipelineParallel, model: Model) -> Times:
    """Return the times of this rank's actions, executed while the other ranks wait."""
    for rank in range(comm.size):
        MPI.COMM_WORLD.Barrier()
        if rank == comm.rank:
            alone.step(model.x, model.labels, len(model.x))
    return alone.times


def _costs(pipe: PipelineParallel, alone: PipelineParallel, own: Times) -> rr.pipeline.Costs:
    """Return the mean milliseconds of each stage's forward and backward, given this rank's times.

    The gradients of the input and of the weights count as halves of the backward.
    """
    took: dict[tuple[int, str], list[float]] = {}
    for action, (begin, end) in zip(alone.schedule.acts(0), own, strict=True):
        stage = pipe.stages[action.stage]
        took.setdefault((stage, action.kind), []).append(1e3 * (end - begin))
    mine = {key: statistics.mean(each) for key, each in took.items()}
    every = {key: each for of in MPI.COMM_WORLD.allgather(mine) for key, each in of.items()}
    stages = range(pipe.schedule.stages)
    return rr.pipeline.Costs(
        forward=[every[stage, "F"] for stage in stages],
        backward=[sum(every.get((stage, kind), 0.0) for kind in "BIW") for stage in stages],
    )


# --- results --------------------------------------------------------------------------------------


def _slowest(seconds: float) -> float:
    found: float = MPI.COMM_WORLD.allreduce(seconds, MPI.MAX)
    return found


def _busy_s(turns: Sequence[Times]) -> float:
    """Return the seconds of this rank's actions, as the median over the turns."""
    return statistics.median(sum(end - begin for begin, end in times) for times in turns)


def _timeline(schedule: rr.pipeline.PipelineSchedule, times: list[Times]) -> rr.pipeline.Timeline:
    """Return the measured times in milliseconds; ranks of one host have one clock."""
    start = min(begin for each in times for begin, _ in each)
    return rr.pipeline.Timeline(
        schedule,
        begins=[[1e3 * (begin - start) for begin, _ in each] for each in times],
        ends=[[1e3 * (end - start) for _, end in each] for each in times],
    )


def _row(model: str, found: Found) -> dict[str, Any]:
    schedule = found.median.predicted.schedule
    row = {
        "benchmark": NAME,
        "model": model,
        "schedule": schedule.name,
        "virtual": schedule.virtual,
        "splits": schedule.splits,
        "predicted_ms": round(statistics.median(t.predicted.time for t in found.turns), 2),
        "median_ms": round(statistics.median(t.milliseconds for t in found.turns), 2),
        "of_predicted": round(found.median.of_predicted, 4),
        "least_of_predicted": round(found.turns[0].of_predicted, 4),
        "most_of_predicted": round(found.turns[-1].of_predicted, 4),
        "steps": len(found.turns),
    }
    if found.at_once_of_alone is not None:
        row["at_once_of_alone"] = round(found.at_once_of_alone, 4)
    return row


def _draw(folder: Path, model: str, turn: Turn) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    schedule = turn.predicted.schedule
    path = folder / f"{model}-{schedule.name}-{schedule.splits}.svg"
    pictures = [_titled(turn.predicted, "predicted"), _titled(turn.measured, "measured")]
    path.write_text(rr.pipeline.to_svg(*pictures))
    print(f"wrote {path}")


def _titled(times: rr.pipeline.Timeline, what: str) -> rr.pipeline.Timeline:
    name = f"{times.schedule.name}, {what} ms"
    return dataclasses.replace(times, schedule=dataclasses.replace(times.schedule, name=name))


if __name__ == "__main__":
    main()
