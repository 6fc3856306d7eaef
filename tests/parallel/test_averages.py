"""The mean of named arrays over the ranks, weighted by samples."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest

import ringreduce as rr

KINDS = {"w": ((5, 3), "float64"), "b": ((3,), "float32"), "scale": ((), ml_dtypes.bfloat16)}


def params(rank: int) -> dict[str, np.ndarray]:
    """Return small integers that differ by rank and index."""
    rng = np.random.default_rng(rank)
    return {n: np.asarray(rng.integers(-9, 9, s)).astype(d) for n, (s, d) in KINDS.items()}


def averaged(ranks: int, weights: list[float], make=params):
    def program(comm):
        found = make(comm.rank)
        rr.train.average(comm, found, samples=weights[comm.rank])
        return found

    return rr.spawn(program, ranks)


@pytest.mark.parametrize("weights", [[2], [1, 1], [3, 0], [1, 2, 5], [7, 0, 1, 0, 4]])
def test_every_rank_has_the_weighted_mean(weights):
    results = averaged(len(weights), weights)
    for name, (_, dtype) in KINDS.items():
        total = sum(
            w * params(r)[name].astype(np.float64) for r, w in enumerate(weights)
        )  # exact: whole numbers
        wide = np.float64 if dtype == "float64" else np.float32
        wanted = (total.astype(wide) / wide(sum(weights))).astype(dtype)
        for found in results:
            assert found[name].dtype == wanted.dtype
            np.testing.assert_array_equal(found[name], wanted)


def test_ranks_count_alike_without_samples():
    def program(comm):
        found = {"w": np.array([1.0, 5.0]) * comm.rank}
        rr.train.average(comm, found)
        return found["w"].tolist()

    assert rr.spawn(program, 3) == [[1.0, 5.0]] * 3


def test_arrays_of_a_rank_without_samples_are_ignored():
    results = averaged(2, [0, 3], lambda rank: {"w": np.array([math.nan, 2.0][rank:][:1])})
    assert [found["w"].tolist() for found in results] == [[2.0], [2.0]]


def test_a_sum_above_the_numbers_of_float16_has_a_mean():
    results = averaged(3, [9, 9, 9], lambda rank: {"w": np.full(2, 60000, np.float16)})
    assert [found["w"].tolist() for found in results] == [[60000.0] * 2] * 3


@pytest.mark.parametrize(
    ("names", "samples", "error", "text"),
    [
        ("vw", 1, rr.MismatchError, r"rank 1 has w: .* where rank 0 has v: "),
        ("vv", 0, ValueError, "^average: samples is 0 on all ranks"),
    ],
)
def test_all_ranks_raise_and_keep_their_arrays(names, samples, error, text):
    def program(comm):
        own = {names[comm.rank]: np.full(2, float(comm.rank))}
        with pytest.raises(error, match=text):
            rr.train.average(comm, own, samples)
        comm.barrier()
        return next(iter(own.values())).tolist()

    assert rr.spawn(program, 2) == [[0.0, 0.0], [1.0, 1.0]]


@pytest.mark.parametrize(
    ("samples", "error", "text"),
    [
        (-1, ValueError, "^average: -1 samples; wanted a finite number of at least 0"),
        (math.nan, ValueError, "^average: nan samples"),
        (True, TypeError, "^average: True samples; wanted a number"),
    ],
)
def test_samples_that_cannot_be_are_refused_before_anything_is_sent(samples, error, text):
    def program(comm):
        if comm.rank == 0:  # alone: the other rank would wait for a message
            with pytest.raises(error, match=text):
                rr.train.average(comm, {"w": np.zeros(2)}, samples)
        comm.barrier()

    rr.spawn(program, 2)
