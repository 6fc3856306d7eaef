"""Helpers of rr.train compute what NumPy computes in the wide dtype, for every dtype."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ringreduce as rr
from ringreduce.train import DataParallel, batch_norm, batch_norm_backward, check_equal, clip, mlp
from ringreduce.train import global_norm as norm_of

SHORT = [np.dtype(t) for t in ("float16", ml_dtypes.bfloat16)]
EIGHT_BITS = [np.dtype(t) for t in (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2)]
REAL = [*SHORT, *map(np.dtype, "fdg")]
DTYPES = [*REAL, *EIGHT_BITS, *map(np.dtype, "FDG")]
SHAPES = [(), (0,), (1,), (7,), (2, 3), (4, 0), (3, 2, 2)]


def unit(dtype: np.dtype) -> float:
    """The largest relative error of one rounding to `dtype`, doubled."""
    return float(ml_dtypes.finfo(dtype).eps if dtype.kind in "Vf" else np.finfo(dtype).eps)


def numbers(dtype: np.dtype, shape: tuple[int, ...], magnitude: float, seed: int) -> np.ndarray:
    """Numbers up to `magnitude` times the largest, or the least normal, number of the dtype.

    Every second array is strided, every third in Fortran's order.
    """
    info = ml_dtypes.finfo(dtype) if dtype.kind in "Vf" else np.finfo(dtype)
    wide = np.promote_types(dtype, np.float64)
    scale = {"large": info.max / 2, "small": info.smallest_normal, "one": 1}[magnitude]
    # A norm is a float: longdouble's own range is beyond it.
    scale = np.clip(np.longdouble(scale), 1e-300, 1e300).astype(wide)
    rng = np.random.default_rng(seed)
    found = rng.uniform(-1, 1, (*shape, 2)).astype(wide)
    if wide.kind == "c":
        found += 1j * rng.uniform(-1, 1, found.shape)
    found = (found * scale).astype(dtype)[..., 0]
    return np.asfortranarray(found) if seed % 3 == 0 else found if seed % 2 else found.copy()


def exact_norm(arrays: list[np.ndarray]) -> np.ndarray:
    """The norm, computed in longdouble with numbers that are scaled before."""
    parts = [a.astype(np.promote_types(a.dtype, np.float64)).reshape(-1) for a in arrays]
    flat = np.concatenate([p.astype(np.clongdouble).view(np.longdouble) for p in parts])
    largest = abs(flat).max(initial=0)
    return largest and largest * np.sqrt(np.square(flat / largest).sum())


@settings(deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    shapes=st.lists(st.sampled_from(SHAPES), min_size=1, max_size=4),
    magnitude=st.sampled_from(["large", "small", "one"]),
    seed=st.integers(0, 99),
)
def test_norm_clipping_and_equality_keep_to_the_wide_dtype(dtype, shapes, magnitude, seed):
    arrays = [numbers(dtype, shape, magnitude, seed + i) for i, shape in enumerate(shapes)]
    wanted = exact_norm(arrays)

    def program(comm):
        mine = {str(i): array.copy(order="K") for i, array in enumerate(arrays)}
        counted = {name: mine[name] for name in list(mine)[comm.rank :: comm.size]}
        norm = norm_of(counted, comm)
        factor = clip(mine, norm, norm / 3)
        return norm, factor, mine, check_equal(comm, mine)

    (norm, factor, mine, _), other = rr.spawn(program, 2)
    assert norm == other[0]
    assert abs(norm - wanted) <= 1e-14 * wanted
    for before, after in zip(arrays, mine.values(), strict=True):
        exact = before.astype(np.promote_types(dtype, np.float64)) * factor
        assert after.dtype == dtype
        assert np.array_equal(after, exact.astype(dtype))


@settings(deadline=None)
@given(
    dtype=st.sampled_from(REAL),
    mean=st.sampled_from([0, 1, 100, 1e-5]),
    deviation=st.sampled_from([1, 300, 1e-4]),
    seed=st.integers(0, 99),
    samples=st.integers(2, 9),
)
def test_batch_norm_keeps_to_the_wide_dtype(dtype, mean, deviation, seed, samples):
    rng = np.random.default_rng(seed)
    x = (mean + deviation * rng.standard_normal((samples, 3))).astype(dtype)
    scale, shift = (rng.standard_normal(3).astype(dtype) for _ in range(2))
    delta = rng.standard_normal(x.shape).astype(dtype)

    def program(comm):
        mine = slice(comm.rank, None, 2)
        forward = batch_norm(comm, x[mine], scale, shift)
        return forward, batch_norm_backward(comm, forward, scale, delta[mine])[0]

    found = rr.spawn(program, 2)
    wide = np.promote_types(dtype, np.float64)
    x, scale, shift, delta = (array.astype(wide) for array in (x, scale, shift, delta))
    inverse = 1 / np.sqrt(x.var(axis=0) + 1e-5)
    normal = (x - x.mean(axis=0)) * inverse
    y = normal * scale + shift
    by_x = delta - delta.mean(axis=0) - normal * (delta * normal).mean(axis=0)
    by_x *= scale * inverse
    eps, u = 1e-11, 2 * unit(dtype)  # cancellation in x - mean loses five digits at most
    for rank, (forward, of_rank) in enumerate(found):
        assert forward.y.dtype == of_rank.dtype == dtype
        assert np.allclose(forward.variance, x.var(axis=0), rtol=1e-8, atol=1e-20)
        assert (abs(forward.y - y[rank::2]) <= u * abs(y[rank::2]) + eps + 6e-8).all()
        # The backward pass takes the normalised rows in x's dtype: three times their largest.
        bound = 30 * (u + eps) * abs(scale * inverse) + 6e-8
        assert (abs(of_rank.astype(wide) - by_x[rank::2]) <= bound).all()


@pytest.mark.parametrize("dtype", REAL, ids=str)
def test_a_small_weight_is_not_rounded_to_the_dtype(dtype):
    """A weight of 1e-7 is no normal number of float16, and its product with 6e4 is one."""

    def program(comm):
        dp = DataParallel(comm, {"w": np.zeros(3, dtype)})
        dp.weigh(1 if comm.rank else 9_999_999)
        dp.ready("w", np.full(3, 60000.0 * comm.rank).astype(dtype))
        return dp.finish()["w"]

    large = np.array(60000.0).astype(dtype).astype(float)
    assert np.allclose(rr.spawn(program, 2)[0].astype(float), large * 1e-7, rtol=8 * unit(dtype))


@pytest.mark.parametrize("dtype", SHORT, ids=str)
def test_a_loss_of_short_floats_is_that_of_float64(dtype):
    logits = (8 * np.random.default_rng(3).standard_normal((500, 20))).astype(dtype)
    labels = np.arange(500) % 20
    loss, gradient = mlp.cross_entropy(logits, labels, 500)
    wanted, slope = mlp.cross_entropy(logits.astype(float), labels, 500)
    assert loss == wanted
    assert gradient.dtype == dtype
    assert np.array_equal(gradient, slope.astype(dtype))


def test_padding_of_longdouble_is_not_compared():
    def program(comm):
        x = np.frombuffer(bytes([comm.rank]) * 64, np.uint8).view(np.longdouble).copy()
        x[...] = 1 / np.longdouble(3)
        raw = x.view(np.uint8).reshape(len(x), -1)
        if np.finfo(np.longdouble).nmant == 63:
            raw[:, 10:] = comm.rank
        return check_equal(comm, {"w": x, "z": x.view(np.clongdouble)})

    assert len(set(rr.spawn(program, 2))) == 1


@pytest.mark.parametrize(
    "other",
    [
        {"w": np.full(2, 1, ml_dtypes.bfloat16)},
        {"w": np.zeros((2, 1), ml_dtypes.bfloat16)},
        {"w": np.zeros(2, np.float16)},
        {"v": np.zeros(2, ml_dtypes.bfloat16)},
        {"w": np.array([0.0, -0.0], ml_dtypes.bfloat16)},
    ],
)
def test_another_value_shape_dtype_or_name_is_a_drift(other):
    def program(comm):
        with pytest.raises(rr.train.DriftError, match="rank 1"):
            check_equal(comm, other if comm.rank == 1 else {"w": np.zeros(2, ml_dtypes.bfloat16)})

    rr.spawn(program, 3)


@pytest.mark.parametrize(
    "given", [None, "abc", {"w": "abc"}, [np.ones(2), None], np.array([1, "a"], object), object()]
)
def test_what_is_no_number_is_refused(given):
    def program(comm):
        for helper in (lambda: check_equal(comm, given), lambda: norm_of(given, comm)):
            with pytest.raises(TypeError, match="wanted an array of numbers"):
                helper()
        with pytest.raises(TypeError, match=r"clip: .*wanted"):
            clip(given, 2.0, 1.0)
        return comm.all_reduce(1).item()  # nothing was sent

    assert rr.spawn(program, 1) == [1]


@pytest.mark.parametrize(
    ("use", "error", "words"),
    [
        (lambda c: rr.train.shard(6.0, c, 0), TypeError, "shard: n is 6.0; wanted a whole"),
        (lambda c: rr.train.shard(6, c, 0, -1), ValueError, "shard: seed is -1; wanted at least 0"),
        (lambda c: rr.train.shard(6, c, -1), ValueError, "shard: epoch is -1"),
        (lambda c: rr.train.shard(c, 10, 0), TypeError, "shard: n is Communicator; wanted"),
        (lambda c: rr.train.shard(10, 10, 0), TypeError, "shard: comm is int; pass the comm"),
        (lambda c: check_equal(np.ones(2), c), TypeError, "check_equal: comm is ndarray"),
        (lambda c: clip([np.ones(2)], 2.0, -1.0), ValueError, "clip: longest is -1.0"),
        (lambda c: clip([np.ones(2)], "2", 1.0), TypeError, "clip: norm is '2'; wanted a number"),
        (lambda c: clip([np.ones(2, int)], 2.0, 1.0), TypeError, "wanted an array of floats"),
        (lambda c: clip([np.broadcast_to(1.0, 2)], 2.0, 1.0), ValueError, "read-only"),
    ],
)
def test_wrong_arguments_are_named(use, error, words):
    with pytest.raises(error, match=r".") as raised:
        rr.spawn(use, 1)
    assert words in str(raised.value)
