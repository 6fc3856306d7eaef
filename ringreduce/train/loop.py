"""Data-parallel training: every rank has all parameters; gradients are summed during backward.

A global batch is divided among the ranks.  Each rank computes its share of the mean loss and of the
gradient (`mlp` divides by the count of the whole batch).  The all-reduce adds the shares, and every
rank makes the same step.  So N ranks compute the same as one rank on the same global batch, up to
the order of additions.  The sum is bitwise the same on all ranks, and so are the parameters.
`check_equal` proves this every `check_every` steps, before each checkpoint, and at the end.

Batch normalisation takes its means and variances over the samples of all ranks.  Their running
means, with which a network is evaluated, are the same on all ranks too.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import numpy as np

import ringreduce as rr
from ringreduce.train import data, mlp, optimizers
from ringreduce.train.clipping import clip, global_norm
from ringreduce.train.data_parallel import DataParallel
from ringreduce.train.equality import check_equal, on_host
from ringreduce.train.results import Epoch, Result, Step, Watcher
from ringreduce.train.settings import Settings

_FORGOTTEN = 0.1
"""Share of a running mean that a step's statistics replace, once ten steps are made."""


@dataclass(frozen=True)
class State:
    """The progress of a run, besides its arrays."""

    step: int
    """Number of steps made."""
    epoch_loss: float
    """Sum of the losses of this epoch's samples so far."""
    last_loss: float
    """Mean loss of the last complete epoch; NaN before."""


class _Timed:
    """Stands in for a communicator, and adds up the time of its all-reduces."""

    def __init__(self, comm: rr.Communicator) -> None:
        self._comm = comm
        self.seconds = 0.0

    def all_reduce(self, x: Any, *, out: Any = None) -> Any:
        """Make the all-reduce."""
        begin = time.perf_counter()
        try:
            return self._comm.all_reduce(x, out=out)
        finally:
            self.seconds += time.perf_counter() - begin


class Trainer:
    """One rank's part of a run.

    Every rank must make a Trainer with the same data and settings, and make the same calls.  All
    ranks start with the parameters of rank 0.

    Args:
        comm: the communicator of the ranks.
        split: the samples to train on, and those that are held out.
        settings: all settings of the run.
        xp: the array module, NumPy or CuPy.

    Attributes:
        sizes: the widths of the network, from inputs to classes.
        flat: all parameters, a one-dimensional array.
        state: the progress of the run: its `step`, and the losses of the epoch.

    Raises:
        ValueError: an unknown algorithm, a wire that does not fit the dtype, or a warm-up that is
            longer than the run.  All ranks raise it.

    Example:
        >>> settings = rr.train.Settings(epochs=3, hidden=(16,), batch=64)
        >>> def program(comm):
        ...     trainer = rr.train.Trainer(comm, rr.train.load(settings), settings)
        ...     return trainer.sizes, trainer.steps, trainer.run().accuracy > 0.8
        >>> rr.spawn(program, 2)[0]
        ((64, 16, 10), 69, True)
    """

    __module__ = "ringreduce.train"

    def __init__(
        self, comm: rr.Communicator, split: data.Split, settings: Settings, xp: ModuleType = np
    ) -> None:
        self.comm, self.settings, self._xp = comm, settings, xp
        self._x = xp.asarray(split.train_x, settings.dtype)
        self._labels = xp.asarray(split.train_labels)
        if settings.warm_up > self.steps:
            raise ValueError(f"warm_up is {settings.warm_up}; the run has {self.steps} steps")
        mine = data.part(len(split.held_out_labels), comm.rank, comm.size)
        self._held_out_x = xp.asarray(split.held_out_x[mine], settings.dtype)
        self._held_out_labels = xp.asarray(split.held_out_labels[mine])
        self._held_out_samples = len(split.held_out_labels)
        self.sizes = sizes = split.widths(settings.hidden)
        norm = settings.batch_norm
        self.flat = mlp.init_params(sizes, settings.seed, settings.dtype, xp, norm)
        self.parameters = mlp.views(self.flat, sizes, norm)
        self._named = mlp.named(self.parameters)
        self._slots = {
            slot: mlp.named(mlp.views(xp.zeros_like(self.flat), sizes, norm))
            for slot in optimizers.SLOTS[settings.optimizer]
        }
        self._running = mlp.init_statistics(sizes, xp) if norm else {}
        self._statistics: dict[str, Any] = {}
        """The means and variances of the last global batch."""
        self._normalising = _Timed(comm)
        self._update = optimizers.update(settings)
        self._dp = DataParallel(
            comm,
            self._named,
            first_bucket_bytes=settings.first_bucket_bytes,
            bucket_bytes=settings.bucket_bytes,
            op="sum",
            wire=None if settings.wire == "none" else settings.wire,
            algorithm=settings.algorithm,
        )
        self._buffers = {name: self._dp.buffer(name) for name in self._named}
        self.state = State(0, 0.0, math.nan)
        self._order: tuple[int, Any] = (-1, None)
        self._unreported: list[Step] = []
        self._steps_of_epoch: list[Step] = []
        self._times = np.zeros(3)
        self._steps_made = 0

    @property
    def epoch_steps(self) -> int:
        """Number of steps in an epoch."""
        return -(-len(self._labels) // self.settings.batch)

    @property
    def steps(self) -> int:
        """Number of steps in the whole run."""
        return self.settings.epochs * self.epoch_steps

    # --- the contents of a checkpoint ---

    def arrays(self) -> dict[str, np.ndarray]:
        """Return all arrays that steps change, by name.

        These are the parameters, the optimizer's own arrays, and the running means of batch
        normalisation.

        Returns:
            Name -> NumPy array.  With `state`, that is the content of a checkpoint.

        Example:
            >>> settings = rr.train.Settings(hidden=(8,))
            >>> def program(comm):
            ...     trainer = rr.train.Trainer(comm, rr.train.load(settings), settings)
            ...     return list(trainer.arrays())[:2]
            >>> rr.spawn(program, 1)
            [['0.weight', '0.bias']]
        """
        return {name: on_host(array) for name, array in self._arrays().items()}

    def restore(self, arrays: Mapping[str, np.ndarray] | None, state: State) -> None:
        """Continue from `state`, with rank 0's `arrays`.

        Args:
            arrays: what `arrays` has returned; ranks other than 0 may pass None.
            state: the `state` of the Trainer at that time.

        Raises:
            ValueError: `state` has more steps than the run.  All ranks raise it.

        Example:
            >>> settings = rr.train.Settings(epochs=1, hidden=(8,), batch=359)
            >>> def program(comm):
            ...     split = rr.train.load(settings)
            ...     before, after = (rr.train.Trainer(comm, split, settings) for _ in range(2))
            ...     digest = before.run().digest
            ...     after.restore(before.arrays(), before.state)
            ...     return after.run().digest == digest
            >>> rr.spawn(program, 2)
            [True, True]
        """
        if state.step > self.steps:
            raise ValueError(
                f"{state.step} steps were made, {state.step / self.epoch_steps:.3g} epochs; with "
                f"epochs = {self.settings.epochs} there is nothing left to do"
            )
        self.state = state
        for name, array in self._arrays().items():
            if arrays is not None:
                array[...] = self._xp.asarray(arrays[name])
            self.comm.broadcast(array, root=0, out=array)

    def _arrays(self) -> dict[str, Any]:
        slots = {
            f"{slot}/{name}": array
            for slot, arrays in self._slots.items()
            for name, array in arrays.items()
        }
        running = {f"running/{name}": array for name, array in self._running.items()}
        return self._named | slots | running

    # --- training ---

    def run(
        self,
        watchers: Sequence[Watcher] = (),
        save: Callable[[Trainer], None] | None = None,
        save_every: int = 0,
    ) -> Result:
        """Train from the present state to the end.

        Args:
            watchers: they receive steps and epochs; they may differ between ranks.
            save: it is called on all ranks every `save_every` steps and at the end.  Before each
                call the parameters are proven to be equal.
            save_every: steps between calls of `save`; 0: one after each epoch.

        Returns:
            The `Result`.

        Raises:
            FloatingPointError: the loss or a parameter is infinite or NaN.  All ranks raise it.
            DriftError: ranks have different parameters.  All ranks raise it.

        Example:
            >>> settings = rr.train.Settings(epochs=2, hidden=(8,), batch=359)
            >>> def program(comm):
            ...     saved = []
            ...     trainer = rr.train.Trainer(comm, rr.train.load(settings), settings)
            ...     trainer.run(save=lambda trainer: saved.append(trainer.state.step))
            ...     return saved
            >>> rr.spawn(program, 2)[0]
            [5, 10]
        """
        every = self.settings.check_every
        while self.state.step < self.steps:
            # An infinite loss is an error below; NumPy need not warn of it as well.
            with np.errstate(over="ignore", invalid="ignore"):
                self._make_step()
            made = self.state.step
            ends = made % self.epoch_steps == 0
            saves = save is not None and (
                made == self.steps or (made % save_every == 0 if save_every else ends)
            )
            checks = every > 0 and made % every == 0
            if ends or saves or checks:
                self._report_steps(watchers)
            if saves or checks:
                check_equal(self.comm, self.flat)
                self._check_finite()
            if ends:
                self._end_epoch(watchers)
            if saves:
                assert save is not None
                save(self)
        digest = check_equal(self.comm, self.flat)
        self._check_finite()
        return Result(self.flat, digest, self.state.last_loss, self.accuracy(), *self._mean_times())

    def gradients(self, x: Any, labels: Any, count: int) -> tuple[float, dict[str, Any]]:
        """Return this rank's share of the mean loss, and the mean's gradient: name -> array.

        Args:
            x: this rank's part of a global batch, (samples, inputs), possibly empty.
            labels: their classes, (samples,).
            count: samples of the global batch.

        Returns:
            The share of the loss, and the gradients, which the next step overwrites.

        Raises:
            MismatchError: another rank makes another call.

        Example:
            >>> settings = rr.train.Settings(hidden=(8,))
            >>> split = rr.train.load(settings)
            >>> def program(comm):
            ...     trainer = rr.train.Trainer(comm, split, settings)
            ...     mine = slice(comm.rank, 10, comm.size)
            ...     loss, gradients = trainer.gradients(
            ...         split.train_x[mine], split.train_labels[mine], count=10
            ...     )
            ...     return loss > 0, gradients["0.weight"].shape
            >>> rr.spawn(program, 2)[0]
            (True, (64, 8))
        """
        loss, pairs = mlp.gradients(
            self.parameters,
            x,
            labels,
            count,
            self._xp,
            self._buffers,
            self._normalising,
            self._statistics,
        )
        for name, _ in pairs:
            self._dp.ready(name)
        return float(loss), self._dp.finish()

    def accuracy(self) -> float:
        """Return the accuracy on the held-out samples; each rank computes a part.  Collective.

        Returns:
            The accuracy, from 0 to 1.

        Raises:
            MismatchError, PeerTimeoutError, PeerLostError: as for `Communicator.all_reduce`.

        Example:
            >>> settings = rr.train.Settings(hidden=(8,))
            >>> def program(comm):
            ...     trainer = rr.train.Trainer(comm, rr.train.load(settings), settings)
            ...     return trainer.accuracy() < 0.5
            >>> rr.spawn(program, 2)  # before training
            [True, True]
        """
        right = mlp.right(
            self.parameters, self._held_out_x, self._held_out_labels, self._xp, self._running
        )
        total = self.comm.all_reduce(np.array([right]), algorithm=self.settings.algorithm)
        return int(total[0]) / self._held_out_samples

    def _make_step(self) -> None:
        begin, self._normalising.seconds = time.perf_counter(), 0.0
        settings, number = self.settings, self.state.step
        epoch, within = number // self.epoch_steps + 1, number % self.epoch_steps
        batch = self._epoch_order(epoch)[within * settings.batch : (within + 1) * settings.batch]
        rows = data.part(len(batch), self.comm.rank, self.comm.size)
        mine = self._xp.asarray(batch[rows])
        x = self._x[mine]
        if settings.noise:
            key = settings.seed, epoch, within
            x += self._xp.asarray(data.noise(rows, x.shape[1], settings.noise, key), x.dtype)
        loss, gradients = self.gradients(x, self._labels[mine], len(batch))
        if settings.clip:
            clip(gradients.values(), global_norm(self._dp.shard, self.comm), settings.clip)
        lr = optimizers.learning_rate(settings, number, self.steps)
        for name, gradient in gradients.items():
            own = tuple(arrays[name] for arrays in self._slots.values())
            optimizers.in_blocks(self._update, self._named[name], own, gradient, lr, number)
        self._average_statistics(number)
        step_s = time.perf_counter() - begin
        normalising_s = self._normalising.seconds
        communication_s = self._dp.times.communication_s + normalising_s
        exposed_s = self._dp.times.exposed_s + normalising_s
        self._times += step_s, communication_s, exposed_s
        self._steps_made += 1
        self.state = replace(self.state, step=number + 1)
        self._unreported.append(
            Step(
                step=number + 1,
                epoch=epoch,
                loss=loss,
                lr=lr,
                samples=len(batch),
                step_s=step_s,
                compute_s=step_s - exposed_s,
                communication_s=communication_s,
                exposed_s=exposed_s,
            )
        )

    def _average_statistics(self, step: int) -> None:
        """Update the running means by the statistics of a step, numbered from 0.

        The first steps count alike, so that the mean does not remember its initial value.
        """
        share = max(_FORGOTTEN, 1 / (step + 1))
        for name, value in self._statistics.items():
            self._running[name] += share * (value - self._running[name])

    def _epoch_order(self, epoch: int) -> Any:
        if self._order[0] != epoch:
            self._order = epoch, data.order(len(self._labels), self.settings.seed, epoch)
        return self._order[1]

    def _report_steps(self, watchers: Sequence[Watcher]) -> None:
        """Add up the ranks' shares of the losses since the last call, and report the steps."""
        shares = np.array([step.loss for step in self._unreported])
        losses = self.comm.all_reduce(shares, algorithm=self.settings.algorithm).tolist()
        reported = [replace(s, loss=loss) for s, loss in zip(self._unreported, losses, strict=True)]
        total = sum((s.loss * s.samples for s in reported), self.state.epoch_loss)
        self.state = replace(self.state, epoch_loss=total)
        self._unreported = []
        self._steps_of_epoch += reported
        bad = next((i for i, step in enumerate(reported) if not math.isfinite(step.loss)), None)
        for watcher in watchers:
            watcher.steps(reported[:bad])
        if bad is not None:
            step = reported[bad]
            raise FloatingPointError(
                f"train: the loss is {step.loss} in step {step.step}, epoch {step.epoch}, with "
                f"lr {step.lr:g}; take a smaller lr"
            )

    def _check_finite(self) -> None:
        """Raise if a parameter is not finite: the loss is computed before its step.

        All ranks have the same parameters, so all raise.
        """
        if not bool(self._xp.isfinite(self.flat).all()):
            raise FloatingPointError(
                f"train: parameters are infinite or no numbers after step {self.state.step}; take "
                "a smaller lr"
            )

    def _end_epoch(self, watchers: Sequence[Watcher]) -> None:
        loss = self.state.epoch_loss / len(self._labels)
        steps, self._steps_of_epoch = self._steps_of_epoch, []
        step_s, exposed_s = (
            sum(getattr(step, name) for step in steps) for name in ("step_s", "exposed_s")
        )
        samples = sum(step.samples for step in steps)
        epoch = Epoch(steps[-1].epoch, loss, self.accuracy(), samples / step_s, exposed_s / step_s)
        self.state = State(self.state.step, 0.0, loss)
        for watcher in watchers:
            watcher.epoch(epoch)

    def _mean_times(self) -> list[float]:
        totals = self.comm.all_reduce(self._times, op="mean", algorithm=self.settings.algorithm)
        means: list[float] = (totals / max(1, self._steps_made)).tolist()
        return means


def shapes(sizes: Sequence[int], settings: Settings) -> dict[str, tuple[int, ...]]:
    """Return the shapes of `Trainer.arrays`, by name."""
    norm = settings.batch_norm
    network = mlp.views(np.empty(mlp.parameter_count(sizes, norm)), sizes, norm)
    ours = {name: array.shape for name, array in mlp.named(network).items()}
    slots = {
        f"{slot}/{name}": shape
        for slot in optimizers.SLOTS[settings.optimizer]
        for name, shape in ours.items()
    }
    running = mlp.init_statistics(sizes) if norm else {}
    return ours | slots | {f"running/{name}": array.shape for name, array in running.items()}


def train(
    comm: rr.Communicator,
    split: data.Split,
    settings: Settings,
    *,
    watchers: Sequence[Watcher] = (),
    xp: ModuleType = np,
) -> Result:
    """Train on the ranks of `comm`; every rank must make this call with equal split and settings.

    Args:
        comm: the communicator of the ranks.
        split: the samples to train on, and those that are held out.
        settings: all settings of the run.
        watchers: they receive steps and epochs; they may differ between ranks.
        xp: the array module, NumPy or CuPy.

    Returns:
        The `Result`, the same on every rank but for its times.

    Raises:
        ValueError, FloatingPointError, DriftError: as for `Trainer` and `Trainer.run`.

    Example:
        >>> settings = rr.train.Settings(epochs=3, hidden=(16,), batch=64)
        >>> def program(comm):
        ...     return rr.train.train(comm, rr.train.load(settings), settings).accuracy > 0.8
        >>> rr.spawn(program, 2)
        [True, True]
    """
    return Trainer(comm, split, settings, xp).run(watchers)
