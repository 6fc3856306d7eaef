"""Replicas: parts of ranks that have all parameters.  They differ in how gradients are added up."""

from __future__ import annotations

import time
from itertools import accumulate
from typing import Any

import numpy as np

import ringreduce as rr
from ringreduce.parallel import sampler
from ringreduce.parallel.buckets import cut
from ringreduce.parallel.data_parallel import DataParallel
from ringreduce.parallel.reducer import StepTimes
from ringreduce.train import mlp
from ringreduce.train.parts import EACH, Metered, Part, Run


class WholeModel(Part):
    """All parameters on every rank.  Subclasses add up the gradients."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.replica, self.replicas = run.comm.rank, run.comm.size
        self._parameters = parameters = run.init_params()
        self.stored = run.with_slots(parameters) | run.init_statistics()
        self._normalising = Metered(run.comm, run.algorithm)
        self.metered = (self._normalising,)
        layers = tuple(mlp.by_layer(parameters).values())
        self._network = mlp.layers(layers, run.xp, self._normalising)
        for layer in self._network:
            layer.pace = run.pace

    def _take(self, arrays: dict[str, Any]) -> None:
        super()._take(arrays)
        self._parameters = {name: arrays[name] for name in self._names}
        for layer in self._network:
            layer.take(arrays)

    def classes(self, x: Any) -> Any:
        logits = (mlp.predict(self._network, block, self.running) for block in mlp.blocks_of(x))
        return self.run.xp.concatenate([each.argmax(axis=1) for each in logits])


class Replica(WholeModel):
    """All parameters on every rank; an all-reduce adds up the gradients."""

    def __init__(self, run: Run, reduces: Any = None) -> None:
        """Make a replica; `reduces` makes the all-reduces: a communicator, by default the run's."""
        super().__init__(run)
        self.reducer: DataParallel = run.data_parallel(self._parameters, reduces)

    def gradients(self, x: Any, labels: Any, count: int) -> float | np.ndarray:
        self._normalising.begin()
        buffers = {name: self.reducer.buffer(name) for name in self._parameters}
        loss, kept, gradients = mlp.step(self._network, x, labels, count, buffers, self.run.xp)
        self.statistics = mlp.statistics_in(self._network)
        self._hold(len(x), kept)
        for name, _ in gradients:
            self.reducer.ready(name)
        self._reduced = self.reducer.finish()
        return float(loss)


class LocalReplica(Replica):
    """A replica that steps alone; every few steps the replicas average their weights."""

    def __init__(self, run: Run, every: int) -> None:
        super().__init__(run)
        self.every = every
        self.places |= {name: EACH for name in self.places if "/" in name}
        self._before: dict[str, Any] = {}  # weights of the last average, if a wire sends changes

    def gradients(self, x: Any, labels: Any, count: int) -> float:
        """Compute this rank's loss and gradients: its shares, times the number of ranks."""
        if self.run.settings.wire != "none" and not self._before:
            self._before = {name: array.copy() for name, array in self._parameters.items()}
        self.reducer.times = StepTimes(0.0, 0.0)
        buffers = {name: self.reducer.buffer(name) for name in self._parameters}
        own = count / self.run.comm.size
        loss, kept, gradients = mlp.step(self._network, x, labels, own, buffers, self.run.xp)
        self._hold(len(x), (kept, self._before))
        self._reduced = dict(gradients)
        return float(loss)

    def meet(self) -> None:
        for name, array in reversed(self._parameters.items()):
            self.reducer.ready(name, array - self._before.get(name, 0))
        for name, total in self.reducer.finish().items():
            self._parameters[name][...] = self._before.get(name, 0) + total / self.run.comm.size
        self._before = {}

    @property
    def sent_bytes(self) -> int:
        return self.reducer.sent_bytes // self.every


class ExactReplica(WholeModel):
    """Replicas whose parameters have the same bits for any number of ranks.

    A batch is cut into logical shards.  Each is computed by itself, in its own shape, so its
    gradients do not depend on the rank that computes it.  `ExactSum` adds the gradients of all
    shards without rounding, so they do not depend on the order.
    """

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._shards = run.settings.batch_shards
        self.losses = self._shards
        mine = sampler.part(self._shards, run.comm.rank, run.comm.size)
        self._mine = range(mine.start, mine.stop)
        """The logical shards of this rank."""
        self._groups: list[np.ndarray] = []
        """For each bucket, the gradients of the shards of this rank: (shards, numbers)."""
        self._of_shards: list[dict[str, np.ndarray]] = [{} for _ in self._mine]
        """For each shard, name of a parameter -> its gradient, a view."""
        self._places: list[dict[str, tuple[slice, tuple[int, ...]]]] = []
        """For each bucket, name of a parameter -> place and shape of its gradient."""
        sizes = run.settings.first_bucket_bytes, run.settings.bucket_bytes
        for bucket in cut([*reversed(self._parameters.items())], *sizes):
            ends = list(accumulate((array.size for _, array in bucket), initial=0))
            places = {
                name: (slice(*ends[number : number + 2]), array.shape)
                for number, (name, array) in enumerate(bucket)
            }
            group = np.zeros((len(self._mine), ends[-1]), run.settings.dtype)
            for row, of_shard in zip(group, self._of_shards, strict=True):
                for name, (part, shape) in places.items():
                    of_shard[name] = row[part].reshape(shape)
            self._groups.append(group)
            self._places.append(places)
        self._exact = rr.ExactSum(run.comm)
        numbers = np.empty(sum(group.shape[1] for group in self._groups), np.int64)
        self._sent_bytes = run.comm.sent_bytes("all_reduce", numbers)

    def rows(self, count: int) -> slice:
        first = sampler.part(count, self._mine.start, self._shards).start
        last = sampler.part(count, self._mine.stop - 1, self._shards).stop
        return slice(first, last)

    def gradients(self, x: Any, labels: Any, count: int) -> np.ndarray:
        losses, first = np.zeros(self._shards), self.rows(count).start
        for shard, buffers in zip(self._mine, self._of_shards, strict=True):
            part = sampler.part(count, shard, self._shards)
            rows = slice(part.start - first, part.stop - first)
            loss, kept, computed = mlp.step(
                self._network, x[rows], labels[rows], count, buffers, self.run.xp
            )
            for _ in computed:  # each gradient, into its buffer
                pass
            losses[shard] = loss
            self._hold(part.stop - part.start, kept)
        begin = time.perf_counter()
        sums = self._exact.sum(self._groups)
        self.waited_s = time.perf_counter() - begin  # conversions included
        self._reduced = {}
        for places, flat in zip(self._places, sums, strict=True):
            for name, (part, shape) in places.items():
                self._reduced[name] = flat[part].reshape(shape)
        return losses

    @property
    def sent_bytes(self) -> int:
        return self._sent_bytes

    @property
    def gradient_bytes(self) -> int:
        return super().gradient_bytes + sum(group.nbytes for group in self._groups)
