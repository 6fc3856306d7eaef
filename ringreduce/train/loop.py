"""Training: the same loop for every strategy.

A global batch is divided among the replicas of the model.  Each rank computes its share of the mean
loss and of the gradient (`mlp` divides by the count of the whole batch).  How the shares are added
up, and which rank updates which parameters, is the matter of the strategy, in a `Part`.  N ranks
compute the same as one rank on the same global batch, up to the order of additions.

Replicas have bitwise the same parameters.  This is proven every `check_every` steps, before each
checkpoint, and at the end.  If replicas step alone, proofs and checkpoints wait until they meet.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from types import ModuleType
from typing import Any

import numpy as np

import ringreduce as rr
from ringreduce.errors import counted, shown
from ringreduce.parallel import sampler
from ringreduce.parallel.data_parallel import average
from ringreduce.parallel.over_ranks import bytes_of, check_equal
from ringreduce.parallel.store_messages import StoreStats
from ringreduce.train import data, strategies
from ringreduce.train.pace import ComputePace
from ringreduce.train.parts import Run
from ringreduce.train.results import Epoch, Result, Step, Watcher
from ringreduce.train.served_part import Served
from ringreduce.train.settings import Settings
from ringreduce.train.steps import (
    PROGRESS,
    STRETCH,
    Course,
    InPlace,
    Journal,
    RunState,
    Store,
    Stretch,
    journal_arrays,
)


class Trainer:
    """One rank's part of a run.

    Every rank must make a Trainer with the same data and settings, and make the same calls.  All
    ranks start with the parameters of rank 0.

    Args:
        comm: the communicator of the ranks.
        split: the samples to train on, and those that are held out.
        settings: all settings of the run.
        xp: the array module, NumPy or CuPy.
        strategy: where parameters are, and how gradients meet.  None: replicas, `Mirrored` on one
            node and `MultiWorkerMirrored` on several.
        elastic: True: `store` is an `rr.State`, so that training can go on after ranks are lost.
            A State: go on with this `store`, of a Trainer that had more ranks.
        pace: the time that this rank computes, for a comparison; None: no longer than it takes.

    Attributes:
        sizes: the widths of the network, from inputs to classes.
        strategy: the strategy of the run.
        store: the arrays that steps change, an `rr.State` if `elastic`.

    Raises:
        TypeError: `strategy` is no `Strategy`.
        ValueError: an unknown algorithm, a wire that does not fit the dtype, a warm-up that is
            longer than the run, a strategy that does not fit the ranks or the settings, or
            `elastic` with arrays that are not on each rank, in NumPy's arrays.  All ranks raise it.
        ImportError: strategy tpu without JAX.

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
        self,
        comm: rr.Communicator,
        split: data.Split,
        settings: Settings,
        xp: ModuleType = np,
        strategy: strategies.Strategy | None = None,
        elastic: bool | rr.State = False,
        pace: ComputePace | None = None,
    ) -> None:
        for kind, value in ((data.Split, split), (Settings, settings)):
            if not isinstance(value, kind):
                wanted = "pass comm, the split, then the settings"
                raise TypeError(f"train: got {shown(value)} for a {kind.__name__}; {wanted}")
        samples = len(split.train_labels)
        settings, per_rank = settings.for_ranks(comm.size), settings.batch_per_rank
        if per_rank and settings.batch > samples:
            make = f"{counted(comm.size, 'rank')} make{'s' * (comm.size == 1)}"
            raise ValueError(
                f"batch_per_rank is {per_rank}: {make} a batch of {settings.batch}, and there are "
                f"{samples} training samples"
            )
        if settings.batch_norm and samples % settings.batch == 1:
            raise ValueError(
                f"batch is {settings.batch}; of {samples} training samples the last batch has one "
                "sample, and batch_norm takes at least two"
            )
        self.comm, self.settings, self._xp, self._pace = comm, settings, xp, pace
        self.strategy = strategies.default(comm.nodes) if strategy is None else strategy
        if not isinstance(self.strategy, strategies.Strategy):
            raise TypeError(
                f"strategy is {shown(self.strategy)}; pass a value such as "
                "rr.train.strategies.Zero(stage=1)"
            )
        self._course = Course(samples, settings, Stretch.new(min(settings.batch, samples)))
        self._x = xp.asarray(split.train_x, settings.dtype)
        self._labels = xp.asarray(split.train_labels)
        if settings.warm_up > self.steps and not per_rank:  # with it, fewer ranks need more steps
            raise ValueError(
                f"warm_up is {settings.warm_up}; the run has {counted(self.steps, 'step')}"
            )
        self.sizes = sizes = split.widths(settings.hidden)
        self.strategy.check(comm.nodes, settings)
        device = "cpu" if xp is np else "cuda"
        if elastic is not False:
            strategies.check_whole_model(self.strategy, device, "--elastic goes on")
        algorithm = self.strategy.algorithm(settings)
        self.strategy.check_device(device)
        if shards := settings.batch_shards:
            strategies.check_whole_model(self.strategy, device, "batch_shards works")
            if shards < comm.size:
                wanted = f"at least as many as ranks, {comm.size}"
                raise ValueError(f"batch_shards is {shards}; wanted {wanted}")
        self._part = part = self.strategy.part(Run(comm, sizes, settings, algorithm, xp, pace))
        mine = sampler.part(len(split.held_out_labels), part.replica, part.replicas)
        self._held_out_x = xp.asarray(split.held_out_x[mine], settings.dtype)
        self._held_out_labels = xp.asarray(split.held_out_labels[mine])
        self._held_out_samples = len(split.held_out_labels)
        arrays = part.stored | journal_arrays(self._course)
        self.store: Store
        if isinstance(elastic, rr.State):
            self.store = elastic
        else:
            self.store = rr.State(arrays) if elastic else InPlace(arrays)
        part.use(self.store)
        self.go_on_with_store()
        self._saved = -1
        self._steps_of_epoch: list[Step] = []
        self._untold: list[Step] = []  # the journal has no room for them until ranks meet
        self._loss = np.zeros(part.losses)
        self._first_with: dict[int, int] = {}
        """Samples of a global batch -> number of the first step of that size, which may compile."""
        self.times = np.zeros((2, 5))
        """Number of steps, and the seconds of them, of communication, of exposed communication, and
        of the sum of the losses: of those steps that may have compiled, and of others."""
        self._sent_bytes = 0

    def go_on_with_store(self) -> None:
        """Begin with the step, the losses and the stretch of steps in the store.

        :meta private:
        """
        samples, batch = self._course.samples, min(self.settings.batch, self._course.samples)
        self._course = Course(samples, self.settings, Stretch.of(self.store[STRETCH]))
        if self._course.stretch.batch != batch:
            self._course = self._course.following(self.store.step, batch)
        self._journal = Journal(self.store, self._course)

    @property
    def state(self) -> RunState:
        """The progress of the run: its `step`, and the losses of the epoch."""
        return self._journal.state

    @property
    def reported(self) -> tuple[int, int]:
        """The numbers of steps and epochs that watchers have received, as they are stored."""
        return self._journal.reported

    @property
    def flat(self) -> Any:
        """All parameters of the model, a one-dimensional array.

        Collective, unless every rank has all parameters.
        """
        return self._part.flat()

    @property
    def epoch_steps(self) -> int:
        """Number of steps in an epoch."""
        return self._course.epoch_steps

    @property
    def steps(self) -> int:
        """Number of steps in the whole run."""
        return self._course.steps

    # --- the contents of a checkpoint ---

    def arrays(self) -> dict[str, np.ndarray]:
        """Return all arrays that steps change, by name.  Collective.

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
        return self._part.arrays()

    def restore(self, arrays: Mapping[str, np.ndarray] | None, state: RunState) -> None:
        """Continue from `state`, with rank 0's `arrays`.

        Args:
            arrays: what `arrays` has returned, or those of a store; ranks other than 0 may pass
                None.
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
        stretch = np.array(state.stretch) if state.stretch else self._course.stretch.numbers
        if arrays is not None:
            stretch = arrays.get(STRETCH, stretch)
        stretch = self.comm.broadcast(np.asarray(stretch, np.float64), root=0)
        self._course = Course(self._course.samples, self.settings, Stretch.of(stretch))
        if state.step > self.steps:
            raise ValueError(
                f"{counted(state.step, 'step')} {'was' if state.step == 1 else 'were'} made, "
                f"{counted(f'{state.step / self.epoch_steps:.3g}', 'epoch')}; with "
                f"epochs = {self.settings.epochs} there is nothing left to do"
            )
        loaded = self._part.load(arrays)
        for name, array in journal_arrays(self._course, state).items():
            of_rank_0 = array if arrays is None else arrays.get(name, array)
            loaded[name] = self.comm.broadcast(of_rank_0, root=0)
        self.store.restore(loaded, state.step)
        self.go_on_with_store()
        self._saved = state.step

    # --- training ---

    def run(
        self,
        watchers: Sequence[Watcher] = (),
        save: Callable[[Trainer], None] | None = None,
        save_every: int = 0,
        epochs: int = 0,
    ) -> Result:
        """Train from the present state to the end, or for some epochs.

        Args:
            watchers: they receive steps and epochs; they may differ between ranks.
            save: it is called on all ranks every `save_every` steps and at the end.  Before each
                call the parameters are proven to be equal.
            save_every: steps between calls of `save`; 0: one after each epoch.
            epochs: number of the epoch after which the call returns; the next call goes on.  0:
                the last one.

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
        if isinstance(self._part, Served):
            return self._run_by_store(self._part, watchers, save, save_every, epochs)
        every = self.settings.check_every
        made = self.store.step
        # Another process may have made steps, or have received them from a checkpoint.
        self.go_on_with_store()
        course, journal = self._course, self._journal
        last = course.epochs(made) + epochs if epochs else self.settings.epochs
        if isinstance(self.store, rr.State):
            lr = course.learning_rate(self.store.step)
            self.store.describe({"batch": self.settings.batch, "lr": lr})
        self._steps_of_epoch = journal.of_epoch()
        if journal.steps < made:
            self._report_steps(watchers)
        if journal.epochs < course.epochs(made):
            self._end_epoch(watchers)
        saves = checks = False
        while made < self.steps and course.epochs(made) < last:
            # An infinite loss is an error below; NumPy need not warn of it as well.
            with np.errstate(over="ignore", invalid="ignore"), rr.span("step"):
                self._make_step()
            made = self.store.step
            ends = course.ends_epoch(made - 1)
            saves |= save is not None and (
                made == self.steps or (made % save_every == 0 if save_every else ends)
            )
            checks |= every > 0 and made % every == 0
            if not self._met:  # what is due waits until ranks meet
                self._untold += journal.take() if journal.is_full else []
                continue
            if ends or saves or checks or journal.is_full:
                self._report_steps(watchers)
            if saves or checks:
                self._check()
            if ends:
                self._end_epoch(watchers)
            if saves:
                self._save(save)
            saves = checks = False
        self._check()
        if self._saved != made:
            self._save(save)
        flat = self.flat
        digest = check_equal(self.comm, flat)
        loss, accuracy = self.state.last_loss, self.accuracy()
        nbytes = self._sent_bytes, self._part.held_bytes
        return Result(flat, digest, loss, accuracy, *self._mean_times(), *nbytes)

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
        share = self._part.gradients(x, labels, count)
        return float(np.sum(share)), self._part.reduced()

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
        with rr.span("evaluate"):
            right = self._part.right(self._held_out_x, self._held_out_labels)
            if not self._part.counts:
                right = 0
            total = self._part.total(np.array([right]))
        return int(total[0]) / self._held_out_samples

    def time_steps(self, count: int) -> list[float]:
        """Make `count` steps, and return how long each has taken.  Collective.

        This is for measurements: no watcher receives these steps, and their losses are in no
        epoch's.  The steps may go past the end of the run.

        Args:
            count: number of steps.

        Returns:
            Seconds of each step on this rank.

        Raises:
            MismatchError, PeerTimeoutError, PeerLostError: as for `Communicator.all_reduce`.

        Example:
            >>> settings = rr.train.Settings(hidden=(8,))
            >>> def program(comm):
            ...     trainer = rr.train.Trainer(comm, rr.train.load(settings), settings)
            ...     return len(trainer.time_steps(3)), trainer.state.step
            >>> rr.spawn(program, 2)
            [(3, 3), (3, 3)]
        """
        return [self._make_step(counts=False) for _ in range(count)]

    @property
    def pushes(self) -> StoreStats | None:
        """Pushes of this rank in its last `run`; None without a parameter server."""
        return self._part.store.stats if isinstance(self._part, Served) else None

    @property
    def held_bytes(self) -> int:
        """The most bytes that this rank has held: parameters, gradients, activations and so on."""
        return self._part.held_bytes

    def close(self) -> None:
        """Close the communicators that this Trainer has made.  Collective.

        The communicator of all ranks stays open.

        Raises:
            MismatchError, PeerTimeoutError, PeerLostError: as for `Communicator.close`.

        Example:
            >>> settings = rr.train.Settings(hidden=(8,))
            >>> strategy = rr.train.strategies.Pipeline()
            >>> def program(comm):
            ...     split = rr.train.load(settings)
            ...     trainer = rr.train.Trainer(comm, split, settings, strategy=strategy)
            ...     trainer.close()
            ...     return comm.all_reduce(1).item()
            >>> rr.spawn(program, 2)
            [2, 2]
        """
        self._part.close()

    def _make_step(self, counts: bool = True) -> float:
        """Make a step, and return its seconds; `counts`: it is a step of the run, and reported."""
        begin = time.perf_counter()
        settings, part, course = self.settings, self._part, self._course
        number = self.store.step
        x, labels, count = self._samples(number)
        with rr.span("compute"):
            share = part.gradients(x, labels, count)
        if settings.clip:
            part.clip(settings.clip)
        self._loss[...] = share if part.counts else 0.0
        alone = self.comm.size == 1
        reduces = 0.0 if alone else time.perf_counter()
        # In every step: after a loss of ranks nobody has their shares of the losses.
        if not part.every:
            self.comm.all_reduce(self._loss, out=self._loss)
        loss_s = 0.0 if alone else time.perf_counter() - reduces
        loss = float(self._loss.sum())
        lr = course.learning_rate(number)
        self._sent_bytes = max(self._sent_bytes, part.sent_bytes)
        with rr.span("update"), self.store.update():
            part.update(lr, number)
            part.average_statistics(number)
            in_epoch, every = course.number_in_epoch(number) + 1, part.every or 1
            self._met = in_epoch % every == 0 or course.ends_epoch(number)
            if self._met:
                part.meet()
            # One rank makes the same calls, and communicates with nobody.
            communication_s, exposed_s = (0.0, 0.0) if alone else part.times
            step_s = time.perf_counter() - begin
            times = step_s, communication_s, exposed_s
            self._journal.record(loss, lr, count, times, counts)
        is_first = self._first_with.setdefault(count, number + 1) == number + 1
        self.times[0 if is_first else 1] += 1, *times, loss_s
        return step_s

    def _samples(self, number: int) -> tuple[Any, Any, int]:
        """Return a step's samples of this rank, their labels, and the count of all samples."""
        settings, course = self.settings, self._course
        begin = 0.0 if self._pace is None else time.thread_time()
        batch = course.batch_of(number)
        rows = self._part.rows(len(batch))
        mine = self._xp.asarray(batch[rows])
        x = self._x[mine]
        if settings.noise:
            key = settings.seed, course.epoch_of(number), course.number_in_epoch(number)
            x += self._xp.asarray(data.noise(rows, x.shape[1], settings.noise, key), x.dtype)
        if self._pace is not None:
            self._pace.begin(begin)
        return x, self._labels[mine], len(batch)

    def _report_steps(self, watchers: Sequence[Watcher]) -> None:
        """Report the steps since the last call.  Collective if ranks step alone."""
        reported, self._untold = [*self._untold, *self._journal.take()], []
        if self._part.every:
            losses = np.array([step.loss for step in reported])
            average(self.comm, {"of steps": losses, "of the epoch": self.store[PROGRESS]})
            reported = [replace(s, loss=x) for s, x in zip(reported, losses.tolist(), strict=True)]
        self._steps_of_epoch += reported
        bad = next((i for i, step in enumerate(reported) if not math.isfinite(step.loss)), None)
        for watcher in watchers:
            watcher.steps(reported[:bad])
        if bad is not None:
            step = reported[bad]
            raise FloatingPointError(
                f"train: the loss is {step.loss}{self._part.blame} in step {step.step}, epoch "
                f"{step.epoch}, with lr {step.lr:g}; take a smaller lr"
            )

    def _check(self) -> None:
        """Raise an error on all ranks if replicas differ, or a parameter is not finite.

        A loss is computed before its step, so it does not show the latter.
        """
        with rr.span("check"):
            self._part.check_equal()
            is_finite = self._part.all_finite()
        if not is_finite:
            raise FloatingPointError(
                f"train: parameters are infinite or no numbers after step {self.state.step}; take "
                "a smaller lr"
            )

    def _end_epoch(self, watchers: Sequence[Watcher]) -> None:
        """Report the epoch whose last step was made just now.  Collective."""
        steps, self._steps_of_epoch = self._steps_of_epoch, []
        steps = [step for step in steps if step.step not in self._first_with.values()] or steps
        step_s, exposed_s = (
            sum(getattr(step, name) for step in steps) for name in ("step_s", "exposed_s")
        )
        samples = sum(step.samples for step in steps)
        epoch = Epoch(
            epoch=self._course.epochs(self.store.step),
            loss=self.state.last_loss,
            accuracy=self.accuracy(),
            samples_per_s=samples / step_s,
            exposed=exposed_s / step_s,
            generation=self.store.generation,
            **self._part.staleness,
        )
        for watcher in watchers:
            watcher.epoch(epoch)
        self._journal.epochs = epoch.epoch

    def _save(self, save: Callable[[Trainer], None] | None) -> None:
        if save is not None:
            with rr.span("save"):
                save(self)
            self._saved = self.store.step

    def _mean_times(self) -> tuple[float, float, float]:
        first, others = self.times
        mine = (others if others[0] else first)[:4].copy()
        count, *totals = self._part.total(mine, "mean")
        step_s, communication_s, exposed_s = (float(total / max(1, count)) for total in totals)
        return step_s, communication_s, exposed_s

    # --- with a parameter server ---

    def _run_by_store(
        self, part: Served, watchers: Sequence[Watcher], save: Any, save_every: int, most: int
    ) -> Result:
        """Train as `run`, with parameters on servers.  Only making the store is collective."""
        course, problem = self._course, ""
        left = range(self.store.step, self.steps)
        epochs = [list(steps) for _, steps in groupby(left, course.epoch_of)][: most or None]
        made = epochs[-1][-1] + 1 if epochs else self.store.step
        with part.open(course, epochs) as store, np.errstate(over="ignore", invalid="ignore"):
            self.store = InPlace(journal_arrays(course, self.state))  # the others are on servers
            self.go_on_with_store()
            if store.is_server:
                store.serve()
                epochs = []
            try:
                for steps in epochs:
                    self._make_epoch(part, steps)
                    saves = not save_every or any((step + 1) % save_every == 0 for step in steps)
                    saves |= steps is epochs[-1]
                    part.pull(slots=saves)
                    for speaks in part.reports(course.epoch_of(steps[0])):
                        self._steps_of_epoch, self._journal.steps = [], steps[-1]
                        self._report_steps(watchers if speaks else ())
                        self._check()
                        if speaks:
                            self._end_epoch(watchers)
                            self._save(save if saves else None)
            except FloatingPointError as error:
                problem = str(error)

        def outcome() -> Any:
            if problem:
                return problem if part.blame or math.isfinite(self.state.last_loss) else None
            lost = sorted(part.lost.items())
            return lost, self.state.last_loss, self.accuracy(), *self._mean_times()

        (lost, *numbers), flat = part.agree(outcome)
        digest = hashlib.sha256(bytes_of(flat).data).hexdigest()
        self.store.restore(journal_arrays(course, RunState(made, 0.0, numbers[0])), made)
        more: dict[str, Any] = {"lost": tuple(map(tuple, lost))}
        more |= {"sent_bytes": part.sent_bytes, "held_bytes": part.held_bytes}
        return Result(flat, digest, *numbers, **more)

    def _make_epoch(self, part: Served, steps: Sequence[int]) -> None:
        """Make the steps of an epoch with the other workers.  In the journal they are one."""
        journal, course, count, store = self._journal, self._course, len(steps), part.store
        begin, waited, part.blame = time.perf_counter(), store.stats.waited_s, ""

        def spent() -> tuple[float, float, float]:
            exposed_s = store.stats.waited_s - waited
            return time.perf_counter() - begin, exposed_s, exposed_s

        is_new = not self.times.any()
        for number in store.steps(count * part.replicas):
            step, part.replica = divmod(number, part.replicas)
            part.gradients(*self._samples(steps[step]))
            if is_new and not self.times[0].any():  # this worker's first step
                self.times[0] = 1, *spent(), 0.0
        times = spent()
        self.times[1] += count, *times, 0.0
        if is_new:
            self.times[1] -= self.times[0]
        samples = course.samples - course.place(steps[0])[1]
        self.store.restore({}, steps[-1])
        journal.steps, journal.epochs = steps[-1], course.epochs(steps[0])
        with self.store.update():
            lr = course.learning_rate(steps[-1])
            journal.record(store.total / samples, lr, samples, times, counts=True)


def train(
    comm: rr.Communicator,
    split: data.Split,
    settings: Settings,
    *,
    watchers: Sequence[Watcher] = (),
    xp: ModuleType = np,
    strategy: strategies.Strategy | None = None,
) -> Result:
    """Train on the ranks of `comm`; every rank must make this call with equal split and settings.

    Args:
        comm: the communicator of the ranks.
        split: the samples to train on, and those that are held out.
        settings: all settings of the run.
        watchers: they receive steps and epochs; they may differ between ranks.
        xp: the array module, NumPy or CuPy.
        strategy: where parameters are, and how gradients meet.  None: replicas, `Mirrored` on one
            node and `MultiWorkerMirrored` on several.

    Returns:
        The `Result`, the same on every rank but for its times and bytes.

    Raises:
        ValueError, FloatingPointError, DriftError: as for `Trainer` and `Trainer.run`.

    Example:
        >>> settings = rr.train.Settings(epochs=3, hidden=(16,), batch=64)
        >>> def program(comm):
        ...     return rr.train.train(comm, rr.train.load(settings), settings).accuracy > 0.8
        >>> rr.spawn(program, 2)
        [True, True]
    """
    trainer = Trainer(comm, split, settings, xp, strategy)
    result = trainer.run(watchers)
    trainer.close()
    return result
