"""What it costs to write where another core has just read: through the caches, and past them.

    python -m benchmarks.shared_writes

A thread copies into shared memory, another on another core copies from there, in turns; writes rows
to ``bench_results/shared_writes.jsonl``.  That decides how `ringreduce.exchange` stages.
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
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from benchmarks.rows import environment, replace
from ringreduce.devices.machine import _stream
from ringreduce.devices.native import acquire, copy, release

NAME = "shared_writes"
_SIZES = tuple(4096 << i for i in range(0, 11, 2))
_TURNS = 300
_WORD, _INT = ir.IntType(64), ir.IntType(32)
_intrinsic: Callable[[Callable[..., Any]], Any] = intrinsic


@_intrinsic
def nanoseconds(_context: Any, words: Any) -> Any:
    """What a clock says that never goes back; `words` is the address of two words to be used."""

    def generate(_: Any, builder: Any, __: Any, arguments: Any) -> Any:
        place = builder.inttoptr(arguments[0], _WORD.as_pointer())
        kind = ir.FunctionType(_INT, (_INT, _WORD.as_pointer()))
        function = cgutils.get_or_insert_function(builder.module, kind, "clock_gettime")
        builder.call(function, (ir.Constant(_INT, time.CLOCK_MONOTONIC), place))
        seconds, rest = (builder.load(builder.gep(place, [ir.Constant(_INT, i)])) for i in (0, 1))
        return builder.add(builder.mul(seconds, ir.Constant(_WORD, 10**9)), rest)

    return types.int64(types.int64), generate


@numba.njit(nogil=True)
def _write(
    flags: Any, into: Any, source: Any, nbytes: Any, turns: Any, past: Any, took: Any
) -> None:
    for turn in range(1, turns + 1):
        copy(source, source + nbytes, nbytes)  # so that it is in this core's cache
        begin = nanoseconds(flags + 128)
        if past:
            _stream(into, source, nbytes)
        else:
            copy(into, source, nbytes)
        took[turn - 1] = nanoseconds(flags + 128) - begin
        release(flags, turn)
        while acquire(flags + 64) < turn:
            pass


@numba.njit(nogil=True)
def _read(flags: Any, source: Any, into: Any, nbytes: Any, turns: Any, took: Any) -> None:
    for turn in range(1, turns + 1):
        while acquire(flags) < turn:
            pass
        begin = nanoseconds(flags + 192)
        copy(into, source, nbytes)
        took[turn - 1] = nanoseconds(flags + 192) - begin
        release(flags + 64, turn)


def measure(nbytes: int, past: bool) -> tuple[float, float]:
    """Median microseconds of writing and of reading."""
    shared = np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)
    flags, mine, theirs = np.zeros(64, np.int64), np.ones(2 * nbytes, "u1"), np.ones(nbytes, "u1")
    writing, reading = np.zeros(_TURNS, np.int64), np.zeros(_TURNS, np.int64)
    at, here = flags.ctypes.data, shared.ctypes.data
    jobs: list[Callable[[], None]] = [
        lambda: _write(at, here, mine.ctypes.data, nbytes, _TURNS, past, writing),
        lambda: _read(at, here, theirs.ctypes.data, nbytes, _TURNS, reading),
    ]
    threads = [
        threading.Thread(target=_on_core, args=(core, job))
        for core, job in zip(sorted(os.sched_getaffinity(0)), jobs, strict=False)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return float(np.median(writing)) / 1e3, float(np.median(reading)) / 1e3


def _on_core(core: int, job: Callable[[], None]) -> None:
    os.sched_setaffinity(0, {core})
    job()


def main() -> None:
    rows = []
    where = environment("python -m benchmarks.shared_writes")
    for name in ("mpi", "mpi4py", "thread_level", "ranks"):
        del where[name]
    measure(4096, past=True)  # compiles
    for nbytes in _SIZES:
        for past in (False, True):
            time.sleep(0.1)
            writing, reading = measure(nbytes, past)
            how = "past the caches" if past else "through the caches"
            print(f"{nbytes:>9} bytes {how:>18}: write {writing:8.2f} us, read {reading:8.2f} us")
            row = {"benchmark": NAME, "bytes": nbytes, "how": how, "cores": len(_cores())}
            rows.append({**row, "write_us": writing, "read_us": reading, **where})
    replace(NAME, rows, same=("bytes", "how"))


def _cores() -> set[int]:
    return os.sched_getaffinity(0)


if __name__ == "__main__":
    main()
