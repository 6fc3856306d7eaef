"""The vector code of folds: instructions that combine 64 bytes of each array in registers.

Numba has no vector types, so this module emits LLVM's instructions.  The class `Vec` lets them read
as arithmetic.

The code reads a chunk of every array before it writes the chunk of the result, and reads each chunk
once.  So the result may be written over any operand.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.base import BaseContext
from numba.core.typing import Signature
from numba.extending import intrinsic

from ringreduce.compiler.intrinsics import prefetch
from ringreduce.devices.float16 import INFINITY_BITS, MAGNITUDE_BITS, NAN_BITS

Builder: TypeAlias = ir.IRBuilder
Intrinsic = Callable[..., None]
_Generator = Callable[[BaseContext, Builder, Signature, Sequence[ir.Value]], ir.Value]
_intrinsic: Callable[[Callable[..., tuple[Signature, _Generator]]], Intrinsic] = intrinsic

CHUNK = 64
"""Bytes of each array that are combined at a time: one cache line."""
_AHEAD = 2048
"""Bytes between the chunk that a fold of 16-bit floats reads and the chunk that it prefetches.

The instructions of a chunk fill the processor's window, so it does not prefetch that far itself.
"""
_BYTE, _WORD = ir.IntType(8), ir.IntType(64)


# --- vectors with operators -----------------------------------------------------------------------


@dataclass(frozen=True)
class VectorKind:
    element: ir.Type
    lanes: int
    signed: bool = True
    """Whether integers are compared and shifted right as signed: LLVM's types have no sign."""

    @property
    def vector(self) -> ir.VectorType:
        return ir.VectorType(self.element, self.lanes)

    @property
    def is_float(self) -> bool:
        return not isinstance(self.element, ir.IntType)


_FLOATS = {4: ir.FloatType(), 8: ir.DoubleType()}
_BITS = VectorKind(ir.IntType(16), CHUNK // 2)
"""A chunk of 16-bit floats, by their bits."""
_PAIRS = VectorKind(ir.IntType(32), CHUNK // 4, signed=False)
"""A chunk of 16-bit floats, two in an element: the first float is in the lower half."""
_SINGLES = VectorKind(ir.FloatType(), CHUNK // 4)
_HALVES, _WIDE_HALVES = (
    VectorKind(element, CHUNK // 2) for element in (ir.HalfType(), ir.FloatType())
)


class Mask:
    def __init__(self, builder: Builder, value: ir.Value) -> None:
        self.builder, self.value = builder, value

    def __or__(self, other: Mask) -> Mask:
        return Mask(self.builder, self.builder.or_(self.value, other.value))

    def as_minus_one(self, kind: VectorKind) -> Vec:
        """Integers of `kind`: -1 where true, 0 where false."""
        return Vec(self.builder, self.builder.sext(self.value, kind.vector), kind)


class Vec:
    """A vector in a register, while code is generated: each operator emits an instruction.

    An int as the right operand stands for a vector with that number in every element.
    """

    def __init__(self, builder: Builder, value: ir.Value, kind: VectorKind) -> None:
        self.builder, self.value, self.kind = builder, value, kind

    def __add__(self, other: Vec | int) -> Vec:
        return self._emit("fadd" if self.kind.is_float else "add", other)

    def __mul__(self, other: Vec | int) -> Vec:
        return self._emit("fmul" if self.kind.is_float else "mul", other)

    def __lt__(self, other: Vec | int) -> Mask:
        return self._compare("<", other)

    def __gt__(self, other: Vec | int) -> Mask:
        return self._compare(">", other)

    def is_nan(self) -> Mask:
        return Mask(self.builder, self.builder.fcmp_unordered("uno", self.value, self.value))

    # --- integers alone ---

    def __sub__(self, other: Vec | int) -> Vec:
        return self._emit("sub", other)

    def __neg__(self) -> Vec:
        return Vec(self.builder, self.builder.neg(self.value), self.kind)

    def __and__(self, other: Vec | int) -> Vec:
        return self._emit("and_", other)

    def __or__(self, other: Vec | int) -> Vec:
        return self._emit("or_", other)

    def __xor__(self, other: Vec | int) -> Vec:
        return self._emit("xor", other)

    def __lshift__(self, other: Vec | int) -> Vec:
        return self._emit("shl", other)

    def __rshift__(self, other: Vec | int) -> Vec:
        """The sign is copied in from the left if the kind is signed, else zeros are."""
        return self._emit("ashr" if self.kind.signed else "lshr", other)

    # --- other kinds ---

    def viewed(self, kind: VectorKind) -> Vec:
        return Vec(self.builder, self.builder.bitcast(self.value, kind.vector), kind)

    def widened(self, kind: VectorKind) -> Vec:
        """Floats as longer floats, exactly."""
        return Vec(self.builder, self.builder.fpext(self.value, kind.vector), kind)

    def rounded(self, kind: VectorKind) -> Vec:
        """Floats as shorter floats, rounded to nearest, ties to even."""
        return Vec(self.builder, self.builder.fptrunc(self.value, kind.vector), kind)

    # --- instructions ---

    def _emit(self, instruction: str, other: Vec | int) -> Vec:
        emit = getattr(self.builder, instruction)
        return Vec(self.builder, emit(self.value, self._value_of(other)), self.kind)

    def _compare(self, order: str, other: Vec | int) -> Mask:
        """Floats compare false where either is NaN."""
        if self.kind.is_float:
            compare = self.builder.fcmp_ordered
        else:
            compare = self.builder.icmp_signed if self.kind.signed else self.builder.icmp_unsigned
        return Mask(self.builder, compare(order, self.value, self._value_of(other)))

    def _value_of(self, other: Vec | int) -> ir.Value:
        return other.value if isinstance(other, Vec) else _constant(self.kind, other)


def _constant(kind: VectorKind, number: int) -> ir.Constant:
    return ir.Constant(kind.vector, [number] * kind.lanes)


def where(mask: Mask, chosen: Vec | int, other: Vec) -> Vec:
    value = chosen.value if isinstance(chosen, Vec) else _constant(other.kind, chosen)
    return Vec(other.builder, other.builder.select(mask.value, value, other.value), other.kind)


# --- operations -----------------------------------------------------------------------------------

Combine = Callable[[Vec, Vec], Vec]


def _least(left: Vec, right: Vec) -> Vec:
    return where(left < right, left, right)


def _greatest(left: Vec, right: Vec) -> Vec:
    return where(left > right, left, right)


def _least_or_nan(left: Vec, right: Vec) -> Vec:
    """The left operand's NaN if it is one, else the right one's; of two zeros the right one."""
    return where((left < right) | left.is_nan(), left, right)


def _greatest_or_nan(left: Vec, right: Vec) -> Vec:
    return where((left > right) | left.is_nan(), left, right)


_OF_FLOATS: dict[str, Combine] = {
    "sum": operator.add,
    "prod": operator.mul,
    "min": _least_or_nan,
    "max": _greatest_or_nan,
}
_OF_INTEGERS: dict[str, Combine] = {
    "sum": operator.add,
    "prod": operator.mul,
    "min": _least,
    "max": _greatest,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
}


# --- 16-bit floats: vectors of the operations in `devices.float16_elements` -----------------------


def _encodes_nan(bits: Vec, name: str) -> Mask:
    """Whether bits of the format `name` are a NaN's: their magnitude is beyond infinity's."""
    return (bits & MAGNITUDE_BITS) > INFINITY_BITS[name]


def _ordered(bits: Vec) -> Vec:
    return bits ^ ((bits >> 15) & MAGNITUDE_BITS)


def _choose_by_bits(choose: Combine, name: str, left: Vec, right: Vec) -> Vec:
    """The least or greatest of 16-bit floats, or the format's NaN if either is a NaN."""
    chosen = choose(_ordered(left), _ordered(right))
    nan = _encodes_nan(left, name) | _encodes_nan(right, name)
    return where(nan, NAN_BITS[name], _ordered(chosen))


def _widen_halves(chunk: Vec) -> tuple[Vec, ...]:
    return (chunk.viewed(_HALVES).widened(_WIDE_HALVES),)


def _narrow_halves(wide: Vec) -> Vec:
    bits = wide.rounded(_HALVES).viewed(_BITS)
    return where(_encodes_nan(bits, "float16"), NAN_BITS["float16"], bits)


def _widen_bfloats(chunk: Vec) -> tuple[Vec, ...]:
    """The even elements, and the odd ones: a bfloat16 is the upper half of a float32."""
    return (chunk << 16).viewed(_SINGLES), (chunk & 0xFFFF0000).viewed(_SINGLES)


def _narrow_bfloats(even: Vec, odd: Vec) -> Vec:
    """Round to nearest, ties to even.

    The upper half becomes one more where the lower half is above 0x8000, and where the lower half
    is 0x8000 and the upper half is odd.  A NaN that arithmetic gives is a quiet NaN, so the upper
    half alone encodes a NaN.
    """
    even, odd = even.viewed(_PAIRS), odd.viewed(_PAIRS)
    upper = ((even >> 16) | (odd & 0xFFFF0000)).viewed(_BITS)
    lower = ((even & 0xFFFF) | (odd << 16)).viewed(_BITS)
    # As signed integers: lower - 0x8000 > 0, or >= 0 where the upper half is odd.
    rounds_up = (lower ^ 0x8000) > -(upper & 1)
    rounded = upper - rounds_up.as_minus_one(_BITS)
    nan = _encodes_nan(upper, "bfloat16")
    return where(nan, NAN_BITS["bfloat16"], rounded).viewed(_PAIRS)


# --- from memory to memory ------------------------------------------------------------------------


def _as_it_is(chunk: Vec) -> tuple[Vec, ...]:
    return (chunk,)


@dataclass(frozen=True)
class Lanes:
    """Functions that combine chunks of one dtype by one operation."""

    kind: VectorKind
    combine: Combine
    """Combines two vectors that `widen` has made, into one of their kind."""
    widen: Callable[[Vec], tuple[Vec, ...]] = _as_it_is
    """Makes of a chunk the vectors to combine, one or two."""
    narrow: Callable[..., Vec] = lambda chunk: chunk
    """Makes a chunk of these vectors again."""
    ahead: int = 0
    """Bytes between the chunk that is read and the one that is prefetched; 0: none is."""


def lanes_of(op: str, dtype: np.dtype) -> Lanes | None:
    """Return the functions that combine chunks of `dtype` by `op`; None if there are none."""
    if dtype.name in NAN_BITS:
        return _lanes_of_16_bits(op, dtype.name)
    combine = (_OF_FLOATS if dtype.kind == "f" else _OF_INTEGERS).get(op)
    element = _FLOATS[dtype.itemsize] if dtype.kind == "f" else ir.IntType(8 * dtype.itemsize)
    kind = VectorKind(element, CHUNK // dtype.itemsize, signed=dtype.kind != "u")
    return combine and Lanes(kind, combine)


def _lanes_of_16_bits(op: str, name: str) -> Lanes | None:
    if op in ("min", "max"):
        return Lanes(_BITS, partial(_choose_by_bits, _OF_INTEGERS[op], name))
    combine = _OF_FLOATS.get(op)
    if combine is None:
        return None
    if name == "float16":
        return Lanes(_BITS, combine, _widen_halves, _narrow_halves, _AHEAD)
    return Lanes(_PAIRS, combine, _widen_bfloats, _narrow_bfloats, _AHEAD)


def folding(lanes: Lanes) -> tuple[Intrinsic, Intrinsic, Intrinsic]:
    """Make three intrinsics: combine a chunk of two arrays, of any number, and less than a chunk.

    ``fold_two(into, left, right)``: all three are addresses of chunks.

    ``fold_chunk(into, sources, n, at)``: `into` is the address of a chunk; `sources` is the address
    of the addresses of `n` arrays, 1 or more, whose chunks begin `at` bytes behind those addresses.

    ``fold_rest(into, sources, n, at, nbytes, memory)``: the same of the first `nbytes` of a chunk.
    `memory` is the address of a chunk of memory, into which each array's bytes are copied first.
    """

    def read(builder: Builder, address: ir.Value) -> Vec:
        if lanes.ahead:
            ahead = builder.add(address, ir.Constant(_WORD, lanes.ahead))
            prefetch(builder, ahead, to_write=False)
        chunk = builder.load(_pointer(builder, address, lanes.kind.vector), align=1)
        return Vec(builder, chunk, lanes.kind)

    def write(builder: Builder, chunk: Vec, address: ir.Value) -> None:
        builder.store(chunk.value, _pointer(builder, address, lanes.kind.vector), align=1)

    def combined(left: Sequence[Vec], right: Sequence[Vec]) -> list[Vec]:
        return [lanes.combine(*pair) for pair in zip(left, right, strict=True)]

    def total(
        builder: Builder,
        sources: ir.Value,
        n: ir.Value,
        at: ir.Value,
        read: Callable[[Builder, ir.Value], Vec],
    ) -> Vec:
        """Emit a loop over the arrays from the second one on."""
        one = ir.Constant(_WORD, 1)

        def widened(index: ir.Value) -> tuple[Vec, ...]:
            place = builder.gep(_pointer(builder, sources, _WORD), [index])
            return lanes.widen(read(builder, builder.add(builder.load(place), at)))

        first = widened(ir.Constant(_WORD, 0))
        places = [cgutils.alloca_once_value(builder, each.value) for each in first]

        def totals() -> list[Vec]:
            pairs = zip(places, first, strict=True)
            return [Vec(builder, builder.load(place), each.kind) for place, each in pairs]

        with cgutils.for_range_slice(builder, one, n, one) as (index, _):
            for place, vector in zip(places, combined(totals(), widened(index)), strict=True):
                builder.store(vector.value, place)
        return lanes.narrow(*totals())

    @_intrinsic
    def fold_two(
        _context: BaseContext, into: types.Type, left: types.Type, right: types.Type
    ) -> tuple[Signature, _Generator]:
        def generate(
            context: BaseContext, builder: Builder, _: Signature, arguments: Sequence[ir.Value]
        ) -> ir.Value:
            into, *operands = arguments
            left, right = (lanes.widen(read(builder, address)) for address in operands)
            write(builder, lanes.narrow(*combined(left, right)), into)
            return context.get_dummy_value()

        return types.void(*(types.int64,) * 3), generate

    @_intrinsic
    def fold_chunk(
        _context: BaseContext,
        into: types.Type,
        sources: types.Type,
        n: types.Type,
        at: types.Type,
    ) -> tuple[Signature, _Generator]:
        def generate(
            context: BaseContext, builder: Builder, _: Signature, arguments: Sequence[ir.Value]
        ) -> ir.Value:
            into, sources, n, at = arguments
            write(builder, total(builder, sources, n, at, read), into)
            return context.get_dummy_value()

        return types.void(*(types.int64,) * 4), generate

    @_intrinsic
    def fold_rest(
        _context: BaseContext,
        into: types.Type,
        sources: types.Type,
        n: types.Type,
        at: types.Type,
        nbytes: types.Type,
        memory: types.Type,
    ) -> tuple[Signature, _Generator]:
        def generate(
            context: BaseContext, builder: Builder, _: Signature, arguments: Sequence[ir.Value]
        ) -> ir.Value:
            into, sources, n, at, nbytes, memory = arguments

            def copy(to: ir.Value, source: ir.Value) -> None:
                to, source = (_pointer(builder, address, _BYTE) for address in (to, source))
                cgutils.raw_memcpy(builder, to, source, nbytes, 1)

            def read_by_copy(builder: Builder, address: ir.Value) -> Vec:
                copy(memory, address)
                return read(builder, memory)

            write(builder, total(builder, sources, n, at, read_by_copy), memory)
            copy(into, memory)
            return context.get_dummy_value()

        return types.void(*(types.int64,) * 6), generate

    return fold_two, fold_chunk, fold_rest


def _pointer(builder: Builder, address: ir.Value, kind: ir.Type) -> ir.Value:
    return builder.inttoptr(address, kind.as_pointer())
