"""What it takes to begin: the time of ``import ringreduce``, and the CPU time of that and `init`.

    mpirun -n 2 python -m benchmarks.start_up

The ranks' way through `init`, with a warm cache of machine code, is compared with ``import numba``
in a process of its own, which shared memory needs, and with what the MPI itself takes.  Writes rows
to ``bench_results/start_up.jsonl``.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

_BEGAN_S = time.process_time()
"""The interpreter's own start is not counted."""

_REPEATS = 5
_IN_A_PROCESS = """
import time
wall, cpu = time.perf_counter(), time.process_time()
import {module}
print(time.perf_counter() - wall, time.process_time() - cpu)
"""


def main() -> None:
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
    replace("start_up", [{**row, **{k: round(v, 4) for k, v in times.items()}, **where}], ("mpi",))


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
