"""Operations on one 16-bit float by its bits: the bodies of the loops in `float16_kernels`.

A combination widens both operands to float32 and rounds once, to nearest, ties to even.  The
operations min and max need no conversion.  Every NaN that is written is the format's positive quiet
NaN without payload.  So three things change no bit of the result: the order of the operands, the
NaN that an instruction happens to keep, and whether an element is computed in a vector or in the
rest of a loop.

With ``NUMBA_DISABLE_JIT=1`` Python runs these functions on NumPy's scalars.

Integers are converted to their type again after each operation.  Numba widens them to 64 bits, and
a loop that computes in 64 bits takes twice as long.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias, TypeVar

import numpy as np
from llvmlite import ir
from numba import types
from numba.core.base import BaseContext
from numba.core.typing import Signature
from numba.extending import intrinsic, overload

from ringreduce.compiler.records import compilable
from ringreduce.devices.float16 import INFINITY_BITS, MAGNITUDE_BITS, NAN_BITS

_Function = TypeVar("_Function", bound=Callable[..., Any])
_intrinsic: Callable[[Callable[..., Any]], Any] = intrinsic
_compiles_to: Callable[[Callable[..., Any]], Callable[[_Function], _Function]] = partial(
    overload, strict=False
)

_Builder: TypeAlias = ir.IRBuilder
_Generator = Callable[[BaseContext, _Builder, Signature, Sequence[ir.Value]], ir.Value]
Bits: TypeAlias = np.uint16
"""The bits of a 16-bit float."""
Pair: TypeAlias = np.uint32
"""The bits of two bfloat16, the first one in the lower half; or of a float32."""
Single: TypeAlias = np.float32
Double: TypeAlias = np.float64

_U16, _U32, _I16, _F32, _F64 = np.uint16, np.uint32, np.int16, np.float32, np.float64

_HALF_INFINITY, _HALF_NAN = _U16(INFINITY_BITS["float16"]), _U16(NAN_BITS["float16"])
_BFLOAT_INFINITY, _BFLOAT_NAN = _U16(INFINITY_BITS["bfloat16"]), _U16(NAN_BITS["bfloat16"])
_NAN = _F32(np.nan)
_MAGNITUDE, _MAGNITUDE_SIGNED = _U16(MAGNITUDE_BITS), _I16(MAGNITUDE_BITS)
_HIGH_HALF, _LOW_HALF, _LAST_KEPT = _U32(0xFFFF0000), _U32(0xFFFF), _U32(0x10000)
_HALFWAY, _16, _ONE = _U32(0x8000), _U32(16), _U32(1)
_LOW_NAN, _HIGH_NAN = _U32(NAN_BITS["bfloat16"]), _U32(NAN_BITS["bfloat16"] << 16)


@compilable
def _bits_of(value: Single) -> Pair:
    return np.float32(value).view(np.uint32)


@compilable
def _single(bits: Pair) -> Single:
    return np.uint32(bits).view(np.float32)


@compilable
def _signed(bits: Bits) -> np.int16:
    return np.uint16(bits).view(np.int16)


@compilable
def _unsigned(bits: np.int16) -> Bits:
    return np.int16(bits).view(np.uint16)


# --- float16: the processor converts it -----------------------------------------------------------


def _half_to_single(bits: Bits) -> Single:
    return _F32(bits.view(np.float16))


def _single_to_half(value: Single) -> Bits:
    return np.float16(value).view(_U16)


@_intrinsic
def _extend(_context: BaseContext, bits: types.Type) -> tuple[Signature, _Generator]:
    def generate(
        _: BaseContext, builder: _Builder, __: Signature, arguments: Sequence[ir.Value]
    ) -> ir.Value:
        return builder.fpext(builder.bitcast(arguments[0], ir.HalfType()), ir.FloatType())

    return types.float32(types.uint16), generate


@_intrinsic
def _truncate(_context: BaseContext, value: types.Type) -> tuple[Signature, _Generator]:
    def generate(
        _: BaseContext, builder: _Builder, __: Signature, arguments: Sequence[ir.Value]
    ) -> ir.Value:
        return builder.bitcast(builder.fptrunc(arguments[0], ir.HalfType()), ir.IntType(16))

    return types.uint16(types.float32), generate


@_compiles_to(_half_to_single)
def _half_to_single_compiled(bits: types.Type) -> Callable[[Bits], Single]:
    return lambda bits: _extend(bits)


@_compiles_to(_single_to_half)
def _single_to_half_compiled(value: types.Type) -> Callable[[Single], Bits]:
    return lambda value: _truncate(value)


@compilable
def single_to_half(value: Single) -> Bits:
    bits = _single_to_half(value)
    return _HALF_NAN if _U16(bits & _MAGNITUDE) > _HALF_INFINITY else bits


@compilable
def add_halves(left: Bits, right: Bits) -> Bits:
    return single_to_half(_half_to_single(left) + _half_to_single(right))


@compilable
def multiply_halves(left: Bits, right: Bits) -> Bits:
    return single_to_half(_half_to_single(left) * _half_to_single(right))


# --- bfloat16: the upper half of a float32 --------------------------------------------------------


@compilable
def _bfloat_to_single(bits: Bits) -> Single:
    return _single(_U32(bits) << _16)


@compilable
def _rounded(value: Single) -> Pair:
    """Round a float32 to bfloat16, in the upper half of the bits; the lower half is not cleared."""
    bits = _U32(_bits_of(value) + _HALFWAY)
    was_halfway = _U32(bits & _LOW_HALF) == 0
    return _U32(bits & ~_LAST_KEPT) if was_halfway else bits


@compilable
def single_to_bfloat(value: Single) -> Bits:
    return _U16(_rounded(value) >> _16) if value == value else _BFLOAT_NAN


@compilable
def _two_bfloats(low: Single, high: Single) -> Pair:
    low_bits = _U32(_rounded(low) >> _16) if low == low else _LOW_NAN
    high_bits = _U32(_rounded(high) & _HIGH_HALF) if high == high else _HIGH_NAN
    return _U32(low_bits | high_bits)


@compilable
def _low(pair: Pair) -> Single:
    return _single(pair << _16)


@compilable
def _high(pair: Pair) -> Single:
    return _single(pair & _HIGH_HALF)


@compilable
def add_bfloats(left: Bits, right: Bits) -> Bits:
    return single_to_bfloat(_bfloat_to_single(left) + _bfloat_to_single(right))


@compilable
def add_bfloat_pairs(left: Pair, right: Pair) -> Pair:
    return _two_bfloats(_low(left) + _low(right), _high(left) + _high(right))


@compilable
def multiply_bfloats(left: Bits, right: Bits) -> Bits:
    return single_to_bfloat(_bfloat_to_single(left) * _bfloat_to_single(right))


@compilable
def multiply_bfloat_pairs(left: Pair, right: Pair) -> Pair:
    return _two_bfloats(_low(left) * _low(right), _high(left) * _high(right))


# --- min and max: by the order of integers --------------------------------------------------------


@compilable
def _ordered(signed: np.int16) -> np.int16:
    return _I16(signed ^ _I16(_I16(signed >> 15) & _MAGNITUDE_SIGNED))


@compilable
def _minimum(left: Bits, right: Bits) -> Bits:
    a, b = _ordered(_signed(left)), _ordered(_signed(right))
    return _unsigned(_ordered(a if a < b else b))


@compilable
def _maximum(left: Bits, right: Bits) -> Bits:
    a, b = _ordered(_signed(left)), _ordered(_signed(right))
    return _unsigned(_ordered(a if a > b else b))


@compilable
def _either_beyond(left: Bits, right: Bits, infinity: Bits) -> np.bool:
    return (_U16(left & _MAGNITUDE) > infinity) | (_U16(right & _MAGNITUDE) > infinity)


@compilable
def least_half(left: Bits, right: Bits) -> Bits:
    return _HALF_NAN if _either_beyond(left, right, _HALF_INFINITY) else _minimum(left, right)


@compilable
def greatest_half(left: Bits, right: Bits) -> Bits:
    return _HALF_NAN if _either_beyond(left, right, _HALF_INFINITY) else _maximum(left, right)


@compilable
def least_bfloat(left: Bits, right: Bits) -> Bits:
    return _BFLOAT_NAN if _either_beyond(left, right, _BFLOAT_INFINITY) else _minimum(left, right)


@compilable
def greatest_bfloat(left: Bits, right: Bits) -> Bits:
    return _BFLOAT_NAN if _either_beyond(left, right, _BFLOAT_INFINITY) else _maximum(left, right)


# --- conversions ----------------------------------------------------------------------------------


@compilable
def _to_odd(value: Double) -> Single:
    """See `float16._to_odd`."""
    nearest = _F32(value)
    back, bits = _F64(nearest), _bits_of(nearest)
    neighbour = _U32(bits - _ONE) if abs(back) > abs(value) else _U32(bits + _ONE)
    to_change = (back != value) & (_U32(bits & _ONE) == 0)
    return _single(neighbour if to_change else bits)


@compilable
def half_to_single(bits: Bits) -> Single:
    value = _half_to_single(bits)
    return value if value == value else _NAN


@compilable
def bfloat_to_single(bits: Bits) -> Single:
    value = _bfloat_to_single(bits)
    return value if value == value else _NAN


@compilable
def half_to_double(bits: Bits) -> Double:
    return _F64(half_to_single(bits))


@compilable
def bfloat_to_double(bits: Bits) -> Double:
    return _F64(bfloat_to_single(bits))


@compilable
def double_to_half(value: Double) -> Bits:
    return single_to_half(_to_odd(value))


@compilable
def double_to_bfloat(value: Double) -> Bits:
    return single_to_bfloat(_to_odd(value))
