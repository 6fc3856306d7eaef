"""Sums that do not depend on their order: numbers as whole multiples of a power of two."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from ringreduce.compiler import jit

DTYPES = ("float32", "float64")
_BITS: dict[str, Any] = {"float32": np.dtype(np.int32), "float64": np.dtype(np.int64)}
_SUM_BITS = 62
"""The sum of all addends is less than 2 ** 62 in magnitude."""
_LARGEST_EXPONENT = 1023
"""Of a power of two that is a finite float64."""


def magnitude(addends: Sequence[np.ndarray], dtype: np.dtype[Any]) -> int:
    """Return the largest number of some arrays without its sign, as bits; 0 without numbers.

    Such bits have the order of the numbers; those of infinity and NaN are the largest.
    """
    bits = _BITS[dtype.name]
    mask, loop = int(np.iinfo(bits).max), _loop(f"fixed-largest-{dtype.name}")
    found = np.zeros(1, np.int64)
    for addend in addends:
        seen = addend.reshape(-1).view(bits)
        if loop is not None:
            loop(seen, mask, found)
        elif seen.size:
            found[0] = max(found[0], int((seen & bits.type(mask)).max()))
    return int(found[0])


def exponent_for(largest: int, count: int, dtype: np.dtype[Any]) -> int | None:
    """Return the exponent of the power of two that the addends are multiplied by.

    `largest` is the `magnitude` of all, `count` their number.  None: a number is not finite.
    """
    number = float(np.array([largest], np.int64).astype(_BITS[dtype.name]).view(dtype)[0])
    if not math.isfinite(number):
        return None
    _, above = math.frexp(number)  # number < 2 ** above
    return min(_SUM_BITS - (count - 1).bit_length() - above, _LARGEST_EXPONENT)


def add(addends: Sequence[np.ndarray], exponent: int, into: np.ndarray) -> None:
    """Add numbers times 2 ** `exponent`, each rounded to a whole number, to int64 `into`."""
    scale = math.ldexp(1.0, exponent)
    for addend in addends:
        flat, loop = addend.reshape(-1), _loop(f"fixed-add-{addend.dtype.name}")
        if loop is not None:
            loop(flat, scale, into)
        else:
            into += np.rint(flat.astype(np.float64) * scale).astype(np.int64)


def to_floats(sums: np.ndarray, exponent: int, out: np.ndarray) -> None:
    """Write the sums divided by 2 ** `exponent`, rounded to the dtype of `out`."""
    with np.errstate(over="ignore"):  # then the result is infinite, as any sum
        np.multiply(sums, math.ldexp(1.0, -exponent), out=out.reshape(-1), casting="unsafe")


def _loop(name: str) -> Any:
    """Return a compiled loop; None where nothing can be compiled."""
    return jit.kernel(name, partial(_described, name))


def _described(name: str) -> jit.Loop:
    from ringreduce.devices import fixed_point_kernels

    return fixed_point_kernels.LOOPS[name]
