"""Compute the bytes that a rank of a pipeline or a hybrid holds, as the trainer counts them.

A trainer takes long to make, for its communicators.  So it is not made to count the bytes of a
candidate whose steps are not measured.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ringreduce.parallel.sampler import part
from ringreduce.train import optimizers
from ringreduce.train.search.candidates import Candidate, Site
from ringreduce.train.search.prices import Shape


def held_bytes(candidate: Candidate, place: Site) -> int:
    """Return the most bytes of a rank: parameters, gradients, optimizer's arrays, activations.

    The settings must have no `batch_norm`, whose layers hold other arrays too.
    """
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
