"""The CPU device: allocation, views and reductions; `test_device_contract` tests all devices."""

from __future__ import annotations

import operator

import ml_dtypes
import numpy as np
import pytest

from ringreduce.devices.cpu import OPS, CpuDevice
from tests.devices.test_device_contract import INTEGERS, can_be_reduced
from tests.support.each import each

FLOATS = ["float16", "bfloat16", "float32", "float64", "longdouble"]
COMPLEX = ["complex64", "complex128", "clongdouble"]


@pytest.fixture
def device():
    return CpuDevice()


def on(device, values, dtype):
    """Return an array of these values on the device."""
    values = np.asarray(values, dtype)
    array = device.empty(values.shape, dtype)
    array[...] = values
    return array


def folded(device, op, left, right, dtype):
    """Return the device's reduction of two arrays."""
    into = device.empty(len(left), dtype)
    device.fold(op, dtype)(on(device, left, dtype), on(device, right, dtype), into)
    return into.tolist()


# --- folds ----------------------------------------------------------------------------------------

MEANINGS = {
    "sum": operator.add,
    "mean": operator.add,
    "min": min,
    "max": max,
    "prod": operator.mul,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
}
REDUCTIONS = [
    (op, dtype)
    for op in MEANINGS
    for dtype in ["bool", *INTEGERS, *FLOATS, *COMPLEX]
    if can_be_reduced(dtype, op)
]


def test_every_op_is_tested():
    assert set(MEANINGS) == set(OPS)


def test_each_kind_of_dtype_can_be_reduced_by_what_has_a_meaning():
    possible = {
        dtype: {op for op, other in REDUCTIONS if other == dtype} for _, dtype in REDUCTIONS
    }
    bitwise, ordered = {"and", "or", "xor"}, {"min", "max"}
    assert possible == {
        "bool": ordered | bitwise,
        **{dtype: {"sum", "prod"} | ordered | bitwise for dtype in INTEGERS},
        **{dtype: {"sum", "prod", "mean"} | ordered for dtype in FLOATS},
        **{dtype: {"sum", "prod", "mean"} for dtype in COMPLEX},
    }


@pytest.mark.parametrize(("op", "dtype"), REDUCTIONS)
def test_folds_mean_what_they_say(device, op, dtype):
    left, right = [1, 2, 5, 0, 7], [3, 2, 4, 9, 1]
    if dtype == "bool":
        left, right = [False, False, True, True], [False, True, False, True]
    if dtype in COMPLEX:
        left = [value + 2j for value in left]
    wanted = [MEANINGS[op](a, b) for a, b in zip(left, right, strict=True)]
    assert folded(device, op, left, right, dtype) == wanted


@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize("op", ["sum", "prod"])
def test_integers_wrap(device, op, dtype):
    info = np.iinfo(dtype)
    left, right = [info.max, info.max, info.min], [1, info.max, info.max]
    modulus = 1 << info.bits
    exact = [MEANINGS[op](a, b) for a, b in zip(left, right, strict=True)]
    wanted = [(value - info.min) % modulus + info.min for value in exact]
    assert folded(device, op, left, right, dtype) == wanted


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("op", ["sum", "mean", "min", "max", "prod"])
def test_nan_on_either_side_gives_nan(device, op, dtype):
    nan = float("nan")
    for left, right in (([nan], [1.0]), ([1.0], [nan]), ([nan], [nan]), ([nan], [np.inf])):
        assert np.isnan(folded(device, op, left, right, dtype)).all()


@pytest.mark.parametrize("dtype", FLOATS)
def test_infinities_fold_as_ieee_says(device, dtype):
    inf = float("inf")
    assert folded(device, "sum", [inf, -inf], [1, 1], dtype) == [inf, -inf]
    assert np.isnan(folded(device, "sum", [inf], [-inf], dtype)).all()
    assert folded(device, "min", [inf, -inf], [1, 1], dtype) == [1, -inf]
    assert folded(device, "max", [inf, -inf], [1, 1], dtype) == [inf, 1]


@pytest.mark.parametrize("dtype", FLOATS)
def test_each_sum_is_rounded_once(device, dtype):
    # 1 and half of its last bit rounds to even; a little more rounds up.
    one, two = np.asarray(1, dtype), np.asarray(2, dtype)
    eps = ml_dtypes.finfo(dtype).eps if dtype == "bfloat16" else np.finfo(dtype).eps
    hair = eps / two * (one + two * eps)
    assert folded(device, "sum", [one, one], [eps / two, hair], dtype) == [one, one + eps]


@pytest.mark.parametrize("dtype", FLOATS)
def test_minus_is_kept_where_zero_is_added_to_minus_zero(device, dtype):
    assert np.signbit(folded(device, "sum", [-0.0], [-0.0], dtype)).all()
    assert not np.signbit(folded(device, "sum", [-0.0], [0.0], dtype)).any()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("by", [1, 2, 3, 7, 1000])
def test_division_is_rounded_once(device, dtype, by):
    values = np.asarray([1.0, 2.0, -7.5, 3e4, 0.0], dtype)
    array = on(device, values, dtype)
    wide = np.float32 if values.itemsize == 2 else dtype
    wanted = (values.astype(wide) / np.asarray(by, wide)).astype(dtype)
    device.divide(array, by)
    assert array.tolist() == wanted.tolist()


@pytest.mark.parametrize("dtype", COMPLEX)
def test_complex_numbers_are_divided_part_by_part(device, dtype):
    real, imaginary = np.asarray([7.0, -0.0, np.inf]), np.asarray([-1.0, 3.0, 5.0])
    array = on(device, [complex(*parts) for parts in zip(real, imaginary, strict=True)], dtype)
    part = array.real.dtype
    device.divide(array, 3)
    assert array.real.tolist() == (real.astype(part) / part.type(3)).tolist()
    assert array.imag.tolist() == (imaginary.astype(part) / part.type(3)).tolist()


@pytest.mark.parametrize("dtype", FLOATS + COMPLEX)
def test_neither_overflow_nor_nan_is_warned_of_or_raised(device, dtype):
    largest = (ml_dtypes.finfo if dtype == "bfloat16" else np.finfo)(dtype).max
    left, right = on(device, [np.inf, largest, np.nan], dtype), on(device, [-np.inf, 2, 1], dtype)
    into = device.empty(3, dtype)
    tiny = on(device, [1e-7 if dtype == "float16" else np.finfo(np.float32).tiny], dtype)
    with np.errstate(all="raise"):
        for op in [op for op in MEANINGS if can_be_reduced(dtype, op)]:
            device.fold(op, dtype)(left, right, into)
            device.fold_many(op, dtype)([left, right, left], into)
        device.divide(tiny, 3)


# --- many at once, and conversions ----------------------------------------------------------------


@pytest.mark.parametrize(("op", "dtype"), REDUCTIONS)
@each("count", [1, 2, 5])
def test_many_are_folded_from_left_to_right(device, op, dtype, count):
    sources = [on(device, np.arange(7) % 3 + i % 2, dtype) for i in range(count)]
    wanted = on(device, sources[0], dtype)
    for source in sources[1:]:
        device.fold(op, dtype)(wanted, source, wanted)
    into = device.empty(7, dtype)
    device.fold_many(op, dtype)(sources, into)
    assert into.tolist() == wanted.tolist()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "int16"])
@pytest.mark.parametrize("place", [0, 1, 3])
def test_many_may_be_folded_into_one_of_them(device, dtype, place):
    sources = [on(device, np.arange(150_001) % 11 + i, dtype) for i in range(4)]
    device.fold_many("sum", dtype)(sources, sources[place])
    wanted = np.asarray(4 * (np.arange(150_001) % 11) + 6, dtype)
    assert sources[place].tolist() == wanted.tolist()


# --- memory ---------------------------------------------------------------------------------------


def test_zero_dimensional_arrays_are_flat_ones_of_one_element(device):
    array = on(device, 7, "int16")
    assert device.flat(array).shape == (1,)
    device.flat(array)[0] = 8
    assert array.tolist() == 8


@pytest.mark.parametrize("dtype", ["bool", *INTEGERS, *FLOATS, *COMPLEX])
def test_bytes_are_those_of_the_array_itself(device, dtype):
    array = on(device, [1, 2, 3], dtype)
    seen = device.bytes_of(array)
    assert (seen.itemsize, seen.ndim, len(seen)) == (1, 1, 3 * array.itemsize)
    seen[:] = bytes(len(seen))
    assert array.tolist() == [0, 0, 0]
    array[1] = 1
    assert np.frombuffer(seen, dtype).tolist() == [0, 1, 0]


def test_bytes_of_a_part_begin_where_the_part_begins(device):
    array = on(device, range(10), "int64")
    device.bytes_of(array[4:6])[:] = np.array([44, 55]).tobytes()
    assert array.tolist() == [0, 1, 2, 3, 44, 55, 6, 7, 8, 9]


def test_an_empty_array_has_no_bytes(device):
    assert len(device.bytes_of(device.empty(0, "float64"))) == 0
