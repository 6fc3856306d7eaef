"""Clip gradients by their norm over all parameters, whichever ranks hold these.

The norm is the root of the sum of the squares of all numbers.  Each rank adds up the squares of the
numbers that it counts, in float64, and an all-reduce adds up the ranks.  So all ranks get bitwise
the same norm, and clip alike.  If that sum overflows, or is so small that squares are lost, all
numbers are first divided by a power of two near the largest: two all-reduces more.

Source: Pascanu, Mikolov & Bengio, "On the difficulty of training recurrent neural networks", ICML
2013.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterable, Mapping
from numbers import Real
from typing import Any

import numpy as np

import ringreduce as rr
from ringreduce.errors import shown
from ringreduce.train.arrays import by_name, check_comm, check_floats, scale, wide

_BLOCK = 1 << 14
"""Elements that are squared at once, so that the squares stay in the cache."""
_SMALL = 2.0**-900
"""A sum of squares from here on has lost nothing that counts by underflow."""
Arrays = Mapping[str, Any] | Iterable[Any]


def global_norm(counted: Arrays, comm: rr.Communicator | None = None) -> float:
    """Return the norm of a gradient of which each rank counts a part.

    Every number of the gradient is counted by exactly one rank: of a parameter that several ranks
    hold, one rank passes the gradient, or each rank a part of it.

    Args:
        counted: arrays that this rank counts: a list, or a mapping from names.
        comm: the communicator of all ranks that count a part; all must then make this call.  None:
            this rank counts all.

    Returns:
        The norm, bitwise the same on every rank.

    Raises:
        TypeError: something is no array of numbers.
        MismatchError: ranks make another call.

    Example:
        >>> def program(comm):
        ...     shared, own = np.array([2.0]), np.array([4.0, 5.0, 6.0]) * comm.rank
        ...     return rr.train.global_norm([own] if comm.rank else [own, shared], comm)
        >>> rr.spawn(program, 2)
        [9.0, 9.0]
    """
    if comm is not None:
        check_comm("global_norm", comm)
    arrays = list(by_name("global_norm", counted).values())

    def of_all_ranks(number: float, op: str) -> float:
        total = np.array(number)
        return float(total if comm is None else comm.all_reduce(total, op, out=total))

    total = of_all_ranks(sum((_squares(each) for each in arrays), 0.0), "sum")
    if _SMALL <= total < math.inf or math.isnan(total):
        return math.sqrt(total)
    largest = of_all_ranks(max((_largest(each) for each in arrays), default=0.0), "max")
    if not 0 < largest < math.inf:
        return largest
    exponent = math.frexp(largest)[1]
    total = of_all_ranks(sum((_squares(each, exponent) for each in arrays), 0.0), "sum")
    root = math.sqrt(total)
    return float(np.ldexp(root, exponent))


def clip(gradients: Arrays, norm: float, longest: float) -> float:
    """Scale gradients in place so that their norm is at most `longest`.

    Args:
        gradients: all arrays of floats that this rank holds: a list, or a mapping from names.
        norm: their norm over all ranks: the result of `global_norm`.
        longest: the largest norm that is left as it is, at least 0.

    Returns:
        The factor: 1 if the norm is at most `longest`, and also if it is infinite or no number.

    Raises:
        ValueError: a gradient cannot be written to, or a norm is negative.
        TypeError: a gradient is no array of floats, or a norm is no number.

    Example:
        >>> gradient = np.array([3.0, 4.0])
        >>> rr.train.clip([gradient], rr.train.global_norm([gradient]), 0.5), gradient
        (0.1, array([0.3, 0.4]))
    """
    for what, value in (("norm", norm), ("longest", longest)):
        if not isinstance(value, (Real, np.ndarray)) or isinstance(value, bool) or np.ndim(value):
            raise TypeError(f"clip: {what} is {shown(value)}; wanted a number")
        if value < 0 or (what == "longest" and math.isnan(value)):
            raise ValueError(f"clip: {what} is {value}; wanted at least 0")
    arrays = by_name("clip", gradients)
    for name, array in arrays.items():
        check_floats("clip", name, array)
    if not longest < norm < math.inf:
        return 1.0
    factor = longest / norm
    # A subnormal factor has lost digits: its two roots have not.
    root = math.sqrt(norm)
    factors = (factor,) if factor >= sys.float_info.min else (1 / root, longest / root)
    for array, each in itertools.product(arrays.values(), factors):
        scale(array, each, out=array)
    return factor


def _squares(array: Any, exponent: int = 0) -> float:
    """Return the sum of the squares, computed in the wide dtype, of array / 2**exponent."""
    flat, total = array.reshape(-1), 0.0
    block = _BLOCK if isinstance(flat, np.ndarray) else max(1, flat.size)
    for start in range(0, flat.size, block):
        part = _real(flat[start : start + block])
        if exponent:
            # Half of the power at a time: a whole one may be no number.
            for half in (-(exponent // 2), exponent // 2 - exponent):
                part *= part.dtype.type(2.0**half)
        with np.errstate(over="ignore", under="ignore"):  # `global_norm` then scales
            part *= part
            total += float(part.sum())
    return total


def _largest(array: Any) -> float:
    """Return the largest absolute value of any real and imaginary part; 0 of no numbers."""
    return float(abs(_real(array.reshape(-1))).max()) if array.size else 0.0


def _real(flat: Any) -> Any:
    """Return a copy in the wide dtype; complex numbers as twice as many real ones."""
    copy = flat.astype(wide(flat.dtype))
    return copy.view(copy.real.dtype) if copy.dtype.kind == "c" else copy
