"""16-bit floats: kernels and NumPy are compared with exact arithmetic, bit for bit."""

from __future__ import annotations

from functools import reduce

import ml_dtypes
import numpy as np
import pytest
from numba import config as numba_config

from ringreduce.devices import compiled
from ringreduce.devices.cpu import CpuDevice
from ringreduce.devices.float16 import NAN_BITS
from tests.support.each import each

SHORT = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
FOLDS = ("sum", "prod", "min", "max")
STRIDE = 211 if numba_config.DISABLE_JIT else 1
"""Step through all bit patterns: 1, or more if kernels run as plain Python."""
PATTERNS = np.arange(0, 1 << 16, STRIDE, dtype=np.uint16)


@pytest.fixture(params=["compiled", "with NumPy"])
def device(request, monkeypatch):
    """The device with its kernels, and without any."""
    if request.param == "with NumPy":
        monkeypatch.setattr(compiled, "kernel", lambda name: None)
    return CpuDevice()


@pytest.fixture(params=SHORT)
def dtype(request):
    return SHORT[request.param]


@pytest.fixture(autouse=True)
def _silently():
    """Ignore overflow, which occurs in the references too."""
    with np.errstate(all="ignore"):
        yield


def bits(array: np.ndarray) -> np.ndarray:
    return array.view(np.uint16)


def canonical(array: np.ndarray) -> np.ndarray:
    """Return the bits of a 16-bit array, with NaNs in the form that kernels write."""
    return np.where(np.isnan(array), np.uint16(NAN_BITS[array.dtype.name]), bits(array))


def rounded(exact: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Round float64 to the nearest 16-bit value, ties to even, by arithmetic alone; as float64.

    A representable value is an integer times a quantum: a power of two that depends on the
    exponent.
    """
    digits, least, top = (11, -24, 2.0**16) if dtype == np.float16 else (8, -133, 2.0**128)
    _, exponent = np.frexp(exact)
    quantum = np.maximum(exponent - digits, least)
    near = np.ldexp(np.rint(np.ldexp(exact, -quantum)), quantum)
    near = np.where(np.isfinite(exact), near, exact)
    return np.where(np.abs(near) >= top, np.copysign(np.inf, exact), near)


def operands(dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Return pairs: every pattern with 12 others, and every special value with every other."""
    left = np.concatenate([PATTERNS] * 12)
    right = np.concatenate([np.roll(PATTERNS, 7919 * i // STRIDE) for i in range(12)])
    nan, infinity = NAN_BITS[dtype.name], int(bits(np.asarray(np.inf, dtype).reshape(1))[0])
    one = int(bits(np.ones(1, dtype))[0])
    special = [0, 1, 2, one - 1, one, one + 1, infinity - 1, infinity, infinity + 1, nan, nan + 5]
    special = np.array([s | sign for s in [*special, 0x7FFF] for sign in (0, 0x8000)], np.uint16)
    grid = np.meshgrid(special, special)
    pairs = (left, grid[0].ravel()), (right, grid[1].ravel())
    first, second = (np.concatenate(parts).view(dtype) for parts in pairs)
    return first, second


# --- the reference --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SHORT)
def test_the_reference_rounds_what_lies_between_to_the_nearest_and_ties_to_even(name):
    dtype = SHORT[name]
    finite = np.arange(0, 0x7C00 if name == "float16" else 0x7F80, STRIDE, dtype=np.uint16)
    here, above = (
        array.view(dtype).astype(np.float64) for array in (finite, finite + np.uint16(1))
    )
    here, above, odd = here[:-1], above[:-1], finite[:-1] % 2 == 1
    middle = (here + above) / 2
    assert np.array_equal(rounded(here, dtype), here)
    assert np.array_equal(rounded(middle, dtype), np.where(odd, above, here))
    assert np.array_equal(rounded(np.nextafter(middle, 0), dtype), here)
    assert np.array_equal(rounded(np.nextafter(middle, np.inf), dtype), above)


# --- folds ----------------------------------------------------------------------------------------


def exactly(op: str, left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Return the sum or product in float64: its rounding error is too small to change 16 bits."""
    return (np.add if op == "sum" else np.multiply)(left.astype(float), right.astype(float))


@pytest.mark.parametrize("op", ["sum", "prod"])
def test_sums_and_products_are_the_exact_ones_rounded_once(device, dtype, op):
    left, right = operands(dtype)
    into = np.empty_like(left)
    device.fold(op, dtype)(left, right, into)
    wanted = rounded(exactly(op, left, right), dtype).astype(dtype)
    assert np.array_equal(bits(into), canonical(wanted))


@pytest.mark.parametrize("op", ["min", "max"])
def test_min_and_max_are_those_of_the_values_and_propagate_nan(device, dtype, op):
    left, right = operands(dtype)
    into = np.empty_like(left)
    device.fold(op, dtype)(left, right, into)
    choose = np.minimum if op == "min" else np.maximum
    wanted = choose(left.astype(float), right.astype(float))
    assert np.array_equal(into.astype(float), wanted, equal_nan=True)
    assert set(bits(into)[np.isnan(wanted)]) == {NAN_BITS[dtype.name]}


@pytest.mark.parametrize(("op", "sign"), [("min", True), ("max", False)])
def test_minus_zero_is_less_than_zero(device, dtype, op, sign):
    left, right = np.array([0.0, -0.0], dtype), np.array([-0.0, 0.0], dtype)
    into = np.empty_like(left)
    device.fold(op, dtype)(left, right, into)
    assert np.signbit(into.astype(float)).tolist() == [sign, sign]


@pytest.mark.parametrize("op", FOLDS)
def test_the_order_of_the_operands_changes_no_bit(device, dtype, op):
    left, right = operands(dtype)
    one, other = np.empty_like(left), np.empty_like(left)
    device.fold(op, dtype)(left, right, one)
    device.fold(op, dtype)(right, left, other)
    assert np.array_equal(bits(one), bits(other))


@pytest.mark.parametrize("op", FOLDS)
def test_with_and_without_compilation_the_bits_are_the_same(dtype, op, monkeypatch):
    left, right = operands(dtype)
    with_kernels, with_numpy = np.empty_like(left), np.empty_like(left)
    CpuDevice().fold(op, dtype)(left, right, with_kernels)
    monkeypatch.setattr(compiled, "kernel", lambda name: None)
    CpuDevice().fold(op, dtype)(left, right, with_numpy)
    assert np.array_equal(bits(with_kernels), bits(with_numpy))


# --- where the elements lie -----------------------------------------------------------------------


def in_memory(values: np.ndarray, offset: int) -> np.ndarray:
    """Return the values in a writeable array, `offset` bytes after an aligned address."""
    memory = np.full(values.nbytes + 128, 0xAA, np.uint8)
    start = -memory.__array_interface__["data"][0] % 64 + offset
    array = memory[start : start + values.nbytes].view(values.dtype)
    array[...] = values
    return array


@pytest.mark.parametrize("op", FOLDS)
@each("count", [*range(10), 15, 16, 17, 31, 33, 63, 64, 65, 97, 127, 129, 1021])
def test_any_length_gives_what_a_longer_one_begins_with(device, dtype, op, count):
    left, right = (operand[-1100:] for operand in operands(dtype))
    longer, into = np.empty_like(left), np.full(count + 8, 1.5, dtype)
    device.fold(op, dtype)(left, right, longer)
    device.fold(op, dtype)(left[:count], right[:count], into[4 : 4 + count])
    assert np.array_equal(bits(into[4 : 4 + count]), bits(longer[:count]))
    assert (into[:4] == 1.5).all()
    assert (into[4 + count :] == 1.5).all()


@pytest.mark.parametrize("op", FOLDS)
@each("offsets", [(0, 2, 4), (2, 0, 6), (6, 30, 2), (1, 3, 5), (1, 0, 63)])
def test_where_arrays_begin_changes_no_bit(device, dtype, op, offsets):
    left, right = (operand[-1100:] for operand in operands(dtype))
    wanted = np.empty_like(left)
    device.fold(op, dtype)(left, right, wanted)
    arrays = [in_memory(v, o) for v, o in zip((left, right, wanted), offsets, strict=True)]
    arrays[2][...] = 0
    device.fold(op, dtype)(*arrays)
    assert np.array_equal(bits(arrays[2]), bits(wanted))


@pytest.mark.parametrize("op", FOLDS)
@each("count", [1, 2, 63, 1001])
@pytest.mark.parametrize("place", [0, 1])
def test_in_place_gives_the_same_bits(device, dtype, op, count, place):
    left, right = (operand[-count:] for operand in operands(dtype))
    wanted = np.empty_like(left)
    device.fold(op, dtype)(left, right, wanted)
    arrays = [left.copy(), right.copy()]
    device.fold(op, dtype)(*arrays, arrays[place])
    assert np.array_equal(bits(arrays[place]), bits(wanted))
    assert np.array_equal(bits(arrays[1 - place]), bits((left, right)[1 - place]))


def test_both_operands_and_the_result_may_be_one_array(device, dtype):
    array = np.arange(101).astype(dtype)
    device.fold("sum", dtype)(array, array, array)
    assert array.tolist() == (2 * np.arange(101)).tolist()


def test_what_is_read_may_be_read_only(device, dtype):
    left, into = np.ones(7, dtype), np.empty(7, dtype)
    left.flags.writeable = False
    device.fold("sum", dtype)(left, left, into)
    assert into.tolist() == [2.0] * 7


# --- division and conversions ---------------------------------------------------------------------


@pytest.mark.parametrize("by", [1, 2, 3, 7, 1000])
def test_quotients_are_the_exact_ones_rounded_once(device, dtype, by):
    array = PATTERNS.view(dtype).copy()
    wanted = rounded(array.astype(float) / by, dtype).astype(dtype)
    device.divide(array, by)
    assert np.array_equal(bits(array), canonical(wanted))


@pytest.mark.parametrize("long", [np.float32, np.float64])
def test_every_pattern_is_widened_exactly(device, dtype, long):
    source = PATTERNS.view(dtype)
    into = np.empty(source.size, long)
    device.convert(source, into)
    assert np.array_equal(into, source.astype(long), equal_nan=True)
    assert np.array_equal(np.signbit(into), np.signbit(source.astype(long)) & ~np.isnan(into))


@pytest.mark.parametrize("long", [np.float32, np.float64])
def test_every_pattern_and_what_lies_beside_and_between_is_narrowed_to_the_nearest(
    device, dtype, long
):
    here = PATTERNS.view(dtype).astype(np.float64)
    above = (PATTERNS + np.uint16(1)).view(dtype).astype(np.float64)
    middle = ((here + above) / 2).astype(long)
    close = [np.nextafter(middle, direction, dtype=long) for direction in (-np.inf, np.inf)]
    limits = np.array([np.finfo(long).max, np.finfo(long).tiny, np.finfo(long).smallest_subnormal])
    source = np.concatenate([here, middle, *close, limits, -limits]).astype(long)
    into = np.empty(source.size, dtype)
    device.convert(source, into)
    wanted = rounded(source.astype(np.float64), dtype).astype(dtype)
    assert np.array_equal(bits(into), canonical(wanted))


def test_a_float64_beside_a_tie_is_not_first_rounded_to_it(device, dtype):
    # Of the ties on both sides of 1 + 2u, one rounds down and one rounds up.  With an addend that
    # float32 cannot represent, both round to 1 + 2u.
    u = 2.0**-11 if dtype == np.float16 else 2.0**-8
    ties, hair = np.array([1 + u, 1 + 3 * u]), np.array([2.0**-40, -(2.0**-40)])
    into, tied = np.empty(2, dtype), np.empty(2, dtype)
    device.convert(ties, tied)
    device.convert(ties + hair, into)
    assert tied.tolist() == [1, 1 + 4 * u]
    assert into.tolist() == [1 + 2 * u, 1 + 2 * u]


def test_nans_with_any_payload_stay_nan(device, dtype):
    payloads = np.array([0x7F800001, 0xFF800001, 0x7FFFFFFF, 0xFFFFFFFF, 0x7FC01234], np.uint32)
    into = np.empty(5, dtype)
    device.convert(payloads.view(np.float32), into)
    assert bits(into).tolist() == [NAN_BITS[dtype.name]] * 5


# --- many at once ---------------------------------------------------------------------------------


@pytest.mark.parametrize("op", ["sum", "mean", "prod"])
@each("count", range(1, 8))
def test_many_are_accumulated_in_float32_and_rounded_once(device, dtype, op, count):
    rng = np.random.default_rng(count)
    sources = [rng.standard_normal(301, np.float32).astype(dtype) for _ in range(count)]
    into = np.empty(301, dtype)
    device.fold_many(op, dtype)(sources, into)
    combine = np.multiply if op == "prod" else np.add
    wanted = reduce(combine, [source.astype(np.float32) for source in sources]).astype(dtype)
    assert np.array_equal(bits(into), bits(wanted))
