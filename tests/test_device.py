"""What allocates, views and adds in host memory; `test_device_contract` tests all devices."""

from __future__ import annotations

import operator

import numpy as np
import pytest

from ringreduce.devices.cpu import OPS, CpuDevice

INTEGERS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
FLOATS = ["float32", "float64"]


@pytest.fixture
def device():
    return CpuDevice()


def on(device, values, dtype):
    """An array of these values on the device."""
    values = np.asarray(values, dtype)
    array = device.empty(values.shape, dtype)
    array[...] = values
    return array


def folded(device, op, left, right, dtype):
    """What the device makes of two arrays of plain numbers."""
    into = device.empty(len(left), dtype)
    with np.errstate(all="ignore"):
        device.fold(op)(on(device, left, dtype), on(device, right, dtype), into)
    return into.tolist()


# --- folds ----------------------------------------------------------------------------------------

MEANINGS = {
    "sum": operator.add,
    "mean": operator.add,
    "min": min,
    "max": max,
    "prod": operator.mul,
}


def test_every_op_is_tested():
    assert set(MEANINGS) == set(OPS)


@pytest.mark.parametrize("dtype", INTEGERS + FLOATS)
@pytest.mark.parametrize("op", MEANINGS)
def test_folds_mean_what_they_say(device, op, dtype):
    left, right = [1, 2, 5, 0, 7], [3, 2, 4, 9, 1]
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
@pytest.mark.parametrize("op", MEANINGS)
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
    # Half of the last bit of 1 rounds to even; a hair more rounds up.
    eps = float(np.finfo(dtype).eps)
    up = 1 + eps
    hair = eps / 2 * (1 + 2 * eps)
    assert folded(device, "sum", [1.0, 1.0], [eps / 2, hair], dtype) == [1.0, up]


@pytest.mark.parametrize("op", MEANINGS)
@pytest.mark.parametrize("aliased", ["left", "right"])
def test_the_result_may_go_into_either_operand(device, op, aliased):
    left, right = on(device, range(1, 1001), "int64"), on(device, range(1001, 1, -1), "int64")
    wanted = folded(device, op, left.tolist(), right.tolist(), "int64")
    into, other = (left, right) if aliased == "left" else (right, left)
    kept = other.tolist()
    device.fold(op)(left, right, into)
    assert into.tolist() == wanted
    assert other.tolist() == kept


@pytest.mark.parametrize("dtype", FLOATS)
def test_minus_is_kept_where_zero_is_added_to_minus_zero(device, dtype):
    assert np.signbit(folded(device, "sum", [-0.0], [-0.0], dtype)).all()
    assert not np.signbit(folded(device, "sum", [-0.0], [0.0], dtype)).any()


@pytest.mark.parametrize("op", MEANINGS)
def test_folding_nothing_is_possible(device, op):
    assert folded(device, op, [], [], "float32") == []


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("by", [1, 2, 3, 7, 1000])
def test_division_is_rounded_once(device, dtype, by):
    array = on(device, [1.0, 2.0, -7.5, 1e30, 0.0], dtype)
    wanted = np.asarray(array.tolist(), dtype) / np.asarray(by, dtype)
    device.divide(array, by)
    assert array.tolist() == wanted.tolist()


# --- memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [0, 5, (), (2, 3), (0, 4)])
@pytest.mark.parametrize("dtype", ["int8", "float64"])
def test_new_arrays_are_in_c_order(device, shape, dtype):
    array = device.empty(shape, dtype)
    assert array.shape == (shape if isinstance(shape, tuple) else (shape,))
    assert array.dtype == dtype
    assert array.flags.c_contiguous


def test_what_is_contiguous_is_viewed_flat(device):
    array = on(device, np.arange(12).reshape(3, 4), "int32")
    flat = device.flat(array)
    flat[5] = 99
    assert array[1, 1] == 99


ARRANGEMENTS = {
    "transposed": lambda a: a.T,
    "strided": lambda a: a[:, ::2],
    "backwards": lambda a: a[::-1],
    "part": lambda a: a[1:, 1:],
}


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_what_is_not_contiguous_is_copied_flat_in_c_order(device, arrangement):
    array = ARRANGEMENTS[arrangement](on(device, np.arange(12).reshape(3, 4), "int32"))
    flat = device.flat(array)
    assert flat.tolist() == [value for row in array.tolist() for value in row]
    flat[0] = 99
    assert 99 not in [value for row in array.tolist() for value in row]


def test_zero_dimensional_arrays_are_flat_ones_of_one_element(device):
    array = on(device, 7, "int16")
    assert device.flat(array).shape == (1,)
    device.flat(array)[0] = 8
    assert array.tolist() == 8


@pytest.mark.parametrize("dtype", INTEGERS + FLOATS)
def test_bytes_are_those_of_the_array_itself(device, dtype):
    array = on(device, [1, 2, 3], dtype)
    seen = device.bytes_of(array)
    assert (seen.itemsize, seen.ndim, len(seen)) == (1, 1, 3 * array.itemsize)
    seen[:] = bytes(len(seen))
    assert array.tolist() == [0, 0, 0]
    array[1] = 5
    assert bytes(seen) == np.array([0, 5, 0], dtype).tobytes()


def test_bytes_of_a_part_begin_where_the_part_begins(device):
    array = on(device, range(10), "int64")
    device.bytes_of(array[4:6])[:] = np.array([44, 55]).tobytes()
    assert array.tolist() == [0, 1, 2, 3, 44, 55, 6, 7, 8, 9]


def test_an_empty_array_has_no_bytes(device):
    assert len(device.bytes_of(device.empty(0, "float64"))) == 0


@pytest.mark.parametrize(
    ("a", "b", "wanted"),
    [
        (slice(0, 5), slice(4, 9), True),
        (slice(0, 5), slice(5, 9), False),
        (slice(0, 9), slice(2, 3), True),
        (slice(0, 9, 2), slice(1, 9, 2), False),
        (slice(0, 9, 2), slice(2, 3), True),
    ],
)
def test_overlap_is_about_shared_bytes(device, a, b, wanted):
    array = on(device, range(9), "float32")
    assert device.overlap(array[a], array[b]) is wanted


def test_arrays_of_their_own_do_not_overlap(device):
    assert not device.overlap(device.empty(4, "int8"), device.empty(4, "int8"))
