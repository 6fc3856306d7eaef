"""Predict the seconds of a step from times of single layers, and the bytes that a rank holds.

A layer's forward, gradient of the input and gradient of the weights are timed for every number of
samples that a candidate passes through it.  `rr.pipeline.price` puts them together, with messages
at the speed of the communicator's profile.  Two numbers are fitted to the steps of two candidates,
since no layer explains them: the time that every action and every all-reduce of a tensor group
takes besides, and the time of the rest of a step, with the optimizer.

Bytes are computed as a trainer counts them.  No trainer is made: its communicators take long.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise
from types import ModuleType
from typing import Any

import numpy as np

import ringreduce as rr
from ringreduce.parallel.consensus import gather_words
from ringreduce.parallel.layers import cross_entropy
from ringreduce.parallel.mesh import Coordinates, Mesh
from ringreduce.parallel.sampler import part
from ringreduce.parallel.stages import splits_of_size
from ringreduce.train import mlp, optimizers
from ringreduce.train.search.candidates import Candidate, Site
from ringreduce.train.strategies import Hybrid, Pipeline

_LEAST, _MOST, _LONGEST_S = 2, 9, 0.1
"""The fewest and the most repetitions of a layer's passes, and about their most seconds."""
_BISECTIONS = 40


@dataclass(frozen=True)
class LayerTimes:
    forward_s: float
    input_s: float
    """The gradient of the input."""
    weights_s: float
    """The gradients of the parameters."""


Measure = Callable[[Sequence[Candidate]], Sequence[float]]
"""Candidates -> the measured seconds of a step of each."""
Layers = Mapping[int, Sequence[LayerTimes]]
"""Number of samples -> the times of each layer."""


@dataclass(frozen=True)
class Shape:
    """How a candidate divides a step among the ranks."""

    sizes: Coordinates
    schedule: rr.pipeline.PipelineSchedule
    rows: int
    """Samples of a microbatch, at most."""
    cut: tuple[int, ...]
    """Layers of each stage."""

    @classmethod
    def of(cls, candidate: Candidate, place: Site) -> Shape:
        """Return the shape of a candidate of a strategy that has a pipeline."""
        strategy, settings = candidate.strategy, candidate.settings
        sizes = strategy.sizes(place.ranks)
        assert isinstance(strategy, (Pipeline, Hybrid))
        virtual, cut = 1, None
        splits = strategy.splits or sizes.pipeline
        if isinstance(strategy, Pipeline):
            virtual, cut = strategy.virtual, strategy.cut
            if strategy.split_size is not None:
                splits = splits_of_size(
                    settings.batch, strategy.split_size, strategy.schedule, place.ranks
                )
        schedule = rr.pipeline.schedule(strategy.schedule, sizes.pipeline, splits, virtual)
        if not isinstance(cut, tuple):
            cut = rr.pipeline.balance(place.costs(settings.batch_norm), schedule.stages)
        rows = -(-settings.batch // (sizes.data * splits))
        return cls(sizes, schedule, rows, cut)

    def layers(self, stage: int) -> range:
        first = sum(self.cut[:stage])
        return range(first, first + self.cut[stage])

    @property
    def actions(self) -> int:
        """The actions of the rank with the most of them."""
        return max(len(self.schedule.acts(rank)) for rank in range(self.schedule.ranks))


class Prices:
    """Predicts the steps of pipelines and hybrids.  Collective: every rank makes the same calls.

    `measure` measures the steps of some candidates.  Timing the layers takes at most about
    `layers_s`, unless two timings of each layer for each number of samples take longer.
    """

    def __init__(
        self,
        comm: rr.Communicator,
        place: Site,
        candidates: Sequence[Candidate],
        measure: Measure,
        xp: ModuleType,
        layers_s: float = math.inf,
    ) -> None:
        self._comm, self._place = comm, place
        self._cores = cores_of_nodes(comm)
        self._shapes = {each: Shape.of(each, place) for each in candidates}
        settings = candidates[0].settings
        self._itemsize = np.dtype(settings.dtype).itemsize
        rows = sorted({shape.rows for shape in self._shapes.values()})
        timer = _LayerTimer(settings.dtype, xp)
        self._layers = time_layers(comm, place.sizes, rows, timer, self._cores, layers_s)
        self._groups = {
            sizes: self._groups_of(sizes)
            for sizes in {shape.sizes: None for shape in self._shapes.values()}
        }
        self._action_s = self._step_s = 0.0
        self._fit(measure)

    def predict(self, candidate: Candidate) -> float:
        """Return the predicted seconds of a step.

        A candidate given to `__init__` must have microbatches as long, and a mesh as large.
        """
        shape = self._shapes.get(candidate) or Shape.of(candidate, self._place)
        return self._base_s(shape, self._action_s) + self._step_s

    def _fit(self, measure: Measure) -> None:
        """Find the two times that make the prediction of two candidates right."""
        # Ranks choose alike: the choice depends on no measured time.
        few = min(self._shapes, key=lambda each: self._shapes[each].actions)
        many = max(self._shapes, key=lambda each: self._shapes[each].actions)
        few_s, many_s = measure([few, many])
        if self._shapes[many].actions > self._shapes[few].actions:
            low, high = 0.0, few_s
            for _ in range(_BISECTIONS):
                middle = (low + high) / 2
                found = self._base_s(self._shapes[many], middle) - self._base_s(
                    self._shapes[few], middle
                )
                low, high = (low, middle) if found > many_s - few_s else (middle, high)
            self._action_s = low
        self._step_s = max(0.0, few_s - self._base_s(self._shapes[few], self._action_s))

    def _base_s(self, shape: Shape, action_s: float) -> float:
        """Return the seconds of forward, backward and all-reduces; `action_s` is fitted."""
        forward, backward = self._of_stages(shape, action_s)
        widths = self._place.sizes
        ends = [shape.layers(stage).stop for stage in range(len(shape.cut))]
        costs = rr.pipeline.Costs(
            forward=forward,
            backward=backward,
            nbytes=[widths[end] * shape.rows * self._itemsize for end in ends],
            nodes=self._groups[shape.sizes].nodes,
            profile=self._comm.config.profile,
        )
        seconds = rr.pipeline.price(shape.schedule, costs)
        work_s = shape.schedule.splits * (sum(forward) + sum(backward))
        groups = shape.sizes.data * shape.sizes.tensor
        crowded_s = work_s * groups / sum(self._cores.values())
        return max(seconds, crowded_s) + self._groups[shape.sizes].replicas_s

    def _of_stages(self, shape: Shape, action_s: float) -> tuple[list[float], list[float]]:
        """Return the seconds of each stage's forward and backward of a microbatch."""
        layers, tensor = self._layers[shape.rows], shape.sizes.tensor
        reduce_s = self._groups[shape.sizes].tensor_s
        is_split = any(act.kind == "W" for act in shape.schedule.acts(0))
        forward, backward = [], []
        for numbers in map(shape.layers, range(len(shape.cut))):
            of_stage = layers[numbers.start : numbers.stop]
            # A pair of layers has an all-reduce in forward, and one in backward.
            reduces = sum(
                reduce_s[self._place.sizes[layer] * shape.rows * self._itemsize] + action_s
                for layer in numbers[::2]
                if tensor > 1
            )
            computed = sum(each.forward_s for each in of_stage) / tensor
            forward.append(computed + reduces + action_s)
            computed = sum(each.input_s + each.weights_s for each in of_stage) / tensor
            backward.append(computed + reduces + action_s * (1 + is_split))
        return forward, backward

    def _groups_of(self, sizes: Coordinates) -> _Groups:
        with closing(Mesh(self._comm, *sizes)) as mesh:
            whole = sum(self._place.costs(False)) * self._itemsize
            tensor, data = mesh.tensor, mesh.data
            lengths = {
                shape.rows * width * self._itemsize
                for shape in self._shapes.values()
                for width in self._place.sizes
                if shape.sizes == sizes
            }
            tensor_s = {nbytes: _all_reduce_s(tensor, nbytes) for nbytes in lengths}
            replicas_s = _all_reduce_s(data, whole // (sizes.pipeline * sizes.tensor))
            return _Groups(tensor_s, replicas_s, mesh.pipeline.nodes)


@dataclass(frozen=True)
class _Groups:
    """What the groups of a mesh cost, as the library predicts it."""

    tensor_s: Mapping[int, float]
    """Bytes -> seconds of an all-reduce of a tensor group."""
    replicas_s: float
    """Seconds of the all-reduce of the gradients."""
    nodes: Sequence[Sequence[int]]
    """The ranks of a pipeline on each node."""


def _all_reduce_s(comm: rr.Communicator, nbytes: int) -> float:
    if comm.size == 1:
        return 0.0
    choice = comm.explain(nbytes)
    return choice.predicted_s[choice.algorithm]


# --- measurements ---------------------------------------------------------------------------------


def cores_of_nodes(comm: rr.Communicator) -> dict[int, int]:
    """Return for each node how many of its ranks can compute at once.  Collective."""
    words = gather_words(comm, [json.dumps(sorted(os.sched_getaffinity(0)))])
    found = {}
    for node, ranks in enumerate(comm.nodes):
        cores = {core for rank in ranks for core in json.loads(words[rank][0])}
        found[node] = min(len(ranks), len(cores))
    return found


def time_layers(
    comm: rr.Communicator,
    sizes: Sequence[int],
    rows: Sequence[int],
    timer: _LayerTimer,
    cores: Mapping[int, int],
    layers_s: float,
) -> Layers:
    """Return the times of the layers for these numbers of samples, in `layers_s`.  Collective.

    They are the least of several repetitions, as the median over the ranks.  As many ranks of a
    node as it has cores compute at once.  The other ranks of the node wait, and time nothing.
    """
    kinds = list(dict.fromkeys(_kinds(sizes)))
    longest_s = min(_LONGEST_S, layers_s / (len(rows) * len(kinds)))
    node = next(number for number, ranks in enumerate(comm.nodes) if comm.rank in ranks)
    computes = comm.local_rank < cores[node]
    found = np.full((len(rows), len(kinds), 3), np.nan)
    for row, samples in enumerate(rows):
        for column, kind in enumerate(kinds):
            comm.barrier()
            if computes:
                found[row, column] = timer.time(kind, samples, longest_s)
    every = comm.all_gather(found[np.newaxis], counts=[1] * comm.size)
    medians = np.nanmedian(every, axis=0).tolist()
    return {
        samples: [LayerTimes(*medians[row][kinds.index(kind)]) for kind in _kinds(sizes)]
        for row, samples in enumerate(rows)
    }


_Shape = tuple[int, int, bool, bool]
"""Inputs, outputs, whether the layer is the first, whether it is the last."""


def _kinds(sizes: Sequence[int]) -> Iterator[_Shape]:
    last = len(sizes) - 2
    for layer, (inputs, outputs) in enumerate(pairwise(sizes)):
        yield inputs, outputs, layer == 0, layer == last


class _LayerTimer:
    def __init__(self, dtype: str, xp: ModuleType) -> None:
        self._dtype, self._xp = dtype, xp

    def time(self, kind: _Shape, samples: int, longest_s: float) -> list[float]:
        """Return the seconds of forward, gradient of the input and gradient of the weights."""
        inputs, outputs, is_first, is_last = kind
        flat = mlp.init_params((inputs, outputs), 0, self._dtype, self._xp)
        (arrays,) = mlp.views(flat, (inputs, outputs))
        layer = mlp.Affine(int(not is_first), arrays, last=is_last, xp=self._xp)
        into = {name: self._xp.empty_like(array) for name, array in layer.parameters.items()}
        x = self._xp.ones((samples, inputs), self._dtype)
        slope = self._xp.ones((samples, outputs), self._dtype)
        labels = self._xp.zeros(samples, int)
        times: list[list[float]] = []
        end = self._now() + longest_s
        while len(times) < _LEAST or (len(times) < _MOST and self._now() < end):
            marks = [self._now()]
            y, kept = layer.forward(x)
            if is_last:
                cross_entropy(y, labels, samples, self._xp)
            marks.append(self._now())
            _, gradients = layer.backward(kept, slope, into)
            marks.append(self._now())
            list(gradients)
            marks.append(self._now())
            times.append([after - before for before, after in pairwise(marks)])
        return [min(each) for each in zip(*times, strict=True)]

    def _now(self) -> float:
        """Return the clock when the device has finished."""
        device: Any = getattr(self._xp, "cuda", None)
        if device is not None:
            device.Device().synchronize()
        return time.perf_counter()


# --- batches --------------------------------------------------------------------------------------


def of_batches(candidates: Sequence[Candidate], measure: Measure) -> dict[Candidate, float]:
    """Return the predicted seconds of a step for each candidate.

    A step takes a time of its own and a time for each sample.  They are fitted to the measured
    steps of two batches.
    """
    small, large = candidates[len(candidates) // 3], candidates[-(-2 * len(candidates) // 3) - 1]
    small_s, large_s = measure([small, large])
    more = large.settings.batch - small.settings.batch
    slope = max(0.0, (large_s - small_s) / more) if more else 0.0
    own_s = max(0.0, small_s - slope * small.settings.batch)
    return {each: own_s + slope * each.settings.batch for each in candidates}


# --- bytes ----------------------------------------------------------------------------------------


def held_bytes(candidate: Candidate, place: Site) -> int:
    """Return the most bytes of a rank, for settings without `batch_norm`."""
    shape, settings = Shape.of(candidate, place), candidate.settings
    assert not settings.batch_norm
    schedule = shape.schedule
    # Where ranks divide something, the first of them has the longest part.  So this counts for the
    # first replica, and for the first rank of each tensor group.
    rows = _length(settings.batch, 0, shape.sizes.data)
    samples = [_length(rows, number, schedule.splits) for number in range(schedule.splits)]
    # Layers 0, 2, 4 and so on are divided by columns, the others by rows.
    widths = [
        _length(width, 0, shape.sizes.tensor) if number % 2 else width
        for number, width in enumerate(place.sizes)
    ]
    # Parameters, the sums of gradients, and the gradients of a microbatch after the first.
    arrays = 2 + (schedule.splits > 1) + len(optimizers.SLOTS[settings.optimizer])
    most = max(
        arrays * _parameters(shape, widths, rank) + _activations(shape, widths, samples, rank)
        for rank in range(schedule.ranks)
    )
    return most * np.dtype(settings.dtype).itemsize


def _length(count: int, number: int, parts: int) -> int:
    of_part = part(count, number, parts)
    length: int = of_part.stop - of_part.start
    return length


def _parameters(shape: Shape, widths: Sequence[int], rank: int) -> int:
    return sum(
        (widths[layer] + 1) * widths[layer + 1]
        for stage in range(rank, shape.schedule.stages, shape.schedule.ranks)
        for layer in shape.layers(stage)
    )


def _activations(shape: Shape, widths: Sequence[int], samples: Sequence[int], rank: int) -> int:
    """Return the most elements of activations that a rank of the pipeline keeps at once.

    Of a stage and a microbatch it keeps the input and the output of each layer, from forward until
    the gradients of the weights are computed.
    """
    kept = {
        stage: sum(widths[layers.start : layers.stop + 1])
        for stage in range(rank, shape.schedule.stages, shape.schedule.ranks)
        for layers in [shape.layers(stage)]
    }
    now = most = 0
    for action in shape.schedule.acts(rank):
        if action.kind == "F":
            now += samples[action.microbatch] * kept[action.stage]
            most = max(most, now)
        elif action.kind in ("B", "W"):
            now -= samples[action.microbatch] * kept[action.stage]
    return most
