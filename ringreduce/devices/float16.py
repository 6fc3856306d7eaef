"""16-bit floats: their formats, and slow functions that reduce them with NumPy.

These functions are for machines on which the kernels cannot be compiled.  They give the same bits:

* a fold widens both operands to float32, combines them and rounds once, to nearest, ties to even;
* every NaN that is written is the format's positive quiet NaN without payload;
* of two zeros -0 is the lesser one.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ringreduce.devices.base import FoldFunction

INFINITY_BITS = {"float16": 0x7C00, "bfloat16": 0x7F80}
NAN_BITS = {"float16": 0x7E00, "bfloat16": 0x7FC0}
MAGNITUDE_BITS = 0x7FFF
"""All bits except the sign."""


def is_short(dtype: np.dtype) -> bool:
    """Whether `dtype` is float16 or `ml_dtypes`' bfloat16, in this machine's byte order."""
    return dtype.name in NAN_BITS and dtype.itemsize == 2 and dtype.isnative


def fold_with_numpy(op: str, dtype: np.dtype) -> FoldFunction:
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
    """Convert sign and magnitude to an integer of the same order, -0 before 0; and back."""
    ordered: np.ndarray = bits ^ ((bits >> 15) & MAGNITUDE_BITS)
    return ordered


def accumulate_with_numpy(op: str) -> Callable[[np.ndarray, np.ndarray], None]:
    """Make ``accumulate(source, total)`` for sum or prod: combine 16-bit floats into float32."""
    combine = np.add if op == "sum" else np.multiply

    def accumulate(source: np.ndarray, total: np.ndarray) -> None:
        combine(total, source.astype(np.float32), total)

    return accumulate


def divide_with_numpy(array: np.ndarray, by: int) -> None:
    convert_with_numpy(array.astype(np.float32) / np.float32(by), array)


def convert_with_numpy(source: np.ndarray, into: np.ndarray) -> None:
    """Copy float32 or float64 into 16-bit floats, rounded once to nearest even; or back."""
    if is_short(into.dtype):
        into[...] = _to_odd(source) if source.dtype == np.float64 else source
        into.view(np.uint16)[np.isnan(source)] = NAN_BITS[into.dtype.name]
    else:
        into[...] = source
        into[np.isnan(source)] = np.nan


def _to_odd(values: np.ndarray) -> np.ndarray:
    """Round float64 to odd, as float32: rounded again to 16 bits, it is as if rounded once.

    A value that float32 cannot represent becomes the neighbour whose last bit is 1.  Boldo and
    Melquiond, IEEE Transactions on Computers 57(4), 2008.
    """
    nearest = values.astype(np.float32)
    back, bits = nearest.astype(np.float64), nearest.view(np.uint32)
    neighbours = np.where(np.abs(back) > np.abs(values), bits - 1, bits + 1)
    odd: np.ndarray = np.where((back != values) & (bits % 2 == 0), neighbours, bits)
    return np.asarray(odd, np.uint32).view(np.float32)
