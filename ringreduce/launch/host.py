"""Find out whether the ranks of a job on this host share memory, and how."""

from __future__ import annotations

from ringreduce.config import Environment, Memory
from ringreduce.launch.probe import ask
from ringreduce.system.cores import usable


class VariableError(Exception):
    """A variable of the environment has a value with which no job would start."""


def memory_of_job(ranks: int, transport: str | None = None) -> Memory | None:
    """Return what a job of `ranks` ranks on this host finds; None if it exchanges messages.

    The job is one that `ringreduce run` starts here, with the cores and variables of this process.
    `transport` is as for `ringreduce.init`; with ``"shm"`` the result is never None.  Raises
    VariableError for a variable that `init` would refuse.
    """
    transport = transport or _transport_of_environment()
    if transport == "mpi":
        return None
    answer = ask("memory")
    found = answer.lines[0] if answer.lines else {}
    if not found.get("shared") and transport != "shm":
        return None
    can = {fact: found.get(fact, False) for fact in ("single_copy", "writes", "quick")}
    return Memory(crowded=ranks > usable(), **can)


def _transport_of_environment() -> str:
    try:
        return Environment.read().transport or "auto"
    except ValueError as error:
        raise VariableError(str(error)) from None
