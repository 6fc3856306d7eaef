"""Endless random calls, in which one rank fails at a random moment: see `main`."""

import contextlib
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from types import FrameType

import numpy as np
from mpi4py import MPI

import ringreduce as rr
from tests.mpi import report

TIMEOUT_S = 1.0
MOST_CALLS = 30
"""Before the fault."""
LONGEST_S = 0.004
"""From the start of a call until the fault, at most: some calls are over by then."""
RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size


def fail(how: str) -> None:
    report(RANK, {"failed_at": time.time()})
    match how:
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "never":
            time.sleep(60)
        case "raise":
            raise ValueError("the victim's own error")
        case "exit":
            sys.exit(3)


def random_call(comm: rr.Communicator, rng: random.Random) -> None:
    """A call that all ranks draw alike, and its result compared with what it must be."""
    count = rng.choice([1, 7, 1000, 5000, 60_000])
    x = np.arange(count) * (RANK + 1)
    total = np.arange(count) * (SIZE * (SIZE + 1) // 2)
    root = rng.randrange(SIZE)
    calls: list[tuple[Callable[[], np.ndarray], np.ndarray]] = [
        (lambda: comm.all_reduce(x, algorithm=rng.choice(["ring", "hierarchical"])), total),
        (lambda: comm.reduce_scatter(x), np.array_split(total, SIZE)[RANK]),
        (lambda: comm.broadcast(x, root), np.arange(count) * (root + 1)),
        (lambda: comm.all_gather(x[: RANK + 1]), gathered(count)),
        (lambda: comm.all_gather(x, counts=[count] * SIZE), gathered(count, whole=True)),
    ]
    call, wanted = rng.choice(calls)
    result = call()
    if not np.array_equal(result, wanted):
        report(RANK, {"wrong_result": f"{result} in place of {wanted}"})
        os._exit(1)


def gathered(count: int, whole: bool = False) -> np.ndarray:
    parts = [np.arange(count) * (rank + 1) for rank in range(SIZE)]
    return np.concatenate([p if whole else p[: rank + 1] for rank, p in enumerate(parts)])


def call_for_ever(comm: rr.Communicator, rng: random.Random, how: str, victim: int) -> None:
    calls, seconds = rng.randrange(MOST_CALLS), rng.uniform(0, LONGEST_S)

    def now(number: int, frame: FrameType | None) -> None:
        fail(how)

    signal.signal(signal.SIGALRM, now)
    while True:
        if victim == RANK and calls == 0:
            signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-6))
        calls -= 1
        random_call(comm, rng)


def main(seed: str, how: str, ending: str, victim: str) -> None:
    """Rank `victim` fails as `how` says; the others' `ending` is "caught" or "uncaught"."""
    rng = random.Random(seed)
    nodes = (1, SIZE - 1) if rng.random() < 0.5 else None
    config = rr.Config(slice_bytes=rng.choice([1 << 15, 4 << 20]))
    comm = rr.init(timeout_s=TIMEOUT_S, nodes=nodes, config=config)
    comm.barrier()
    in_with_block = rng.random() < 0.5
    if ending == "uncaught" or int(victim) == RANK:
        with comm if in_with_block else contextlib.nullcontext():
            call_for_ever(comm, rng, how, int(victim))
    try:
        call_for_ever(comm, rng, how, int(victim))
    except rr.RingReduceError as error:
        said = {"error": type(error).__name__, "text": str(error)}
        report(RANK, {**said, "ranks": getattr(error, "ranks", None), "raised_at": time.time()})


if __name__ == "__main__":
    main(*sys.argv[1:])
