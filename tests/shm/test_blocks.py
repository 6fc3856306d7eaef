"""Blocks that ranks share: how they are made, waited for, taken over, given up and freed."""

from __future__ import annotations

import errno
import gc
import os
import signal
import subprocess
import threading
import time
from pathlib import Path
from statistics import median

import numpy as np
import pytest

import ringreduce as rr
from ringreduce.shm import blocks
from ringreduce.shm.block_access import BLOCK_BYTES, BlockLock, committing, held
from ringreduce.shm.blocks import Blocks, share_blocks
from ringreduce.system.proc import start_of
from tests.shm.test_program import gathered
from tests.support import processes
from tests.support.shared_adds import STEPS, is_exact

pytestmark = pytest.mark.skipif(
    os.environ.get("NUMBA_DISABLE_JIT") == "1", reason="nothing is compiled, so nothing shared"
)
FLOAT, LONG = np.dtype(np.float64), np.dtype(np.longdouble)
BLOCK = BLOCK_BYTES // FLOAT.itemsize
TAKEN_OVER_S = 10.0
"""The longest time to take over the lock of a killed rank; waits end after 20 s."""


def shared(ranks: int, count: int, dtype=FLOAT, owner=0, timeout_s=20.0) -> list:
    """What each rank gets that makes blocks of `count` elements: `Blocks`, or an exception."""

    def use(rank, collect):
        how = {"crowded": True, "timeout_s": timeout_s}
        try:
            return share_blocks(count * dtype.itemsize, dtype, owner, rank, collect, **how)
        except (ValueError, MemoryError) as error:
            return error

    return gathered(ranks, use)


def lock(of: Blocks, block: int) -> BlockLock:
    return BlockLock(of._access.locks + block * blocks.LOCK_BYTES)


def read(of: Blocks) -> list:
    out = np.empty_like(of.array)
    of.read(out)
    return out.tolist()


# --- making them ----------------------------------------------------------------------------------


@pytest.mark.parametrize("owner", [0, 2])
@pytest.mark.parametrize("count", [0, 1, BLOCK - 1, BLOCK, 3 * BLOCK + 1])
def test_all_ranks_have_one_array_of_zeros(count, owner):
    ranks = shared(3, count, owner=owner)
    assert all(not each.array.any() and each.array.shape == (count,) for each in ranks)
    for rank, each in enumerate(ranks):
        each.array[:] = rank + 1
        assert all((other.array == rank + 1).all() for other in ranks)


def test_nothing_stays_open_but_a_file_for_each_map():
    before = len(os.listdir("/proc/self/fd"))
    kept = shared(3, 5)
    assert len(os.listdir("/proc/self/fd")) == before + len(kept)


@pytest.mark.slow
def test_memory_is_free_when_the_last_reference_is_gone():
    def maps() -> int:
        gc.collect()
        return Path("/proc/self/maps").read_text().count("memfd:ringreduce")

    before = maps()
    ranks = shared(2, 5)
    view = ranks[0].array[1:]
    assert maps() == before + 2
    del ranks
    assert maps() == before + 1
    view[:] = 7
    del view
    assert maps() == before


def all_raise(ranks: list, kind: type[Exception]) -> str:
    """Check that all ranks raised one error; return its text."""
    assert {type(each) for each in ranks} == {kind}
    (text,) = {str(each) for each in ranks}
    return text


def test_where_one_rank_cannot_share_all_raise_before_anything_is_allocated(monkeypatch):
    answers = [True, False, True]
    monkeypatch.setattr(blocks, "_is_able", lambda dtype: answers.pop())
    monkeypatch.setattr(blocks, "_new_file", lambda *arguments: pytest.fail("allocated"))
    text = all_raise(shared(3, 5), ValueError)
    assert text.startswith("shared: rank ")
    assert text.endswith("memory files and Numba: 'ringreduce doctor' says what is missing")


@pytest.mark.parametrize("lacking", ["another system", "memory files", "Numba"])
def test_what_sharing_takes(monkeypatch, lacking):
    assert blocks._is_able(FLOAT)
    if lacking == "another system":
        monkeypatch.setattr(blocks.sys, "platform", "darwin")
    elif lacking == "memory files":
        monkeypatch.delattr(os, "memfd_create")
    else:
        monkeypatch.setattr(blocks.functions, "address", lambda name: None)
    assert not blocks._is_able(FLOAT)


@pytest.mark.parametrize("count", [1 << 45, 1 << 70])
def test_where_the_owner_has_no_memory_all_raise(count):
    text = all_raise(shared(3, count, owner=1), MemoryError)
    assert text.startswith("shared: rank 1 cannot allocate ")
    assert text.endswith(os.strerror(errno.ENOMEM))


def test_where_one_rank_cannot_map_the_file_all_raise(monkeypatch):
    real = blocks.map_file_of

    def fails_on_rank_2(*place):
        return None if threading.current_thread().name == "rank 2" else real(*place)

    monkeypatch.setattr(blocks, "map_file_of", fails_on_rank_2)

    def use(rank, collect):
        threading.current_thread().name = f"rank {rank}"
        with pytest.raises(ValueError, match="rank 2 cannot map the memory of rank 0") as raised:
            share_blocks(8, FLOAT, 0, rank, collect, crowded=True, timeout_s=1)
        return str(raised.value)

    assert len(set(gathered(3, use))) == 1


def test_a_process_out_of_sight_is_refused(monkeypatch):
    """In another container process ids are others, or /proc hides processes."""
    starts = iter([5, 5, 5, None, 5, 5])
    monkeypatch.setattr(blocks, "start_of", lambda process: next(starts))
    text = all_raise(shared(2, 5), ValueError)
    assert "to see each other in /proc" in text


# --- adding among threads -------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [FLOAT, LONG], ids=str)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_all_adds_of_all_ranks_are_there(ranks, dtype):
    count, times = 2 * BLOCK + 5, 300 if dtype == FLOAT else 30
    ends = shared(ranks, count, dtype)

    def use(rank, collect):
        x = (np.arange(count) % 5 + rank).astype(dtype)
        for _ in range(times):
            ends[rank].add(x)
        collect(b"")
        return read(ends[rank]), ends[rank].version

    wanted = times * (ranks * (np.arange(count) % 5) + ranks * (ranks - 1) // 2)
    for values, version in gathered(ranks, use):
        assert values == wanted.tolist()
        assert version == ranks * times


def test_threads_of_one_rank_may_add_at_the_same_time():
    end, other = shared(2, 3 * BLOCK)
    x = np.ones(3 * BLOCK)

    def use(*_):
        for _ in range(500):
            end.add(x)

    gathered(3, use)
    assert set(read(other)) == {1500.0}


@pytest.mark.slow
def test_what_is_read_while_others_add_has_whole_blocks():
    ends, seen, deadline = shared(3, 2 * BLOCK), set(), time.monotonic() + 20

    def use(rank, _):
        x, out = np.ones(2 * BLOCK), np.empty(2 * BLOCK)
        while len(seen) < 100 and time.monotonic() < deadline:
            if rank < 2:
                ends[rank].add(x)
                continue
            ends[rank].read(out)
            for block in out.reshape(2, BLOCK):
                assert (block == block[0]).all()
                seen.add(block[0])

    gathered(3, use)
    assert len(seen) >= 100


# --- waiting --------------------------------------------------------------------------------------


def test_a_rank_waits_for_a_lock_that_a_living_rank_holds():
    one, two = shared(2, 5)
    lock(one, 0).word = held(1)

    def free():
        time.sleep(0.1)
        lock(two, 0).word = 0

    thread = threading.Thread(target=free)
    thread.start()
    begin = time.monotonic()
    one.add(np.ones(5))
    assert time.monotonic() - begin > 0.05
    assert read(two) == [1.0] * 5
    thread.join()


@pytest.mark.parametrize(("call", "doing"), [(Blocks.add, "add"), (Blocks.read, "read")])
def test_a_rank_that_waits_too_long_names_the_holder(call, doing):
    one, two = shared(2, 2 * BLOCK, timeout_s=0.1)
    lock(one, 1).word = held(1)
    with pytest.raises(rr.PeerTimeoutError) as raised:
        call(one, np.ones(2 * BLOCK))
    assert str(raised.value).startswith(f"{doing}: rank 1 has held the lock of block 1 of the")
    assert raised.value.ranks == (1,)
    lock(two, 1).word = 0
    one.add(np.ones(2 * BLOCK))
    assert one.version == 1


@pytest.fixture
def dead() -> blocks._Process:
    """A process that was killed and is not reaped."""
    process = subprocess.Popen(["sleep", "60"])
    begun = start_of(process.pid)
    assert begun is not None
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    yield blocks._Process(process.pid, begun)
    process.wait()


@pytest.mark.parametrize("reused", [False, True])
def test_the_lock_of_a_dead_rank_is_taken_over(dead, reused):
    """Its process id may be that of another process meanwhile."""
    one, two = shared(2, 5, timeout_s=2)
    one._processes[1] = blocks._Process(os.getpid(), 1) if reused else dead
    lock(one, 0).word = held(1)
    two._result[:40].view(FLOAT)[:] = 100
    one.add(np.ones(5))
    assert read(two) == [1.0] * 5


def test_the_result_of_a_dead_rank_is_copied(dead):
    one, two, three = shared(3, 5, timeout_s=2)
    one._processes[1] = one._processes[2] = dead
    three._result[:40].view(FLOAT)[:] = 100
    lock(one, 0).word = committing(1, 2)
    one.add(np.ones(5))
    assert read(two) == [101.0] * 5


# --- exceptions -----------------------------------------------------------------------------------


class InterruptError(Exception):
    """Raised by the handler of a signal."""


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [FLOAT, LONG], ids=str)
def test_an_exception_in_an_add_leaves_locks_free_and_blocks_whole(dtype):
    count = 4 * BLOCK_BYTES // dtype.itemsize
    one, two = shared(2, count, dtype)
    x, interrupted = np.ones(count, dtype), 0

    def interrupt(*_):
        raise InterruptError

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for number in range(300):
            try:
                signal.setitimer(signal.ITIMER_REAL, 2e-5 * (number % 20 + 1))
                for _ in range(100):
                    one.add(x)
                signal.setitimer(signal.ITIMER_REAL, 0)
            except InterruptError:
                interrupted += 1
            assert not any(lock(one, block).word for block in range(4))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert interrupted > 100
    values = np.reshape(read(two), (4, -1))
    assert (values == values[:, :1]).all()
    assert two.version <= values.min()
    assert values.max() <= two.version + interrupted
    two.add(x)
    assert (np.reshape(read(one), (4, -1)) == values + 1).all()


def test_an_add_from_within_an_add_is_refused():
    one, _ = shared(2, 5, LONG)
    x, fold = np.ones(5, LONG), one._fold

    def fold_and_add(*arrays):
        with pytest.raises(ValueError, match="a call from within a call"):
            one.add(x)
        fold(*arrays)

    one._fold = fold_and_add
    one.add(x)
    assert (read(one), one.version) == ([1] * 5, 1)


@pytest.mark.parametrize("call", [Blocks.add, Blocks.read])
def test_a_forked_process_is_refused(call):
    one, _ = shared(2, 5)
    child = os.fork()
    if child == 0:
        try:
            call(one, np.ones(5))
        except ValueError as error:
            os._exit(7 if str(error).startswith("this process was forked") else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


@pytest.mark.parametrize(("call", "what"), [(Blocks.add, "add: x"), (Blocks.read, "read: out")])
def test_the_array_itself_is_refused(call, what):
    one, _ = shared(2, 5)
    with pytest.raises(ValueError, match=f"{what} overlaps the shared array"):
        call(one, one.array)


# --- processes without MPI ------------------------------------------------------------------------


@pytest.mark.slow
def test_whichever_instruction_a_rank_is_killed_at_its_add_is_whole():
    *killed, found = processes.run(
        len(STEPS) + 1, "tests.support.shared_adds:die_at_each_step", timeout_s=60
    )
    assert killed == [None] * len(STEPS)
    with_second_add = {"after store_release": 1, "in copy": 1, "after copy": 1, "fetch_and_add": 2}
    for step, each in zip(STEPS, found, strict=True):
        one, two = with_second_add.get(step, 0), 2 - with_second_add.get(step, 0)
        assert sorted(each["blocks"]) == [[101.0]] * two + [[201.0]] * one, step
        assert each["version"] == 2, step
    assert median(each["took_s"] for each in found[1:-1]) < TAKEN_OVER_S


@pytest.mark.few(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("elements", "victim"), [(5, -1), (5, 2), (2 * BLOCK + 9, 2), (2 * BLOCK + 9, -1)]
)
def test_many_adds_of_four_processes_are_exact(elements, victim):
    function = "tests.support.shared_adds:add_in_processes"
    found = processes.run(4, function, 100_000 if elements == 5 else 20_000, elements, victim)
    assert [rank for rank in range(4) if found[rank] is None] == [victim] * (victim >= 0)
    assert all(each is None or is_exact(each) for each in found), found
