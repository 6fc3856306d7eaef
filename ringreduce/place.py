"""The place of this process in its job, in torchrun's variables, from those of its launcher."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, MutableMapping
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

RANK_VARIABLES = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK")
"""The environment variables in which the MPIs' process managers give a process its rank."""


class PlaceVariables(NamedTuple):
    """The environment variables in which a launcher gives a process its place in the job."""

    rank: str
    size: str
    """Number of ranks."""
    local_rank: str
    """Index among the ranks of the host."""
    local_size: str
    """Number of ranks of the host."""


HYDRA = PlaceVariables("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
"""Of MPICH and Intel MPI."""
OPEN_MPI = PlaceVariables(
    *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    *("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
)
SRUN = PlaceVariables(
    *("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
)
"""Of Slurm's srun: a batch script has no variables of a step."""
MPIS = (HYDRA, OPEN_MPI)

TORCHRUN = "TORCHELASTIC_RUN_ID"
"""An environment variable that torchrun sets."""
SET_BY = "RINGREDUCE_PLACED_BY"
"""The environment variable with the process id of the launcher, where `fill` has set others."""
_FIRST_PORT, _PORTS = 20000, 12000
"""Ports below those that Linux gives to connections."""


def fill(variables: MutableMapping[str, str] = os.environ) -> None:
    """Set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT where they are missing.

    Does nothing if no launcher has started this process, or if srun has started it alone, as a
    shell for example.  Ranks of a job that a rank has started inherit the variables of that rank:
    theirs are set anew.
    """
    found = of_launcher(variables)
    if not found:
        return
    outer = variables.get(SET_BY, found[SET_BY]) != found[SET_BY]
    for name, value in found.items():
        if outer or name not in variables:
            variables[name] = value


def of_launcher(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of torchrun for this process; {} if no launcher has given it a place.

    MASTER_ADDR and MASTER_PORT are left out if the job has several hosts.  All ranks of a host
    compute the same port, from the process id of the launcher.
    """
    # srun sets an MPI's rank and size, too, but no local rank of an MPI.
    for names in sorted((*MPIS, SRUN), key=lambda names: names.local_rank not in variables):
        size = variables.get(names.size, "1")
        # Slurm sets PMI_RANK, but no local rank of an MPI, for a shell.
        by_mpi = names in MPIS and names.local_rank in variables
        if names.rank in variables and (size != "1" or by_mpi):
            found = {"RANK": variables[names.rank], "WORLD_SIZE": size}
            if names.local_rank in variables:
                found["LOCAL_RANK"] = variables[names.local_rank]
            found[SET_BY] = str(_launcher(names.rank))
            if variables.get(names.local_size) == size:
                found["MASTER_ADDR"] = "localhost"
                found["MASTER_PORT"] = str(port_of(found[SET_BY]))
            return found
    return {}


def mpi_rank(variables: Mapping[str, str] = os.environ) -> int | None:
    """Return the rank in MPI_COMM_WORLD; None if no launcher of an MPI has started this process.

    torchrun hands the variables of its own launcher, such as srun, to all processes that it starts.
    These processes are no ranks of that launcher's MPI.
    """
    if TORCHRUN in variables:
        return None
    for name in RANK_VARIABLES:
        if variables.get(name, "").isdecimal():
            return int(variables[name])
    return None


def _launcher(name: str) -> int:
    """Return the process id of the nearest ancestor whose environment lacks the variable `name`.

    Between a rank and its launcher there may be a shell, which has the rank's variables.
    """
    process = os.getppid()
    while process > 1:
        try:
            variables = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
            if not any(each.startswith(f"{name}=".encode()) for each in variables):
                break
            process = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:  # the process of another user, such as Slurm's daemon
            break
    return process


def port_of(launcher: str) -> int:
    """Return a port for the job of a launcher, given the text of its process id."""
    digest = blake2b(launcher.encode(), digest_size=8).digest()
    return _FIRST_PORT + int.from_bytes(digest, "little") % _PORTS


def is_here(address: str) -> bool:
    """Return whether this host has an address: only then a socket can be bound to it."""
    try:
        found = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)
    except OSError:
        return address == socket.gethostname()
    for family, kind, protocol, _, where in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.bind(where)
                return True
        except OSError:
            continue
    return False
