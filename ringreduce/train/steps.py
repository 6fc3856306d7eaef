"""The steps of a run: samples and learning rates, a record of the last steps, and the arrays.

The global batch is fixed, or follows the number of ranks.  A *stretch* is a run of steps with the
same global batch; another begins when the number of ranks has changed.  A new stretch goes on with
the next sample of the epoch, so that each epoch has each sample once.

The last steps, the losses, and what the watchers have received of them, are in the store with the
arrays that steps change: another process that goes on with the store reports each step and epoch
once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from enum import IntEnum, auto
from typing import Any

import numpy as np
from numpy.typing import NDArray

import ringreduce as rr
from ringreduce.parallel.sampler import Sampler
from ringreduce.train import optimizers
from ringreduce.train.results import Step
from ringreduce.train.settings import Settings


@dataclass(frozen=True)
class Stretch:
    """Steps with the same global batch."""

    first: int
    """Its first step, counted from 0."""
    epoch: int
    """The epoch of that step, counted from 1."""
    position: int
    """Samples of the epoch that were before it."""
    batch: int
    scale_before: float
    """Factor of the learning rate in the last step of the stretch before."""
    base: int
    """The global batch of the first stretch."""

    @classmethod
    def new(cls, batch: int) -> Stretch:
        return cls(0, 1, 0, batch, 1.0, batch)

    @classmethod
    def of(cls, numbers: NDArray[np.float64]) -> Stretch:
        first, epoch, position, batch, scale_before, base = numbers.tolist()
        return cls(int(first), int(epoch), int(position), int(batch), scale_before, int(base))

    @property
    def numbers(self) -> NDArray[np.float64]:
        """All its numbers, to be stored."""
        return np.array(astuple(self), np.float64)


class Course:
    """The steps of a run, from the beginning of a stretch to the end."""

    def __init__(self, samples: int, settings: Settings, stretch: Stretch) -> None:
        self.samples, self.stretch, self._settings = samples, stretch, settings
        self._sampler = Sampler(samples, stretch.batch, settings.seed)
        self.epoch_steps = self._sampler.epoch_steps
        self._begun_steps = -(-(samples - stretch.position) // stretch.batch)
        """Steps to the end of the epoch in which the stretch begins."""

    @property
    def steps(self) -> int:
        """Number of steps in the whole run, if the batch stays as it is."""
        whole = self._settings.epochs - self.stretch.epoch
        return self.stretch.first + self._begun_steps + whole * self.epoch_steps

    def place(self, step: int) -> tuple[int, int]:
        """Return the epoch of a step of this stretch, and the samples of the epoch before it."""
        made, begin = step - self.stretch.first, self.stretch
        if made < self._begun_steps:
            return begin.epoch, begin.position + made * begin.batch
        epochs, made = divmod(made - self._begun_steps, self.epoch_steps)
        return begin.epoch + 1 + epochs, made * begin.batch

    def epoch_of(self, step: int) -> int:
        return self.place(step)[0]

    def epochs(self, steps: int) -> int:
        """Return how many epochs are complete after `steps` steps."""
        return self.place(steps)[0] - 1

    def ends_epoch(self, step: int) -> bool:
        return self.place(step + 1)[1] == 0

    def batch_of(self, step: int) -> NDArray[np.intp]:
        """Return the indices of the samples in the global batch of a step."""
        epoch, position = self.place(step)
        return self._sampler.order_of(epoch)[position : position + self.stretch.batch]

    def number_in_epoch(self, step: int) -> int:
        """Return a batch's number in its epoch; after a change two may have the same."""
        return self.place(step)[1] // self.stretch.batch

    def learning_rate(self, step: int) -> float:
        settings = self._settings
        if not settings.batch_per_rank:
            return optimizers.learning_rate(settings, step, self.steps)
        epoch, position = self.place(step)
        made = (epoch - 1) * self.samples + position
        lr = optimizers.scheduled(settings, made, settings.epochs * self.samples)
        return optimizers.warm_up(lr * self._scale(step), step, settings.warm_up)

    def following(self, step: int, batch: int) -> Course:
        """Return the course from this step on, with another global batch."""
        epoch, position = self.place(step)
        scale = self._scale(step - 1) if step else 1.0
        begin = Stretch(step, epoch, position, batch, scale, self.stretch.base)
        return Course(self.samples, self._settings, begin)

    def _scale(self, step: int) -> float:
        """Return the factor of the learning rate: in proportion to the batch, reached evenly."""
        stretch, ramp = self.stretch, self._settings.ramp_steps
        aim = stretch.batch / (self._settings.lr_batch or stretch.base)
        if not stretch.first or step - stretch.first + 1 >= ramp:
            return aim
        share = (step - stretch.first + 1) / ramp
        return stretch.scale_before + (aim - stretch.scale_before) * share


PROGRESS, ROWS, STRETCH = "progress", "rows", "stretch"
"""Names of the journal's arrays in the store, and in a checkpoint of it."""
MOST = 128
"""The most steps that are kept; the watchers must receive them before there are more."""
_NUMBERS = 8
"""Numbers of a step that are kept, in the order of `Journal.record`."""


class _At(IntEnum):
    """Places in the array of the progress."""

    EPOCH_LOSS = 0
    LAST_LOSS = auto()
    REPORTED_STEPS = auto()
    REPORTED_EPOCHS = auto()


@dataclass(frozen=True)
class RunState:
    step: int
    epoch_loss: float
    """Sum of the losses of this epoch's samples so far."""
    last_loss: float
    """Mean loss of the last complete epoch; NaN before."""
    stretch: tuple[float, ...] = ()
    """The numbers of the stretch of steps; (): those of the store, or of a new run."""


def journal_arrays(course: Course, state: RunState | None = None) -> dict[str, Any]:
    """Return the arrays of a journal: a new one, or one whose steps are all reported."""
    progress = np.array([0.0, math.nan, 0.0, 0.0])
    if state is not None:
        reported = state.step, course.epochs(state.step)
        progress[:] = state.epoch_loss, state.last_loss, *reported
    rows = np.zeros((MOST, _NUMBERS))
    return {PROGRESS: progress, ROWS: rows, STRETCH: course.stretch.numbers}


class Journal:
    """The journal in a store.

    Attributes:
        steps, epochs: the numbers of those that this rank's watchers have received; other ranks
            count alike.  The next update stores them.
    """

    def __init__(self, store: Store, course: Course) -> None:
        self._store, self._course = store, course
        self.steps, self.epochs = self.reported

    @property
    def reported(self) -> tuple[int, int]:
        """The numbers of steps and epochs that watchers have received, as they are stored."""
        progress = self._store[PROGRESS]
        return int(progress[_At.REPORTED_STEPS]), int(progress[_At.REPORTED_EPOCHS])

    @property
    def state(self) -> RunState:
        epoch_loss, last_loss = self._store[PROGRESS][: _At.REPORTED_STEPS].tolist()
        stretch = tuple(self._store[STRETCH].tolist())
        return RunState(self._store.step, epoch_loss, last_loss, stretch)

    @property
    def is_full(self) -> bool:
        """Whether the watchers must receive the steps before another is made."""
        return self._store.step - self.steps >= MOST

    def record(
        self, loss: float, lr: float, samples: int, times: tuple[float, float, float], counts: bool
    ) -> None:
        """Keep the step of the present update; `counts`: it is a step of the run, and reported.

        `times` are those of the step, of its communication and of its exposed communication.
        """
        number, course = self._store.step, self._course
        row = loss, lr, samples, *times, self._store.generation, course.epoch_of(number)
        self._store[ROWS][number % MOST] = row
        if number == course.stretch.first:
            self._store[STRETCH][:] = course.stretch.numbers
        progress = self._store[PROGRESS]
        epoch_loss, last_loss = progress[: _At.REPORTED_STEPS].tolist()
        if counts:
            epoch_loss += loss * samples
            if course.ends_epoch(number):
                epoch_loss, last_loss = 0.0, epoch_loss / course.samples
        else:  # as if the watchers had received it
            self.steps, self.epochs = number + 1, course.epochs(number + 1)
        progress[:] = epoch_loss, last_loss, self.steps, self.epochs

    def of_epoch(self) -> list[Step]:
        """Return the kept steps of the present epoch that watchers have received already."""
        made = self._store.step
        epoch = int(self._store[ROWS][(made - 1) % MOST][-1])
        known = self._between(max(0, made - MOST), self.steps)
        # Steps before a checkpoint are not known: their times are 0.
        return [step for step in known if step.epoch == epoch and step.step_s]

    def take(self) -> list[Step]:
        """Return the steps that the watchers have not received; they count as received."""
        made = self._store.step
        found, self.steps = self._between(self.steps, made), made
        return found

    def _between(self, start: int, end: int) -> list[Step]:
        """Return the steps from number `start` to before `end`, counted from 0."""
        rows, found = self._store[ROWS], []
        for number in range(start, end):
            row = rows[number % MOST].tolist()
            loss, lr, samples, step_s, communication_s, exposed_s, generation, epoch = row
            found.append(
                Step(
                    step=number + 1,
                    epoch=int(epoch),
                    loss=loss,
                    lr=lr,
                    samples=int(samples),
                    step_s=step_s,
                    compute_s=step_s - exposed_s,
                    communication_s=communication_s,
                    exposed_s=exposed_s,
                    generation=int(generation),
                )
            )
        return found


class InPlace:
    """Arrays that an update changes where they are: on a GPU, or those that ranks divide.

    They are lost with the process.  Other arrays are in an `rr.State`, with the same methods.
    """

    generation = 1
    """Number of the membership of ranks; the first is 1."""

    def __init__(self, arrays: Mapping[str, Any]) -> None:
        self._arrays = dict(arrays)
        self.step = 0
        """Number of updates made."""

    def __getitem__(self, name: str) -> Any:
        """Return an array; of a State inside an update the new one, which has the old values."""
        return self._arrays[name]

    def empty(self, name: str) -> Any:
        """Return the new array of the update, to write all of its values."""
        return self._arrays[name]

    @contextmanager
    def update(self) -> Iterator[None]:
        """Change arrays, all at once, and count the update."""
        yield
        self.step += 1

    def restore(self, arrays: Mapping[str, Any], step: int) -> None:
        for name, array in arrays.items():
            self._arrays[name][...] = array
        self.step = step


Store = InPlace | rr.State
