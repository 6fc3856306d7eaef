"""Folds of any number of arrays at once: compiled code that `shm.executor` calls.

A fold is a C function ``fold(into, sources, n, count, by, memory)``.

* `into` is the address of `count` elements of the result.
* `sources` is the address of the addresses of `n` arrays, 2 or more.  `into` may be one of these.
* `by` is a number that the result is divided by; 0: it is not divided.
* `memory` is the address of 64 bytes that the fold may overwrite.

A fold reads each array once, combines them in their order, and gives the bits that `devices.cpu`
gives.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numba import carray

from ringreduce.compiler.memory import load, pointer
from ringreduce.compiler.records import Address, compilable
from ringreduce.devices import float16_elements
from ringreduce.devices.float16 import is_short
from ringreduce.devices.vectors import CHUNK, folding, lanes_of

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

Fold = Callable[[Address, Address, int, int, int, Address], None]
_Divide = Callable[[Address, int, int], None]
_Number = Any
"""A NumPy scalar: Python has no type for one of any dtype."""


def fold_of(op: str, dtype: DTypeLike) -> Fold | None:
    """Make the fold of `op` and `dtype`; None if there is none, as for longdouble."""
    dtype = np.dtype(dtype)
    if dtype.kind == "c" and op == "sum":
        dtype = np.empty(0, dtype).real.dtype
    if dtype.kind == "b" and op not in ("sum", "prod"):
        dtype = np.dtype(np.uint8)
    short = is_short(dtype)
    if not short and (dtype.kind not in "iuf" or dtype.itemsize > 8 or not dtype.isnative):
        return None
    lanes = lanes_of(op, dtype)
    if lanes is None:
        return None
    fold_two, fold_chunk, fold_rest = folding(lanes)
    itemsize = dtype.itemsize
    divide = _dividing(dtype) if op == "sum" and (short or dtype.kind == "f") else _no_division

    def fold(into: Address, sources: Address, n: int, count: int, by: int, memory: Address) -> None:
        nbytes = count * itemsize
        whole = nbytes & -CHUNK
        if n == 2:
            left, right = load(sources), load(sources + 8)
            for at in range(0, whole, CHUNK):
                fold_two(into + at, left + at, right + at)
        else:
            for at in range(0, whole, CHUNK):
                fold_chunk(into + at, sources, n, at)
        if whole < nbytes:
            fold_rest(into + whole, sources, n, whole, nbytes - whole, memory)
        if by > 0:
            divide(into, count, by)

    return fold


@compilable
def _no_division(into: Address, count: int, by: int) -> None:
    """Do nothing: only a mean of floats is divided, and `by` is 0."""


def _dividing(dtype: np.dtype[Any]) -> _Divide:
    if dtype.name in _CONVERSIONS:
        return _dividing_by(np.uint16, np.float32, *_CONVERSIONS[dtype.name])
    return _dividing_by(dtype.type, dtype.type, _same, _same)


def _dividing_by(
    element: type[np.generic],
    number: Callable[[int], _Number],
    widen: Callable[[_Number], _Number],
    narrow: Callable[[_Number], _Number],
) -> _Divide:
    """Make ``divide(into, count, by)`` for arrays of `element`, which divides in type `number`."""

    @compilable
    def divide(into: Address, count: int, by: int) -> None:
        out, by_number = carray(pointer(into), (count,), element), number(by)
        for i in range(out.size):
            out[i] = narrow(widen(out[i]) / by_number)

    return divide


@compilable
def _same(value: _Number) -> _Number:
    return value


_CONVERSIONS = {
    "float16": (float16_elements.half_to_single, float16_elements.single_to_half),
    "bfloat16": (float16_elements.bfloat_to_single, float16_elements.single_to_bfloat),
}
"""By dtype: conversions from the bits of 16-bit floats to float32, and back."""
