"""Our all-reduce of CuPy arrays beside copying out, MPI's Allreduce and copying in.

    mpirun -n 2 python -m benchmarks.gpu

Ours is timed twice: through shared memory, and by messages, as between hosts.  All ranks share the
GPU that is current.  All in place, float32, in turns in one run, until the result is on the GPU.
The host memory of the other way is pinned too.  Inputs are rewritten before each call, and results
are compared with sums that are exact.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import cupy
import numpy as np
from cupy.cuda import runtime
from mpi4py import MPI

import ringreduce as rr
from benchmarks.rows import command_line, environment, replace

SIZES = [4 << 10, 64 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20]
_SECONDS_A_SIZE = 3.0


def gpu() -> dict[str, Any]:
    """What the figures depend on besides the host."""
    properties = runtime.getDeviceProperties(cupy.cuda.Device().id)
    return {
        "gpu": properties["name"].decode(),
        "gpus": runtime.getDeviceCount(),
        "cuda": runtime.runtimeGetVersion(),
        "driver": runtime.driverGetVersion(),
        "cupy": cupy.__version__,
    }


def over_the_host(world: MPI.Comm, x: Any) -> Callable[[], None]:
    """What one writes without a library: copy out, reduce, copy in."""
    pinned = cupy.cuda.alloc_pinned_memory(x.nbytes)
    host = np.frombuffer(pinned, x.dtype, x.size)

    def reduce() -> None:
        x.get(out=host)
        world.Allreduce(MPI.IN_PLACE, host)
        x.set(host)

    return reduce


def measure(
    comm: rr.Communicator, by_messages: rr.Communicator, world: MPI.Comm, nbytes: int
) -> dict[str, float]:
    """Median seconds of each way, of the slowest rank."""
    stream = cupy.cuda.get_current_stream()
    x = cupy.empty(nbytes // 4, np.float32)
    pattern = cupy.arange(x.size, dtype=np.float32) % 1000
    wanted = pattern * np.float32(world.size * (world.size + 1) / 2)
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: comm.all_reduce(x, out=x),
        "all_reduce by messages": lambda: by_messages.all_reduce(x, out=x),
        "copy, Allreduce, copy": over_the_host(world, x),
    }
    times: dict[str, list[float]] = {name: [] for name in calls}
    end = time.perf_counter() + _SECONDS_A_SIZE
    repeat = 0
    while world.bcast(repeat < 7 or time.perf_counter() < end):
        for name, call in calls.items():
            cupy.multiply(pattern, np.float32(world.rank + 1), out=x)
            stream.synchronize()
            world.Barrier()
            start = time.perf_counter()
            call()
            stream.synchronize()
            seconds = world.allreduce(time.perf_counter() - start, MPI.MAX)
            if repeat >= 2:
                times[name].append(seconds)
            assert repeat % 4 or bool((x == wanted).all()), f"{name} gives a wrong sum"
        repeat += 1
    return {name: statistics.median(series) for name, series in times.items()}


def main() -> None:
    world = MPI.COMM_WORLD
    rows = []
    with rr.init() as comm, rr.init(transport="mpi") as by_messages:
        for nbytes in SIZES:
            medians = measure(comm, by_messages, world, nbytes)
            row = {
                "benchmark": "gpu",
                "bytes": nbytes,
                **environment(command_line("gpu")),
                **gpu(),
                "milliseconds": {name: round(1e3 * t, 4) for name, t in medians.items()},
            }
            ours, _, theirs = medians.values()
            row["times_faster"] = round(theirs / ours, 3)
            rows.append(row)
            if world.rank == 0:
                print(nbytes >> 10, "KiB", row["milliseconds"], row["times_faster"], flush=True)
    if world.rank == 0:
        replace("gpu", rows, same=("mpi", "ranks", "bytes", "gpu"))


if __name__ == "__main__":
    main()
