"""Calls through shared memory between processes: sums, registered arrays, fallbacks, faults."""

from __future__ import annotations

import os
import random

import numpy as np
import pytest

import ringreduce as rr
from tests.calls.test_faults import run_to_its_end
from tests.shm.test_program import rounds_of

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.skipif(
        os.environ.get("NUMBA_DISABLE_JIT") == "1",
        reason="nothing is compiled, so nothing exchanged",
    ),
]


def over_mpi(transport: str) -> list:
    """What a rank of a job comes to: whether sums of seven lengths went through memory."""
    with rr.init(transport=transport, timeout_s=120) as comm:
        for turn in range(2000):
            x = np.arange(turn % 7 + 1.0) + comm.rank
            wanted = comm.size * np.arange(turn % 7 + 1.0) + comm.size * (comm.size - 1) / 2
            assert np.array_equal(comm.all_reduce(x, algorithm="one_shot"), wanted)
        return [rounds_of(comm) >= 2000, comm.all_reduce(np.ones(100_000))[-1]]


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("transport", "ranks", "through_memory"),
    [("shm", 2, True), ("auto", 4, True), ("mpi", 2, False)],
)
def test_sums_over_mpi(mpi, transport, through_memory, ranks):
    done = mpi.run_ok("call", ranks, "tests.shm.test_program_mpi:over_mpi", transport)
    assert done == [[through_memory, ranks]] * ranks


def what_comes_of(collective: str, given: list[np.ndarray], rank: int) -> np.ndarray:
    if collective == "broadcast":
        return given[0]
    if collective == "all_gather":
        return np.concatenate(given)
    if collective == "all_to_all":
        return np.concatenate([np.split(each, len(given))[rank] for each in given])
    return sum(given)


def registered_in_any_mixture(way: str, seed: str) -> int:
    """Which arrays are registered, and who works in place, each rank draws for itself."""
    common = random.Random(seed)
    config = rr.Config(pull_bytes=1 if way == "single-copy" else 1 << 40)
    with rr.init(transport="shm", timeout_s=120, config=config) as comm:
        own = random.Random(f"{seed} {comm.rank}")
        collectives = ["all_reduce", "all_reduce", "broadcast", "reduce", "all_gather"]
        for turn in range(150):
            collective = common.choice([*collectives, "all_to_all"])
            algorithm = common.choice(["auto", "two_shot", "ring", "halving_doubling"])
            count = common.choice([1, 500, 5_003, 40_009])
            size = count * comm.size if collective == "all_to_all" else count
            longer = size * comm.size if collective == "all_gather" else size
            x = own.choice([np.empty, comm.empty])(size, np.int64)
            y = own.choice([np.empty, comm.empty])(longer, np.int64)
            in_place = collective in ("all_reduce", "broadcast") and own.random() < 0.4
            out = None if collective == "reduce" and comm.rank else x if in_place else y
            given = [np.arange(size) * (rank + 2) + turn for rank in range(comm.size)]
            x[...] = given[comm.rank]
            how = {"algorithm": algorithm} if collective == "all_reduce" else {}
            getattr(comm, collective)(x, out=out, **how)
            wanted = what_comes_of(collective, given, comm.rank)
            assert out is None or np.array_equal(out, wanted), (turn, collective, algorithm, count)
            assert in_place or np.array_equal(x, given[comm.rank])
        return rounds_of(comm)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("way", "ranks", "seed"), [("single-copy", 2, 1), ("staged", 3, 2), ("single-copy", 4, 3)]
)
def test_registered_arrays_in_any_mixture(mpi, way, ranks, seed):
    done = mpi.run_ok(
        "call", ranks, "tests.shm.test_program_mpi:registered_in_any_mixture", way, str(seed)
    )
    assert all(rounds >= 150 for rounds in done)


WAYS = [(way, kind) for way in ("staged", "single-copy") for kind in ("plain", "registered")]


def past_the_caches(way: str, kind: str) -> bool:
    """Stream all that peers read; return whether reads went by way of the buffer."""
    config = rr.Config(pull_bytes=1 if way == "single-copy" else 1 << 40)
    with rr.init(transport="shm", timeout_s=120, config=config) as comm:
        team = comm._engine.shared_memory.team
        before = 1 << 40
        team.trial.streams, team.trial.phase_end = 1, before
        team.indirect_reads = before
        make = comm.empty if kind == "registered" else np.empty
        for count in (20_001, 300_007):
            x, y = make(count + 3, np.float32)[3:], make(count + 1, np.float32)[1:]
            for out in (y, x):
                x[...] = np.arange(count) % 1000 + comm.rank
                comm.all_reduce(x, out=out)
                assert np.array_equal(out, 3 * (np.arange(count) % 1000) + 3)
        return team.indirect_reads < before


def past_the_caches_in_all_ways() -> list[bool]:
    return [past_the_caches(*way) for way in WAYS]


def test_past_the_caches(mpi):
    """As where cores share no cache, which otherwise the clock decides."""
    done = mpi.run_ok("call", 3, "tests.shm.test_program_mpi:past_the_caches_in_all_ways")
    assert done == [[way == ("single-copy", "plain") for way in WAYS]] * 3


@pytest.mark.parametrize("lacking", ["reads", "memory files", "memory files of one"])
def test_where_the_best_way_cannot_be_had_another_is_taken(mpi, lacking):
    assert mpi.run_ok("fallback", 3, lacking) == [[0, True, False]] * 3


def test_delays_change_nothing(mpi):
    done = mpi.run_ok("delayed_rounds", 3, "300", "303")
    assert [each["wrong"] for each in done] == [0] * 3


@pytest.mark.parametrize("how", ["stop", "kill"])
def test_a_rank_that_stops_or_dies_is_an_error_and_no_spin_for_ever(mpi, how):
    done = run_to_its_end(mpi, "shm_fault", 3, how)
    if how == "stop":
        # The third may be woken by its mpiexec; the first to end may take the other with it.
        told = [done.results[rank] for rank in (0, 2) if done.results[rank] is not None]
        assert told
        assert {each["error"] for each in told} == {"PeerTimeoutError"}
        assert all(each["text"].startswith("rank 1 stopped answering") for each in told)
