"""Communicators that a program drops without `close`, on the ranks of threads or of an MPI job."""

from __future__ import annotations

from typing import Any

import numpy as np

import ringreduce as rr


def over_mpi() -> dict[str, Any]:
    """Return `facts` over MPI, and how many of 5 communicators are open after the last `init`."""
    engines = []
    with rr.init() as comm:
        found = facts(comm)
    for _ in range(5):
        again = rr.init()  # the one before is still held meanwhile
        again.split(0)
        engines.append(again._engine)
    return {**found, "init": sum(engine.usable for engine in engines)}


def facts(comm: rr.Communicator) -> dict[str, Any]:
    """Return how many parts of `comm`, of three ranks, are open after what ranks do with them.

    And what messages and calls of parts bring that some ranks have dropped, or that are kept by a
    method alone.
    """
    x, found, engines = np.array([comm.rank + 1]), {}, []

    def dropped() -> rr.Communicator:
        part = comm.split(comm.rank % 2)
        for _ in range(3):  # the third is compiled
            part.all_reduce(x)
        engines.append(part._engine)
        return part

    def still_open() -> int:
        comm.split(None)
        return sum(engine.usable for engine in engines)

    for _ in range(5):
        dropped().split(0)
    found["all drop"] = still_open()

    part = comm.split(0, key=-comm.rank)  # rank 2 is its rank 0
    engines.append(part._engine)
    if comm.rank == 2:
        del part
    found["two keep"] = [still_open(), still_open()]
    if comm.rank == 0:
        part.send(x, peer=1)
    elif comm.rank == 1:
        found["received"] = part.recv(np.zeros(1, int), peer=2).item()
    part = None
    found["none keeps"] = still_open()

    part = comm.split(0)
    engines.append(part._engine)
    out = np.zeros(1, int)
    if comm.rank == 0:
        works = part.recv(out, peer=1, async_op=True), part.all_reduce(x, async_op=True)
        part = None
    found["works wait"] = [still_open(), still_open()]
    if comm.rank == 1:
        part.send(x, peer=0)
    if comm.rank:
        part.all_reduce(x)
    else:
        found["late"] = [work.wait().item() for work in works]
    part = None
    found["works are over"] = still_open()

    part = comm.split(0)
    engines.append(part._engine)
    reduce, again = part.all_reduce, part.plan("all_reduce", x)
    part = None
    found["a method is kept"] = [still_open(), reduce(x).item()]
    reduce = None
    found["a planned call is kept"] = [still_open(), again().item()]
    again = None
    found["nothing is kept"] = still_open()
    return found


_SAME = {
    "all drop": 0,
    "two keep": [1, 1],
    "none keeps": 0,
    "works wait": [1, 1],
    "works are over": 0,
    "a method is kept": [1, 6],
    "a planned call is kept": [1, 6],
    "nothing is kept": 0,
}
RIGHT = [{**_SAME, "late": [2, 6]}, {**_SAME, "received": 1}, _SAME]
"""What the three ranks return."""
