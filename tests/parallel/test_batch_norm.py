"""Batch normalisation over the samples of all ranks, forward and backward; and misuse."""

from __future__ import annotations

import numpy as np
import pytest

import ringreduce as rr
from ringreduce.parallel import sampler
from ringreduce.train import batch_norm, batch_norm_backward
from tests.support.rounding import batch_norm_backward_bounds, batch_norm_bounds

COLUMNS = 4


def problem(samples: int, seed: int = 0):
    """Samples with columns of very different means and widths; scale, shift and derivatives."""
    rng = np.random.default_rng((seed, samples))
    x = rng.normal(size=(samples, COLUMNS)) * [1, 1e-3, 1e3, 1] + [0, 5, -7, 1e4]
    scale, shift = rng.normal(size=(2, COLUMNS))
    return x, scale, shift, rng.normal(size=(samples, COLUMNS))


def parts(comm, x, scale, shift, delta):
    """Normalise this rank's part of the samples, and return all results."""
    mine = sampler.part(len(x), comm.rank, comm.size)
    forward = batch_norm(comm, x[mine], scale, shift)
    return forward, batch_norm_backward(comm, forward, scale, delta[mine])


def whole(results):
    """Put the parts of all ranks together: y, and the derivatives by x, scale and shift."""
    y = np.concatenate([forward.y for forward, _ in results])
    by_x = np.concatenate([backward[0] for _, backward in results])
    by_scale, by_shift = (sum(backward[i] for _, backward in results) for i in (1, 2))
    return y, by_x, by_scale, by_shift


@pytest.mark.parametrize("ranks", range(1, 6))
@pytest.mark.parametrize("samples", [2, 3, 5, 32])
def test_ranks_compute_what_one_rank_computes(ranks, samples):
    """Ranks above the number of samples have an empty part."""
    x, scale, shift, delta = problem(samples)
    alone = whole(rr.spawn(parts, 1, x, scale, shift, delta))
    together = whole(rr.spawn(parts, ranks, x, scale, shift, delta))
    values, off = batch_norm_bounds(x, np.zeros_like(x), scale, shift, ranks)
    _, off_backward = batch_norm_backward_bounds(
        values, off, scale, delta, np.zeros_like(delta), ranks
    )
    for found, wanted, bound in zip(together, alone, (off.y, *off_backward), strict=True):
        assert (np.abs(found - wanted) <= 2 * bound).all()


def test_statistics_are_bitwise_the_same_on_every_rank():
    results = rr.spawn(parts, 4, *problem(7))
    for name in ("mean", "variance", "inverse"):
        assert len({getattr(forward, name).tobytes() for forward, _ in results}) == 1


def test_a_column_of_equal_values_becomes_the_shift():
    x = np.full((6, 1), 0.1)
    results = rr.spawn(parts, 2, x, np.array([3.0]), np.array([0.5]), np.ones((6, 1)))
    assert np.allclose(whole(results)[0], 0.5, rtol=1e-12)


# --- misuse ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("samples", "words"), [(0, "no rank has samples"), (1, "all ranks together have one sample")]
)
def test_fewer_than_two_samples_are_refused_on_every_rank(samples, words):
    def program(comm):
        with pytest.raises(ValueError, match=words):
            batch_norm(comm, np.empty((samples * comm.rank, 2)), np.ones(2), np.zeros(2))
        return comm.all_reduce(1).item()

    assert rr.spawn(program, 2) == [2, 2]


X, ONES = np.ones((3, 2)), np.ones(2)


def test_derivatives_of_another_shape_are_refused():
    def program(comm):
        forward = batch_norm(comm, X, ONES, ONES)
        with pytest.raises(ValueError, match=r"delta is float64\[2\]; wanted float64\[3, 2\]"):
            batch_norm_backward(comm, forward, ONES, np.ones(2))

    rr.spawn(program, 1)
