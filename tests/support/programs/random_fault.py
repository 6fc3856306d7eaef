"""Endless random calls, in which one rank fails at a random moment: see `main`."""

import contextlib
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np

import ringreduce as rr
from ringreduce.algorithms import ALGORITHMS
from tests.support.mpi import place, report

SILENCE_S, LOSS_S = 1.0, 20.0
"""Timeout of calls: others learn of a silent victim by it alone, of a lost one long before."""
TRANSPORT = "TRANSPORT_OF_FAULTS"
MOST_CALLS = 30
"""Before the fault."""
LONGEST_S = 0.004
"""From the start of a call until the fault, at most: some calls are over by then."""
ALL_REDUCES = (
    *ALGORITHMS["all_reduce"],
    *("hierarchical(ring, allgather_reduce)", "hierarchical(leader, doubling)", "star(2)"),
)
RANK, SIZE = place()


class VictimsError(Exception):
    """That nobody else raises, and so nobody expects."""


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
            raise VictimsError("the victim's own error")
        case "exit":
            sys.exit(3)


def random_call(comm: rr.Communicator, rng: random.Random) -> None:
    """A call that all ranks draw alike, and its result compared with what it must be."""
    count = rng.choice([1, 7, 1000, 5000, 60_000])
    root = rng.randrange(SIZE)
    algorithm = rng.choice(ALL_REDUCES)
    x, total = np.arange(count) * (RANK + 1), np.arange(count) * (SIZE * (SIZE + 1) // 2)
    from_root, at_root = np.arange(count) * (root + 1), root == RANK
    exact = np.arange(count, dtype=np.float32) % 8
    to_each = np.concatenate([x + rank for rank in range(SIZE)])

    def asynchronous() -> np.ndarray:
        first, second, third = (comm.all_reduce(x * i, async_op=True) for i in (1, 2, 3))
        return second.wait() // 2 + third.wait() // 3 + first.wait()

    def planned() -> np.ndarray:
        out = x.copy()
        call = comm.plan("all_reduce", out, out=out, algorithm=algorithm)
        call()
        out[:] = x
        return call()

    def fused() -> np.ndarray:
        whole, part = comm.all_reduce([x, x[:5].astype(np.int32)], "max")
        assert are_equal(part, (np.arange(count)[:5] * SIZE).astype(np.int32))
        return whole

    calls: list[tuple[Callable[[], Any], np.ndarray | None]] = [
        (lambda: comm.all_reduce(x, algorithm=algorithm), total),
        (asynchronous, 3 * total),
        (planned, total),
        (fused, np.arange(count) * SIZE),
        (lambda: comm.all_reduce(exact, "mean", wire="bfloat16"), exact),
        (lambda: comm.reduce_scatter(x), np.array_split(total, SIZE)[RANK]),
        (lambda: comm.reduce(x, root), total if at_root else None),
        (lambda: comm.broadcast(x, root), from_root),
        (lambda: comm.all_gather(x[: RANK + 1]), gathered(count)),
        (lambda: comm.all_gather(x, counts=[count] * SIZE), gathered(count, whole=True)),
        (lambda: comm.gather(x[: RANK + 1], root), gathered(count) if at_root else None),
        (
            lambda: comm.scatter(x if at_root else None, root),
            np.array_split(from_root, SIZE)[RANK],
        ),
        (lambda: comm.all_to_all(to_each), gathered(count, whole=True) + RANK),
        (lambda: comm.barrier(), None),
    ]
    call, wanted = rng.choice(calls)
    result = call()
    if not are_equal(result, wanted):
        report(RANK, {"wrong_result": f"{result} in place of {wanted}"})
        os._exit(1)


def are_equal(a: np.ndarray | None, b: np.ndarray | None) -> bool:
    """Compare without `np.array_equal`, which returns False where a signal handler raises."""
    if a is None or b is None:
        return a is b
    return a.shape == b.shape and bool((a == b).all())


def gathered(count: int, whole: bool = False) -> np.ndarray:
    parts = [np.arange(count) * (rank + 1) for rank in range(SIZE)]
    return np.concatenate([p if whole else p[: rank + 1] for rank, p in enumerate(parts)])


def call_for_ever(comm: rr.Communicator, rng: random.Random, how: str, victim: int) -> None:
    calls, seconds = rng.randrange(MOST_CALLS), rng.uniform(0, LONGEST_S)

    def now(number: int, frame: FrameType | None) -> None:
        fail(how)

    signal.signal(signal.SIGALRM, now)
    # Python drops what a handler raises in the callback of a weak reference: then it fails again.
    sys.unraisablehook = lambda _: signal.setitimer(signal.ITIMER_REAL, 1e-3)
    while True:
        if victim == RANK and calls == 0:
            signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-6))
        calls -= 1
        random_call(comm, rng)


def main(seed: str, how: str, ending: str, victim: str) -> None:
    """Rank `victim` fails as `how` says; the others' `ending` is "caught" or "uncaught"."""
    rng = random.Random(seed)
    # What 16-bit calls need is imported and compiled before: it may take longer than the timeout.
    rr.spawn(lambda c: c.all_reduce(np.ones(3, np.float32), "mean", wire="bfloat16"), 3)
    rr.init(timeout_s=60).close()  # without MPI, ranks may start at very different times
    nodes = (1, SIZE - 1) if rng.random() < 0.5 else None
    config = rr.Config(slice_bytes=rng.choice([1 << 15, 4 << 20]))
    comm = rr.init(
        transport=os.environ.get(TRANSPORT, "auto"),
        timeout_s=SILENCE_S if how in ("stop", "never") else LOSS_S,
        nodes=nodes,
        config=config,
    )
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
