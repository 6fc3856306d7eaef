"""An mpiexec that prints a version and starts nothing, and the versions that MPIs print."""

from __future__ import annotations

from pathlib import Path

HYDRA_5 = "HYDRA build details:\n    Version:                                 5.0.2\n"
OPEN_MPI_5 = "mpiexec (Open MPI) 5.0.11\n\nReport bugs to https://www.open-mpi.org\n"
OPEN_MPI_5_LIBRARY = "Open MPI v5.0.11, package: Open MPI user@localhost Distribution"
INTEL = "Intel(R) MPI Library for Linux* OS, Version 2021.18.1 Build 20260626 (id: b44796a)"


def put_mpiexec(directory: Path, says: str, name: str = "mpiexec") -> Path:
    """Write an mpiexec that prints `says` into `directory`, and return its path."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / name
    path.write_text(f"#!/bin/sh\ncat <<'END'\n{says}\nEND\n")
    path.chmod(0o755)
    return path
