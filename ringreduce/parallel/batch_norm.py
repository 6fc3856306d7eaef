"""Batch normalisation over the samples of all ranks, as pure functions.

    y = scale * (x - mean) / sqrt(variance + eps) + shift

`mean` and `variance` are those of a column over the samples of all ranks, so N ranks compute what
one rank computes for the same samples.  Forward makes two small all-reduces, backward one.

``xp`` is the array module, by default NumPy.

Source: Ioffe & Szegedy, "Batch normalization: accelerating deep network training by reducing
internal covariate shift", ICML 2015.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol

import numpy as np

from ringreduce.parallel.arrays import is_float, wide

EPS = 1e-5
"""Added to the variance, so that a column of equal values is not divided by zero."""

Array = Any
"""An array of the module in use."""


class Sums(Protocol):
    """Adds up arrays of all ranks: a communicator, or an object that stands in for one."""

    def all_reduce(self, x: Array, *, out: Array = None) -> Array:
        """Return the sum of the arrays of all ranks, in `out` if that is given."""


@dataclass(frozen=True)
class Normalised:
    """The result of `batch_norm`, and the values that its backward pass needs.

    Example:
        >>> def program(comm):
        ...     x = np.array([[1.0], [5.0]]) if comm.rank == 0 else np.empty((0, 1))
        ...     return rr.train.batch_norm(comm, x, np.ones(1), np.zeros(1))
        >>> of_rank_1 = rr.spawn(program, 2)[1]  # it has no samples
        >>> of_rank_1.y.shape, of_rank_1.mean, of_rank_1.variance, of_rank_1.samples
        ((0, 1), array([3.]), array([4.]), 2)
    """

    y: Array
    """The normalised rows of this rank, (samples, columns)."""
    unit: Array
    """The rows before scale and shift: mean 0 and variance 1 over all ranks."""
    inverse: Array
    """1 / sqrt(variance + eps), (columns,)."""
    mean: Array
    """Mean of each column over the samples of all ranks, (columns,)."""
    variance: Array
    """Mean square of the distance from the mean, over the samples of all ranks, (columns,)."""
    samples: int
    """Samples of all ranks."""


Normalised.__module__ = "ringreduce.train"  # not before: dataclasses look that module up


def batch_norm(
    comm: Sums,
    x: Array,
    scale: Array,
    shift: Array,
    *,
    eps: float = EPS,
    xp: ModuleType = np,
) -> Normalised:
    """Normalise the columns of `x` over the samples of all ranks, then scale and shift them.

    Every rank must make this call; a rank may have no samples.  All numbers are computed in float64
    (longdouble for longdouble), and rounded once to x's dtype.

    Args:
        comm: the communicator of the ranks.
        x: this rank's samples, floats of shape (samples, columns).
        scale, shift: (columns,) of x's dtype, the same on every rank.
        eps: is added to the variance.
        xp: the array module, NumPy or CuPy.

    Returns:
        The `Normalised`.  `Normalised.y` has x's shape and dtype.  The means and variances are
        bitwise the same on every rank.

    Raises:
        ValueError: a shape or dtype does not fit.  Or all ranks together have fewer than two
            samples, which all ranks raise: the variance of one sample is 0.
        MismatchError: ranks have another number of columns, or make another call.

    Example:
        >>> def program(comm):
        ...     x = np.array([[1.0, 4.0], [3.0, 8.0]])[comm.rank :: 2]
        ...     return rr.train.batch_norm(comm, x, np.ones(2), np.zeros(2)).y.round(3)
        >>> rr.spawn(program, 2)
        [array([[-1., -1.]]), array([[1., 1.]])]
    """
    _check(x, scale, shift)
    rows = x.astype(wide(x.dtype))
    sums = xp.empty(x.shape[1] + 1, rows.dtype)
    sums[:-1] = rows.sum(axis=0)
    sums[-1] = len(x)
    comm.all_reduce(sums, out=sums)
    samples = int(sums[-1])
    if not samples:
        raise ValueError("batch_norm: no rank has samples; there is no mean of them")
    if samples == 1:
        raise ValueError(
            "batch_norm: all ranks together have one sample, whose variance is 0; pass at least two"
        )
    mean = sums[:-1] / samples
    rows -= mean
    squares = xp.square(rows).sum(axis=0)
    variance = comm.all_reduce(squares, out=squares) / samples
    inverse = 1 / xp.sqrt(variance + eps)
    rows *= inverse
    y = (rows * scale.astype(rows.dtype) + shift.astype(rows.dtype)).astype(x.dtype)
    return Normalised(y, rows.astype(x.dtype), inverse, mean, variance, samples)


def batch_norm_backward(
    comm: Sums, normalised: Normalised, scale: Array, delta: Array, *, xp: ModuleType = np
) -> tuple[Array, Array, Array]:
    """Return the derivatives of the loss by `x`, `scale` and `shift`, from those by `y`.

    Every rank must make this call.  The derivatives by scale and shift are this rank's share: the
    shares of all ranks add up to the derivative.

    Args:
        comm: the communicator of the ranks.
        normalised: the result of `batch_norm`.
        scale: as for `batch_norm`.
        delta: derivatives of the loss by `Normalised.y`, of its shape and dtype.
        xp: the array module, NumPy or CuPy.

    Returns:
        The derivatives by x (samples, columns), scale (columns,) and shift (columns,).

    Raises:
        ValueError: `delta` has another shape or dtype than ``normalised.y``.
        MismatchError: ranks make another call.

    Example:
        >>> def program(comm):
        ...     x = np.array([[0.0], [1.0], [5.0]])[comm.rank :: 2]
        ...     normalised = rr.train.batch_norm(comm, x, np.ones(1), np.zeros(1))
        ...     _, _, shift = rr.train.batch_norm_backward(
        ...         comm, normalised, np.ones(1), np.ones_like(x)
        ...     )
        ...     return shift
        >>> rr.spawn(program, 2)
        [array([2.]), array([1.])]
    """
    unit = normalised.unit
    if _text(delta) != _text(unit):
        raise ValueError(
            f"batch_norm_backward: delta is {_text(delta)}; wanted {_text(unit)}, as y has"
        )
    dtype, delta = delta.dtype, delta.astype(wide(delta.dtype))
    unit, scale = unit.astype(delta.dtype), scale.astype(delta.dtype)
    by_scale, by_shift = (delta * unit).sum(axis=0), delta.sum(axis=0)
    of_scale, of_shift = comm.all_reduce(xp.stack([by_scale, by_shift])) / normalised.samples
    delta -= of_shift
    delta -= unit * of_scale
    delta *= scale * normalised.inverse
    return delta.astype(dtype), by_scale.astype(dtype), by_shift.astype(dtype)


def normalise_by(
    mean: Array, variance: Array, x: Array, scale: Array, shift: Array, xp: ModuleType = np
) -> Array:
    """Return the rows of `x`, normalised by a given `mean` and `variance`, scaled and shifted."""
    inverse = scale.astype(wide(x.dtype)) / xp.sqrt(variance + EPS)
    y = (x.astype(inverse.dtype) - mean) * inverse + shift.astype(inverse.dtype)
    return y.astype(x.dtype)


def _check(x: Array, scale: Array, shift: Array) -> None:
    if not hasattr(x, "dtype") or x.ndim != 2 or x.dtype.kind == "c" or not is_float(x.dtype):
        raise ValueError(f"batch_norm: x is {_text(x)}; wanted floats of shape (samples, columns)")
    wanted = f"{x.dtype}[{x.shape[1]}]"
    for name, array in (("scale", scale), ("shift", shift)):
        if _text(array) != wanted:
            raise ValueError(
                f"batch_norm: {name} is {_text(array)}; wanted {wanted}, one number for each "
                "column of x"
            )


def _text(array: Array) -> str:
    """Return the dtype and shape of an array, and the type of anything else."""
    return f"{array.dtype}{list(array.shape)}" if hasattr(array, "dtype") else type(array).__name__
