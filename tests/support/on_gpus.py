"""Calls on arrays on a GPU, between work of the caller: for a real and for a simulated GPU.

A GPU, `tests.support.late.Gpu` or `CudaGpu`, puts values in new arrays, in the order of the
current stream, and returns the values of an array once all work is complete.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

import ringreduce as rr
from tests.support.cases import CONFIG, IN_PLACE, Case, call, expected, needs_out, values_of

COUNTS = (0, 1, 700, 5000, 60_001)
_SPIN = r"""
extern "C" __global__ void spin(long long cycles) {
    long long start = clock64();
    while (clock64() - start < cycles) {}
}
"""
_A_MOMENT = 1_000_000
"""Cycles: much longer than the processor takes to ask for a few more things."""


class CudaGpu:
    """The GPU that CuPy uses, through CuPy alone."""

    def __init__(self) -> None:
        import cupy

        self.cupy = cupy
        self._spin = cupy.RawKernel(_SPIN, "spin")

    def spin(self, cycles: int) -> None:
        """Keep the current stream busy."""
        self._spin((1,), (1,), (np.int64(cycles),))

    def array(self, shape: Any, dtype: Any) -> Any:
        array = self.cupy.empty(shape, dtype)
        array.reshape(-1).view(np.uint8)[...] = 0xCB
        return array

    def put(self, content: Any) -> Any:
        """A new array that will have these values: who does not wait for them gets others."""
        content = np.array(content)
        array = self.array(content.shape, content.dtype)
        self.assign(array, content)
        return array

    def assign(self, array: Any, content: Any) -> None:
        """Give an array these values, late."""
        source = self.cupy.asarray(content)
        self.spin(_A_MOMENT)
        array[...] = source

    def at_once(self, array: Any) -> np.ndarray:
        """What the array has now, whatever is still to be done on it."""
        with self.cupy.cuda.Stream(non_blocking=True):
            return self.cupy.asnumpy(array)

    def values(self, array: Any) -> np.ndarray:
        self.cupy.cuda.Device().synchronize()
        return self.cupy.asnumpy(array)


def ramp(comm, count, number=0):
    """Different on every rank, at every index and in every call; sums are exact."""
    return np.arange(count) * (comm.rank + 1.0) + number


def total(comm, count, number=0):
    n = comm.size
    return np.arange(count) * (n * (n + 1) / 2) + number * n


# --- any call -------------------------------------------------------------------------------------


def as_view(gpu: Any, content: np.ndarray, view: str) -> Any:
    """The same values on the GPU, in memory of another order."""
    if content.ndim == 0 or view == "plain":
        return gpu.put(content)
    if view == "fortran":
        array = gpu.array(content.shape[::-1], content.dtype).T
    elif view == "strided":
        array = gpu.array((*content.shape[:-1], 2 * content.shape[-1]), content.dtype)[..., ::2]
    else:
        array = gpu.array(content.shape, content.dtype)[::-1]
    gpu.assign(array, content)
    return array


def run_case(comm: rr.Communicator, gpu: Any, case: Case) -> None:
    """The call, between work of the caller's own that must come before it and after it."""
    wanted = expected(case, comm.rank)
    x = as_view(gpu, values_of(case, comm.rank), case.view)
    out = None
    if wanted is not None and (case.out != "new" or needs_out(case, comm.rank)):
        in_place = case.out == "in_place" and case.collective in IN_PLACE
        out = x if in_place else as_view(gpu, np.zeros(wanted.shape, wanted.dtype), case.view)
    result = call(comm, case, x, out)
    if wanted is None:
        assert result is None
        return
    assert out is None or result is out
    if type(result) is np.ndarray:
        assert case.collective == "scatter"
        got = result
    else:
        kept = gpu.array(result.shape, result.dtype)
        kept[...] = result
        for array in (x, result):
            array[...] = 0
        got = gpu.values(kept)
    assert np.array_equal(got, wanted), f"rank {comm.rank}: {case}"


# --- programs -------------------------------------------------------------------------------------


def one_after_another(comm, gpu):
    """The same memory again and again; what comes of each call is copied by the caller's stream."""
    kept = []
    for number in range(12):
        count = COUNTS[number % len(COUNTS)]
        x = gpu.put(ramp(comm, count, number))
        result = comm.all_reduce(x, out=x if number % 2 else None)
        kept.append((gpu.array(count, np.float64), total(comm, count, number)))
        kept[-1][0][...] = result
        x[...] = -1.0
    assert all(np.array_equal(gpu.values(got), wanted) for got, wanted in kept)


def on_the_same_arrays(comm, gpu):
    """Messages stay bound: the next call comes into blocks that may still be copied from."""
    for count in COUNTS:
        x, out = gpu.array(count, np.float64), gpu.array(count, np.float64)
        kept = []
        for number in range(4):
            gpu.assign(x, ramp(comm, count, number))
            assert comm.all_reduce(x, out=out) is out
            kept.append((gpu.array(count, np.float64), total(comm, count, number)))
            kept[-1][0][...] = out
        assert all(np.array_equal(gpu.values(got), wanted) for got, wanted in kept)


def asynchronous(comm, gpu):
    """When a Work is over its result is there, whatever stream looks at it."""
    works = []
    for number in range(8):
        x = gpu.put(ramp(comm, COUNTS[number % len(COUNTS)], number))
        works.append(comm.all_reduce(x, async_op=True))
    last = comm.all_reduce(gpu.put(ramp(comm, 700)))
    for number, work in enumerate(works):
        result = gpu.at_once(work.wait())
        assert np.array_equal(result, total(comm, COUNTS[number % len(COUNTS)], number))
    assert np.array_equal(gpu.values(last), total(comm, 700))


def persistent(comm, gpu):
    for count in COUNTS:
        x, out = gpu.array(count, np.float64), gpu.array(count, np.float64)
        op = comm.plan("all_reduce", x, out=out)
        kept = []
        for number in range(3):
            gpu.assign(x, ramp(comm, count, number))
            assert op() is out
            kept.append((gpu.array(count, np.float64), total(comm, count, number)))
            kept[-1][0][...] = out
        assert all(np.array_equal(gpu.values(got), wanted) for got, wanted in kept)


def lists_and_wire(comm, gpu):
    members = [gpu.put(ramp(comm, 700)), gpu.put(ramp(comm, 60).astype(np.int16).reshape(3, 20))]
    members.append(gpu.put(ramp(comm, 5000))[::-2])
    results = comm.all_reduce(members)
    comm.all_reduce(members, out=members)
    for result, member, wanted in zip(
        results,
        members,
        (total(comm, 700), total(comm, 60).reshape(3, 20), total(comm, 5000)[::-2]),
        strict=True,
    ):
        assert np.array_equal(gpu.values(result), wanted)
        assert np.array_equal(gpu.values(member), wanted)
    small = gpu.put((ramp(comm, 100) % 8).astype(np.float32))
    wanted = sum(np.arange(100) * (rank + 1.0) % 8 for rank in range(comm.size))
    assert np.array_equal(gpu.values(comm.all_reduce(small, wire="float16")), wanted)


def other_collectives(comm, gpu):
    mine = gpu.put(np.full((comm.rank + 1, 3), comm.rank))
    everybody = np.concatenate([np.full((rank + 1, 3), rank) for rank in range(comm.size)])
    assert np.array_equal(gpu.values(comm.all_gather(mine)), everybody)
    counts = range(1, comm.size + 1)
    assert np.array_equal(gpu.values(comm.all_gather(mine, counts=counts)), everybody)
    pieces = gpu.put(np.arange(comm.size) + 10 * comm.rank)
    swapped = comm.all_to_all(pieces)
    assert np.array_equal(gpu.values(swapped), 10 * np.arange(comm.size) + comm.rank)
    comm.barrier()
    for root in range(comm.size):
        at_root = comm.gather(mine, root)
        summed = comm.reduce(gpu.put(ramp(comm, 5000)), root)
        part = comm.scatter(gpu.put(everybody) if comm.rank == root else None, root)
        assert (at_root is None) == (summed is None) == (comm.rank != root)
        if comm.rank == root:
            assert np.array_equal(gpu.values(at_root), everybody)
            assert np.array_equal(gpu.values(summed), total(comm, 5000))
            part = gpu.values(part)
        assert np.array_equal(part, np.array_split(everybody, comm.size)[comm.rank])
        out, at_root = gpu.put(np.zeros_like(part)), comm.rank == root
        comm.scatter(gpu.put(everybody) if at_root else None, root, out=out)
        assert np.array_equal(gpu.values(out), part)
        out = gpu.put(np.zeros((comm.rank + 1, 3), int))
        given = gpu.put(everybody) if at_root else None
        assert comm.scatter(given, root, out=out, counts=counts) is out
        assert np.array_equal(gpu.values(out), np.full((comm.rank + 1, 3), comm.rank))
        out = None if at_root else gpu.put(np.zeros_like(part))
        found = comm.scatter(everybody if at_root else None, root, out=out)
        assert np.array_equal(found if at_root else gpu.values(out), part)
    assert np.array_equal(gpu.values(comm.broadcast(mine[:1], root=comm.size - 1)), everybody[-1:])
    shard = comm.reduce_scatter(gpu.put(ramp(comm, 5000)), "max")
    wanted = np.array_split(np.arange(5000.0) * comm.size, comm.size)[comm.rank]
    assert np.array_equal(gpu.values(shard), wanted)


def disagreeing(comm, gpu):
    """Ranks whose arrays differ all raise an error, and can make the next call."""
    for count in (1, 700, 60_001):
        for number in range(3):
            with pytest.raises(rr.MismatchError, match=r"float64\[2\]"):
                comm.all_reduce(gpu.put(np.ones(2 if comm.rank == 0 else count + 2)))
            result = comm.all_reduce(gpu.put(ramp(comm, count, number)))
            assert np.array_equal(gpu.values(result), total(comm, count, number))


PROGRAMS = [
    one_after_another,
    on_the_same_arrays,
    asynchronous,
    persistent,
    lists_and_wire,
    other_collectives,
]


def over_mpi(on_a_stream: str = "") -> str:
    """On each rank of an MPI job: all programs on one GPU, which the ranks share."""
    gpu = CudaGpu()
    stream = gpu.cupy.cuda.Stream(non_blocking=True) if on_a_stream else nullcontext()
    with stream, rr.init(config=CONFIG) as comm:
        for program in PROGRAMS:
            program(comm, gpu)
    return "done"
