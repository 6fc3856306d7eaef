"""What it costs to write where another core has just read: through the caches, and past them.

    python -m benchmarks.shared_writes

A thread copies into shared memory, another on another core copies from there, in turns: always to
the same place, or round a ring.  Writes rows to ``bench_results/shared_writes.jsonl``.  The
length of the ring in `ringreduce.shm.layout` follows from them.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import numba
import numpy as np

from benchmarks.rows import environment, replace
from ringreduce.compiler import intrinsics
from ringreduce.compiler.memory import copy, fence, nanoseconds
from ringreduce.compiler.records import load_acquire, store_release
from ringreduce.shm.layout import Slot
from ringreduce.shm.stores import stream

NAME = "shared_writes"
_SIZES = tuple(4096 << i for i in range(8))
_RINGS = (1 << 20, 4 << 20)
_TURNS = 300


@numba.njit(nogil=True)
def _write(
    flags: Any, into: Any, source: Any, nbytes: Any, ring: Any, turns: Any, past: Any, took: Any
) -> None:
    for turn in range(1, turns + 1):
        copy(source, source + nbytes, nbytes)  # so that it is in this core's cache
        place = into + (turn * nbytes) % ring
        begin = nanoseconds(flags + 128)
        if past:
            stream(place, source, nbytes)
            fence()
        else:
            copy(place, source, nbytes)
        took[turn - 1] = nanoseconds(flags + 128) - begin
        store_release(Slot(flags), "sequence", turn)
        while load_acquire(Slot(flags + 64), "sequence") < turn:
            pass


@numba.njit(nogil=True)
def _read(
    flags: Any, source: Any, into: Any, nbytes: Any, ring: Any, turns: Any, took: Any
) -> None:
    for turn in range(1, turns + 1):
        while load_acquire(Slot(flags), "sequence") < turn:
            pass
        begin = nanoseconds(flags + 192)
        copy(into, source + (turn * nbytes) % ring, nbytes)
        took[turn - 1] = nanoseconds(flags + 192) - begin
        store_release(Slot(flags + 64), "sequence", turn)


def measure(nbytes: int, ring: int, past: bool) -> tuple[float, float]:
    """Median microseconds of writing and of reading."""
    intrinsics.register()
    shared = np.frombuffer(mmap.mmap(-1, ring), np.uint8)
    flags, mine, theirs = np.zeros(64, np.int64), np.ones(2 * nbytes, "u1"), np.ones(nbytes, "u1")
    turns = _TURNS + ring // nbytes
    writing, reading = np.zeros(turns, np.int64), np.zeros(turns, np.int64)
    at, here = flags.ctypes.data, shared.ctypes.data
    jobs: list[Callable[[], None]] = [
        lambda: _write(at, here, mine.ctypes.data, nbytes, ring, turns, past, writing),
        lambda: _read(at, here, theirs.ctypes.data, nbytes, ring, turns, reading),
    ]
    threads = [
        threading.Thread(target=_on_core, args=(core, job))
        for core, job in zip(sorted(os.sched_getaffinity(0)), jobs, strict=False)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    once_round = slice(ring // nbytes, None)
    return tuple(float(np.median(each[once_round])) / 1e3 for each in (writing, reading))


def _on_core(core: int, job: Callable[[], None]) -> None:
    os.sched_setaffinity(0, {core})
    job()


def main() -> None:
    rows = []
    where = environment("python -m benchmarks.shared_writes")
    for name in ("mpi", "mpi4py", "thread_level", "ranks"):
        del where[name]
    measure(4096, 4096, past=True)  # compiles
    for nbytes in _SIZES:
        for ring, past in [(nbytes, True), *((ring, False) for ring in (nbytes, *_RINGS))]:
            time.sleep(0.1)
            writing, reading = measure(nbytes, ring, past)
            how = "past the caches" if past else "through the caches"
            print(
                f"{nbytes:>9} bytes {how:>18}, in a ring of {ring >> 10:>5} KiB: "
                f"write {writing:8.2f} us, read {reading:8.2f} us"
            )
            row = {"benchmark": NAME, "bytes": nbytes, "how": how, "ring_bytes": ring}
            times = {"write_us": writing, "read_us": reading}
            rows.append({**row, "cores": len(_cores()), **times, **where})
    replace(NAME, rows, same=("bytes", "how", "ring_bytes"))


def _cores() -> set[int]:
    return os.sched_getaffinity(0)


if __name__ == "__main__":
    main()
