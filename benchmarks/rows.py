"""Rows for bench_results/: each says which machine, versions, command and day it comes from."""

from __future__ import annotations

import datetime
import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

import numpy as np

RESULTS = Path(__file__).parent.parent / "bench_results"
HOSTS = "BENCHMARK_HOSTS"
"""What `benchmarks.hosts` was told, where it has made hosts for the ranks."""


def environment(command: str) -> dict[str, Any]:
    """Where a figure comes from.  Called on a rank of the job."""
    import mpi4py
    from mpi4py import MPI

    levels = ("single", "funneled", "serialized", "multiple")
    hosts = {"hosts": os.environ[HOSTS]} if HOSTS in os.environ else {}
    return hosts | {
        "date": datetime.date.today().isoformat(),
        "command": command,
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "mpi": MPI.Get_library_version()
        .splitlines()[0]
        .split(",")[0]
        .strip("\0 ")
        .replace("\t", ""),
        "thread_level": levels[MPI.Query_thread()],
        "ranks": MPI.COMM_WORLD.Get_size(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "mpi4py": mpi4py.__version__,
        "kernel": platform.release().split("-")[0],
    }


def command_line(module: str) -> str:
    """How this benchmark was started, as one would type it."""
    from mpi4py import MPI

    program = f"python -m benchmarks.{module} {' '.join(sys.argv[1:])}".strip()
    if HOSTS in os.environ:
        return f"python -m benchmarks.hosts {os.environ[HOSTS]} -- {program}"
    return f"mpirun -n {MPI.COMM_WORLD.Get_size()} {program}"


def replace(name: str, rows: list[dict[str, Any]], same: tuple[str, ...]) -> None:
    """Put rows into ``bench_results/<name>.jsonl``, in place of older ones alike in `same`."""
    path = RESULTS / f"{name}.jsonl"
    kept = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    new = {tuple(row.get(key) for key in same) for row in rows}
    kept = [row for row in kept if tuple(row.get(key) for key in same) not in new]
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in kept + rows))


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()
