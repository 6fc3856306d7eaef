"""The loops on 16-bit floats that Numba compiles: bits in, bits out, converted in registers.

One element after the other, over whole arrays: that is what vectorises; with an offset in an index
it does not.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

from numba import types

from ringreduce.devices import float16_elements

Combine = Callable[[Any, Any], Any]
Change = Callable[[Any], Any]


class Kernel(NamedTuple):
    """A loop, and the types of the arrays and numbers that it is compiled for."""

    loop: Callable[..., Any]
    signature: tuple[Any, ...]


def _read(element: Any) -> Any:
    """Contiguous arrays, writeable and aligned or not: one compilation serves them all."""
    return types.Array(element, 1, "C", readonly=True, aligned=False)


def _written(element: Any) -> Any:
    return types.Array(element, 1, "C", aligned=False)


_BITS, _PAIR, _SINGLE, _DOUBLE = types.uint16, types.uint32, types.float32, types.float64


def _folding(combine: Combine, element: Any = _BITS) -> Kernel:
    """``fold(left, right, into)``; `into` may be either operand.

    In place has a loop of its own, in which what is read is visibly what is written: where the
    compiler must fear that two arrays overlap by chance, it goes element by element.
    """

    def fold(left: Any, right: Any, into: Any) -> None:
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
    """``accumulate(source, into)``: 16 bits into float32."""

    def accumulate(source: Any, into: Any) -> None:
        for i in range(into.size):
            into[i] = combine(into[i], widen(source[i]))

    return Kernel(accumulate, (_read(_BITS), _written(_SINGLE)))


def _dividing(widen: Change, narrow: Change) -> Kernel:
    """``divide(array, by)``: in place, in float32, rounded once."""

    def divide(array: Any, by: Any) -> None:
        for i in range(array.size):
            array[i] = narrow(widen(array[i]) / by)

    return Kernel(divide, (_written(_BITS), _SINGLE))


def _converting(change: Change, source_type: Any, into_type: Any) -> Kernel:
    """``convert(source, into)``"""

    def convert(source: Any, into: Any) -> None:
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
"""Loops by operation and dtype; conversions by both dtypes, from and to."""
