"""Folds of any number of arrays at once, each read once, in their order; called by `machine`.

A fold is a C function ``fold(into, sources, n, count, by, memory)``: `into` is the address of
`count` elements, `sources` that of the addresses of `n` arrays, 2 or more, one of which may be
`into` itself; what comes out is divided by `by` unless that is 0; `memory` is 64 bytes long.  It
gives the bits that `devices.cpu` gives.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numba import carray, types

from ringreduce.compiler.memory import load, pointer
from ringreduce.compiler.records import compilable
from ringreduce.devices import float16_elements
from ringreduce.devices.float16 import is_short
from ringreduce.devices.vectors import CHUNK, folding, lanes_of


class Fold(NamedTuple):
    """A C function, and the types that it takes."""

    function: Callable[..., None]
    signature: Any = types.void(*(types.int64,) * 6)


def fold_of(op: str, dtype: Any) -> Fold | None:
    """The fold of an operation and a dtype; None if there is none, as for longdouble."""
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
    divide = _dividing(dtype) if op == "sum" and (short or dtype.kind == "f") else _nothing

    def fold(into: Any, sources: Any, n: Any, count: Any, by: Any, memory: Any) -> None:
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

    return Fold(fold)


@compilable
def _nothing(into: Any, count: Any, by: Any) -> None:
    pass


def _dividing(dtype: np.dtype) -> Callable[..., None]:
    if dtype.name in _CONVERSIONS:
        return _dividing_by(np.uint16, np.float32, *_CONVERSIONS[dtype.name])
    return _dividing_by(dtype.type, dtype.type, _same, _same)


def _dividing_by(element: Any, number: Any, widen: Any, narrow: Any) -> Callable[..., None]:
    @compilable
    def divide(into: Any, count: Any, by: Any) -> None:
        out, by_number = carray(pointer(into), (count,), element), number(by)
        for i in range(out.size):
            out[i] = narrow(widen(out[i]) / by_number)

    return divide


@compilable
def _same(value: Any) -> Any:
    return value


_CONVERSIONS = {
    "float16": (float16_elements.half_to_single, float16_elements.single_to_half),
    "bfloat16": (float16_elements.bfloat_to_single, float16_elements.single_to_bfloat),
}
