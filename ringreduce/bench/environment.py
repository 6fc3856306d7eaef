"""The origin of a figure: machine, versions, command and day."""

from __future__ import annotations

import datetime
import platform
from typing import Any

import numpy as np

from ringreduce import rendezvous
from ringreduce.system.cores import cores
from ringreduce.system.proc import cpu_name

_LEVELS = ("single", "funneled", "serialized", "multiple")


def environment(command: str) -> dict[str, Any]:
    """The fields that every row has of its run.  Call it on a rank of the job."""
    from ringreduce.bench.world import HAS_MPI  # here: the import may initialise MPI

    return {
        "date": datetime.date.today().isoformat(),
        "command": command,
        "cpu": cpu_name() or platform.processor(),
        "cores": cores(),
        **(_of_mpi() if HAS_MPI else _without_mpi()),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "kernel": platform.release().split("-")[0],
    }


def _of_mpi() -> dict[str, Any]:
    import mpi4py
    from mpi4py import MPI

    library = MPI.Get_library_version().splitlines()[0].split(",")[0]
    return {
        "mpi": library.strip("\0 ").replace("\t", ""),
        "thread_level": _LEVELS[MPI.Query_thread()],
        "ranks": MPI.COMM_WORLD.Get_size(),
        "mpi4py": mpi4py.__version__,
    }


def _without_mpi() -> dict[str, Any]:
    size: int | None = 1  # of a process that nothing has started
    if rendezvous.default():
        size = rendezvous.find("env://", None, None, timeout_s=1.0).size
    return {"mpi": "none", "thread_level": "multiple", "ranks": size}
