"""Calls on CuPy arrays, on a GPU."""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings

import ringreduce as rr
from ringreduce.devices import cuda_kernels
from ringreduce.train import Settings, load, train
from ringreduce.train.strategies import CentralStorage, Mirrored, Pipeline, Tensor, Zero
from tests.support.case_strategies import cases
from tests.support.cases import CONFIG, nodes_of
from tests.support.on_gpus import PROGRAMS, CudaGpu, disagreeing, ramp, run_case, total

pytestmark = pytest.mark.gpu

SECOND = 1_500_000_000
"""About one second, in cycles of the GPU."""


def spawn(program, ranks, *args, nodes=None, on_a_stream=False, shares=False):
    """Run ``program(comm, gpu, *args)`` on ranks as threads that share the GPU.

    `shares`: through shared memory; otherwise by messages.
    """

    def run(comm):
        gpu = CudaGpu()
        with gpu.cupy.cuda.Stream(non_blocking=True) if on_a_stream else nullcontext():
            return program(comm, gpu, *args)

    config = replace(CONFIG, shared_memory=shares)
    return rr.spawn(run, ranks, nodes=nodes, timeout_s=60, config=config)


@given(case=cases(range(1, 6)).filter(lambda case: "longdouble" not in case.dtype))
@settings(max_examples=60)
def test_any_case_gives_what_numpy_gives(case):
    spawn(run_case, case.ranks, case, nodes=nodes_of(case.layout, case.ranks))


@pytest.mark.parametrize("shares", [False, True], ids=["messages", "shared memory"])
@pytest.mark.parametrize("on_a_stream", [False, True], ids=["default stream", "own stream"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_programs_on_threads(program, ranks, on_a_stream, shares):
    spawn(program, ranks, on_a_stream=on_a_stream, shares=shares)


@pytest.mark.mpi
@pytest.mark.parametrize("on_a_stream", ["", "yes"], ids=["default stream", "own stream"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_programs_over_mpi(mpi, ranks, on_a_stream):
    done = mpi.run_ok("call", ranks, "tests.support.on_gpus:over_mpi", on_a_stream)
    assert done == ["done"] * ranks


@pytest.mark.parametrize("shares", [False, True], ids=["messages", "shared memory"])
def test_a_large_array_in_place(shares):
    def program(comm, gpu):
        x = gpu.cupy.arange(1 << 24, dtype=np.float32) % 1000 * (comm.rank + 1)
        wanted = gpu.cupy.arange(1 << 24, dtype=np.float32) % 1000 * 6
        assert comm.all_reduce(x, out=x) is x
        assert bool((x == wanted).all())

    spawn(program, 3, shares=shares)


def test_memory_that_is_pinned_is_known_to_the_driver():
    from cupy.cuda import runtime

    from ringreduce.devices.cuda import CudaDevice

    stream = CudaDevice().stream
    memory = np.empty(1 << 20, np.uint8)
    for pinned in (False, True, False):
        kind = runtime.pointerGetAttributes(memory.ctypes.data).type
        assert (kind == runtime.memoryTypeHost) == pinned
        stream.close() if pinned else stream.pin(memory)
    stream.close()


@pytest.mark.parametrize("dtype", cuda_kernels.C_TYPES)
def test_every_kernel_compiles(dtype):
    from ringreduce.devices.cuda import CudaDevice

    device = CudaDevice()
    for name in cuda_kernels.names_for(dtype):
        assert device._kernel(name, dtype) is not None


def test_other_streams_are_not_waited_for():
    """A call that synchronised the whole GPU would wait for all streams."""

    def program(comm, gpu):
        x = gpu.put(ramp(comm, 60_001))
        gpu.values(comm.all_reduce(x))
        with gpu.cupy.cuda.Stream(non_blocking=True) as other:
            gpu.spin(2 * SECOND)
        start = time.perf_counter()
        result = comm.all_reduce(x)
        seconds = time.perf_counter() - start
        assert not other.done
        assert seconds < 0.5
        assert np.array_equal(gpu.values(result), total(comm, 60_001))

    spawn(program, 1)


def test_a_call_waits_for_what_the_caller_has_asked_before():
    def program(comm, gpu):
        x = gpu.put(ramp(comm, 5000))
        gpu.spin(SECOND // 4)
        x *= 2
        assert np.array_equal(gpu.values(comm.all_reduce(x)), 2 * total(comm, 5000))

    spawn(program, 2)


def test_some_ranks_on_the_card_and_some_in_host_memory():
    def program(comm, gpu):
        for count in (1, 700, 60_001):
            x = ramp(comm, count)
            result = comm.all_reduce(gpu.put(x) if comm.rank % 2 else x)
            assert isinstance(result, gpu.cupy.ndarray) == bool(comm.rank % 2)
            result = gpu.values(result) if comm.rank % 2 else result
            assert np.array_equal(result, total(comm, count))

    spawn(program, 4)


def test_ranks_that_disagree_go_on():
    spawn(disagreeing, 3)


def test_tensors_of_another_library():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    if not torch.cuda.is_available():
        pytest.skip("this torch has no CUDA")

    def program(comm, gpu):
        x = torch.arange(5000, device="cuda", dtype=torch.float64) * (comm.rank + 1)
        assert np.array_equal(gpu.values(comm.all_reduce(x)), total(comm, 5000))
        assert comm.all_reduce(x, out=x) is x
        assert np.array_equal(x.cpu().numpy(), total(comm, 5000))

    spawn(program, 2)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize(
    "strategy", [Mirrored(), Zero(1), Zero(3), CentralStorage(), Pipeline(), Tensor()], ids=str
)
def test_the_trainer_learns_on_a_gpu_what_it_learns_beside_it(strategy, optimizer):
    import cupy

    settings = Settings(epochs=2, dtype="float64", optimizer=optimizer, lr=0.01)

    def run(comm, xp):
        result = train(comm, load(settings), settings, xp=xp, strategy=strategy)
        return np.asarray(result.parameters.get() if xp is cupy else result.parameters)

    on_gpu, beside = (rr.spawn(run, 2, xp, timeout_s=60)[0] for xp in (cupy, np))
    assert np.allclose(on_gpu, beside, rtol=1e-6, atol=1e-9)


def test_gradients_of_a_model_of_ones_own():
    def program(comm, gpu):
        params = {"w": gpu.put(np.full((300, 200), comm.rank, "f4")), "b": gpu.put(np.zeros(7))}
        dp = rr.train.DataParallel(comm, params, first_bucket_bytes=1, bucket_bytes=1)
        assert not params["w"].any()
        for step in range(3):
            for name in ("b", "w"):
                dp.ready(name, gpu.cupy.full_like(params[name], step + comm.rank))
            means = dp.finish()
            assert bool((means["w"] == step + 0.5).all())
            assert bool((means["b"] == step + 0.5).all())

    spawn(program, 2)
