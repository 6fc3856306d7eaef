"""Small calls through shared memory: the memory, results, disagreements, faults."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ringreduce as rr
from ringreduce.shm import functions, segments, stores
from ringreduce.shm.program import SharedMemory
from ringreduce.shm.segments import map_files
from ringreduce.transports import thread
from ringreduce.transports.yielding import Yielding
from tests.control.test_agreement import agreed, check_words
from tests.support.case_strategies import OUTS, VIEWS, cases
from tests.support.cases import CONFIG, run_case
from tests.support.disagreements import CALLS, mix, mixtures
from tests.support.threads import on_threads
from tests.support.through_memory import rounds_of

SHARED = replace(CONFIG, shared_memory=True)
pytestmark = pytest.mark.skipif(
    os.environ.get("NUMBA_DISABLE_JIT") == "1", reason="nothing is compiled, so nothing exchanged"
)


# --- the memory -----------------------------------------------------------------------------------


def gathered(ranks: int, use) -> list:
    """Call ``use(rank, collect)`` on threads, which collect bytes from each other."""
    barrier = threading.Barrier(ranks)
    given: list[bytes] = [b""] * ranks
    results: list = [None] * ranks

    def run(rank: int) -> None:
        def collect(mine: bytes) -> bytearray:
            given[rank] = mine
            barrier.wait(120)
            everybody = bytearray(b"".join(given))
            barrier.wait(120)
            return everybody

        results[rank] = use(rank, collect)

    on_threads(run, ranks)
    return results


def bytes_at(address: int, count: int) -> np.ndarray:
    import ctypes

    return np.frombuffer((ctypes.c_uint8 * count).from_address(address), np.uint8)


def test_what_one_writes_the_others_read():
    blocks = gathered(3, lambda rank, collect: map_files(4096, collect, rank))
    for rank, mine in enumerate(blocks):
        bytes_at(mine.addresses[rank], 4096)[7] = rank + 1
    for each in blocks:
        assert [bytes_at(a, 4096)[7] for a in each.addresses] == [1, 2, 3]
        assert not any(bytes_at(a, 4096)[:7].any() for a in each.addresses)


def test_nothing_stays_open():
    before = len(os.listdir("/proc/self/fd"))
    kept = gathered(2, lambda rank, collect: map_files(4096, collect, rank))
    assert len(os.listdir("/proc/self/fd")) <= before + 2 * len(kept)  # a map keeps one of its own


@pytest.mark.parametrize("lacking", ["memfd", "proc", "other"])
def test_where_one_cannot_none_does(lacking, monkeypatch):
    if lacking == "memfd":
        monkeypatch.setattr(os, "memfd_create", lambda name: (_ for _ in ()).throw(OSError(1)))
    if lacking == "proc":
        monkeypatch.setattr(segments, "map_file_of", lambda *place: None)

    def use(rank, collect):
        if lacking == "other" and rank == 1:
            # Somebody else's process has that number here: what it has open is another file.
            real = collect
            collect = lambda mine: real(mine[:32] + bytes(16) if len(mine) > 1 else mine)  # noqa: E731
        return map_files(4096, collect, rank)

    assert gathered(3, use) == [None] * 3


def test_what_is_needed_is_there():
    assert functions.is_available()


# --- results --------------------------------------------------------------------------------------


SINGLE_COPY = replace(SHARED, slice_bytes=None, pull_bytes=1)
"""Everything that can be is read from where it lies."""
PARTS = st.sampled_from([0.0, 0.3, 1.0])


@pytest.mark.parametrize("collective", ["broadcast", "reduce"])
def test_slices_too_long_to_be_copied_in_are_read_directly(collective, monkeypatch):
    """Where each rank has a core, shorter slices of data that go one way are copied in."""
    # As if each rank had a core.
    monkeypatch.setattr(thread, "Yielding", lambda crowded: Yielding(crowded=False))
    config = replace(SHARED, slice_bytes=1 << 30)

    def program(comm):
        memory = comm.config.memory
        assert not memory.crowded
        x, before = np.full(3 << 20, comm.rank + 1.0, np.float32), rounds_of(comm)
        result = getattr(comm, collective)(x, algorithm="star")
        assert result is None or (result == (1 if collective == "broadcast" else 3)).all()
        return memory.single_copy, rounds_of(comm) > before

    for single_copy, in_memory in rr.spawn(program, 2, config=config):
        assert in_memory is single_copy


@pytest.mark.few(12)
@pytest.mark.parametrize("config", [SHARED, SINGLE_COPY], ids=["staged", "single-copy"])
@pytest.mark.parametrize("algorithm", ["two_shot", "one_shot", "ring", "tree", "torus"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_all_ways_of_calling_again(ranks, algorithm, config):
    def program(comm):
        for count in (1, 4096, 7000, 100_000):
            x, y = (np.zeros(count, np.float32) for _ in range(2))
            op = comm.plan("all_reduce", x, out=y, algorithm=algorithm)
            for turn in range(4):
                wanted = comm.size * (np.arange(count) % 9 + turn) + comm.size * (comm.size - 1) / 2
                x[...] = np.arange(count) % 9 + comm.rank + turn
                assert np.array_equal(op(), wanted)
                assert np.array_equal(comm.all_reduce(x, algorithm=algorithm), wanted)
                y[...] = 0
                assert comm.all_reduce(x, algorithm=algorithm, out=y) is y
                assert np.array_equal(y, wanted)
                strided = np.zeros(2 * count, np.float32)[::2]
                comm.all_reduce(x, algorithm=algorithm, out=strided)
                assert np.array_equal(strided, wanted)
                comm.all_reduce(x, algorithm=algorithm, out=x)
                assert np.array_equal(x, wanted)
            with pytest.raises(ValueError, match="overlaps"):
                comm.all_reduce(x[:-1], out=x[1:], algorithm=algorithm) if count > 1 else _wrong()
            with pytest.raises((TypeError, ValueError)):
                comm.all_reduce(x, out=y.astype("f8"), algorithm=algorithm)
        return rounds_of(comm)

    assert all(rr.spawn(program, ranks, config=config, timeout_s=120))


def _wrong() -> None:
    raise ValueError("one element overlaps nothing")


@pytest.mark.parametrize("ranks", [2, 3, 5])
@pytest.mark.parametrize("count", [0, 1, 5, 1000, 1024])
def test_a_thousand_calls_in_a_row(ranks, count):
    def program(comm):
        for turn in range(1000):
            x = np.arange(count, dtype=np.float32) + comm.rank + turn % 5
            y = comm.all_reduce(x, algorithm="one_shot")
            wanted = ranks * (np.arange(count) + turn % 5) + ranks * (ranks - 1) / 2
            assert np.array_equal(y, wanted)
        return rounds_of(comm)

    assert all(rr.spawn(program, ranks, config=SHARED, timeout_s=120))


def test_calls_through_memory_and_through_messages_take_turns():
    def program(comm):
        for turn in range(200):
            small = np.full(turn % 3 + 1, comm.rank + turn)
            large = np.full(5000, comm.rank * turn)
            assert (comm.all_reduce(small) == 2 * turn + 1).all()
            assert (comm.all_reduce(large) == turn).all()
            if turn % 3 == 0:
                assert comm.all_gather(np.array([comm.rank])).tolist() == [0, 1]
            if turn % 5 == 0:
                comm.barrier()
        return rounds_of(comm)

    assert all(rr.spawn(program, 2, config=SHARED, timeout_s=120))


@settings(max_examples=60)
@given(case=cases(range(1, 6)), pull_bytes=st.sampled_from([1, 1 << 11, 1 << 20]), pushed=PARTS)
def test_any_case_gives_what_numpy_gives(case, pull_bytes, pushed):
    config = replace(SHARED, pull_bytes=pull_bytes)
    part = patch("ringreduce.shm.program.pushed_part", lambda *_: pushed)
    with part, patch("ringreduce.planning.instructions.PAGE_BYTES", 1):
        rr.spawn(run_case, case.ranks, case, timeout_s=120, config=config)


def test_counts_change_from_call_to_call_if_both_ends_of_a_message_copy():
    """The program of an all-to-all is rewritten.  Some halves are written in several pieces."""

    def program(comm):
        rng = np.random.default_rng(1)
        for most in (10, 900_000, 10, 500_000, 2_000):
            counts = rng.integers(0, most, (comm.size, comm.size))
            given = [np.arange(row.sum()) * (rank + 2) for rank, row in enumerate(counts)]
            result = comm.all_to_all(given[comm.rank], counts=counts[comm.rank].tolist())
            parts = [np.split(x, np.cumsum(row)) for x, row in zip(given, counts, strict=True)]
            assert np.array_equal(result, np.concatenate([row[comm.rank] for row in parts]))

    part = lambda _, nbytes, __: 1.0 if nbytes < 1 << 20 else 0.5  # noqa: E731
    streamed = patch("ringreduce.shm.program._STREAMED_BYTES", 1 << 16)
    yielding = patch.object(thread, "Yielding", lambda crowded: Yielding(crowded=False))
    with patch("ringreduce.shm.program.pushed_part", part), streamed, yielding:
        rr.spawn(program, 3, config=SINGLE_COPY, timeout_s=120)


@pytest.mark.parametrize("pull_bytes", [1, 1 << 40], ids=["single copy", "staged"])
def test_counts_change_from_call_to_call_in_several_slices(pull_bytes):
    """The program is rewritten as long as there are as many slices."""
    made, rewrite = [], SharedMemory.rewrite

    def noted(*args):
        made.append(rewrite(*args))
        return made[-1]

    def program(comm):
        rng = np.random.default_rng(2)
        for _ in range(5):
            counts = rng.integers(90, 110, (comm.size, comm.size))
            given = [np.arange(row.sum()) * (rank + 2) for rank, row in enumerate(counts)]
            result = comm.all_to_all(given[comm.rank], counts=counts[comm.rank].tolist())
            parts = [np.split(x, np.cumsum(row)) for x, row in zip(given, counts, strict=True)]
            assert np.array_equal(result, np.concatenate([row[comm.rank] for row in parts]))

    config = replace(SHARED, pull_bytes=pull_bytes, slice_bytes=2700)  # of 6,480 to 7,848
    with patch.object(SharedMemory, "rewrite", noted):
        rr.spawn(program, 3, config=config, timeout_s=120)
    assert len(made) == 12
    assert all(len(each.rounds) == 3 for each in made)


@pytest.mark.slow
@settings(max_examples=25)
@given(
    case=cases(range(1, 5)),
    others=st.lists(
        st.tuples(st.sampled_from(VIEWS), st.sampled_from(OUTS), st.integers(0, 9)),
        min_size=2,
        max_size=6,
    ),
)
def test_any_case_again_and_again_on_other_arrays_gives_what_numpy_gives(case, others):
    """The first call prepares what the next ones take, if their arrays allow it."""

    def program(comm):
        run_case(comm, case)
        for view, out, seed in others:
            run_case(comm, replace(case, view=view, out=out, seed=seed))
            comm.barrier()

    rr.spawn(program, case.ranks, timeout_s=120, config=SHARED)


@pytest.mark.parametrize("op", ["sum", "mean", "min", "max", "prod"])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize(("algorithm", "count"), [("one_shot", 500), ("two_shot", 300_001)])
def test_the_bits_are_those_of_messages(op, dtype, algorithm, count):
    """A two-shot in place, of several pieces that are written to the arrays of all ranks."""

    def program(comm):
        rng = np.random.default_rng(comm.rank)
        x = (rng.standard_normal(count) * 10).astype(dtype)
        return comm.all_reduce(x, op, out=x, algorithm=algorithm).tobytes()

    shared = SHARED if algorithm == "one_shot" else SINGLE_COPY
    assert rr.spawn(program, 4, config=shared) == rr.spawn(program, 4, config=CONFIG)


def test_another_view_of_the_same_memory_is_in_place():
    def program(comm):
        general, run_now = [], comm._engine.run_now
        comm._engine.run_now = lambda *given: general.append(1) or run_now(*given)
        x = np.ones((4, 2), np.float32)
        for turn in range(1, 4):
            comm.all_reduce(x, out=x[:])
            assert (x == 2**turn).all()
            with pytest.raises(ValueError, match="overlaps"):
                comm.all_to_all(x, out=x[:])
        return len(general)

    assert rr.spawn(program, 2, config=SHARED, timeout_s=120) == [1, 1]


@pytest.mark.slow
def test_a_call_from_within_a_call_is_refused():
    """As from a signal handler, which Python runs as soon as it is back from compiled code."""

    waits_in, end = [-1], time.monotonic() + 120

    def program(comm):
        engine, number = comm._engine, 0
        wait_for = engine.wait_for

        def interrupted(*arguments):
            with pytest.raises(ValueError, match="within a call"):
                comm.barrier()
            with pytest.raises(ValueError, match="within a call"):
                comm.all_reduce(x)
            if comm.rank == 0:
                waits_in[0] = number
            wait_for(*arguments)

        engine.wait_for = interrupted
        x, parts = np.ones(6), np.empty(3)
        op = comm.plan("all_reduce", x, out=np.empty(6))
        for turn in range(5):
            for call in (comm.all_reduce, lambda _: op(), lambda x: comm.all_reduce([x])[0]):
                number += 1
                while turn and comm.rank and waits_in[0] < number:
                    assert time.monotonic() < end, f"rank 0 does not wait in call {number}"
                    time.sleep(0.001)
                assert (call(x) == 2).all()
            assert (comm.reduce_scatter(x, out=parts) == 2).all()
        return True

    assert rr.spawn(program, 2, config=SHARED, timeout_s=120) == [True, True]


@pytest.mark.slow
def test_what_peers_may_still_read_is_kept():
    """A rank that gave up may let go of its array before another reads it, in this very process."""

    gave_up = threading.Event()

    def program(comm):
        x = np.full(200_000, comm.rank + 1.0)
        for _ in range(3):
            assert (comm.all_reduce(x) == 3).all()
        if comm.rank == 0:
            with pytest.raises(rr.PeerTimeoutError):
                comm.all_reduce(x, timeout_s=0.5)
            gave_up.set()
            (executable,) = comm._engine.running
            return any(each is x for each in executable.held)
        assert gave_up.wait(120)
        with pytest.raises(rr.RingReduceError):
            comm.all_reduce(x)
        return True

    config = replace(SHARED, slice_bytes=None, pull_bytes=1)
    assert rr.spawn(program, 2, config=config, timeout_s=120) == [True] * 2


def test_parts_of_a_communicator_have_memory_of_their_own():
    def program(comm):
        part = comm.split(comm.rank % 2)
        totals = [part.all_reduce(np.array([comm.rank]))[0] for _ in range(20)]
        both = comm.all_reduce(np.array([1]), algorithm="one_shot")[0]
        return int(totals[-1]), int(both), rounds_of(part) > 0

    assert rr.spawn(program, 4, config=SHARED) == [(2, 4, True), (4, 4, True)] * 2


# --- when ranks disagree --------------------------------------------------------------------------


OFTEN = ("sum", "sliced", "barrier", "gather")
MIXED = [pytest.param(call, marks=() if call in OFTEN else pytest.mark.long) for call in CALLS]


@pytest.mark.slow
@pytest.mark.parametrize("usual", MIXED)
@pytest.mark.parametrize("ranks", [2, 3])
def test_any_two_calls_mixed(usual, ranks):
    mixed = mixtures(usual, ranks)
    ended = rr.spawn(mix, ranks, mixed, config=SHARED, timeout_s=120)
    check_words(agreed(ended), mixed, ranks)


def test_two_who_only_speak_are_found_out():
    def speak(comm, x):
        for root in (comm.rank, 0):
            comm.broadcast(x, root)

    def program(comm):
        x = np.full(4, comm.rank)
        with pytest.raises(rr.MismatchError, match="root=1"):
            speak(comm, x)
        return comm.broadcast(x, root=0)[0] == 0 and rounds_of(comm) > 0

    assert rr.spawn(program, 2, config=SHARED, timeout_s=120) == [True] * 2


def test_ranks_begin_their_trials_of_stores_anew_after_an_error():
    """Rank 0 has begun the call that differs, perhaps with another phase of its trial."""
    x = np.ones(64 << 10)

    def program(comm):
        for _ in range(3 * stores.FIRST_INTERVAL):
            comm.all_reduce(x)
        trial = comm._engine.executables._shared_memory.team.trial
        if comm.rank == 0:
            stores.next_phase(comm._engine.executables._shared_memory.team)
        with pytest.raises(rr.MismatchError):
            comm.all_reduce(x, op="max" if comm.rank else "sum")
        return trial.phase, trial.phase_end - rounds_of(comm), trial.streams, trial.interval

    first, second = rr.spawn(program, 2, config=SHARED, timeout_s=120)
    assert first == second
