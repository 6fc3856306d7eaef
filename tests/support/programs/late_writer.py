"""Rank 1 is stopped while it writes to an array of rank 0, or before, or at any moment.

late_writer.py WHERE KIND FATE SEED: the writer is then killed, stays stopped until the end, or
goes on after the error.  Rank 0 reports its error, and how many bytes were changed of memory that
it has used anew.
"""

import os
import random
import signal
import sys
import threading
import time

import numpy as np

import ringreduce as rr
from ringreduce.shm.protocol import departure_of, mark_of, slot_of
from ringreduce.system.proc import stat_of
from tests.support.mpi import DEADLINE_S, report


def stop(victim: int, segment: int, base: int) -> None:
    """Stop or kill rank 1 in the second of the two rounds of a call, with the mark or without."""
    time.sleep(drawn.uniform(0, 0.2) * (where == "at any moment"))
    while True:
        os.kill(victim, signal.SIGSTOP)
        while stat_of(victim)[0] != b"T":
            time.sleep(1e-4)
        latest = max(slot_of(segment, parity).sequence for parity in range(2))
        in_a_write = mark_of(segment).writes == (where == "in a write")
        if where == "at any moment" or ((latest - base) % 2 and in_a_write):
            break
        os.kill(victim, signal.SIGCONT)
        time.sleep(1e-3)
    if fate == "killed":
        os.kill(victim, signal.SIGKILL)


def used_anew(x: np.ndarray, may_be_written: bool) -> list[np.ndarray]:
    """Return arrays in memory that the caller may use: `x`, or the memory that `x` has left."""
    if may_be_written:
        size = x.size
        del x
        return [np.full(size, 77, np.uint8) for _ in range(3)]
    x[...] = 77
    return [x]


where, kind, fate, seed = sys.argv[1:]
drawn = random.Random(seed)
_BYTES = drawn.choice((256, 512, 1024, 2048)) << 10
config = rr.Config(pull_bytes=1 if kind == "ordinary" else None)
comm = rr.init(transport="shm", timeout_s=120, config=config)
x = comm.empty(_BYTES, np.uint8) if kind == "registered" else np.empty(_BYTES, np.uint8)
x[...] = 0
pids = comm.all_gather(np.array([os.getpid()]))
memory, base = comm._engine.executables._shared_memory, comm._engine.executables.rounds
segment = memory._memory.addresses[1]
if comm.rank == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher sends it after a killed rank
    how = int(pids[1]), segment, base
    threading.Thread(target=stop, args=how, daemon=True).start()
try:
    while True:
        comm.all_reduce(x, "min", out=x, algorithm="two_shot", timeout_s=1)
except rr.RingReduceError as error:
    found = {"error": type(error).__name__}
if comm.rank == 0:
    arrays = [x]
    del x
    arrays = used_anew(arrays.pop(), where != "before a write")
    if fate == "continued":
        os.kill(int(pids[1]), signal.SIGCONT)
        end = time.monotonic() + DEADLINE_S
        while not departure_of(segment).has_left:
            assert time.monotonic() < end
            time.sleep(1e-3)
    found["changed"] = sum(int((each != 77).sum()) for each in arrays)
report(comm.rank, found)
if comm.rank == 0 and fate == "stopped":
    os.kill(int(pids[1]), signal.SIGKILL)
