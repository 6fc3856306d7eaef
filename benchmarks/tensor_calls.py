"""Calls of a communicator on tensors of torch and other arrays, beside the same calls on NumPy's.

    .venv-torch/bin/python -m benchmarks.tensor_calls

In an environment with torch's CPU wheel, JAX and array_api_strict.  Starts `ringreduce run` with
two ranks.  Each row is one call on arrays of one size, made with each kind of array in turns: NumPy
arrays, tensors of float32, tensors of bfloat16 (beside NumPy arrays of bfloat16), objects with
``__array_interface__``, objects with DLPack's methods alone, arrays of array_api_strict.  These are
views of the same memory.  Arrays of JAX, which nobody can write to, are only read.  Results are
verified.

Then measures what the backend adds to ``import torch``, in new processes.

Writes ``bench_results/tensor_calls.jsonl``: medians over the turns, on rank 0, in microseconds for
a call and in milliseconds for the import.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.rows import environment, replace

NAME = "tensor_calls"
COMMAND = "python -m benchmarks.tensor_calls"
SIZES = (8, 1024, 64 << 10)
"""Bytes of the float32 array."""
_TURNS, _CALLS = 31, 2000
_IMPORTS = 15
_IMPORT = """
import time
from importlib.metadata import entry_points
import torch
found = entry_points(group="torch.backends")
began = time.perf_counter()
for backend in found:
    backend.load()()
print(time.perf_counter() - began)
"""
"""Loads the backends after torch, as the last statement of torch's own import does otherwise.

Torch looks for backends whether or not there is one.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    if parser.parse_args().worker:
        _work()
        return
    ringreduce = Path(sys.executable).parent / "ringreduce"
    command = [ringreduce, "run", "-n", "2", "-m", "benchmarks.tensor_calls", "--worker"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    measured = {key for key in rows[0] if key.endswith("_us")}
    rows.append({key: rows[0][key] for key in rows[0] if key not in measured} | _of_import())
    replace(NAME, rows, same=("cpu", "call", "bytes"))
    for row in rows:
        print({key: value for key, value in row.items() if key in ("call", "bytes") or "_" in key})


def _work() -> None:
    """As a rank: time all calls.  Rank 0 prints the rows."""
    import torch

    import ringreduce as rr

    torch.set_num_threads(1)
    with rr.init() as comm:
        where = environment(COMMAND)
        for nbytes in SIZES:
            for call, calls in _calls(comm, nbytes // 4).items():
                times = _times(comm, calls)
                row = {"benchmark": NAME, "call": call, "bytes": nbytes}
                for name, us in times.items():
                    numpy = "numpy_bfloat16" if name.endswith("bfloat16") else "numpy"
                    row |= {f"{name}_us": us, f"{name}_more_us": us - times[numpy]}
                if comm.rank == 0:
                    print(json.dumps(row | {"torch": torch.__version__} | where), flush=True)


def _times(comm: Any, calls: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Return the median time of each call over the turns, in microseconds."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(_TURNS):
        for name, call in calls.items():
            comm.barrier()
            began = time.perf_counter()
            for _ in range(_CALLS):
                call()
            found[name].append((time.perf_counter() - began) / _CALLS)
    return {name: statistics.median(seconds) * 1e6 for name, seconds in found.items()}


class _ByInterface:
    def __init__(self, array: np.ndarray) -> None:
        self._array = array

    @property
    def __array_interface__(self) -> Any:
        return self._array.__array_interface__


class _ByDlpack:
    def __init__(self, array: np.ndarray) -> None:
        self._array = array

    def __dlpack__(self, **named: Any) -> Any:
        return self._array.__dlpack__(**named)

    def __dlpack_device__(self) -> Any:
        return self._array.__dlpack_device__()


def _calls(comm: Any, count: int) -> dict[str, dict[str, Callable[[], Any]]]:
    """Return for each call what makes it, by the kind of array."""
    import array_api_strict
    import jax.numpy as jnp
    import ml_dtypes
    import torch

    x, out = np.ones(count, np.float32), np.empty(count, np.float32)
    half, into = (np.ones(2 * count, ml_dtypes.bfloat16) for _ in range(2))
    kinds: dict[str, tuple[Any, Any]] = {
        "numpy": (x, out),
        "tensor": (torch.from_numpy(x), torch.from_numpy(out)),
        "interface": (_ByInterface(x), _ByInterface(out)),
        "dlpack": (_ByDlpack(x), _ByDlpack(out)),
        "array_api_strict": tuple(array_api_strict.asarray(a, copy=False) for a in (x, out)),
        "numpy_bfloat16": (half, into),
        "tensor_bfloat16": tuple(
            torch.from_numpy(array.view(np.int16)).view(torch.bfloat16) for array in (half, into)
        ),
    }
    forms: dict[str, Callable[[Any, Any], Any]] = {
        "all_reduce(x, 'max')": lambda a, _: comm.all_reduce(a, "max"),
        "all_reduce(x, 'max', out=x)": lambda a, _: comm.all_reduce(a, "max", out=a),
        "all_reduce(x, 'max', out=out)": lambda a, b: comm.all_reduce(a, "max", out=b),
        "broadcast(x, out=x)": lambda a, _: comm.broadcast(a, out=a),
    }
    made: dict[str, dict[str, Callable[[], Any]]] = {}
    for form, call in forms.items():
        read = {} if "out" in form else {"jax": (jnp.full(count, comm.rank + 1, np.float32), None)}
        made[form] = {name: partial(call, *arrays) for name, arrays in (kinds | read).items()}
        for name, (a, b) in (kinds | read).items():
            x[:], half[:] = comm.rank + 1, comm.rank + 1
            out[:], into[:] = 0, 0
            result = call(a, b)
            wanted = 1 if "broadcast" in form else comm.size
            a_and_b = (half, into) if name.endswith("bfloat16") else (x, out)
            found = dict(zip((id(a), id(b)), a_and_b, strict=True))
            if not (found.get(id(result), result) == wanted).all():
                raise ValueError(f"{form} of {name} gives {result}")
    return made


def _of_import() -> dict[str, Any]:
    """Return how long ``import torch`` takes to load the backend, in new processes."""
    seconds = []
    for _ in range(_IMPORTS):
        done = subprocess.run(
            [sys.executable, "-c", _IMPORT],
            env=os.environ | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        seconds.append(float(done.stdout))
    row = {"benchmark": NAME, "call": "import torch", "bytes": 0}
    return row | {"backend_ms": statistics.median(seconds) * 1e3}


if __name__ == "__main__":
    main()
