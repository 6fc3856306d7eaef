"""Ranks that add to a shared array at the same time, one of which is killed meanwhile.

The functions are called on every rank, by processes without MPI (`tests.support.processes`) and by
MPI jobs; `make(shape)` makes a shared array of float64.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import ringreduce as rr
from ringreduce.calls.shared_array import SharedArray
from ringreduce.shm import block_access
from ringreduce.shm.block_access import BLOCK_BYTES, Access
from ringreduce.shm.blocks import share_blocks
from ringreduce.system.proc import start_of
from tests.support.mpi import report

Make = Callable[[Any], SharedArray[np.float64]]
BLOCK = BLOCK_BYTES // 8
"""Elements of a block."""
_DEADLINE_S = 300.0


def maker(rank: int, collect: Callable[[bytes], bytes]) -> Make:
    """Return `make` for ranks that `collect` bytes from each other."""

    def make(shape: Any) -> SharedArray[np.float64]:
        dtype, nbytes = np.dtype(np.float64), 8 * int(np.prod(shape))
        sizes = shape if isinstance(shape, tuple) else (shape,)
        blocks = share_blocks(nbytes, dtype, 0, rank, collect, crowded=True, timeout_s=20)
        return SharedArray(blocks, sizes, owner=0)

    return make


def add_many(
    make: Make, rank: int, ranks: int, adds: int, elements: int, victim: int = -1
) -> dict[str, Any]:
    """Add integers `adds` times on every rank.  If there is a victim, rank 0 kills it halfway.

    Returns what this rank finds in the end; see `_found`.
    """
    total, progress = make(elements), make(ranks)
    pids, finished = make(ranks), make(ranks)
    pattern = np.arange(elements) % 7 + 1.0
    x = pattern * (rank + 1)
    pids.array[rank] = os.getpid()
    _until(lambda: bool((pids.array > 0).all()))
    kills = rank == 0 <= victim
    for number in range(adds if rank != victim else 1 << 62):
        total.add(x)
        progress.array[rank] = number + 1
        if kills and progress.array[victim] >= adds // 2:
            os.kill(int(pids.array[victim]), signal.SIGKILL)
            kills = False
    if kills:
        _until(lambda: bool(progress.array[victim] >= adds // 2))
        os.kill(int(pids.array[victim]), signal.SIGKILL)
    finished.array[rank] = 1
    living = [each for each in range(ranks) if each != victim]
    _until(lambda: bool(finished.array[living].all()))
    if victim >= 0:
        _until(lambda: start_of(int(pids.array[victim])) is None)
    return _found(total, pattern, adds, living, victim, int(progress.array[victim]))


def _found(
    total: SharedArray[np.float64],
    pattern: np.ndarray,
    adds: int,
    living: list[int],
    victim: int,
    progress: int,
) -> dict[str, Any]:
    """Return the state after all adds.

    counted: adds of the victim that the version counts; progress: adds that the victim has seen
    completed; in_blocks: adds of the victim in each block; whole: whether all elements of a block
    have the same adds.
    """
    version = total.version  # before an add is taken over, which changes no version
    theirs = total.read() - pattern * adds * sum(rank + 1 for rank in living)
    times = theirs / pattern / (victim + 1 or 1)
    blocks = [times[at : at + BLOCK] for at in range(0, times.size, BLOCK)]
    return {
        "counted": version - adds * len(living),
        "progress": progress if victim >= 0 else 0,
        "in_blocks": [float(block[0]) for block in blocks],
        "whole": all(bool((block == block[0]).all()) for block in blocks),
    }


def is_exact(found: dict[str, Any]) -> bool:
    """Whether all completed adds are there, and all or none of an interrupted add in each block."""
    counted = found["counted"]
    return (
        found["whole"]
        and counted in (found["progress"], found["progress"] + 1)
        and set(found["in_blocks"]) <= {counted, counted + 1}
    )


def _until(ready: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _DEADLINE_S
    while not ready():
        assert time.monotonic() < deadline, "the other ranks do not get on"
        time.sleep(0.001)


# --- ranks of an MPI job --------------------------------------------------------------------------


def add_over_mpi(*numbers: str) -> dict[str, Any]:
    """`add_many` for the program ``call``; `numbers`: adds, elements, and perhaps the victim.

    With a victim the living ranks do not return: MPI_Finalize would wait for the victim.
    """
    adds, elements, *victims = map(int, numbers)
    with rr.init(timeout_s=120) as comm:

        def make(shape: Any) -> SharedArray[np.float64]:
            return comm.shared(shape, np.float64, owner=comm.size - 1)

        reported = make(comm.size)
        found = add_many(make, comm.rank, comm.size, adds, elements, *victims)
        if victims:
            report(comm.rank, found)
            reported.add(np.eye(comm.size)[comm.rank])
            _until(lambda: reported.version == comm.size - 1)
            os._exit(0)
        return found


# --- ranks without MPI ----------------------------------------------------------------------------


def add_in_processes(
    rank: int, ranks: int, collect: Callable[[bytes], bytes], *numbers: str
) -> dict[str, Any]:
    """`add_many` for `tests.support.processes`; `numbers`: adds, elements, victim."""
    return add_many(maker(rank, collect), rank, ranks, *map(int, numbers))


STEPS = (
    "compare_and_swap",
    "after compare_and_swap",
    "in call_fold",
    "after call_fold",
    "after store_release",
    "in copy",
    "after copy",
    "fetch_and_add",
)
"""Where a rank is killed in its first add: before, in the middle of, or after the first call."""


def die_at_each_step(
    rank: int, ranks: int, collect: Callable[[bytes], bytes]
) -> list[dict[str, Any]]:
    """Each rank but the last is killed in an add to an array of its own, at its step of `STEPS`.

    The last rank then adds to all arrays.  It returns for each the elements, the version, and the
    seconds that its add took.
    """
    make = maker(rank, collect)
    arrays = [make((2 * BLOCK,)) for _ in STEPS]
    pids = make(ranks)
    pids.array[rank] = os.getpid()
    x = np.full(2 * BLOCK, 100.0)
    collect(b"")
    if rank < len(STEPS):
        arrays[rank].add(x)
        _interpret(arrays[rank], STEPS[rank])
        arrays[rank].add(x)
        raise AssertionError("this rank is not killed")
    _until(lambda: all(start_of(int(pid)) is None for pid in pids.array[:-1]))
    found = []
    for array in arrays:
        begin = time.monotonic()
        array.add(np.ones(2 * BLOCK))
        took_s = time.monotonic() - begin
        values = [sorted(set(block.tolist())) for block in array.read().reshape(2, BLOCK)]
        found.append({"blocks": values, "version": array.version, "took_s": took_s})
    return found


def _interpret(array: SharedArray[np.float64], step: str) -> None:
    """Let Python run the functions of `block_access` for an array, and die at a step."""
    when, _, name = step.rpartition(" ")
    called = getattr(block_access, name)

    def dying(*given: Any) -> Any:
        if when == "in":  # the second half is never done
            at = {"copy": 2, "call_fold": 4}[name]
            given = (*given[:at], given[at] // 2, *given[at + 1 :])
        if when:
            called(*given)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(block_access, name, dying)
    array._blocks._serve = lambda address, *request: block_access.serve(Access(address), *request)
