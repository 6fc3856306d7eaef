"""Clip gradients by their norm over all parameters, whichever ranks hold these.

The norm is the root of the sum of the squares of all numbers, in float64.  Each rank computes the
norm of the numbers that it counts, and that of the norms of all ranks.  So all ranks get bitwise
the same norm, and clip alike.

Source: Pascanu, Mikolov & Bengio, "On the difficulty of training recurrent neural networks", ICML
2013.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterable, Iterator, Mapping
from numbers import Real
from typing import Any

import numpy as np

import ringreduce as rr
from ringreduce.errors import shown
from ringreduce.parallel.arrays import by_name, check_comm, scale, wide

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
    arrays = by_name("global_norm", counted).values()
    own = _norm(np.array([_norm(block) for array in arrays for block in _blocks(array)]))
    return own if comm is None else _norm(comm.all_gather(np.array([own])))


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
    arrays = by_name("clip", gradients, changed=True)
    if not longest < norm < math.inf:
        return 1.0
    factor = longest / norm
    # A subnormal factor has lost digits: its two roots have not.
    root = math.sqrt(norm)
    factors = (factor,) if factor >= sys.float_info.min else (1 / root, longest / root)
    for array, each in itertools.product(arrays.values(), factors):
        scale(array, each, out=array)
    return factor


def _blocks(array: Any) -> Iterator[Any]:
    """Yield the numbers of an array in the wide dtype; of complex numbers both parts."""
    flat = array.reshape(-1)
    step = _BLOCK if isinstance(flat, np.ndarray) else max(1, flat.size)
    for start in range(0, flat.size, step):
        block = flat[start : start + step].astype(wide(flat.dtype))
        yield block.view(block.real.dtype) if block.dtype.kind == "c" else block


def _norm(numbers: Any) -> float:
    """Return the norm of real numbers, which are scaled if their squares overflow or get lost."""
    with np.errstate(over="ignore", under="ignore"):
        total = float(np.square(numbers).sum())
    if _SMALL <= total < math.inf or math.isnan(total) or not numbers.size:
        return math.sqrt(total)
    largest = float(abs(numbers).max())
    if not 0 < largest < math.inf:
        return largest
    exponent = math.frexp(largest)[1]
    return float(np.ldexp(_norm(np.ldexp(numbers, -exponent)), exponent))
