"""What is done to one 16-bit float, by its bits: the insides of the loops in `kernels`.

A combination widens both operands to float32 and rounds once, to nearest, ties to even; min and max
need no conversion.  Every NaN that is made is the format's positive quiet one without payload.  So
neither the order of the operands, nor which NaN an instruction happens to keep, nor whether an
element falls into a vector or into the rest of a loop changes a bit of the result.

The functions are Python on NumPy's scalars as well: with ``NUMBA_DISABLE_JIT=1`` that is what runs.
Integers are wrapped in their type again after each operation: Numba makes 64 bits of them, and a
loop that computes in 64 bits takes twice as long.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload, register_jitable

from ringreduce.devices.float16 import INFINITY_BITS, MAGNITUDE_BITS, NAN_BITS

_Function = TypeVar("_Function", bound=Callable[..., Any])
_compilable: Callable[[_Function], _Function] = register_jitable
_intrinsic: Callable[[Callable[..., Any]], Any] = intrinsic
_compiles_to: Callable[[Callable[..., Any]], Callable[[_Function], _Function]] = partial(
    overload, strict=False
)

_U16, _U32, _I16, _F32, _F64 = np.uint16, np.uint32, np.int16, np.float32, np.float64

_HALF_INFINITY, _HALF_NAN = _U16(INFINITY_BITS["float16"]), _U16(NAN_BITS["float16"])
_BFLOAT_INFINITY, _BFLOAT_NAN = _U16(INFINITY_BITS["bfloat16"]), _U16(NAN_BITS["bfloat16"])
_NAN = _F32(np.nan)
_MAGNITUDE, _MAGNITUDE_SIGNED = _U16(MAGNITUDE_BITS), _I16(MAGNITUDE_BITS)
_HIGH_HALF, _LOW_HALF, _LAST_KEPT = _U32(0xFFFF0000), _U32(0xFFFF), _U32(0x10000)
_HALFWAY, _16, _ONE = _U32(0x8000), _U32(16), _U32(1)
_LOW_NAN, _HIGH_NAN = _U32(NAN_BITS["bfloat16"]), _U32(NAN_BITS["bfloat16"] << 16)


@_compilable
def _bits_of(value: Any) -> Any:
    return np.float32(value).view(np.uint32)


@_compilable
def _single(bits: Any) -> Any:
    return np.uint32(bits).view(np.float32)


@_compilable
def _signed(bits: Any) -> Any:
    return np.uint16(bits).view(np.int16)


@_compilable
def _unsigned(bits: Any) -> Any:
    return np.int16(bits).view(np.uint16)


# --- float16: the processor converts --------------------------------------------------------------


def _half_to_single(bits: Any) -> Any:
    return _F32(bits.view(np.float16))


def _single_to_half(value: Any) -> Any:
    return np.float16(value).view(_U16)


@_intrinsic
def _extend(_context: Any, bits: Any) -> Any:
    def generate(_: Any, builder: Any, __: Any, arguments: Any) -> Any:
        return builder.fpext(builder.bitcast(arguments[0], ir.HalfType()), ir.FloatType())

    return types.float32(types.uint16), generate


@_intrinsic
def _truncate(_context: Any, value: Any) -> Any:
    def generate(_: Any, builder: Any, __: Any, arguments: Any) -> Any:
        return builder.bitcast(builder.fptrunc(arguments[0], ir.HalfType()), ir.IntType(16))

    return types.uint16(types.float32), generate


@_compiles_to(_half_to_single)
def _half_to_single_compiled(bits: Any) -> Any:
    return lambda bits: _extend(bits)


@_compiles_to(_single_to_half)
def _single_to_half_compiled(value: Any) -> Any:
    return lambda value: _truncate(value)


@_compilable
def single_to_half(value: Any) -> Any:
    """The bits of a float32 rounded to float16."""
    bits = _single_to_half(value)
    return _HALF_NAN if _U16(bits & _MAGNITUDE) > _HALF_INFINITY else bits


@_compilable
def add_halves(left: Any, right: Any) -> Any:
    return single_to_half(_half_to_single(left) + _half_to_single(right))


@_compilable
def multiply_halves(left: Any, right: Any) -> Any:
    return single_to_half(_half_to_single(left) * _half_to_single(right))


# --- bfloat16: the upper half of a float32 --------------------------------------------------------


@_compilable
def _bfloat_to_single(bits: Any) -> Any:
    return _single(_U32(bits) << _16)


@_compilable
def _rounded(value: Any) -> Any:
    """The bits of a float32 rounded to bfloat16, in the upper half; the lower is not cleared."""
    bits = _U32(_bits_of(value) + _HALFWAY)
    was_halfway = _U32(bits & _LOW_HALF) == 0
    return _U32(bits & ~_LAST_KEPT) if was_halfway else bits


@_compilable
def single_to_bfloat(value: Any) -> Any:
    """The bits of a float32 rounded to bfloat16."""
    return _U16(_rounded(value) >> _16) if value == value else _BFLOAT_NAN


@_compilable
def _two_bfloats(low: Any, high: Any) -> Any:
    low_bits = _U32(_rounded(low) >> _16) if low == low else _LOW_NAN
    high_bits = _U32(_rounded(high) & _HIGH_HALF) if high == high else _HIGH_NAN
    return _U32(low_bits | high_bits)


@_compilable
def _low(pair: Any) -> Any:
    return _single(pair << _16)


@_compilable
def _high(pair: Any) -> Any:
    return _single(pair & _HIGH_HALF)


@_compilable
def add_bfloats(left: Any, right: Any) -> Any:
    return single_to_bfloat(_bfloat_to_single(left) + _bfloat_to_single(right))


@_compilable
def add_bfloat_pairs(left: Any, right: Any) -> Any:
    return _two_bfloats(_low(left) + _low(right), _high(left) + _high(right))


@_compilable
def multiply_bfloats(left: Any, right: Any) -> Any:
    return single_to_bfloat(_bfloat_to_single(left) * _bfloat_to_single(right))


@_compilable
def multiply_bfloat_pairs(left: Any, right: Any) -> Any:
    return _two_bfloats(_low(left) * _low(right), _high(left) * _high(right))


# --- min and max: the bits, in an order of integers -----------------------------------------------


@_compilable
def _ordered(signed: Any) -> Any:
    """Sign and magnitude to an integer of the same order, -0 before 0; and back again."""
    return _I16(signed ^ _I16(_I16(signed >> 15) & _MAGNITUDE_SIGNED))


@_compilable
def _minimum(left: Any, right: Any) -> Any:
    a, b = _ordered(_signed(left)), _ordered(_signed(right))
    return _unsigned(_ordered(a if a < b else b))


@_compilable
def _maximum(left: Any, right: Any) -> Any:
    a, b = _ordered(_signed(left)), _ordered(_signed(right))
    return _unsigned(_ordered(a if a > b else b))


@_compilable
def _either_beyond(left: Any, right: Any, infinity: Any) -> Any:
    return (_U16(left & _MAGNITUDE) > infinity) | (_U16(right & _MAGNITUDE) > infinity)


@_compilable
def least_half(left: Any, right: Any) -> Any:
    return _HALF_NAN if _either_beyond(left, right, _HALF_INFINITY) else _minimum(left, right)


@_compilable
def greatest_half(left: Any, right: Any) -> Any:
    return _HALF_NAN if _either_beyond(left, right, _HALF_INFINITY) else _maximum(left, right)


@_compilable
def least_bfloat(left: Any, right: Any) -> Any:
    return _BFLOAT_NAN if _either_beyond(left, right, _BFLOAT_INFINITY) else _minimum(left, right)


@_compilable
def greatest_bfloat(left: Any, right: Any) -> Any:
    return _BFLOAT_NAN if _either_beyond(left, right, _BFLOAT_INFINITY) else _maximum(left, right)


# --- conversions ----------------------------------------------------------------------------------


@_compilable
def _to_odd(value: Any) -> Any:
    """A float64 as a float32, rounded to odd: rounded again to 16 bits it is as if rounded once.

    The neighbour with an odd last bit, if it is not exact.  Boldo and Melquiond, IEEE Transactions
    on Computers 57(4), 2008.
    """
    nearest = _F32(value)
    back, bits = _F64(nearest), _bits_of(nearest)
    neighbour = _U32(bits - _ONE) if abs(back) > abs(value) else _U32(bits + _ONE)
    to_change = (back != value) & (_U32(bits & _ONE) == 0)
    return _single(neighbour if to_change else bits)


@_compilable
def half_to_single(bits: Any) -> Any:
    value = _half_to_single(bits)
    return value if value == value else _NAN


@_compilable
def bfloat_to_single(bits: Any) -> Any:
    value = _bfloat_to_single(bits)
    return value if value == value else _NAN


@_compilable
def half_to_double(bits: Any) -> Any:
    return _F64(half_to_single(bits))


@_compilable
def bfloat_to_double(bits: Any) -> Any:
    return _F64(bfloat_to_single(bits))


@_compilable
def double_to_half(value: Any) -> Any:
    return single_to_half(_to_odd(value))


@_compilable
def double_to_bfloat(value: Any) -> Any:
    return single_to_bfloat(_to_odd(value))
