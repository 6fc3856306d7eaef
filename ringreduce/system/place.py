"""The place of this process in its job, in torchrun's variables, from those of its launcher."""

from __future__ import annotations

import os
import re
import socket
import sys
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from hashlib import blake2b
from typing import NamedTuple

from ringreduce.system.proc import FLAGS, PARENT, file_of, stat_of, variables_of

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
"""The variables of MPICH and Intel MPI."""
OPEN_MPI = PlaceVariables(
    *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    *("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
)
SRUN = PlaceVariables(
    *("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
)
"""The variables of Slurm's srun: a batch script has no variables of a step."""
_NODES = "SLURM_STEP_NODELIST"
"""The environment variable with the hosts of a step of Slurm."""
MPIS = (HYDRA, OPEN_MPI)
OURS = PlaceVariables("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
"""The variables of ranks that the launcher starts without MPI, and of torchrun."""

TORCHRUN = "TORCHELASTIC_RUN_ID"
"""An environment variable that torchrun sets."""
SET_BY = "RINGREDUCE_PLACED_BY"
"""The environment variable with the process id of the launcher, where `fill` has set others."""
RANK_PROCESS = "RINGREDUCE_RANK_PROCESS"
"""The environment variable by which the worker processes of a rank know the rank and its job."""
SURVIVED = "RINGREDUCE_SURVIVED"
"""The environment variable with the descriptor of a pipe to a launcher that lets ranks be lost."""
_BY_ENV: tuple[str, ...] = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_FORKED = 0x40
"""PF_FORKNOEXEC: the process was forked, and has begun no program of its own."""
_PLACES = (
    *(*OURS, "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE"),
    *(TORCHRUN, "TORCHELASTIC_RESTART_COUNT"),
    *("TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_USE_AGENT_STORE", SET_BY),
)
"""The environment variables of a place in a job."""
INDEX = "JOB_COMPLETION_INDEX"
"""The environment variable in which Kubernetes numbers the pods of an indexed Job."""
_USUAL_PORT = "29500"
"""The MASTER_PORT of torchrun where none is given."""
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


def without(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables without the place that a container or another launcher has given.

    MASTER_ADDR and MASTER_PORT stay if there is no RANK or WORLD_SIZE: then the user has set them.
    """
    of_others = {*_PLACES}
    if not {"RANK", "WORLD_SIZE"}.isdisjoint(variables):
        of_others |= {"MASTER_ADDR", "MASTER_PORT"}
    return {name: value for name, value in variables.items() if name not in of_others}


def of_launcher(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of torchrun for this process; {} if no launcher has given it a place.

    All ranks of a host compute the same port, from the process id of the launcher.  Of a job on
    several hosts MASTER_ADDR and MASTER_PORT are known only under srun, which starts rank 0 on the
    first host of its list, and the port in Kubernetes, where each pod has addresses of its own.
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
            elif names is SRUN and (first := _first_host(variables.get(_NODES, ""))):
                step = f"{variables.get('SLURM_JOB_ID')}.{variables.get('SLURM_STEP_ID')}"
                found["MASTER_ADDR"], found["MASTER_PORT"] = first, str(port_of(step))
            return found
    missing = "RANK" not in variables or SET_BY in variables
    if INDEX in variables and "WORLD_SIZE" in variables and missing:
        place = {"RANK": variables[INDEX], "LOCAL_RANK": "0", "MASTER_PORT": _USUAL_PORT}
        return place | {SET_BY: str(_launcher(INDEX))}
    return {}


def _first_host(hosts: str) -> str:
    """Return the first host of a list of Slurm: "node03" of ``node[03-05,7],other1``."""
    first = re.match(r"(?:[^,\[]|\[[^]]*\])*", hosts)
    return re.sub(r"\[([^],-]*)[^]]*\]", r"\1", first.group()) if first else ""


def local_rank(variables: Mapping[str, str] = os.environ) -> int | None:
    """Return the index of this process among the ranks of its host; None if it is not known."""
    found = (of_launcher(variables) | dict(variables)).get("LOCAL_RANK", "")
    return int(found) if found.isdecimal() else None


def master(variables: Mapping[str, str] = os.environ) -> str:
    """Return the host of rank 0; "" if it is not known."""
    return (of_launcher(variables) | dict(variables)).get("MASTER_ADDR", "")


def mpi_rank(variables: Mapping[str, str] = os.environ) -> int | None:
    """Return the rank in MPI_COMM_WORLD; None if no launcher of an MPI has started this process.

    torchrun hands the variables of its own launcher, such as srun, to all processes that it starts.
    These processes are no ranks of that launcher's MPI.
    """
    if by_torchrun(variables):
        return None
    for name in RANK_VARIABLES:
        if variables.get(name, "").isdecimal():
            return int(variables[name])
    return None


def by_torchrun(variables: Mapping[str, str]) -> bool:
    """Return whether torchrun has started this process, and no MPI launcher in a rank of torchrun.

    The launcher of an MPI has torchrun's variables only if a rank of torchrun has started it.
    """
    if TORCHRUN not in variables:
        return False
    with suppress(OSError):
        by_mpi = [name for name in RANK_VARIABLES if name in variables]
        return not any(TORCHRUN in variables_of(_launcher(name)) for name in by_mpi)
    return True


def _launcher(name: str) -> int:
    """Return the process id of the nearest ancestor whose environment lacks the variable `name`.

    Between a rank and its launcher there may be a shell, which has the rank's variables.
    """
    process = os.getppid()
    while process > 1:
        try:
            if name not in variables_of(process):
                break
            process = int(stat_of(process)[PARENT])
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
    except (OSError, UnicodeError):
        return address == socket.gethostname()
    for family, kind, protocol, _, where in found:
        with suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.bind(where)
            return True
    return False


# --- worker processes of ranks --------------------------------------------------------------------


def mark(variables: MutableMapping[str, str] = os.environ) -> None:
    """Mark this process as a rank, for its worker processes."""
    variables[RANK_PROCESS] = f"{os.getpid()} {_job(variables)}"


def is_worker(variables: Mapping[str, str] = os.environ) -> bool:
    """Return whether this process is a worker of a rank: it has the rank's place in a job.

    A worker inherits the mark of its rank.  Before a rank is marked, only forks and multiprocessing
    tell its workers from a rank whose launcher started it by another program, such as a shell.
    Ranks of a job that a rank or a worker has started have a place of their own.
    """
    with suppress(OSError):
        mark, here = variables.get(RANK_PROCESS, ""), _job(variables)
        process, _, job = mark.partition(" ")
        if process == str(os.getpid()):
            return False
        if mark and mark != variables_of("self").get(RANK_PROCESS):
            return True  # set in the memory from which this process was forked
        if not here:
            return False
        if job == here:
            return True
        closed = "PMI_FD" in variables and not _connection(variables)
        if here.startswith(RANK_VARIABLES) and closed and "mpi4py.MPI" not in sys.modules:
            return True  # a rank's process manager leaves it open; Python closes it for a program
        forked = int(stat_of(os.getpid())[FLAGS]) & _FORKED
        return bool(forked or _by_multiprocessing()) and _job(variables_of(os.getppid())) == here
    return False


def _job(variables: Mapping[str, str]) -> str:
    """Return a text for the place in a job that the variables give; "" if they give none."""
    names, connection = _BY_ENV, ""
    if by_torchrun(variables):
        names = (TORCHRUN, *_BY_ENV)
    elif any(name in variables for name in RANK_VARIABLES):
        names, connection = (*RANK_VARIABLES, "PMIX_NAMESPACE"), _connection(variables)
    elif of_launcher(variables):
        names = (SRUN.rank, "SLURM_JOB_ID", "SLURM_STEP_ID", INDEX)
    elif "RANK" not in variables and "WORLD_SIZE" not in variables:
        return ""
    return " ".join((*(f"{name}={variables.get(name, '')}" for name in names), connection))


def _connection(variables: Mapping[str, str]) -> str:
    """Return the socket to the process manager of MPICH or Intel MPI; "" if there is none."""
    with suppress(OSError):
        file = os.readlink(file_of("self", variables.get("PMI_FD", "none")))
        return file if file.startswith("socket:") else ""
    return ""


def _by_multiprocessing() -> bool:
    """Return whether multiprocessing has started this process, which may not know it yet."""
    module = sys.modules.get("multiprocessing.process")
    if module is None:
        return False
    process = module.current_process()
    return hasattr(process, "_inheriting") or type(process).__name__ != "_MainProcess"


def tell_survived(survived: bool) -> None:
    """Tell the launcher whether the other ranks can go on if this one is lost.

    Does nothing under the launcher of an MPI, which does not ask.
    """
    if SURVIVED in os.environ:
        with suppress(OSError):  # the launcher has ended, or the descriptor is closed in a child
            line = f"{'+' if survived else '-'}{os.environ['RANK']}\n"
            os.write(int(os.environ[SURVIVED]), line.encode())
