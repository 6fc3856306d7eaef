"""16-bit floats: which they are, their bits, and a right but slow way to reduce them with NumPy.

The way for machines on which the kernels cannot be compiled.  It gives the same bits: a fold widens
both operands to float32, combines them and rounds once, to nearest, ties to even; every NaN that is
written is the format's positive quiet one without payload; of two zeros -0 is the lesser.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ringreduce.devices.base import FoldFunction

INFINITY_BITS = {"float16": 0x7C00, "bfloat16": 0x7F80}
NAN_BITS = {"float16": 0x7E00, "bfloat16": 0x7FC0}
MAGNITUDE_BITS = 0x7FFF


def is_short(dtype: np.dtype) -> bool:
    """Whether it is float16 or `ml_dtypes`' bfloat16, in this machine's byte order."""
    return dtype.name in NAN_BITS and dtype.itemsize == 2 and dtype.isnative


def fold_with_numpy(op: str, dtype: np.dtype) -> FoldFunction:
    """``fold(left, right, into)`` for sum, prod, min or max of arrays of `dtype`."""
    if op in ("min", "max"):
        return _fold_in_order(np.minimum if op == "min" else np.maximum, dtype)
    combine = np.add if op == "sum" else np.multiply

    def fold(left: np.ndarray, right: np.ndarray, into: np.ndarray) -> None:
        convert_with_numpy(combine(left.astype(np.float32), right.astype(np.float32)), into)

    return fold


def _fold_in_order(choose: Callable[..., np.ndarray], dtype: np.dtype) -> FoldFunction:
    infinity, nan = INFINITY_BITS[dtype.name], NAN_BITS[dtype.name]

    def fold(left: np.ndarray, right: np.ndarray, into: np.ndarray) -> None:
        a, b = left.view(np.int16), right.view(np.int16)
        beyond = ((a & MAGNITUDE_BITS) > infinity) | ((b & MAGNITUDE_BITS) > infinity)
        bits = _ordered(choose(_ordered(a), _ordered(b)))
        into.view(np.int16)[...] = np.where(beyond, np.int16(nan), bits)

    return fold


def _ordered(bits: np.ndarray) -> np.ndarray:
    """Sign and magnitude to an integer of the same order, -0 before 0; and back again."""
    ordered: np.ndarray = bits ^ ((bits >> 15) & MAGNITUDE_BITS)
    return ordered


def accumulate_with_numpy(op: str) -> Callable[[np.ndarray, np.ndarray], None]:
    """``accumulate(source, total)`` for sum or prod: 16 bits into float32."""
    combine = np.add if op == "sum" else np.multiply

    def accumulate(source: np.ndarray, total: np.ndarray) -> None:
        combine(total, source.astype(np.float32), total)

    return accumulate


def divide_with_numpy(array: np.ndarray, by: int) -> None:
    """``array /= by`` in float32, rounded once."""
    convert_with_numpy(array.astype(np.float32) / np.float32(by), array)


def convert_with_numpy(source: np.ndarray, into: np.ndarray) -> None:
    """Copy float32 or float64 into a 16-bit float, rounded once to nearest even; or back."""
    if is_short(into.dtype):
        into[...] = _to_odd(source) if source.dtype == np.float64 else source
        into.view(np.uint16)[np.isnan(source)] = NAN_BITS[into.dtype.name]
    else:
        into[...] = source
        into[np.isnan(source)] = np.nan


def _to_odd(values: np.ndarray) -> np.ndarray:
    """float64 as float32, rounded to odd: rounded again to 16 bits it is as if rounded once.

    What is not exact becomes the neighbour with an odd last bit.  Boldo and Melquiond, IEEE
    Transactions on Computers 57(4), 2008.
    """
    nearest = values.astype(np.float32)
    back, bits = nearest.astype(np.float64), nearest.view(np.uint32)
    neighbours = np.where(np.abs(back) > np.abs(values), bits - 1, bits + 1)
    odd: Any = np.where((back != values) & (bits % 2 == 0), neighbours, bits)
    return np.asarray(odd, np.uint32).view(np.float32)
