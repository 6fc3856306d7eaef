"""Records: Python and compiled code see the same fields at the same places."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading

import numba
import numpy as np
import pytest

from ringreduce.compiler import intrinsics
from ringreduce.compiler.memory import copy, load, nanoseconds, store
from ringreduce.compiler.records import (
    Int32,
    Record,
    Word,
    address_of,
    compare_and_swap,
    compilable,
    fetch_and_add,
    load_acquire,
    offset_of,
    record,
    size_of,
    store_release,
)


@record
class Point(Record):
    x: Word
    y: Word


@record
class Shape(Record):
    first: Word
    sides: Int32
    corner: Point
    last: Word


@compilable
def moved(shape: Shape, by: int) -> int:
    """Move a corner; the sum of all words before that."""
    before = shape.first + shape.sides + shape.corner.x + shape.corner.y + shape.last
    shape.corner.x += by
    shape.sides += 1
    store_release(shape, "last", address_of(shape.corner) - address_of(shape))
    return before + 100 * load_acquire(shape, "first")


@compilable
def by_address(address: int) -> int:
    """Copy the third word to the first, and write the second."""
    copy(address, address + 16, 8)
    store(address + 8, nanoseconds(address + 32) > 0)
    return load(address)


def interpreted(address: int) -> int:
    return moved(Shape(address), 7)


def swapped(address: int, expected: int) -> int:
    """Swap the first word of a point for 9; twice whether it had the value, plus one."""
    return 2 * compare_and_swap(Point(address), "x", expected, 9) + 1


def added(address: int) -> int:
    """Add 5 to the second word of a point; its old value."""
    return fetch_and_add(Point(address), "y", 5)


def count_twice(address: int, times: int) -> None:
    """Add 1 to the first word of a shape, and under the lock in its second to the fourth."""
    shape = Shape(address)
    for _ in range(times):
        fetch_and_add(shape, "first", 1)
        while not compare_and_swap(shape.corner, "x", 0, 1):
            pass
        shape.corner.y += 1
        store_release(shape.corner, "x", 0)


@pytest.fixture(params=["interpreted", "compiled"])
def run(request):
    """Runs a function of addresses, as Python or compiled."""
    if request.param == "interpreted":
        return lambda function, *arguments: function(*arguments)
    if numba.config.DISABLE_JIT:
        pytest.skip("compiles")
    intrinsics.register()
    return lambda function, *arguments: numba.njit(function)(*arguments)


def test_fields_are_read_and_assigned(run):
    words = np.array([5, 2, 30, 40, 600], np.int64)
    assert run(interpreted, words.ctypes.data) == 5 + 2 + 30 + 40 + 600 + 500
    assert words.tolist() == [5, 3, 37, 40, 16]


def test_a_field_of_32_bits_keeps_its_sign_and_its_neighbour(run):
    words = np.array([0, (9 << 32) | 0xFFFFFFFF, 0, 0, 0], np.int64)
    assert run(interpreted, words.ctypes.data) == -1
    assert words[1] == 9 << 32


def test_memory_is_read_and_written_by_its_address(run):
    words = np.array([1, 2, 3, 4, 0, 0], np.int64)
    assert run(by_address, words.ctypes.data) == 3
    assert words[:4].tolist() == [3, 1, 3, 4]


@pytest.mark.parametrize(("expected", "found"), [(3, 9), (4, 3)])
def test_a_field_is_swapped_if_it_has_the_expected_value(run, expected, found):
    words = np.array([3, 7], np.int64)
    assert run(swapped, words.ctypes.data, expected) == 2 * (expected == 3) + 1
    assert words.tolist() == [found, 7]


def test_a_field_is_increased_and_its_old_value_returned(run):
    words = np.array([3, 7], np.int64)
    assert run(added, words.ctypes.data) == 7
    assert words.tolist() == [3, 12]


def test_swaps_and_additions_of_several_threads_are_atomic():
    if numba.config.DISABLE_JIT:
        pytest.skip("compiles")
    intrinsics.register()
    times, words = 200_000, np.zeros(5, np.int64)
    count = numba.njit("void(int64, int64)", nogil=True)(count_twice)
    threads = [threading.Thread(target=count, args=(words.ctypes.data, times)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert words.tolist() == [3 * times, 0, 0, 3 * times, 0]


def test_fields_are_aligned_as_c_aligns_them():
    assert size_of(Shape) == 40
    offsets = [offset_of(Shape, name) for name in ("first", "sides", "corner", "last")]
    assert offsets == [0, 8, 16, 32]


def test_a_record_has_its_own_fields_alone():
    with pytest.raises(AssertionError, match="Longer inherits"):

        @record
        class Longer(Point):
            z: Word


@pytest.mark.parametrize(
    "code",
    [
        "Shape(words).frist",
        "load_acquire(Shape(words), 'frist')",
        "compare_and_swap(Shape(words), 'frist', 0, 1)",
        "fetch_and_add(Shape(words), 'frist', 1)",
    ],
)
def test_a_misspelt_field_does_not_compile(code):
    if numba.config.DISABLE_JIT:
        pytest.skip("compiles")
    intrinsics.register()
    known = (Shape, load_acquire, compare_and_swap, fetch_and_add)
    names = {each.__name__: each for each in known}
    function = eval(f"lambda words: {code}", names)
    with pytest.raises((KeyError, numba.core.errors.TypingError), match=r"frist"):
        numba.njit(function)(0)


@pytest.mark.slow
def test_mypy_finds_a_misspelt_field(tmp_path):
    (tmp_path / "misspelt.py").write_text(
        "from ringreduce.shm.layout import Slot\n"
        "Slot(0).sequence = 1\n"
        "Slot(0).header.callnumber = 1\n"
    )
    command = [sys.executable, "-m", "mypy", "--strict", str(tmp_path / "misspelt.py")]
    told = subprocess.run(command, capture_output=True, text=True, check=False)
    assert '"Header" has no attribute "callnumber"' in told.stdout
    assert told.stdout.count(" error: ") == 1


def test_records_and_marks_import_no_compiler():
    code = "import sys, ringreduce.shm.executor; print('numba' in sys.modules)"
    command = [sys.executable, "-c", code]
    told = subprocess.run(command, capture_output=True, text=True, check=True)
    assert told.stdout == "False\n"


def test_a_record_is_the_memory_at_its_address():
    memory = (ctypes.c_int64 * 2)(3, 4)
    point = Point(ctypes.addressof(memory))
    point.y = 5
    assert (point.x, memory[1], address_of(point)) == (3, 5, ctypes.addressof(memory))
