"""Rows for bench_results/: each says which machine, versions, command and day it comes from."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "bench_results"
HOSTS = "BENCHMARK_HOSTS"
"""The variable with the options of `benchmarks.hosts`, set where it has made the hosts."""


_EXPECTED_SIZE = "RINGREDUCE_EXPECTED_SIZE"
"""`recovery.wire.EXPECTED_SIZE`, which older checkouts have elsewhere: they use this file, too."""


def environment(command: str) -> dict[str, Any]:
    """The origin of a figure.  Call it on a rank of the job."""
    from ringreduce.bench.environment import environment as of_the_run

    hosts = {"hosts": os.environ[HOSTS]} if HOSTS in os.environ else {}
    return hosts | of_the_run(command)


def command_line(module: str) -> str:
    """How this benchmark was started, as one would type it."""
    from mpi4py import MPI

    program = f"python -m benchmarks.{module} {' '.join(sys.argv[1:])}".strip()
    if HOSTS in os.environ:
        return f"python -m benchmarks.hosts {os.environ[HOSTS]} -- {program}"
    ranks = MPI.COMM_WORLD.Get_size()
    if _EXPECTED_SIZE in os.environ:
        return f"ringreduce run -n {ranks} {program.removeprefix('python ')}"
    return f"mpirun -n {ranks} {program}"


def replace(name: str, rows: list[dict[str, Any]], same: tuple[str, ...]) -> None:
    """Put rows into ``bench_results/<name>.jsonl``, in place of older ones alike in `same`.

    Paths of this checkout become relative.
    """
    path = RESULTS / f"{name}.jsonl"
    kept = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    new = {tuple(row.get(key) for key in same) for row in rows}
    kept = [row for row in kept if tuple(row.get(key) for key in same) not in new]
    path.parent.mkdir(exist_ok=True)
    lines = "".join(json.dumps(row) + "\n" for row in kept + rows)
    path.write_text(lines.replace(f"{ROOT.resolve()}/", ""))
