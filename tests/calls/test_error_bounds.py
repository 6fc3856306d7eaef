"""Error bounds of all-reduces in 16 bits."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import ringreduce as rr

pytestmark = pytest.mark.slow

SHORT = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
UNIT_ROUNDOFF = {"float16": 2.0**-11, "bfloat16": 2.0**-8}

# A fold rounds the exact sum of two 16-bit floats to the nearest 16-bit float, as
# `tests.devices.test_float16` shows for all of them: rounding to float32 on the way changes
# nothing, since 24 digits are at least 2p + 2 for p = 11 and p = 8 (Figueroa, SIGNUM Newsletter
# 30(3), 1995).  So folding n contributions in any order is summation in p digits,
# with n - 1 additions ("hops").  Its error is at most (n - 1) u sum|x|, u = 2**-p, to all orders
# (Jeannerod and Rump, SIAM J. Matrix Anal. Appl. 34(2), 2013); subnormals add nothing, for sums in
# their range are exact.  The bound that we promise, (hops + 1) u sum|x|, leaves one u for the
# division of a mean: it rounds once more, by u |sum| / n at most, or half the least subnormal.
#
# fold_many sums in float32, with at most (n - 1) 2**-24 sum|x|, and then rounds by u |sum|.


@pytest.mark.parametrize("name", SHORT)
@pytest.mark.parametrize("op", ["sum", "mean", "prod", "min", "max"])
@pytest.mark.parametrize("count", [1, 5, 3000, 40_001])
def test_an_all_reduce_gives_all_ranks_the_same_bits_within_the_bound(name, op, count):
    dtype = SHORT[name]
    rng = np.random.default_rng(count)
    inputs = rng.uniform(0.5, 2, (4, count)).astype(dtype)

    def program(comm):
        return comm.all_reduce(inputs[comm.rank], op)

    results = rr.spawn(program, 4, nodes=(2, 2), timeout_s=20)
    assert {result.dtype for result in results} == {dtype}
    assert len({result.tobytes() for result in results}) == 1
    exact = {"sum": np.sum, "mean": np.mean, "prod": np.prod, "min": np.min, "max": np.max}[op](
        inputs.astype(float), axis=0
    )
    # All contributions are positive, so sum|x| is the sum; a product's errors add up likewise.
    hops = 3
    error = np.abs(results[0].astype(float) - exact)
    assert (error <= (hops + 1) * UNIT_ROUNDOFF[dtype.name] * exact).all()


@pytest.mark.parametrize("name", SHORT)
@pytest.mark.parametrize("algorithm", ["one_shot", "two_shot", "star", "allgather_reduce"])
@pytest.mark.parametrize("count", [1, 3000, 100_000])
def test_ranks_that_add_all_at_once_round_once(name, algorithm, count):
    dtype = SHORT[name]
    inputs = np.random.default_rng(count).uniform(-2, 2, (5, count)).astype(dtype)
    results = rr.spawn(
        lambda comm: comm.all_reduce(inputs[comm.rank], algorithm=algorithm), 5, timeout_s=20
    )
    wanted = np.add.accumulate(inputs.astype(np.float32), axis=0)[-1].astype(dtype)
    assert all(np.array_equal(result, wanted) for result in results)
