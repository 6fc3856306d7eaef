"""Loops over 16-bit floats, for Numba to compile.

The loops read and write bits, and convert to and from float32 and float64 in registers.  Each loop
goes over whole arrays, one element after the other.  The compiler vectorises such loops; it does
not vectorise loops with an offset in an index.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numba import types

from ringreduce.devices import float16_elements

Combine = Callable[[Any, Any], Any]
"""Combines two elements: NumPy's scalars, of the types that the function names."""
Change = Callable[[Any], Any]
"""Converts an element to another type."""


class Kernel(NamedTuple):
    loop: Callable[..., None]
    signature: tuple[types.Type, ...]


def _read(element: types.Type) -> types.Type:
    """The type of an array that is read: contiguous, writeable and aligned or not."""
    return types.Array(element, 1, "C", readonly=True, aligned=False)


def _written(element: types.Type) -> types.Type:
    return types.Array(element, 1, "C", aligned=False)


_BITS, _PAIR, _SINGLE, _DOUBLE = types.uint16, types.uint32, types.float32, types.float64


def _folding(combine: Combine, element: types.Type = _BITS) -> Kernel:
    """``fold(left, right, into)``; `into` may be either operand.

    Folding in place has a loop of its own, in which the array that is written is visibly one that
    is read.  Where arrays may overlap as far as the compiler knows, it goes element by element.
    """

    def fold(left: np.ndarray, right: np.ndarray, into: np.ndarray) -> None:
        if right.ctypes.data == into.ctypes.data:
            left, right = right, left
        if left.ctypes.data == into.ctypes.data:
            for i in range(into.size):
                into[i] = combine(into[i], right[i])
        else:
            for i in range(into.size):
                into[i] = combine(left[i], right[i])

    return Kernel(fold, (_read(element), _read(element), _written(element)))


def _accumulating(widen: Change, combine: Combine) -> Kernel:
    """``accumulate(source, into)``: combine 16-bit floats into float32."""

    def accumulate(source: np.ndarray, into: np.ndarray) -> None:
        for i in range(into.size):
            into[i] = combine(into[i], widen(source[i]))

    return Kernel(accumulate, (_read(_BITS), _written(_SINGLE)))


def _dividing(widen: Change, narrow: Change) -> Kernel:
    """``divide(array, by)``: divide in place, in float32, rounded once."""

    def divide(array: np.ndarray, by: np.float32) -> None:
        for i in range(array.size):
            array[i] = narrow(widen(array[i]) / by)

    return Kernel(divide, (_written(_BITS), _SINGLE))


def _converting(change: Change, source_type: types.Type, into_type: types.Type) -> Kernel:
    """``convert(source, into)``: convert each element."""

    def convert(source: np.ndarray, into: np.ndarray) -> None:
        for i in range(into.size):
            into[i] = change(source[i])

    return Kernel(convert, (_read(source_type), _written(into_type)))


KERNELS = {
    "sum-float16": _folding(float16_elements.add_halves),
    "prod-float16": _folding(float16_elements.multiply_halves),
    "min-float16": _folding(float16_elements.least_half),
    "max-float16": _folding(float16_elements.greatest_half),
    "sum-bfloat16": _folding(float16_elements.add_bfloats),
    "sum-bfloat16-pairs": _folding(float16_elements.add_bfloat_pairs, _PAIR),
    "prod-bfloat16": _folding(float16_elements.multiply_bfloats),
    "prod-bfloat16-pairs": _folding(float16_elements.multiply_bfloat_pairs, _PAIR),
    "min-bfloat16": _folding(float16_elements.least_bfloat),
    "max-bfloat16": _folding(float16_elements.greatest_bfloat),
    "accumulate-sum-float16": _accumulating(float16_elements.half_to_single, operator.add),
    "accumulate-prod-float16": _accumulating(float16_elements.half_to_single, operator.mul),
    "accumulate-sum-bfloat16": _accumulating(float16_elements.bfloat_to_single, operator.add),
    "accumulate-prod-bfloat16": _accumulating(float16_elements.bfloat_to_single, operator.mul),
    "divide-float16": _dividing(float16_elements.half_to_single, float16_elements.single_to_half),
    "divide-bfloat16": _dividing(
        float16_elements.bfloat_to_single, float16_elements.single_to_bfloat
    ),
    "float16-float32": _converting(float16_elements.half_to_single, _BITS, _SINGLE),
    "float16-float64": _converting(float16_elements.half_to_double, _BITS, _DOUBLE),
    "bfloat16-float32": _converting(float16_elements.bfloat_to_single, _BITS, _SINGLE),
    "bfloat16-float64": _converting(float16_elements.bfloat_to_double, _BITS, _DOUBLE),
    "float32-float16": _converting(float16_elements.single_to_half, _SINGLE, _BITS),
    "float32-bfloat16": _converting(float16_elements.single_to_bfloat, _SINGLE, _BITS),
    "float64-float16": _converting(float16_elements.double_to_half, _DOUBLE, _BITS),
    "float64-bfloat16": _converting(float16_elements.double_to_bfloat, _DOUBLE, _BITS),
}
"""Loops by operation and dtype; conversions by the dtype of the source and that of the result."""
