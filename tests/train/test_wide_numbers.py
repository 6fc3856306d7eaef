"""Every helper of rr.train, for every dtype and kind of values, beside NumPy in the wide dtype."""

from __future__ import annotations

import hashlib

import ml_dtypes
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import ringreduce as rr
from ringreduce.parallel.batch_norm import normalise_by
from ringreduce.parallel.layers import cross_entropy
from ringreduce.train import (
    DataParallel,
    batch_norm,
    batch_norm_backward,
    check_equal,
    clip,
    mlp,
    optimizers,
)
from ringreduce.train import global_norm as norm_of

SHORT = [np.dtype(t) for t in ("float16", ml_dtypes.bfloat16)]
REAL = [*SHORT, *map(np.dtype, "fdg")]
EIGHT_BITS = [np.dtype(t) for t in (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2)]
COMPLEX = [*map(np.dtype, "FDG")]
WHOLE = [*map(np.dtype, "?bBhHiIqQ")]
SHAPES = [(), (0,), (1,), (7,), (2, 3), (4, 0), (3, 2, 2)]
KINDS = ["ordinary", "subnormal", "small", "large", "around a mean"]


def wide(dtype):
    return np.dtype(np.float64) if dtype in EIGHT_BITS else np.promote_types(dtype, np.float64)


def info(dtype):
    return ml_dtypes.finfo(dtype) if dtype.char not in "gG" else np.finfo(dtype)


def widened(array):
    return array.astype(wide(array.dtype))


class Draw:
    """Arrays of one dtype and one kind of values, in several orders of memory."""

    def __init__(self, dtype, kind, seed):
        self.dtype, self.kind, self.rng = dtype, kind, np.random.default_rng(seed)

    def __call__(self, *shape, most=1e300):
        if self.dtype in WHOLE:
            numbers = self.rng.integers(0, 256, (*shape, 2, self.dtype.itemsize), np.uint8)
            found = (numbers & 1 if self.dtype == bool else numbers).view(self.dtype)[..., 0]
        else:
            found = self._floats((*shape, 2), most)
        order = self.rng.integers(3)  # strided, Fortran's, C's
        return [found[..., 0], np.array(found[..., 0], order="F"), found[..., 0].copy()][order]

    def _floats(self, shape, most):
        about = info(self.dtype)
        least = max(float(about.smallest_normal), 1e-300)  # a norm is a float: no longdouble
        size = {"large": min(float(about.max), most) / 2, "small": 9 * least}.get(self.kind, 1)
        size = least if self.kind == "subnormal" else size
        mean = 100 if self.kind == "around a mean" else 0
        found = mean + size * self.rng.uniform(-1, 1, shape).astype(wide(self.dtype))
        if self.dtype in COMPLEX:
            found = found + 1j * size * self.rng.uniform(-1, 1, shape)
        return found.astype(self.dtype)


def assert_near(found, wanted, roundings, size=0.0):
    """`found` is `wanted`, but for roundings of its dtype, relative to the larger of two sizes."""
    about = info(found.dtype)
    bound = roundings * float(about.eps) * np.maximum(abs(wanted), size)
    bound += 2 * roundings * np.asarray(about.smallest_subnormal, np.longdouble)
    assert found.shape == wanted.shape
    assert (abs(widened(found) - wanted) <= bound).all()


# --- a helper each: it draws arrays, and compares what two ranks compute with NumPy ---------------


def norms_and_clipping(draw, shapes):
    arrays = [draw(*shape) for shape in shapes]
    parts = [widened(a).reshape(-1).astype(np.clongdouble).view(np.longdouble) for a in arrays]
    flat = np.concatenate(parts)
    largest = abs(flat).max(initial=0)
    wanted = largest and largest * np.sqrt(np.square(flat / largest).sum())

    def program(comm):
        mine = {str(i): array.copy(order="K") for i, array in enumerate(arrays)}
        norm = norm_of({name: mine[name] for name in list(mine)[comm.rank :: 2]}, comm)
        return norm, mine, 1.0 if draw.dtype in WHOLE else clip(mine, norm, norm / 3)

    (norm, mine, factor), other = rr.spawn(program, 2)
    assert norm == other[0]
    assert abs(norm - wanted) <= 1e-14 * wanted
    assert factor == (norm / 3 / norm if norm and draw.dtype not in WHOLE else 1.0)
    for before, after in zip(arrays, mine.values(), strict=True):
        assert after.dtype == draw.dtype
        assert draw.dtype in WHOLE or np.array_equal(
            after, (widened(before) * factor).astype(draw.dtype)
        )


def equality(draw, shapes):
    arrays = [draw(*shape) for shape in shapes]
    digests = rr.spawn(lambda comm: check_equal(comm, arrays), 2)
    if draw.dtype.char not in "gG":
        assert digests == [hashlib.sha256(b"".join(a.tobytes() for a in arrays)).hexdigest()] * 2
    assume(arrays[0].size)
    other = arrays[0].copy()
    other.reshape(-1)[-1] = 0 if other.reshape(-1)[-1] else 1

    def drift(comm):
        with pytest.raises(rr.train.DriftError, match="rank 1"):
            check_equal(comm, [other if comm.rank == 1 else arrays[0], *arrays[1:]])

    rr.spawn(drift, 3)


def batch_norms(draw, shapes):
    rows = 2 + draw.rng.integers(7)
    x, delta = draw(rows, 3, most=1e150), draw.rng.uniform(-0.3, 0.3, (rows, 3)).astype(draw.dtype)
    scale, shift = (draw.rng.uniform(-1, 1, 3).astype(draw.dtype) for _ in range(2))
    cut = draw.rng.integers(rows + 1)  # a rank may have no rows

    def program(comm):
        mine = slice(cut) if comm.rank else slice(cut, None)
        forward = batch_norm(comm, x[mine], scale, shift)
        return forward, batch_norm_backward(comm, forward, scale, delta[mine])

    (first, of_first), (second, of_second) = rr.spawn(program, 2)
    mean, variance = widened(x).mean(axis=0), widened(x).var(axis=0)
    inverse = 1 / np.sqrt(variance + 1e-5)
    unit = (widened(x) - mean) * inverse
    # The mean is off by a few roundings of the wide dtype, relative to the largest number.
    off = 1e-14 * abs(widened(x)).max() * inverse.max() / float(info(draw.dtype).eps)
    y = unit * widened(scale) + widened(shift)
    assert first.samples == rows
    assert {array.dtype for array in (first.y, *of_first)} == {draw.dtype}
    assert np.allclose(first.mean, mean, rtol=1e-14, atol=1e-14 * abs(widened(x)).max())
    assert np.allclose(first.variance, variance, rtol=1e-8, atol=0)
    assert_near(np.concatenate([second.y, first.y]), y, 2, off)
    assert_near(normalise_by(mean, variance, x, scale, shift), y, 2, off)
    # The backward pass has the normalised rows in x's dtype: three times their largest.
    slope = widened(delta) - widened(delta).mean(axis=0)
    slope -= unit * (widened(delta) * unit).mean(axis=0)
    by_x = np.concatenate([of_second[0], of_first[0]])
    bound = 30 * (1 + off) * abs(widened(scale) * inverse)
    assert_near(by_x, slope * widened(scale) * inverse, 1, bound)
    assert_near(of_first[1], (widened(delta) * unit)[cut:].sum(axis=0), 1, 10 * (1 + off))
    assert_near(of_first[2], widened(delta[cut:]).sum(axis=0), 1)


def weighted_means(draw, shapes):
    gradients = [[draw(*shape) for shape in shapes] for _ in range(2)]
    weights = [[1, 9_999_999], [3, 4], [0, 2]][draw.rng.integers(3)]
    joins = draw.rng.integers(2)

    def program(comm):
        dp = DataParallel(comm, {str(i): g.copy() for i, g in enumerate(gradients[0])})
        if not joins:
            dp.weigh(weights[comm.rank])
        for _ in dp.join([1], lambda batch: weights[comm.rank]) if joins else [1]:
            for i, gradient in enumerate(gradients[comm.rank]):
                dp.ready(str(i), gradient)
            means = dp.finish()
        return list(means.values())

    found, other = rr.spawn(program, 2)
    for i, mean in enumerate(found[::-1]):
        assert mean.dtype == draw.dtype
        assert np.array_equal(mean, other[::-1][i])
        shares = [
            widened(g[i]) * (w / sum(weights)) for g, w in zip(gradients, weights, strict=True)
        ]
        assert_near(mean, shares[0] + shares[1], 2, sum(map(abs, shares)))


def losses(draw, shapes):
    logits, labels = draw(20, 5), np.arange(20) % 5
    loss, gradient = cross_entropy(logits, labels, 20)
    shifted = widened(logits) - widened(logits).max(axis=1, keepdims=True)
    log_p = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    assert np.isclose(loss, -log_p[range(20), labels].sum() / 20, rtol=1e-13, atol=0)
    assert_near(gradient, (np.exp(log_p) - np.eye(5)[labels]) / 20, 2, 1e-13)


def accuracies(draw, shapes):
    logits = draw(20, 5)
    assert np.array_equal(
        mlp.predict((), logits, {}).argmax(axis=1), widened(logits).argmax(axis=1)
    )


def sums_over_a_batch(draw, shapes):
    """The gradient of a bias; matrix products are those of the dtype."""
    delta = draw(3000, 2, most=1e290)
    arrays = mlp.AffineArrays(np.zeros((1, 2), draw.dtype), np.zeros(2, draw.dtype))
    kept = mlp.Kept(np.zeros((3000, 1), draw.dtype), delta, None)
    _, pairs = mlp.Affine(0, arrays, last=True).backward(kept, delta, {})
    wanted = widened(delta).sum(axis=0)
    assume((abs(wanted) < float(info(draw.dtype).max)).all())
    bound = 1e-13 / float(info(draw.dtype).eps) * abs(widened(delta)).sum(axis=0)
    assert_near(next(pairs)[1], wanted, 1, bound)


def steps_of_optimizers(draw, shapes):
    arrays = [abs(draw(7, most=1e100)) for _ in range(3)]
    gradient = draw(7, most=1e100)
    for step, count in ((optimizers.sgd, 2), (optimizers.adam, 3)):
        exact, given = tuple(map(widened, arrays[:count])), tuple(a.copy() for a in arrays[:count])
        step(exact, widened(gradient), 0.01, 3)
        step(given, gradient, 0.01, 3)
        assert all(
            np.array_equal(g, e.astype(draw.dtype)) for g, e in zip(given, exact, strict=True)
        )


HELPERS = {
    norms_and_clipping: [*REAL, *EIGHT_BITS, *COMPLEX, *WHOLE],
    equality: [*REAL, *EIGHT_BITS, *COMPLEX, *WHOLE],
    batch_norms: [*REAL, *EIGHT_BITS],
    weighted_means: [*REAL, *COMPLEX],
    losses: REAL,
    accuracies: [*REAL, *EIGHT_BITS],
    sums_over_a_batch: REAL,
    steps_of_optimizers: SHORT,
}
"""Helper -> the dtypes that it takes."""


@pytest.mark.slow
@pytest.mark.parametrize("helper", HELPERS, ids=lambda helper: helper.__name__)
@settings(deadline=None)
@given(data=st.data(), kind=st.sampled_from(KINDS), seed=st.integers(0, 999))
@pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero) encountered")
def test_a_helper_computes_what_numpy_computes_in_the_wide_dtype(helper, data, kind, seed):
    dtype = data.draw(st.sampled_from(HELPERS[helper]))
    shapes = data.draw(st.lists(st.sampled_from(SHAPES), min_size=1, max_size=4))
    helper(Draw(dtype, kind, seed), shapes)


def test_padding_of_longdouble_is_not_compared():
    def program(comm):
        x = np.full(4, 1 / np.longdouble(3))
        if np.finfo(np.longdouble).nmant == 63:
            x.view(np.uint8).reshape(4, -1)[:, 10:] = comm.rank
        return check_equal(comm, {"w": x, "z": x.view(np.clongdouble)})

    assert len(set(rr.spawn(program, 2))) == 1


@pytest.mark.parametrize(
    "other",
    [
        {"w": np.zeros((2, 1), ml_dtypes.bfloat16)},
        {"w": np.zeros(2, np.float16)},
        {"v": np.zeros(2, ml_dtypes.bfloat16)},
        {"w": np.array([0.0, -0.0], ml_dtypes.bfloat16)},
    ],
)
def test_another_sign_shape_dtype_or_name_is_a_drift(other):
    def program(comm):
        with pytest.raises(rr.train.DriftError, match="rank 1"):
            check_equal(comm, other if comm.rank == 1 else {"w": np.zeros(2, ml_dtypes.bfloat16)})

    rr.spawn(program, 3)
