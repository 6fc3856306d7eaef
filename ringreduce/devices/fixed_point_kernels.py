"""Loops that turn floating-point numbers into whole ones, for Numba to compile."""

from __future__ import annotations

import numpy as np
from numba import types

from ringreduce.compiler.jit import Loop

_BLOCK = 1024
"""Sums that stay in the nearest cache while the rows are added."""


def _largest(bits: np.ndarray, mask: int, into: np.ndarray) -> None:
    most = into[0]
    for i in range(bits.size):
        magnitude = np.int64(bits[i]) & mask
        most = max(most, magnitude)
    into[0] = most


def _add(numbers: np.ndarray, scale: float, into: np.ndarray) -> None:
    """Add each row of the numbers times `scale`, rounded to whole numbers, to `into`."""
    count = into.size
    for block in range(0, count, _BLOCK):
        length = min(_BLOCK, count - block)
        for start in range(block, numbers.size, count):
            for i in range(length):
                into[block + i] += np.int64(np.rint(np.float64(numbers[start + i]) * scale))


def _divide(sums: np.ndarray, scale: float, out: np.ndarray) -> None:
    for i in range(sums.size):
        out[i] = np.float64(sums[i]) * scale


def _read(element: types.Type) -> types.Array:
    return types.Array(element, 1, "C", readonly=True, aligned=False)


_SUMS = types.Array(types.int64, 1, "C")
_FLOATS = {"float32": (types.float32, types.int32), "float64": (types.float64, types.int64)}
LOOPS = (
    {
        f"fixed-largest-{name}": Loop(_largest, (_read(bits), types.int64, _SUMS))
        for name, (_, bits) in _FLOATS.items()
    }
    | {
        f"fixed-add-{name}": Loop(_add, (_read(number), types.float64, _SUMS))
        for name, (number, _) in _FLOATS.items()
    }
    | {
        f"fixed-divide-{name}": Loop(
            _divide, (_SUMS, types.float64, types.Array(number, 1, "C", aligned=False))
        )
        for name, (number, _) in _FLOATS.items()
    }
)
