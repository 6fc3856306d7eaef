"""What a fold does to 64 bytes of each array at once, in vectors, which Numba has no words for.

What is combined stays in registers until all arrays are read: none is read twice, nothing is
written in between, and so it does not matter whether the result goes where an operand lies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ringreduce.compiler.intrinsics import prefetch
from ringreduce.devices.float16 import INFINITY_BITS, MAGNITUDE_BITS, NAN_BITS

_intrinsic: Callable[[Callable[..., Any]], Any] = intrinsic

CHUNK = 64
"""Bytes."""
_AHEAD = 2048
"""How many bytes before they are read floats of 16 bits are asked for: so much is to be done with
each chunk that the processor does not see so far by itself."""
_BYTE, _WORD = ir.IntType(8), ir.IntType(64)
_FLOATS = {4: ir.FloatType(), 8: ir.DoubleType()}
_HALVES, _PAIRS = (ir.VectorType(ir.IntType(8 * size), CHUNK // size) for size in (2, 4))
_SINGLES = ir.VectorType(ir.FloatType(), CHUNK // 4)

Builder = Any
Vector = Any
Combine = Callable[[Builder, Vector, Vector], Vector]


class Lanes(NamedTuple):
    """How elements are folded: widened to one vector or two, combined, and narrowed again."""

    kind: ir.VectorType
    combine: Combine
    widen: Callable[[Builder, Vector], tuple[Vector, ...]] = lambda _, chunk: (chunk,)
    narrow: Callable[..., Vector] = lambda _, chunk: chunk
    ahead: int = 0


def lanes_of(op: str, dtype: np.dtype) -> Lanes | None:
    """How elements of a dtype are folded by an operation; None if that is not known."""
    if dtype.name in NAN_BITS:
        return _short_lanes(op, dtype.name)
    if dtype.kind == "f":
        combine = _OF_FLOATS.get(op)
        element = _FLOATS[dtype.itemsize]
    else:
        combine = (_OF_UNSIGNED if dtype.kind == "u" else _OF_SIGNED).get(op)
        element = ir.IntType(8 * dtype.itemsize)
    return combine and Lanes(ir.VectorType(element, CHUNK // dtype.itemsize), combine)


def _short_lanes(op: str, name: str) -> Lanes | None:
    if op in ("min", "max"):
        return Lanes(_HALVES, _extreme(op, name))
    combine = _OF_FLOATS.get(op)
    if combine is None:
        return None
    if name == "float16":
        return Lanes(_HALVES, combine, _widen_halves, _narrow_halves, _AHEAD)
    return Lanes(_PAIRS, combine, _widen_bfloats, _narrow_bfloats, _AHEAD)


def _all(kind: ir.VectorType, value: int) -> ir.Constant:
    return ir.Constant(kind, [value] * kind.count)


# --- operations -----------------------------------------------------------------------------------


def _chosen(order: str) -> Combine:
    """The first NaN, if there is one; of two that are equal, the right one."""

    def combine(builder: Builder, left: Vector, right: Vector) -> Vector:
        before = builder.fcmp_ordered(order, left, right)
        return builder.select(
            builder.or_(before, builder.fcmp_unordered("uno", left, left)), left, right
        )

    return combine


def _chosen_integer(order: str, signed: bool) -> Combine:
    def combine(builder: Builder, left: Vector, right: Vector) -> Vector:
        compare = builder.icmp_signed if signed else builder.icmp_unsigned
        return builder.select(compare(order, left, right), left, right)

    return combine


def _by(name: str) -> Combine:
    return lambda builder, left, right: getattr(builder, name)(left, right)


_OF_FLOATS = {"sum": _by("fadd"), "prod": _by("fmul"), "min": _chosen("<"), "max": _chosen(">")}
_OF_SIGNED, _OF_UNSIGNED = (
    {
        "sum": _by("add"),
        "prod": _by("mul"),
        "min": _chosen_integer("<", signed),
        "max": _chosen_integer(">", signed),
        "and": _by("and_"),
        "or": _by("or_"),
        "xor": _by("xor"),
    }
    for signed in (True, False)
)


# --- floats of 16 bits: what `devices.float16_elements` does to one -------------------------------


def _is_nan(builder: Builder, bits: Vector, infinity: int) -> Vector:
    magnitude = builder.and_(bits, _all(_HALVES, MAGNITUDE_BITS))
    return builder.icmp_signed(">", magnitude, _all(_HALVES, infinity))


def _with_own_nan(builder: Builder, bits: Vector, name: str, upper: Vector = None) -> Vector:
    """The format's NaN for any; `upper` is what `bits` were before they were rounded."""
    nan = _is_nan(builder, bits if upper is None else upper, INFINITY_BITS[name])
    return builder.select(nan, _all(_HALVES, NAN_BITS[name]), bits)


def _extreme(op: str, name: str) -> Combine:
    """min or max by the order of integers, in which -0 is before 0."""
    choose = _OF_SIGNED[op]

    def ordered(builder: Builder, bits: Vector) -> Vector:
        negative = builder.ashr(bits, _all(_HALVES, 15))
        return builder.xor(bits, builder.and_(negative, _all(_HALVES, MAGNITUDE_BITS)))

    def combine(builder: Builder, left: Vector, right: Vector) -> Vector:
        chosen = choose(builder, ordered(builder, left), ordered(builder, right))
        nans = (_is_nan(builder, bits, INFINITY_BITS[name]) for bits in (left, right))
        nan = builder.or_(*nans)
        return builder.select(nan, _all(_HALVES, NAN_BITS[name]), ordered(builder, chosen))

    return combine


def _widen_halves(builder: Builder, chunk: Vector) -> tuple[Vector, ...]:
    halves = builder.bitcast(chunk, ir.VectorType(ir.HalfType(), _HALVES.count))
    return (builder.fpext(halves, ir.VectorType(ir.FloatType(), _HALVES.count)),)


def _narrow_halves(builder: Builder, singles: Vector) -> Vector:
    halves = builder.fptrunc(singles, ir.VectorType(ir.HalfType(), _HALVES.count))
    return _with_own_nan(builder, builder.bitcast(halves, _HALVES), "float16")


def _widen_bfloats(builder: Builder, chunk: Vector) -> tuple[Vector, ...]:
    """Two at a time: each is the upper half of a float32."""
    low = builder.shl(chunk, _all(_PAIRS, 16))
    high = builder.and_(chunk, _all(_PAIRS, 0xFFFF0000))
    return builder.bitcast(low, _SINGLES), builder.bitcast(high, _SINGLES)


def _narrow_bfloats(builder: Builder, low: Vector, high: Vector) -> Vector:
    """The upper halves, one more where the lower is over halfway, or there and the upper is odd.

    A NaN that an addition gives is a quiet one, which its upper half shows.
    """
    low, high = builder.bitcast(low, _PAIRS), builder.bitcast(high, _PAIRS)
    sixteen, upper_half = _all(_PAIRS, 16), _all(_PAIRS, 0xFFFF0000)
    upper = builder.or_(builder.lshr(low, sixteen), builder.and_(high, upper_half))
    lower = builder.or_(builder.and_(low, _all(_PAIRS, 0xFFFF)), builder.shl(high, sixteen))
    upper, lower = builder.bitcast(upper, _HALVES), builder.bitcast(lower, _HALVES)
    over_halfway = builder.xor(lower, _all(_HALVES, 0x8000))
    odd = builder.and_(upper, _all(_HALVES, 1))
    rounds_up = builder.icmp_signed(">", over_halfway, builder.neg(odd))
    rounded = builder.sub(upper, builder.sext(rounds_up, _HALVES))
    return builder.bitcast(_with_own_nan(builder, rounded, "bfloat16", upper), _PAIRS)


# --- a chunk --------------------------------------------------------------------------------------


def folding(lanes: Lanes) -> tuple[Any, Any, Any]:
    """What folds a chunk of two arrays, a chunk of any number, and less than a chunk of these.

    ``fold_two(into, left, right)``, ``fold_chunk(into, sources, n, at)`` and
    ``fold_rest(into, sources, n, at, nbytes, memory)``: `into`, `left` and `right` are addresses,
    `sources` that of the addresses of `n` arrays, read from the byte `at` on.  `memory`, a chunk of
    it, is what the rest goes by way of.
    """

    def place(builder: Builder, address: Any, kind: Any) -> Any:
        return builder.inttoptr(address, kind.as_pointer())

    def read(builder: Builder, source: Any) -> Vector:
        if lanes.ahead:
            ahead = builder.add(source, ir.Constant(_WORD, lanes.ahead))
            prefetch(builder, ahead, to_write=False)
        return builder.load(place(builder, source, lanes.kind), align=1)

    def write(builder: Builder, chunk: Vector, into: Any) -> None:
        builder.store(chunk, place(builder, into, lanes.kind), align=1)

    def combined(builder: Builder, left: Any, right: Any) -> Iterator[Vector]:
        for pair in zip(left, right, strict=True):
            yield lanes.combine(builder, *pair)

    def folded(builder: Builder, arguments: Any, read: Callable[..., Vector]) -> Vector:
        _, sources, n, at, *_ = arguments
        one = ir.Constant(_WORD, 1)

        def widened(k: Any) -> tuple[Vector, ...]:
            source = builder.load(builder.gep(place(builder, sources, _WORD), [k]))
            return lanes.widen(builder, read(builder, builder.add(source, at)))

        first = widened(ir.Constant(_WORD, 0))
        totals = [cgutils.alloca_once_value(builder, vector) for vector in first]
        with cgutils.for_range_slice(builder, one, n, one) as (k, _):
            sums = combined(builder, map(builder.load, totals), widened(k))
            for total, vector in zip(totals, sums, strict=True):
                builder.store(vector, total)
        return lanes.narrow(builder, *map(builder.load, totals))

    @_intrinsic
    def fold_two(_context: Any, into: Any, left: Any, right: Any) -> Any:
        def code(context: Any, builder: Builder, _: Any, arguments: Any) -> Any:
            into, *operands = arguments
            left, right = (lanes.widen(builder, read(builder, each)) for each in operands)
            write(builder, lanes.narrow(builder, *combined(builder, left, right)), into)
            return context.get_dummy_value()

        return types.void(*(types.int64,) * 3), code

    @_intrinsic
    def fold_chunk(_context: Any, into: Any, sources: Any, n: Any, at: Any) -> Any:
        def code(context: Any, builder: Builder, _: Any, arguments: Any) -> Any:
            write(builder, folded(builder, arguments, read), arguments[0])
            return context.get_dummy_value()

        return types.void(*(types.int64,) * 4), code

    @_intrinsic
    def fold_rest(
        _context: Any, into: Any, sources: Any, n: Any, at: Any, nbytes: Any, memory: Any
    ) -> Any:
        def code(context: Any, builder: Builder, _: Any, arguments: Any) -> Any:
            into, *_, nbytes, memory = arguments

            def copy(to: Any, source: Any) -> None:
                to, source = (place(builder, each, _BYTE) for each in (to, source))
                cgutils.raw_memcpy(builder, to, source, nbytes, 1)

            def read_by_copy(builder: Builder, source: Any) -> Vector:
                copy(memory, source)
                return read(builder, memory)

            write(builder, folded(builder, arguments, read_by_copy), memory)
            copy(into, memory)
            return context.get_dummy_value()

        return types.void(*(types.int64,) * 6), code

    return fold_two, fold_chunk, fold_rest
