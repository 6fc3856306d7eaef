"""Sums that do not depend on their order: numbers as whole multiples of a power of two."""

from __future__ import annotations

import math
from functools import cache, partial
from typing import Any

import numpy as np

from ringreduce.compiler import jit

DTYPES = (np.dtype(np.float32), np.dtype(np.float64))
_SUM_BITS = 62
"""The sum of all addends is at most 2 ** 62 in magnitude."""
_LARGEST_EXPONENT = 1023
"""Of a power of two that is a finite float64."""


def magnitude(numbers: np.ndarray) -> int:
    """Return the largest of the numbers without its sign, as bits; 0 without numbers.

    Such bits have the order of the numbers; those of infinity and NaN are the largest.
    """
    bits, mask, loop = _functions(numbers.dtype)[:3]
    seen, found = numbers.reshape(-1).view(bits), np.zeros(1, np.int64)
    if loop is not None:
        loop(seen, mask, found)
    elif seen.size:
        found[0] = int((seen & bits.type(mask)).max())
    return int(found[0])


def exponent_for(largest: int, count: int, dtype: np.dtype[Any]) -> int | None:
    """Return the exponent of the power of two to multiply `count` addends by.

    `largest` is the `magnitude` of all.  None: a number is not finite.
    """
    bits = _functions(dtype)[0]
    number = float(np.array([largest], np.int64).astype(bits).view(dtype)[0])
    if not math.isfinite(number):
        return None
    _, above = math.frexp(number)  # number < 2 ** above
    return min(_SUM_BITS - (count - 1).bit_length() - above, _LARGEST_EXPONENT)


def add(rows: np.ndarray, exponent: int, into: np.ndarray) -> None:
    """Add each row times 2 ** `exponent`, rounded to whole numbers, to int64 `into`.

    `rows` is contiguous, and has a whole number of rows as long as `into`.
    """
    flat, scale = rows.reshape(-1), math.ldexp(1.0, exponent)
    loop = _functions(rows.dtype)[3]
    if loop is not None:
        loop(flat, scale, into)
    elif into.size:
        for row in flat.reshape(-1, into.size):
            into += np.rint(row.astype(np.float64) * scale).astype(np.int64)


def to_floats(sums: np.ndarray, exponent: int, out: np.ndarray) -> None:
    """Write the sums divided by 2 ** `exponent`, rounded to the dtype of `out`, which is 1-d."""
    scale, loop = math.ldexp(1.0, -exponent), _functions(out.dtype)[4]
    if loop is not None:
        loop(sums, scale, out)
    else:
        with np.errstate(over="ignore"):  # then the result is infinite, as any sum
            np.multiply(sums, scale, out=out, casting="unsafe")


@cache
def _functions(dtype: np.dtype[Any]) -> tuple[np.dtype[Any], int, Any, Any, Any]:
    """Return the dtype of the bits, the mask of the sign, and the loops (None: not compiled)."""
    bits: np.dtype[Any] = np.dtype(f"int{8 * dtype.itemsize}")
    largest, adds, divides = (
        jit.kernel(name, partial(_described, name))
        for name in (f"fixed-{what}-{dtype.name}" for what in ("largest", "add", "divide"))
    )
    return bits, int(np.iinfo(bits).max), largest, adds, divides


def _described(name: str) -> jit.Loop:
    from ringreduce.devices import fixed_point_kernels

    return fixed_point_kernels.LOOPS[name]
