"""Calls through shared memory on the ranks of an MPI job: see `facts`."""

from __future__ import annotations

import contextlib
import os
import random
from typing import Any
from unittest import mock

import numpy as np

import ringreduce as rr
from ringreduce.shm import segments
from tests.support.mpi import place

TURNS = 100
TRANSPORTS = ("shm", "auto", "mpi")
WAYS = ("single-copy", "staged")
KINDS = ("plain", "registered")
LACKING = ("reads", "writes of one", "memory files", "memory files of one")


def facts() -> dict[str, Any]:
    """Return the result of each function below on this rank, by the name of the fact."""
    return {
        **{transport: sums(transport) for transport in TRANSPORTS},
        **{way: registered_in_any_mixture(way) for way in WAYS},
        **{f"{way} {kind}": past_the_caches(way, kind) for way in WAYS for kind in KINDS},
        **{lacking: sums(lacking=lacking) for lacking in LACKING},
    }


def rounds_of(comm: rr.Communicator) -> int:
    """Return the number of flows of a communicator that go through memory."""
    shared_memory = comm._engine.executables._shared_memory
    return 0 if shared_memory is None else shared_memory.rounds


def config_of(way: str) -> rr.Config:
    return rr.Config(pull_bytes=1 if way == "single-copy" else 1 << 40)


def sums(transport: str = "auto", lacking: str = "") -> list:
    """Return how many sums are wrong, whether through memory, single-copy, and written directly.

    `lacking` is a way of sharing memory that is not to be had.
    """
    patch: Any = contextlib.nullcontext()
    if lacking == "reads":
        patch = mock.patch.object(segments, "_reads", return_value=False)
    elif lacking == "writes of one":
        patch = mock.patch.object(segments, "_writes", return_value=place()[0] != 1)
    elif lacking == "memory files" or (lacking and place()[0] == 1):
        patch = mock.patch.object(os, "memfd_create", side_effect=OSError)
    with patch, rr.init(transport=transport, timeout_s=120) as comm:
        wrong = 0
        for count in (1, 6, 7, 1000, 100_000, 400_000) * 2:
            for x in (np.empty(count, np.float32), comm.empty(count, np.float32)):
                fill(comm, x)
                wrong += not np.array_equal(comm.all_reduce(x), filled_sum(comm, count))
                comm.all_reduce(x, out=x)
                wrong += not np.array_equal(x, filled_sum(comm, count))
        found = comm.config.memory
        facts = (False, False) if found is None else (found.single_copy, found.writes)
        return [wrong, rounds_of(comm) > 0, *facts]


def fill(comm: rr.Communicator, x: np.ndarray) -> None:
    x[...] = np.arange(x.size) % 1000 + comm.rank


def filled_sum(comm: rr.Communicator, count: int) -> np.ndarray:
    return comm.size * (np.arange(count) % 1000) + comm.size * (comm.size - 1) / 2


def registered_in_any_mixture(way: str) -> int:
    """Each rank draws whether its arrays are registered, and whether it works in place."""
    common = random.Random(way)
    with rr.init(transport="shm", timeout_s=120, config=config_of(way)) as comm:
        own = random.Random(f"{way} {comm.rank}")
        collectives = ["all_reduce", "all_reduce", "broadcast", "reduce", "all_gather", "gather"]
        for turn in range(TURNS):
            collective = common.choice([*collectives, "all_to_all"])
            algorithm = common.choice(["auto", "two_shot", "ring", "halving_doubling"])
            count = common.choice([1, 500, 5_003, 40_009, 150_001])
            size = count * comm.size if collective == "all_to_all" else count
            longer = size * comm.size if collective.endswith("gather") else size
            x = own.choice([np.empty, comm.empty])(size, np.int64)
            y = own.choice([np.empty, comm.empty])(longer, np.int64)
            in_place = collective in ("all_reduce", "broadcast") and own.random() < 0.4
            only_root = collective in ("reduce", "gather")
            out = None if only_root and comm.rank else x if in_place else y
            given = [np.arange(size) * (rank + 2) + turn for rank in range(comm.size)]
            x[...] = given[comm.rank]
            how = {"algorithm": algorithm} if collective == "all_reduce" else {}
            getattr(comm, collective)(x, out=out, **how)
            wanted = what_comes_of(collective, given, comm.rank)
            assert out is None or np.array_equal(out, wanted), (turn, collective, algorithm, count)
            assert in_place or np.array_equal(x, given[comm.rank])
        return rounds_of(comm)


def what_comes_of(collective: str, given: list[np.ndarray], rank: int) -> np.ndarray:
    if collective == "broadcast":
        return given[0]
    if collective.endswith("gather"):
        return np.concatenate(given)
    if collective == "all_to_all":
        return np.concatenate([np.split(each, len(given))[rank] for each in given])
    return sum(given)


def past_the_caches(way: str, kind: str) -> bool:
    """Stream all that peers read; return whether reads went by way of the buffer."""
    with rr.init(transport="shm", timeout_s=120, config=config_of(way)) as comm:
        team = comm._engine.executables._shared_memory.team
        before = 1 << 40
        team.trial.streams, team.trial.phase_end = 1, before
        team.indirect_reads = before
        make = comm.empty if kind == "registered" else np.empty
        for count in (20_001, 300_007):
            x, y = make(count + 3, np.float32)[3:], make(count + 1, np.float32)[1:]
            for out in (y, x):
                fill(comm, x)
                comm.all_reduce(x, out=out)
                assert np.array_equal(out, filled_sum(comm, count))
            for root in (0, 1):
                fill(comm, x)
                comm.broadcast(x, root, out=x)
                assert np.array_equal(x, np.arange(count) % 1000 + root)
        return team.indirect_reads < before
