"""Faults of particular kinds: ``trouble.py kind``, the name of a function here."""

import contextlib
import os
import signal
import sys
import time

import numpy as np
from mpi4py import MPI

import ringreduce as rr
from ringreduce.calls.runner import Runner
from tests.support.mpi import report
from tests.support.programs.fault import LONG_S, caught

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size


def differing_timeouts() -> None:
    """Rank 0 is the least patient, rank 1 never calls."""
    comm = rr.init(timeout_s=LONG_S)
    if RANK == 1:
        time.sleep(LONG_S)
    report(RANK, caught(comm, lambda: comm.all_reduce(1, timeout_s=LONG_S if RANK else 0.5)))


def stopped_in_a_disagreement() -> None:
    """Ranks 0 and 1 disagree while rank 2 is stopped."""
    comm = rr.init(timeout_s=3)
    comm.barrier()
    if RANK == 2:
        os.kill(os.getpid(), signal.SIGSTOP)
    report(RANK, caught(comm, lambda: comm.all_reduce(np.ones(8 + RANK))))


def left_and_caught() -> None:
    """Rank 1 leaves its with block by an exception, and goes on without the communicator."""
    comm = rr.init(timeout_s=LONG_S)
    if RANK == 1:
        with contextlib.suppress(KeyError), comm:
            raise KeyError("mine")
    report(RANK, caught(comm, comm.barrier))


def never_init() -> None:
    """Rank 1 never calls init."""
    if RANK == 1:
        time.sleep(LONG_S)
    try:
        rr.init(timeout_s=3)
    except rr.PeerTimeoutError as error:
        report(RANK, {"error": "PeerTimeoutError", "text": str(error), "ranks": error.ranks})


def stopped_in_init() -> None:
    """Rank 1 stops between the steps of init."""
    if RANK == 1:
        meet = Runner.meet

        def stop(*arguments: object) -> None:
            os.kill(os.getpid(), signal.SIGSTOP)
            meet(*arguments)

        Runner.meet = stop
    try:
        rr.init(timeout_s=3)
    except rr.PeerTimeoutError as error:
        report(RANK, {"error": "PeerTimeoutError", "text": str(error), "ranks": error.ranks})


def paused() -> None:
    """Calls for some seconds, during which the test stops and continues ranks."""
    comm = rr.init(timeout_s=120)
    x = np.arange(1000.0)
    # The first calls, which load machine code, are not meant by the timeout of the later ones.
    comm.all_reduce(1, "min")
    comm.all_reduce(x)
    report(RANK, {"pid": os.getpid()})
    end = time.time() + 6
    while comm.all_reduce(int(time.time() < end), "min", timeout_s=2):
        total = comm.all_reduce(x * (RANK + 1), timeout_s=2)
        assert np.array_equal(total, x * (SIZE * (SIZE + 1) // 2))
        time.sleep(0.01)
    comm.close()
    report(RANK, {"done": True})


def forked() -> None:
    """A child calls: it is refused at once, and the ranks go on as if nothing had been."""
    comm = rr.init(timeout_s=120)
    comm.all_reduce(np.ones(3))
    if RANK == 0:
        work = comm.all_reduce(np.ones(3), async_op=True)  # the others do not call it yet
    calls = [lambda: comm.all_reduce(np.ones(3)), lambda: comm.all_reduce(np.ones(5))]
    answers = []
    for call in [*calls, work.wait] if RANK == 0 else calls:
        readable, writable = os.pipe()
        child = os.fork()
        if not child:
            start = time.monotonic()
            try:
                call()
            except ValueError as error:
                os.write(writable, f"{time.monotonic() - start} {error}".encode())
            os._exit(0)
        os.close(writable)
        os.waitpid(child, 0)
        answers.append(os.read(readable, 1000).decode())
    MPI.COMM_WORLD.Barrier()
    total = (work.wait() if RANK == 0 else comm.all_reduce(np.ones(3))).tolist()
    comm.close()
    report(RANK, {"answers": answers, "total": total})


def blocked() -> None:
    """All ranks but 0 wait in a collective."""
    comm = rr.init(timeout_s=LONG_S)
    comm.barrier()
    report(RANK, {"pid": os.getpid()})
    if RANK == 0:
        time.sleep(LONG_S)
    comm.barrier()


if __name__ == "__main__":
    globals()[sys.argv[1]]()
