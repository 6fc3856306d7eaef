"""Folds of any number of arrays at once, each read once, in their order; called by `machine`.

A fold is a C function ``fold(into, sources, n, count, by, memory)``: `into` is the address of
`count` elements, `sources` that of the addresses of `n` arrays, 2 or more, one of which may be
`into` itself; what comes out is divided by `by` unless that is 0; `memory` is 16 KiB long.  It
gives the bits that `devices.cpu` gives.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numba import carray, types

from ringreduce.devices import elements
from ringreduce.devices.compilable import compilable
from ringreduce.devices.native import load, pointer

_BLOCK = 2048
"""Elements that more than two arrays are folded by at a time: what is accumulated stays in L1."""

Combine = Callable[[Any, Any], Any]


class Fold(NamedTuple):
    """A C function, and the types that it takes."""

    function: Callable[..., None]
    signature: Any = types.void(*(types.int64,) * 6)


@compilable
def _array(address: Any, count: Any, dtype: Any) -> Any:
    return carray(pointer(address), (count,), dtype)


def _pairwise(dtype: Any, combine: Combine) -> Callable[..., None]:
    """``fold(left, right, into, count)`` of arrays at addresses, two at a time.

    In place has loops of their own, in which what is read is visibly what is written: where the
    compiler must fear that two arrays overlap by chance, it goes element by element.
    """

    @compilable
    def fold(left: Any, right: Any, into: Any, count: Any) -> None:
        out = _array(into, count, dtype)
        if left == into:
            b = _array(right, count, dtype)
            for i in range(out.size):
                out[i] = combine(out[i], b[i])
        elif right == into:
            a = _array(left, count, dtype)
            for i in range(out.size):
                out[i] = combine(a[i], out[i])
        else:
            a, b = _array(left, count, dtype), _array(right, count, dtype)
            for i in range(out.size):
                out[i] = combine(a[i], b[i])

    return fold


def _by_twos(one: Callable[..., None], combine: Combine) -> Callable[..., None]:
    """`_pairwise` of 16 bits, two elements at a time as far as they go."""
    two = _pairwise(np.uint32, combine)

    @compilable
    def fold(left: Any, right: Any, into: Any, count: Any) -> None:
        if count & 1:
            last = 2 * (count - 1)
            one(left + last, right + last, into + last, 1)
        two(left, right, into, count >> 1)

    return fold


@compilable
def _nothing(into: Any, count: Any, by: Any) -> None:
    pass


def _dividing(dtype: Any) -> Callable[..., None]:
    @compilable
    def divide(into: Any, count: Any, by: Any) -> None:
        out = _array(into, count, dtype)
        for i in range(out.size):
            out[i] = out[i] / dtype(by)

    return divide


def _in_own_type(
    itemsize: int, pair: Callable[..., None], divide: Callable[..., None] = _nothing
) -> Fold:
    """A fold that never leaves the elements' type."""

    def fold(into: Any, sources: Any, n: Any, count: Any, by: Any, memory: Any) -> None:
        if n == 2:
            pair(load(sources), load(sources + 8), into, count)
        else:
            for start in range(0, count, _BLOCK):
                length = min(_BLOCK, count - start)
                offset = start * itemsize
                pair(load(sources) + offset, load(sources + 8) + offset, memory, length)
                for k in range(2, n - 1):
                    pair(memory, load(sources + 8 * k) + offset, memory, length)
                pair(memory, load(sources + 8 * (n - 1)) + offset, into + offset, length)
        if by > 0:
            divide(into, count, by)

    return Fold(fold)


def _in_single(
    pair: Callable[..., None],
    widen: Any,
    combine: Combine,
    narrow: Any,
    divide: Callable[..., None],
) -> Fold:
    """A fold of 16-bit floats: more than two are added up in float32 and rounded once."""

    def fold(into: Any, sources: Any, n: Any, count: Any, by: Any, memory: Any) -> None:
        if n == 2:
            pair(load(sources), load(sources + 8), into, count)
        else:
            for start in range(0, count, _BLOCK):
                length = min(_BLOCK, count - start)
                offset = 2 * start
                total = _array(memory, length, np.float32)
                first = _array(load(sources) + offset, length, np.uint16)
                second = _array(load(sources + 8) + offset, length, np.uint16)
                for i in range(total.size):
                    total[i] = combine(widen(first[i]), widen(second[i]))
                for k in range(2, n):
                    source = _array(load(sources + 8 * k) + offset, length, np.uint16)
                    for i in range(total.size):
                        total[i] = combine(total[i], widen(source[i]))
                out = _array(into + offset, length, np.uint16)
                for i in range(total.size):
                    out[i] = narrow(total[i])
        if by > 0:
            divide(into, count, by)

    return Fold(fold)


@compilable
def _add(left: Any, right: Any) -> Any:
    return left + right


@compilable
def _multiply(left: Any, right: Any) -> Any:
    return left * right


@compilable
def _and(left: Any, right: Any) -> Any:
    return left & right


@compilable
def _or(left: Any, right: Any) -> Any:
    return left | right


@compilable
def _xor(left: Any, right: Any) -> Any:
    return left ^ right


@compilable
def _least(left: Any, right: Any) -> Any:
    """The first NaN, if there is one; of two that are equal, the right one."""
    return left if (left < right) | (left != left) else right


@compilable
def _greatest(left: Any, right: Any) -> Any:
    return left if (left > right) | (left != left) else right


_ANY = {"sum": _add, "prod": _multiply, "min": _least, "max": _greatest}
_BITS = {"and": _and, "or": _or, "xor": _xor}
_SHORT = {
    ("float16", "sum"): (elements.add_halves, elements.half_to_single, _add),
    ("float16", "prod"): (elements.multiply_halves, elements.half_to_single, _multiply),
    ("float16", "min"): (elements.least_half, None, None),
    ("float16", "max"): (elements.greatest_half, None, None),
    ("bfloat16", "sum"): (elements.add_bfloats, elements.bfloat_to_single, _add),
    ("bfloat16", "prod"): (elements.multiply_bfloats, elements.bfloat_to_single, _multiply),
    ("bfloat16", "min"): (elements.least_bfloat, None, None),
    ("bfloat16", "max"): (elements.greatest_bfloat, None, None),
}
_BY_TWOS = {
    ("bfloat16", "sum"): elements.add_bfloat_pairs,
    ("bfloat16", "prod"): elements.multiply_bfloat_pairs,
}
_NARROW = {"float16": elements.single_to_half, "bfloat16": elements.single_to_bfloat}


def fold_of(op: str, dtype: Any) -> Fold | None:
    """The fold of an operation and a dtype; None if there is none, as for longdouble."""
    dtype = np.dtype(dtype)
    if (dtype.name, op) in _SHORT:
        return _short(op, dtype)
    if dtype.kind == "c" and op == "sum":
        dtype = np.empty(0, dtype).real.dtype
    if dtype.kind == "b" and op not in ("sum", "prod"):
        dtype = np.dtype(np.uint8)
    if dtype.kind not in "iuf" or dtype.itemsize > 8 or not dtype.isnative:
        return None
    combine = _ANY.get(op) if dtype.kind == "f" else {**_ANY, **_BITS}.get(op)
    if combine is None:
        return None
    pair = _pairwise(dtype.type, combine)
    if dtype.kind == "f" and op == "sum":
        return _in_own_type(dtype.itemsize, pair, _dividing(dtype.type))
    return _in_own_type(dtype.itemsize, pair)


def _short(op: str, dtype: Any) -> Fold:
    combine, widen, accumulate = _SHORT[dtype.name, op]
    pair = _pairwise(np.uint16, combine)
    if (dtype.name, op) in _BY_TWOS:
        pair = _by_twos(pair, _BY_TWOS[dtype.name, op])
    if widen is None or accumulate is None:
        return _in_own_type(2, pair)
    narrow = _NARROW[dtype.name]
    return _in_single(pair, widen, accumulate, narrow, _dividing_short(widen, narrow))


def _dividing_short(widen: Any, narrow: Any) -> Callable[..., None]:
    @compilable
    def divide(into: Any, count: Any, by: Any) -> None:
        out, by_single = _array(into, count, np.uint16), np.float32(by)
        for i in range(out.size):
            out[i] = narrow(widen(out[i]) / by_single)

    return divide
