"""The contract of every device: host memory, a stand-in whose work is late, a GPU if there is one.

Results are compared with NumPy's, bit for bit but for the payload of a NaN.
"""

from __future__ import annotations

import mmap
import tempfile
import weakref

import ml_dtypes
import numpy as np
import pytest

from ringreduce.calls.ops import check_reduction
from ringreduce.devices.cpu import OPS, CpuDevice
from tests.support.each import each
from tests.support.late import Gpu, LateDevice

INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
FLOATS = ("float16", "bfloat16", "float32", "float64")
SHORT = ("float16", "bfloat16")
COMPLEX = ("complex64", "complex128")
DTYPES = ("bool", *INTEGERS, *FLOATS, *COMPLEX)
COUNT = 5003


class OnHost:
    """Moves values to and from arrays in host memory."""

    def __init__(self):
        self.device = CpuDevice()

    def put(self, content):
        return np.array(content)

    def get(self, array):
        return array.copy()


class OnLateGpu(OnHost):
    def __init__(self):
        self.gpu = Gpu(0)
        self.device = LateDevice(self.gpu)

    def put(self, content):
        return self.gpu.put(content)

    def get(self, array):
        return self.gpu.values(array)


class OnGpu(OnHost):
    def __init__(self):
        from ringreduce.devices.cuda import CudaDevice

        self.device = CudaDevice()

    def put(self, content):
        import cupy

        return cupy.asarray(content)

    def get(self, array):
        import cupy

        return cupy.asnumpy(array)


GPU = pytest.param(OnGpu, marks=pytest.mark.gpu, id="cuda")
QUEUED = [pytest.param(OnLateGpu, id="late"), GPU]


@pytest.fixture(params=[pytest.param(OnHost, id="cpu"), *QUEUED])
def place(request):
    return request.param()


@pytest.fixture(params=QUEUED)
def queued(request):
    return request.param()


# --- arithmetic -----------------------------------------------------------------------------------


def awkward(dtype: str, seed: int) -> np.ndarray:
    """Draw numbers from the whole range; of floats also NaN, infinities and both zeros."""
    rng = np.random.default_rng(seed)
    kind = np.dtype(dtype)
    if kind.kind == "b":
        return rng.integers(0, 2, COUNT).astype(bool)
    if kind.kind in "iu":
        return rng.integers(np.iinfo(kind).min, np.iinfo(kind).max, COUNT, kind, endpoint=True)
    if kind.kind == "c":  # small integers: products are exact, however they are put together
        content = (rng.integers(-9, 9, COUNT) + 1j * rng.integers(-9, 9, COUNT)).astype(kind)
        content.real[rng.integers(0, COUNT, 200)] = 3 * np.finfo(kind).smallest_subnormal
        return content
    content = (rng.standard_normal(COUNT) * 10.0 ** rng.integers(-6, 4, COUNT)).astype(kind)
    least = float(ml_dtypes.finfo(kind).smallest_subnormal)
    for special in (np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 3 * least):
        content[rng.integers(0, COUNT, 200)] = special
    return content


def can_be_reduced(dtype: str, op: str) -> bool:
    try:
        check_reduction("test", np.dtype(dtype), op, OPS)
    except TypeError:
        return False
    return True


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Check that two arrays are equal to the last bit; any NaN equals any NaN."""
    if a.dtype.kind == "c":
        a, b = (x.view(x.real.dtype) for x in (a, b))
    bits_a, bits_b = (x.reshape(-1).view(np.uint8).reshape(-1, x.itemsize) for x in (a, b))
    same = (bits_a == bits_b).all(axis=1)
    if a.dtype.name in FLOATS:
        same |= np.isnan(a) & np.isnan(b)
    return bool(a.dtype == b.dtype and same.all())


@pytest.mark.parametrize(
    ("op", "dtype"),
    [(op, dtype) for dtype in DTYPES for op in OPS if can_be_reduced(dtype, op)],
)
@each("aliased", [None, "left", "right"])
def test_folds_have_the_processors_bits(place, op, dtype, aliased):
    left, right = awkward(dtype, 1), awkward(dtype, 2)
    wanted = np.empty_like(left)
    CpuDevice().fold(op, dtype)(left, right, wanted)
    a, b = place.put(left), place.put(right)
    into = {None: place.device.empty(COUNT, dtype), "left": a, "right": b}[aliased]
    place.device.fold(op, dtype)(a, b, into)
    assert same_bits(place.get(into), wanted)
    untouched = [(a, left)] if aliased == "right" else [(b, right)]
    assert all(same_bits(place.get(array), content) for array, content in untouched)


@each("count", [1, 2, 5])
@pytest.mark.parametrize(
    ("op", "dtype"),
    [(op, dtype) for dtype in ("int16", *FLOATS) for op in OPS if can_be_reduced(dtype, op)],
)
def test_folds_of_many_have_the_processors_bits(place, op, dtype, count):
    contents = [awkward(dtype, seed) for seed in range(count)]
    wanted = np.empty_like(contents[0])
    CpuDevice().fold_many(op, dtype)(contents, wanted)
    sources = [place.put(content) for content in contents]
    place.device.fold_many(op, dtype)(sources, sources[-1])
    assert same_bits(place.get(sources[-1]), wanted)


@pytest.mark.parametrize("short", SHORT)
@pytest.mark.parametrize("wide", ["float32", "float64"])
def test_conversions_have_the_processors_bits(place, short, wide):
    for source, into in ((wide, short), (short, wide)):
        content = awkward(source, 6)
        wanted = np.empty(COUNT, into)
        CpuDevice().convert(content, wanted)
        converted = place.device.empty(COUNT, into)
        place.device.convert(place.put(content), converted)
        assert place.get(converted).tobytes() == wanted.tobytes()


@pytest.mark.parametrize("count", [0, 1, 3, 257])
@pytest.mark.parametrize("start", [0, 1])
def test_any_part_can_be_folded(place, count, start):
    x = place.put(np.arange(600.0))
    place.device.fold("sum", "float64")(
        x[start : start + count], x[300 : 300 + count], x[start : start + count]
    )
    wanted = np.arange(600.0)
    wanted[start : start + count] += wanted[300 : 300 + count]
    assert np.array_equal(place.get(x), wanted)


def test_more_than_all_threads_of_a_kernel_can_be_folded(place):
    content = np.arange((1 << 21) + 5, dtype=np.int32)
    x = place.put(content)
    place.device.fold("sum", "int32")(x, x, x)
    assert np.array_equal(place.get(x), 2 * content)


@pytest.mark.parametrize("by", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("dtype", FLOATS)
def test_division_has_the_processors_bits(place, dtype, by):
    content = awkward(dtype, 3)
    wanted = content.copy()
    CpuDevice().divide(wanted, by)
    x = place.put(content)
    place.device.divide(x, by)
    assert same_bits(place.get(x), wanted)


# --- memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [0, 5, (), (2, 3), (0, 4)])
@pytest.mark.parametrize("dtype", ["int8", "float64"])
def test_new_arrays_are_in_c_order(place, shape, dtype):
    array = place.device.empty(shape, dtype)
    assert array.shape == (shape if isinstance(shape, tuple) else (shape,))
    assert array.dtype == dtype
    assert array.flags.c_contiguous


def test_scratch_is_bytes_that_can_be_viewed_as_anything(place):
    scratch = place.device.scratch(1000)
    assert (scratch.dtype, scratch.shape) == (np.uint8, (1000,))
    part = scratch[:800].view(np.float64)
    part[...] = place.put(np.arange(100.0))
    assert np.array_equal(place.get(part), np.arange(100.0))


def test_what_is_contiguous_is_viewed_flat(place):
    array = place.put(np.arange(12).reshape(3, 4))
    flat = place.device.flat(array)
    assert place.device.overlap(flat, array)
    flat[...] = place.put(np.arange(12) * 2)
    assert np.array_equal(place.get(array), np.arange(12).reshape(3, 4) * 2)


ARRANGEMENTS = {
    "transposed": lambda a: a.T,
    "strided": lambda a: a[:, ::2],
    "backwards": lambda a: a[::-1],
    "part": lambda a: a[1:, 1:],
}


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_what_is_not_contiguous_is_copied_flat_in_c_order(place, arrangement):
    content = np.arange(12).reshape(3, 4)
    arranged = ARRANGEMENTS[arrangement](place.put(content))
    flat = place.device.flat(arranged)
    assert np.array_equal(place.get(flat), ARRANGEMENTS[arrangement](content).reshape(-1))
    assert not place.device.overlap(flat, arranged)


def test_an_unowned_array_is_the_same_memory_and_does_not_keep_it(place):
    array = place.put(np.arange(10.0))
    unowned = place.device.unowned(array)
    assert place.device.address(unowned) == place.device.address(array)
    assert (unowned.shape, unowned.dtype) == (array.shape, array.dtype)
    unowned[2:4] = place.put(np.array([-2.0, -3.0]))
    assert place.get(array)[2:4].tolist() == [-2.0, -3.0]
    kept = weakref.ref(array)
    del array
    assert kept() is None


def test_addresses_are_those_of_the_first_element(place):
    array = place.put(np.arange(10, dtype=np.int32))
    start = place.device.address(array)
    assert place.device.address(array[3:]) == start + 12


@pytest.mark.parametrize(
    ("a", "b", "wanted"),
    [
        (slice(0, 5), slice(4, 9), True),
        (slice(0, 5), slice(5, 9), False),
        (slice(0, 9), slice(2, 3), True),
        (slice(0, 9, 2), slice(1, 9, 2), False),
        (slice(0, 9, 2), slice(2, 3), True),
        (slice(8, None, -1), slice(0, 1), True),
        (slice(3, 3), slice(0, 9), False),
    ],
)
def test_overlap_is_about_shared_bytes(place, a, b, wanted):
    array = place.put(np.arange(9, dtype=np.float32))
    assert place.device.overlap(array[a], array[b]) is wanted


# --- queues ---------------------------------------------------------------------------------------


def round_trip(queued, content, host=None):
    """Copy to pinned memory and back, polling until both copies are complete."""
    stream, device = queued.device.stream, queued.device
    array, into = queued.put(content), device.empty(content.shape, content.dtype)
    host = stream.pinned(content.nbytes) if host is None else host
    mark = stream.mark()
    stream.follow()
    stream.copy_out(array, host)
    mark.set()
    while not mark.reached():
        pass
    assert bytes(device.bytes_of(host)) == content.tobytes()
    stream.copy_in(host, into)
    mark.set()
    while not mark.reached():
        pass
    return queued.get(into)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_copied_out_and_in_is_the_same(queued, dtype):
    content = awkward(dtype, 4)
    assert round_trip(queued, content).tobytes() == content.tobytes()


def test_memory_of_files_is_pinned_and_unpinned(queued):
    stream, content = queued.device.stream, awkward("float32", 5)
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        file.truncate(1 << 20)
        memory = np.frombuffer(mmap.mmap(file.fileno(), 1 << 20), np.uint8)
        for _ in range(3):
            stream.pin(memory)
            host = memory[4096:][: content.nbytes]
            assert round_trip(queued, content, host).tobytes() == content.tobytes()
            stream.close()


def test_a_mark_that_was_never_set_is_reached(queued):
    assert queued.device.stream.mark().reached()


def test_pinned_bytes_are_those_of_the_memory_itself(queued):
    host = queued.device.stream.pinned(100)
    seen = queued.device.bytes_of(host)
    assert (seen.itemsize, seen.ndim, len(seen)) == (1, 1, 100)
    seen[:] = bytes(range(100))
    assert host.tolist() == list(range(100))
    host[10] = 255
    assert seen[10] == 255


@pytest.mark.slow
def test_the_queue_follows_and_leads_the_callers_work(queued):
    device, stream = queued.device, queued.device.stream
    array = queued.put(np.zeros(1 << 20))
    for number in range(20):
        array[...] = queued.put(np.full(1 << 20, number * 1.0))
        stream.follow()
        with stream.selected():
            device.fold("sum", "float64")(array, array, array)
        stream.lead()
        array[...] = queued.put(queued.get(array) + 1)
        assert np.array_equal(queued.get(array), np.full(1 << 20, 2.0 * number + 1))


def test_work_in_the_queue_is_in_order(queued):
    device, stream = queued.device, queued.device.stream
    array = queued.put(np.ones(100_000))
    host, mark = stream.pinned(array.nbytes), stream.mark()
    stream.follow()
    with stream.selected():
        for _ in range(10):
            device.fold("sum", "float64")(array, array, array)
        stream.copy_out(array, host)
        mark.set()
        device.fold("sum", "float64")(array, array, array)
    while not mark.reached():
        pass
    assert np.array_equal(host.view(np.float64), np.full(100_000, 1024.0))
    stream.close()
    assert np.array_equal(queued.get(array), np.full(100_000, 2048.0))


def test_arrays_for_the_caller_can_be_made_within_the_queue(queued):
    empty = queued.device.stream.callers_empty()
    with queued.device.stream.selected():
        array = empty((2, 3), np.float32)
    assert (array.shape, array.dtype) == ((2, 3), np.float32)
    array[...] = queued.put(np.ones((2, 3), np.float32))
    assert np.array_equal(queued.get(array), np.ones((2, 3)))
