"""Communicators that a program drops without `close`, on the ranks of threads or of an MPI job."""

from __future__ import annotations

import numpy as np

import ringreduce as rr


def over_mpi() -> int:
    """Check `facts` over MPI; return how many of 5 communicators are open after the last."""
    engines = []
    with rr.init() as comm:
        facts(comm)
    for _ in range(5):
        again = rr.init()  # the one before is still held meanwhile
        again.split(0)
        engines.append(again._engine)
    return sum(engine.ended is None for engine in engines)


def facts(comm: rr.Communicator) -> None:
    """Check how many parts of `comm`, of three ranks, are open after what ranks do with them.

    And what messages and calls of parts bring that some ranks have dropped, or that are kept by a
    method alone.
    """
    x, engines = np.array([comm.rank + 1]), []

    def dropped() -> rr.Communicator:
        part = comm.split(comm.rank % 2)
        for _ in range(3):  # the third is compiled
            part.all_reduce(x)
        engines.append(part._engine)
        return part

    def still_open() -> int:
        comm.split(None)
        return sum(engine.ended is None for engine in engines)

    for _ in range(5):
        dropped().split(0)
    assert still_open() == 0, "all ranks have dropped all parts"

    part = comm.split(0, key=-comm.rank)  # rank 2 is its rank 0
    engines.append(part._engine)
    if comm.rank == 2:
        del part
    assert [still_open(), still_open()] == [1, 1], "two ranks keep the part"
    if comm.rank == 0:
        part.send(x, peer=1)
    elif comm.rank == 1:
        assert part.recv(np.zeros(1, int), peer=2).item() == 1
    part = None
    assert still_open() == 0, "no rank keeps the part"

    part = comm.split(0)
    engines.append(part._engine)
    if comm.rank == 0:
        works = (
            part.recv(np.zeros(1, int), peer=1, async_op=True),
            part.all_reduce(x, async_op=True),
        )
        part = None
    assert [still_open(), still_open()] == [1, 1], "calls of the part are under way"
    if comm.rank == 1:
        part.send(x, peer=0)
    if comm.rank:
        part.all_reduce(x)
    else:
        assert [work.wait().item() for work in works] == [2, 6]
    part = None
    assert still_open() == 0, "the calls are over"

    part = comm.split(0)
    engines.append(part._engine)
    reduce, again = part.all_reduce, part.plan("all_reduce", x)
    part = None
    assert [still_open(), reduce(x).item()] == [1, 6], "a method is kept"
    reduce = None
    assert [still_open(), again().item()] == [1, 6], "a planned call is kept"
    again = None
    assert still_open() == 0, "nothing is kept"
