"""The place of this process in a job, in the variables of torchrun, from those of its launcher."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from hashlib import blake2b
from pathlib import Path

_LAUNCHERS = (
    # rank, ranks, rank on the host, ranks on the host
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    (
        *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        *("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
)
"""The variables of each launcher.  Slurm sets those of a step only for the processes of srun."""
_SET_BY = "RINGREDUCE_PLACED_BY"
"""The number of the launcher's process from whose variables the others follow."""
_FIRST_PORT, _PORTS = 20000, 12000
"""Ports below those that Linux gives to connections."""


def fill(variables: MutableMapping[str, str] = os.environ) -> None:
    """Set what is missing of RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT.

    Does nothing if no launcher has started this process, or has started it alone.  A rank may start
    a job of its own, whose ranks inherit its variables: those are set anew.
    """
    found = of_launcher(variables)
    if not found:
        return
    outer = variables.get(_SET_BY, found[_SET_BY]) != found[_SET_BY]
    for name, value in found.items():
        if outer or name not in variables:
            variables[name] = value


def of_launcher(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of torchrun for this process; {} if no launcher has started several.

    MASTER_ADDR and MASTER_PORT are left out if the job has several hosts.  All ranks of a host
    compute the same port, from the number of the launcher's process.
    """
    for rank, size, local_rank, local_size in _LAUNCHERS:
        if rank in variables and variables.get(size, "1") != "1":
            found = {"RANK": variables[rank], "WORLD_SIZE": variables[size]}
            if local_rank in variables:
                found["LOCAL_RANK"] = variables[local_rank]
            found[_SET_BY] = str(_launcher(rank))
            if variables.get(local_size) == variables[size]:
                found["MASTER_ADDR"] = "localhost"
                found["MASTER_PORT"] = str(_port(found[_SET_BY]))
            return found
    return {}


def _launcher(name: str) -> int:
    """Return the number of the nearest parent process whose environment lacks the variable.

    Between a rank and its launcher there may be a shell, which has the rank's variables.
    """
    process = os.getppid()
    while process > 1:
        try:
            variables = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
            if not any(each.startswith(f"{name}=".encode()) for each in variables):
                break
            process = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:  # a process of somebody else, as Slurm's is
            break
    return process


def _port(launcher: str) -> int:
    digest = blake2b(launcher.encode(), digest_size=8).digest()
    return _FIRST_PORT + int.from_bytes(digest, "little") % _PORTS
