"""The time of ``import ringreduce``, the CPU time of that and `init`, and the first start of all.

    mpirun -n 2 python -m benchmarks.start_up
    python -m benchmarks.start_up --first

The CPU time of `init`, with machine code that is kept, is compared with that of ``import numba`` in
a process of its own, which compiling needs, and with that of the MPI's own start.

``--first`` measures the first start: `init` and an all-reduce on two ranks that find no machine
code and compile everything.  Each of its runs has a new cache folder.

Writes rows to ``bench_results/start_up.jsonl``.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

_BEGAN_S = time.process_time()
"""The interpreter's own start is not counted."""

_REPEATS = 5
_IN_A_PROCESS = """
import time
wall, cpu = time.perf_counter(), time.process_time()
import {module}
print(time.perf_counter() - wall, time.process_time() - cpu)
"""

FIRST_START = """
import time
began = time.perf_counter()
import numpy as np
import ringreduce as rr
with rr.init() as comm:
    assert comm.all_reduce(np.ones(2, np.float32))[0] == comm.size
    seconds = np.array([time.perf_counter() - began])
    slowest = float(comm.all_reduce(seconds, "max", algorithm="ring")[0])
    if comm.rank == 0: print(slowest, flush=True)
    comm.barrier(timeout_s=300)
"""
"""A program for all ranks: prints the seconds that the slowest one needs until it has a result."""
_WHERE = """
import json
from mpi4py import MPI
from benchmarks.rows import environment
where = environment("python -m benchmarks.start_up --first")
if MPI.COMM_WORLD.rank == 0: print(json.dumps(where))
"""
_RANKS_OF_FIRST = 2


def main() -> None:
    if "--first" in sys.argv:
        _first()
    else:
        _with_kept_code()


def _first() -> None:
    from benchmarks.rows import replace

    seconds = []
    for _ in range(_REPEATS):
        with tempfile.TemporaryDirectory() as cache:
            seconds.append(float(_on_ranks(FIRST_START, NUMBA_CACHE_DIR=cache).split()[-1]))
        print(f"{'first start':>22} {seconds[-1]:6.3f}", flush=True)
    where = json.loads(_on_ranks(_WHERE).splitlines()[-1])
    row = {"benchmark": "start_up", "first": True, "ranks": _RANKS_OF_FIRST}
    row["first_start_s"] = round(statistics.median(seconds), 3)
    replace("start_up", [{**row, **where}], ("mpi", "first"))


def _on_ranks(program: str, **variables: str) -> str:
    """What a program prints that all ranks run."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "program.py"
        file.write_text(program)
        start = [sys.executable, "-m", "ringreduce.launch.cli", "run"]
        done = subprocess.run(
            [*start, "-n", str(_RANKS_OF_FIRST), str(file)],
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent), **variables},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    return done.stdout


def _with_kept_code() -> None:
    if sys.dont_write_bytecode:
        raise SystemExit("Python keeps no bytecode here (PYTHONDONTWRITEBYTECODE): unset that")
    import numpy as np
    from mpi4py import MPI

    mpi_s = time.process_time() - _BEGAN_S
    import ringreduce as rr

    with rr.init() as comm:
        took_s = time.process_time() - _BEGAN_S
        MPI.COMM_WORLD.Barrier()
        slowest = comm.all_reduce(np.array([mpi_s, took_s]), "max")
        shares = comm.config.memory is not None
        if comm.rank == 0:
            _report(*map(float, slowest), shares)
        comm.barrier(timeout_s=300)


def _report(mpi_s: float, took_s: float, shares: bool) -> None:
    from benchmarks.rows import environment, replace

    where = environment("mpirun -n 2 python -m benchmarks.start_up")
    own, numba = _import("ringreduce"), _import("numba")
    times = {
        "import_ringreduce_s": own[0],
        "import_numba_cpu_s": numba[1],
        "import_mpi_cpu_s": mpi_s,
        "import_and_init_cpu_s": took_s,
        "beyond_numba_cpu_s": took_s - numba[1],
    }
    for name, seconds in times.items():
        print(f"{name:>22} {seconds:6.3f}")
    row = {"benchmark": "start_up", "shares_memory": shares}
    rounded = {name: round(seconds, 4) for name, seconds in times.items()}
    replace("start_up", [{**row, **rounded, **where}], ("mpi", "first"))


def _import(module: str) -> tuple[float, float]:
    """Median seconds, and CPU seconds, of an import in a process of its own."""
    runs = []
    for _ in range(_REPEATS):
        program = [sys.executable, "-c", _IN_A_PROCESS.format(module=module)]
        done = subprocess.run(program, capture_output=True, text=True, check=True)
        runs.append(tuple(map(float, done.stdout.split())))
    return statistics.median(run[0] for run in runs), statistics.median(run[1] for run in runs)


if __name__ == "__main__":
    main()
