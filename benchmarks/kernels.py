"""Adding 16-bit floats by our kernels beside NumPy, ml_dtypes, and float32 of the same bytes.

    mpirun -n 1 python -m benchmarks.kernels

One core; arrays that fit in its caches, and that do not.  All are interleaved in one run and their
results verified; times are medians.  GB/s count the bytes of the arrays read and the one written.
Beside two arrays added by what Python calls, two, four and eight by what shared memory's machine
calls (`devices.folds`), which are compared with its own float32.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import ml_dtypes
import numpy as np

from benchmarks.rows import command_line, environment, replace
from ringreduce.devices import compiled
from ringreduce.devices.cpu import CpuDevice, address_of

SIZES = (64 << 10, 1 << 20, 64 << 20)
REPEATS = 25
BYTES_A_REPEAT = 16 << 20
FLOAT32 = "float32, NumPy"
FOLDED = (2, 4, 8)
"""Arrays at once."""
FOLDED_BYTES = 128 << 10
Addition = Callable[[np.ndarray, np.ndarray, np.ndarray], object]


def additions() -> dict[str, tuple[str, Addition]]:
    """Name -> the dtype, and how to add two arrays of it into a third."""
    device = CpuDevice()
    return {
        FLOAT32: ("float32", np.add),
        "float16, NumPy": ("float16", np.add),
        "bfloat16, ml_dtypes": ("bfloat16", np.add),
        "float16, ours": ("float16", device.fold("sum", np.float16)),
        "bfloat16, ours": ("bfloat16", device.fold("sum", ml_dtypes.bfloat16)),
    }


def operands(dtype: str, nbytes: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Two random arrays, and their sum as it ought to be: in float32, rounded once."""
    rng = np.random.default_rng(1)
    count = nbytes // np.dtype(dtype).itemsize
    left, right = (rng.standard_normal(count, np.float32).astype(dtype) for _ in range(2))
    return left, right, (left.astype(np.float32) + right.astype(np.float32)).astype(dtype)


def seconds(nbytes: int, in_place: bool) -> dict[str, float]:
    """The median time of each addition."""
    calls: dict[str, Callable[[], object]] = {}
    for name, (dtype, add) in additions().items():
        left, right, total = operands(dtype, nbytes)
        into = left if in_place else np.empty_like(left)
        add(left, right, into)
        assert into.tobytes() == total.tobytes(), f"{name} gives a wrong sum"
        if in_place:
            into[...] = 0  # what is added again and again must stay finite
            right[...] = 0
        calls[name] = lambda add=add, arrays=(left, right, into): add(*arrays)
    return medians(calls, nbytes)


def medians(calls: dict[str, Callable[[], object]], nbytes: int) -> dict[str, float]:
    """The median time of each, in turns, in seconds."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(REPEATS):
        for name, call in calls.items():
            loops = max(1, BYTES_A_REPEAT // nbytes)
            start = time.perf_counter()
            for _ in range(loops):
                call()
            times[name].append((time.perf_counter() - start) / loops)
    return {name: statistics.median(series) for name, series in times.items()}


def folds(count: int) -> dict[str, float]:
    """The median time of each compiled fold of `count` arrays, apart."""
    calls: dict[str, Callable[[], object]] = {}
    for dtype in ("float32", "float16", "bfloat16"):
        left, right, _ = operands(dtype, FOLDED_BYTES)
        sources = [left, right] * (count // 2)
        total = sum(source.astype(np.float32) for source in sources).astype(dtype)
        into, memory = np.empty_like(left), np.empty(compiled.FOLD_BYTES, np.uint8)
        places = np.array([address_of(source) for source in sources])
        address = compiled.fold("sum", np.dtype(dtype))
        assert address is not None, "nothing can be compiled here"
        fold = ctypes.CFUNCTYPE(None, *(ctypes.c_int64,) * 6)(address)
        arguments = address_of(into), address_of(places), count, into.size, 0, address_of(memory)
        fold(*arguments)
        assert into.tobytes() == total.tobytes(), f"{dtype} gives a wrong sum"
        kept = sources, into, places, memory
        calls[dtype] = lambda fold=fold, arguments=arguments, kept=kept: fold(*arguments)
    return medians(calls, FOLDED_BYTES)


def main() -> None:
    """Measure, print, and put the rows in bench_results/kernels.jsonl."""
    rows = []
    for nbytes in SIZES:
        for in_place in (False, True):
            measured = {"bytes": nbytes, "in_place": in_place}
            rows.append(_row(measured, seconds(nbytes, in_place), 3 * nbytes, FLOAT32))
    for count in FOLDED:
        measured = {"bytes": FOLDED_BYTES, "in_place": False, "arrays": count}
        rows.append(_row(measured, folds(count), (count + 1) * FOLDED_BYTES, "float32"))
    replace("kernels", rows, same=("cpu", "bytes", "in_place", "arrays"))


def _row(
    measured: dict[str, Any], times: dict[str, float], moved: int, unit: str
) -> dict[str, Any]:
    """What was measured, in GB/s and in units of the time of `unit`; printed, too."""
    versions = {name: version(name) for name in ("numba", "llvmlite", "ml_dtypes")}
    found = {
        "gb_per_s": {name: round(1e-9 * moved / t, 2) for name, t in times.items()},
        "times_of_float32": {name: round(t / times[unit], 3) for name, t in times.items()},
    }
    print(measured, found, flush=True)
    where = environment(command_line("kernels")) | versions
    return {"benchmark": "kernels", **measured, **where, **found}


if __name__ == "__main__":
    main()
