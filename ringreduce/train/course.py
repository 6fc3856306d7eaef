"""The steps of a run: which samples each has, and its learning rate.

The global batch is fixed, or follows the number of ranks.  A *stretch* is a run of steps with the
same global batch; another begins when the number of ranks has changed.  A new stretch goes on with
the next sample of the epoch, so that each epoch has each sample once.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass

import numpy as np
from numpy.typing import NDArray

from ringreduce.parallel.sampler import Sampler
from ringreduce.train import optimizers
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
    """Samples of a global batch."""
    scale_before: float
    """Factor of the learning rate in the last step of the stretch before."""
    base: int
    """The global batch of the first stretch."""

    @classmethod
    def new(cls, batch: int) -> Stretch:
        """Return the first stretch of a run."""
        return cls(0, 1, 0, batch, 1.0, batch)

    @classmethod
    def of(cls, numbers: NDArray[np.float64]) -> Stretch:
        """Return the stretch that `numbers` has stored."""
        first, epoch, position, batch, scale_before, base = numbers.tolist()
        return cls(int(first), int(epoch), int(position), int(batch), scale_before, int(base))

    @property
    def numbers(self) -> NDArray[np.float64]:
        """All its numbers, to be stored."""
        return np.array(astuple(self), np.float64)


class Course:
    """The steps of a run, from the beginning of a stretch to the end.

    Attributes:
        epoch_steps: number of steps in a whole epoch.
    """

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
        """Return the epoch of a step of this stretch, counted from 1."""
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
        """Return the number of a batch in its epoch.

        After a change of the batch, two batches of an epoch may have the same number.
        """
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
