"""Arrays in shared memory: allocated, freed in any order, used again."""

from __future__ import annotations

import gc
import mmap
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringreduce.shm.allocator import Arena

PAGE = 4096


def arena(pages: int) -> Arena:
    return Arena(np.frombuffer(mmap.mmap(-1, pages * PAGE), np.uint8))


def test_arrays_are_arrays():
    allocator = arena(8)
    x = allocator.empty((3, 5), np.dtype("float32"))
    assert (x.shape, x.dtype, x.flags.c_contiguous, x.flags.writeable) == ((3, 5), "f4", True, True)
    x[...] = np.arange(15).reshape(3, 5)
    y = allocator.empty((15,), np.dtype("float64"))
    y[...] = 7
    assert x.sum() == 105
    assert not np.shares_memory(x, y)


@pytest.mark.slow
def test_memory_is_free_when_the_last_view_is_gone():
    allocator = arena(4)
    x = allocator.empty((PAGE,), np.dtype("u1"))
    view = x.reshape(2, -1)[1:].view("i4")
    del x
    gc.collect()
    assert allocator.free_bytes == 3 * PAGE
    view[...] = 5
    del view
    gc.collect()
    assert allocator.free_bytes == 4 * PAGE


@pytest.mark.slow
def test_none_where_there_is_no_room():
    allocator = arena(2)
    assert allocator.empty((3 * PAGE,), np.dtype("u1")) is None
    kept = allocator.empty((2 * PAGE,), np.dtype("u1"))
    assert allocator.empty((1,), np.dtype("u1")) is None
    del kept
    gc.collect()
    assert allocator.empty((2 * PAGE,), np.dtype("u1")) is not None


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3 * PAGE)), max_size=40))
def test_allocated_arrays_never_overlap_and_freed_memory_is_used_again(turns):
    allocator, held = arena(16), []
    for frees, size in turns:
        if frees and held:
            held.pop(size % len(held))
        else:
            array = allocator.empty((size,), np.dtype("u1"))
            if array is not None:
                array[...] = len(held) + 1
                held.append(array)
        places = sorted((a.ctypes.data, a.ctypes.data + a.size) for a in held if a.size)
        assert all(one[1] <= other[0] for one, other in pairwise(places))
    held.clear()
    array = None
    assert allocator.free_bytes == 16 * PAGE


@pytest.mark.slow
def test_large_arrays_give_their_pages_back():
    pages = (40 << 20) // PAGE
    allocator = arena(pages)
    x = allocator.empty((pages * PAGE,), np.dtype("u1"))
    x[...] = 1
    del x
    gc.collect()
    again = allocator.empty((pages * PAGE,), np.dtype("u1"))
    assert not again.any()


@pytest.mark.slow
def test_an_array_outlives_the_arena():
    x = arena(3).empty((PAGE,), np.dtype("u1"))
    gc.collect()
    x[...] = 3
    assert x.sum() == 3 * PAGE


@pytest.mark.parametrize("shape", [(0,), (3, 0), ()])
def test_nothing_and_a_number(shape):
    array = arena(1).empty(shape, np.dtype("f8"))
    assert array is None if 0 in shape else array.shape == shape
