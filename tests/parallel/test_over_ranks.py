"""Gradient clipping by the norm over all parameters, for several placements of these."""

from __future__ import annotations

import math

import numpy as np
import pytest

import ringreduce as rr
from ringreduce.train import DataParallel, Settings, Trainer, clip, global_norm, load_split, train
from tests.support.rounding import gamma

SHAPES = {"0.weight": (30, 20), "0.bias": (20,), "1.weight": (20, 3), "1.bias": (3,), "scale": ()}


def gradients(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=shape) for name, shape in SHAPES.items()}


def everything() -> np.ndarray:
    """All numbers of the gradients, in one array."""
    return np.concatenate([array.reshape(-1) for array in gradients().values()])


def replicas(comm):
    """Every rank holds all gradients, and counts its shard of each bucket."""
    found = gradients()
    dp = DataParallel(comm, gradients(1), bucket_bytes=500, first_bucket_bytes=100)
    for name in reversed(found):
        dp.ready(name, found[name])
    dp.finish()
    return dp.shard


def stages(comm):
    """Every rank holds some of the parameters."""
    return list(gradients().values())[comm.rank :: comm.size]


@pytest.mark.parametrize("placement", [replicas, stages])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_the_norm_is_that_of_all_numbers(ranks, placement):
    norms = rr.spawn(lambda comm: global_norm(placement(comm), comm), ranks)
    exact = math.sqrt(math.fsum(everything() ** 2))
    # The squares, their sum in any order, and the mean of `finish`; a root halves the error.
    assert abs(norms[0] - exact) <= gamma(len(everything()) + 2 * ranks + 4) * exact
    assert len(set(norms)) == 1


def test_blocks_change_nothing_but_the_order_of_additions():
    whole = np.random.default_rng(0).normal(size=(1 << 15) + 5)
    assert global_norm([whole]) == pytest.approx(np.linalg.norm(whole), rel=1e-13)


@pytest.mark.parametrize("norm", [0.0, 1.0, 2.0, math.inf, math.nan])
def test_a_shorter_gradient_and_one_without_a_norm_stay_as_they_are(norm):
    found = gradients()
    assert clip(found.values(), norm, 2.0) == 1.0
    assert all(np.array_equal(found[name], array) for name, array in gradients().items())


# --- the trainer ----------------------------------------------------------------------------------


def test_a_run_clips_every_gradient():
    """With one step the parameters move by the learning rate times the clipped norm."""
    split = load_split(np.float64)
    settings = Settings(epochs=1, batch=1438, dtype="float64", clip=0.01, momentum=0.0, lr=0.5)

    def run(comm):
        trainer = Trainer(comm, split, settings)
        before = trainer.flat.copy()
        return np.linalg.norm(trainer.run().parameters - before)

    assert rr.spawn(run, 3) == pytest.approx([0.5 * 0.01] * 3, rel=1e-12)


def test_a_norm_that_no_gradient_reaches_changes_nothing():
    def run(comm, longest):
        return train(comm, load_split(), Settings(epochs=1, batch=200, clip=longest)).digest

    assert rr.spawn(run, 2, 1e6) == rr.spawn(run, 2, 0.0)
