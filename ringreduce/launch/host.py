"""What a job on this host finds: whether its ranks share memory, and how."""

from __future__ import annotations

from ringreduce.config import Environment, Memory
from ringreduce.launch.launcher import cores
from ringreduce.launch.probe import ask


def memory_of_job(ranks: int, transport: str | None = None) -> Memory | None:
    """Return what a job of `ranks` ranks on this host finds; None if it exchanges messages.

    The job is one that `ringreduce run` starts here, with the cores and variables of this process.
    `transport` is as for `ringreduce.init`; with ``"shm"`` the result is never None.
    """
    transport = transport or Environment.read().transport
    if transport == "mpi":
        return None
    answer = ask("memory")
    found = answer.lines[0] if answer.lines else {"shared": False, "single_copy": False}
    if not found["shared"] and transport != "shm":
        return None
    return Memory(found["single_copy"], crowded=ranks > cores())
