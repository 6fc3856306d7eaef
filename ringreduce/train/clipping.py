"""Clip gradients by their norm over all parameters, whichever ranks hold these.

The norm is the root of the sum of the squares of all numbers.  Each rank adds up the squares of the
numbers that it counts, in float64, and an all-reduce adds up the ranks.  So all ranks get bitwise
the same norm, and clip alike.

Source: Pascanu, Mikolov & Bengio, "On the difficulty of training recurrent neural networks", ICML
2013.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

import ringreduce as rr

_BLOCK = 1 << 14
"""Elements that are squared at once, so that the squares stay in the cache."""


def global_norm(counted: Iterable[Any], comm: rr.Communicator | None = None) -> float:
    """Return the norm of a gradient of which each rank counts a part.

    Every number of the gradient is counted by exactly one rank: of a parameter that several ranks
    hold, one rank passes the gradient, or each rank a part of it.

    Args:
        counted: arrays that this rank counts.
        comm: the communicator of all ranks that count a part; all must then make this call.  None:
            this rank counts all.

    Returns:
        The norm, bitwise the same on every rank.

    Raises:
        MismatchError: ranks make another call.

    Example:
        >>> def program(comm):
        ...     shared, own = np.array([2.0]), np.array([4.0, 5.0, 6.0]) * comm.rank
        ...     return rr.train.global_norm([own] if comm.rank else [own, shared], comm)
        >>> rr.spawn(program, 2)
        [9.0, 9.0]
    """
    total = np.array(sum(map(_squares, counted), 0.0))
    if comm is not None:
        comm.all_reduce(total, out=total)
    return math.sqrt(total)


def clip(gradients: Iterable[Any], norm: float, longest: float) -> float:
    """Scale gradients in place so that their norm is at most `longest`.

    Args:
        gradients: all arrays that this rank holds.
        norm: their norm over all ranks: the result of `global_norm`.
        longest: the largest norm that is left as it is.

    Returns:
        The factor: 1 if the norm is at most `longest`, and also if it is infinite or no number.

    Raises:
        ValueError: a gradient cannot be written to.

    Example:
        >>> gradient = np.array([3.0, 4.0])
        >>> rr.train.clip([gradient], rr.train.global_norm([gradient]), 0.5), gradient
        (0.1, array([0.3, 0.4]))
    """
    if not longest < norm < math.inf:
        return 1.0
    factor = longest / norm
    for gradient in gradients:
        gradient *= gradient.dtype.type(factor)
    return factor


def _squares(gradient: Any) -> float:
    """Return the sum of the squares, computed in float64."""
    flat = gradient.reshape(-1)
    if not isinstance(flat, np.ndarray):
        return float((flat.astype(np.float64) ** 2).sum())
    total = 0.0
    for start in range(0, flat.size, _BLOCK):
        block = flat[start : start + _BLOCK].astype(np.float64)
        block *= block
        total += float(block.sum())
    return total
