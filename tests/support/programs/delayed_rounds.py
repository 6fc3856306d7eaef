"""Check many random calls through shared memory, with random delays before instructions."""

import random
import sys

import numpy as np

import ringreduce as rr
from ringreduce.planning import shm_instructions
from tests.support.mpi import report

CALLS = (
    "all_reduce",
    "all_reduce",
    "reduce_scatter",
    "all_gather",
    "broadcast",
    "reduce",
    "barrier",
)


def main(count: int, seed: int) -> None:
    """Every rank draws the same calls, and delays of its own.

    In half of the runs small arrays are exposed, written directly and staged in the ring, as
    large arrays are.
    """
    rng = random.Random(seed)
    if rng.random() < 0.5:
        shm_instructions.DIRECT_BYTES, shm_instructions.IN_SLOT_BYTES = 1, 0
    config = rr.Config(pull_bytes=rng.choice([256, 4096, 1 << 20]), slice_bytes=1 << 14)
    with rr.init(transport="shm", timeout_s=120, config=config) as comm:
        shared_memory = comm._engine.executables._shared_memory
        shared_memory.team.delay_seed = 2 * (1000 * seed + comm.rank) + 1
        registered = comm.empty((2, 20_000), np.int64)
        wrong = sum(not right(comm, rng, registered) for _ in range(count))
        shared_memory.team.delay_seed = 0
        report(comm.rank, {"wrong": wrong, "calls": count, "rounds": shared_memory.rounds})


def right(comm: rr.Communicator, rng: random.Random, registered: np.ndarray) -> bool:
    """Make a call; return whether its result is right."""
    name, base, root = rng.choice(CALLS), rng.randrange(1000), rng.randrange(comm.size)
    size = rng.choice([1, 2, 3, 7, 30, 100, 500]) if rng.random() < 0.97 else rng.randrange(20_000)
    algorithm = rng.choice(["auto", "auto", "one_shot", "two_shot", "ring", "tree"])
    ramp = np.arange(size) % 50 + base
    # Not the same on all ranks.
    x = registered[0, :size] if (base + comm.rank) % 3 == 0 else np.empty(size, np.int64)
    y = registered[1, :size] if (base + comm.rank) % 5 < 2 else np.empty(size, np.int64)
    x[...] = ramp + comm.rank
    total = comm.size * ramp + comm.size * (comm.size - 1) // 2
    if name == "barrier":
        comm.barrier()
        return True
    if name == "all_reduce":
        out = (x, y, None)[rng.randrange(3)]
        return np.array_equal(comm.all_reduce(x, out=out, algorithm=algorithm), total)
    if name == "reduce_scatter":
        return np.array_equal(comm.reduce_scatter(x), np.array_split(total, comm.size)[comm.rank])
    if name == "all_gather":
        everybody = np.concatenate([ramp + rank for rank in range(comm.size)])
        return np.array_equal(comm.all_gather(x, counts=[size] * comm.size), everybody)
    if name == "broadcast":
        return np.array_equal(comm.broadcast(x, root), ramp + root)
    result = comm.reduce(x, root)
    return result is None if comm.rank != root else np.array_equal(result, total)


main(int(sys.argv[1]), int(sys.argv[2]))
