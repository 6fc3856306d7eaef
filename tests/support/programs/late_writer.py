"""Rank 1 is stopped while it writes to an array of rank 0, or before, and goes on after the error.

Rank 0 reports its error, and how many bytes were changed of memory that it has used anew.
"""

import os
import signal
import sys
import threading
import time

import numpy as np

import ringreduce as rr
from ringreduce.processes import stat_of
from ringreduce.shm.protocol import departure_of, mark_of, slot_of
from tests.support.mpi import DEADLINE_S, report

_BYTES = 2 << 20


def stop(victim: int, segment: int, base: int, while_it_writes: bool) -> None:
    """Stop rank 1 in the second of the two rounds of a call, with the mark or without."""
    while True:
        os.kill(victim, signal.SIGSTOP)
        while stat_of(victim)[0] != b"T":
            time.sleep(1e-4)
        latest = max(slot_of(segment, parity).sequence for parity in range(2))
        if (latest - base) % 2 and mark_of(segment).writes == while_it_writes:
            break
        os.kill(victim, signal.SIGCONT)
        time.sleep(1e-3)


def used_anew(x: np.ndarray, while_it_writes: bool) -> list[np.ndarray]:
    """Return arrays in memory that the caller may use: `x`, or the memory that `x` has left."""
    if while_it_writes:
        size = x.size
        del x
        return [np.full(size, 77, np.uint8) for _ in range(3)]
    x[...] = 77
    return [x]


where, kind = sys.argv[1:]
config = rr.Config(pull_bytes=1 if kind == "ordinary" else None)
comm = rr.init(transport="shm", timeout_s=120, config=config)
x = comm.empty(_BYTES, np.uint8) if kind == "registered" else np.empty(_BYTES, np.uint8)
x[...] = 0
pids = comm.all_gather(np.array([os.getpid()]))
memory, base = comm._engine.shared_memory, comm._engine.rounds
segment = memory._memory.addresses[1]
if comm.rank == 0:
    how = int(pids[1]), segment, base, where == "in a write"
    threading.Thread(target=stop, args=how, daemon=True).start()
try:
    while True:
        comm.all_reduce(x, "min", out=x, algorithm="two_shot", timeout_s=1)
except rr.RingReduceError as error:
    found = {"error": type(error).__name__}
if comm.rank == 0:
    arrays = [x]
    del x
    arrays = used_anew(arrays.pop(), where == "in a write")
    os.kill(int(pids[1]), signal.SIGCONT)
    end = time.monotonic() + DEADLINE_S
    while not departure_of(segment).has_left:
        assert time.monotonic() < end
        time.sleep(1e-3)
    found["changed"] = sum(int((each != 77).sum()) for each in arrays)
report(comm.rank, found)
