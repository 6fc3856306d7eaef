"""Compiling at the first start: others wait for it, and the user is told."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest

import ringreduce as rr
from ringreduce.compiler import jit
from ringreduce.errors import PeerTimeoutError
from ringreduce.shm import segments
from ringreduce.transports.thread import Switchboard, ThreadTransport
from tests.support.threads import on_threads


@pytest.mark.parametrize(("silent_s", "lines"), [(0.0, 1), (600.0, 0)])
def test_the_user_is_told_once_that_a_start_compiles(monkeypatch, capsys, silent_s, lines):
    spent = SimpleNamespace(seconds=0.0, said=False)
    monkeypatch.setattr(jit, "_SPENT", spent)
    monkeypatch.setattr(jit, "_SILENT_S", silent_s)
    for name in ("one", "two"):
        release = threading.Event()
        timer = threading.Timer(0.1, release.set)
        timer.start()
        jit._make({}, name, release.wait)
    assert capsys.readouterr().err.count("ringreduce: compiling") == lines
    assert spent.seconds > 0.1
    assert not jit.COMPILING.locked()


@pytest.mark.parametrize("compiling", [(), (1,), (0, 1)])
def test_all_ranks_wait_longer_if_one_says_that_it_compiles(monkeypatch, compiling):
    patience = [], []
    here = threading.local()

    class Recorded(ThreadTransport):
        def collect(self, mine, patience_s=0.0):
            patience[self.rank].append(patience_s)
            return super().collect(mine, patience_s)

    def run(rank):
        here.rank = rank
        return segments.share_segments(Recorded(switchboard, rank))

    switchboard = Switchboard(2)
    monkeypatch.setattr(segments, "compiles", lambda: here.rank in compiling)
    monkeypatch.setattr(segments, "is_available", lambda: False)
    assert on_threads(run, 2) == [None, None]
    assert patience == ([0.0, 600.0] if compiling else [0.0],) * 2


@pytest.mark.slow
def test_patience_is_for_a_rank_that_comes_later_than_the_timeout():
    switchboard = Switchboard(2)
    first, second = (ThreadTransport(switchboard, rank, timeout_s=0.05) for rank in range(2))
    timer = threading.Timer(0.3, second.collect, (b"b",))
    timer.start()
    assert first.collect(b"a", patience_s=600.0) == b"ab"
    with pytest.raises(PeerTimeoutError, match="not there: 1"):
        first.collect(b"a")


def init_while_rank_0_compiles() -> int:
    """By the clock of rank 1, rank 0 compiles for longer than the timeout of `init`."""
    from ringreduce.transports import mpi

    rank, asked = mpi.MPI.COMM_WORLD.rank, [0]

    def is_available() -> bool:
        asked[0] += 1
        if rank == 0:
            time.sleep(0.5)  # rank 1 looks at its clock meanwhile
        return True

    def monotonic() -> float:
        return time.monotonic() + 300.0 * (asked[0] == 2)  # rank 1 waits for rank 0

    segments.compiles = lambda: rank == 0
    segments.is_available = is_available
    mpi.time = SimpleNamespace(monotonic=monotonic, sleep=time.sleep)  # type: ignore[assignment]
    with rr.init(timeout_s=100) as comm:
        return int(comm.all_reduce(rank + 1))


@pytest.mark.mpi
def test_the_time_that_another_rank_compiles_is_no_silence_over_mpi(mpi):
    assert mpi.run_ok("call", 2, f"{__name__}:init_while_rank_0_compiles") == [3, 3]


def test_a_function_that_is_kept_is_not_to_be_compiled(monkeypatch):
    monkeypatch.setattr(jit, "_ADDRESSES", {"made": 4096})
    monkeypatch.setattr(jit, "_load", lambda path: 8192 if path == "kept.code" else None)
    monkeypatch.setattr(jit, "_kept_in", "{}.code".format)
    assert [jit.is_kept(name) for name in ("made", "kept", "new")] == [True, True, False]
    assert jit.address("kept", lambda: None) == 8192
