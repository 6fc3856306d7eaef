"""The last steps of a run, its losses, and what the watchers have received of them.

They are in the store with the arrays that steps change: another process that goes on with the store
reports each step and epoch once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum, auto
from typing import Any

import numpy as np

from ringreduce.train.course import Course
from ringreduce.train.results import Step
from ringreduce.train.stores import Store

PROGRESS, ROWS, STRETCH = "progress", "rows", "stretch"
"""Names of the journal's arrays in the store, and in a checkpoint of it."""
MOST = 128
"""The most steps that are kept; the watchers must receive them before there are more."""
_NUMBERS = 8
"""Numbers of a step that are kept, in the order of `Journal.record`."""


class _At(IntEnum):
    """Places in the array of the progress."""

    EPOCH_LOSS = 0
    """Sum of the losses of this epoch's samples so far."""
    LAST_LOSS = auto()
    """Mean loss of the last complete epoch; NaN before."""
    REPORTED_STEPS = auto()
    """Steps that the watchers have received."""
    REPORTED_EPOCHS = auto()
    """Epochs that the watchers have received."""


@dataclass(frozen=True)
class RunState:
    """The progress of a run, besides its arrays."""

    step: int
    """Number of steps made."""
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
