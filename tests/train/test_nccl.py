"""All-reduces by NCCL, with a stand-in for CuPy's module `cuda`."""

from __future__ import annotations

from ctypes import c_char
from types import SimpleNamespace

import numpy as np
import pytest

import ringreduce as rr
from ringreduce.train import DataParallel, Settings, load_split, strategies, train
from ringreduce.train.nccl import NcclCommunicator


class OnGpu(np.ndarray):
    """An array with CuPy's pointer."""

    @property
    def data(self):
        return SimpleNamespace(ptr=self.ctypes.data)


class Cuda:
    """What `NcclCommunicator` uses of ``cupy.cuda``; a call completes when its stream is awaited.

    `log` has the order in which streams were used.
    """

    def __init__(self, comm, available=True):
        self.log = log = []
        present = SimpleNamespace(ptr=0, wait_event=lambda event: log.append("present waits"))
        self.get_current_stream = lambda: present

        class Event:
            done = True

            def __init__(self, disable_timing):
                assert disable_timing

            def record(self, stream):
                log.append("record present" if stream is present else "record own")

        class Stream:
            ptr = 77

            def __init__(self, non_blocking):
                assert non_blocking

            def wait_event(self, event):
                log.append("own waits")

        class Nccl:
            def __init__(self, size, identity, rank):
                assert (size, rank) == (comm.size, comm.rank)
                assert identity == tuple(range(128))  # rank 0's

            def allReduce(self, source, target, count, dtype, op, stream):  # noqa: N802 (NCCL's)
                assert (op, stream) == ("sum", 77)
                arrays = [
                    np.frombuffer((c_char * (count * int(dtype[1]))).from_address(at), dtype)
                    for at in (source, target)
                ]
                log.append("reduce")
                arrays[1][...] = comm.all_reduce(arrays[0])

        self.Event, self.Stream = Event, Stream
        self.nccl = SimpleNamespace(
            available=available,
            get_unique_id=lambda: tuple(n * (comm.rank + 1) for n in range(128)),
            NcclCommunicator=Nccl,
            NCCL_SUM="sum",
            NCCL_FLOAT32="f4",
            NCCL_FLOAT64="f8",
        )


def on_gpu(values):
    return np.array(values).view(OnGpu)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_arrays_are_added_up(dtype):
    def program(comm):
        x = on_gpu(np.arange(5, dtype=dtype) + comm.rank)
        nccl = NcclCommunicator(comm, Cuda(comm))
        return nccl.all_reduce(x).tolist(), x[0], nccl.all_reduce(x, out=x) is x, x.tolist()

    sums = [3.0, 6.0, 9.0, 12.0, 15.0]
    assert rr.spawn(program, 3) == [(sums, rank, True, sums) for rank in range(3)]


def test_the_reduction_waits_for_the_computation_and_the_computation_for_the_result():
    def program(comm):
        cuda = Cuda(comm)
        work = NcclCommunicator(comm, cuda).all_reduce(on_gpu([1.0]), async_op=True)
        before = list(cuda.log)
        work.wait()
        return before, cuda.log[len(before) :], work.done()

    started = ["record present", "own waits", "reduce", "record own"]
    assert rr.spawn(program, 2) == [(started, ["present waits"], True)] * 2


def test_an_empty_array_is_not_sent():
    def program(comm):
        cuda = Cuda(comm)
        NcclCommunicator(comm, cuda).all_reduce(on_gpu(np.zeros(0)))
        return "reduce" in cuda.log

    assert rr.spawn(program, 2) == [False, False]


@pytest.mark.parametrize("how", [{"op": "max"}, {"wire": "float16"}])
def test_only_sums_in_their_dtype_are_reduced(how):
    def program(comm):
        with pytest.raises(ValueError, match="adds up gradients in their dtype"):
            NcclCommunicator(comm, Cuda(comm)).all_reduce(on_gpu([1.0]), **how)

    rr.spawn(program, 2)


def test_cupy_without_nccl_is_refused():
    def program(comm):
        with pytest.raises(ValueError, match="this CuPy has no NCCL: choose two_shot"):
            NcclCommunicator(comm, Cuda(comm, available=False))

    rr.spawn(program, 2)


def test_the_strategy_needs_gpus():
    def program(comm):
        with pytest.raises(ValueError, match="cross_device is nccl, which reduces on GPUs"):
            train(comm, load_split(), Settings(), strategy=strategies.Mirrored("nccl"))

    rr.spawn(program, 2)


def test_gradients_meet_by_it():
    def program(comm):
        nccl = NcclCommunicator(comm, Cuda(comm))
        nccl.empty = lambda count, dtype: np.empty(count, dtype).view(OnGpu)
        dp = DataParallel(nccl, {"w": np.zeros(3), "b": np.zeros(2)}, op="sum")
        for name, size in (("b", 2), ("w", 3)):
            dp.ready(name, np.full(size, comm.rank + 1.0))
        return {name: array.tolist() for name, array in dp.finish().items()}, dp.sent_bytes

    assert rr.spawn(program, 2) == [({"w": [3.0] * 3, "b": [3.0] * 2}, 5 * 8)] * 2
