"""`spawn` with processes: results, errors and ends of ranks that are processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

import ringreduce as rr
from ringreduce.start import spawning
from tests.support.mpi import alive_in_the_end

pytestmark = pytest.mark.slow
FORKS_OR_STARTS = pytest.mark.parametrize("forks", [True, False], indirect=True)


@pytest.fixture(autouse=True)
def forks(request, monkeypatch):
    """Has `spawn` fork, or start new interpreters."""
    forks = getattr(request, "param", True)
    monkeypatch.setattr(spawning, "is_forkable", lambda: forks)
    monkeypatch.setattr("ringreduce.start.process_exit.has_begun", lambda: not forks)


def add(comm, factor):
    return os.getpid(), comm.nodes, comm.all_reduce(np.arange(3) * factor * (comm.rank + 1))


@FORKS_OR_STARTS
def test_each_rank_is_a_process_and_returns_its_result():
    found = rr.spawn(add, 3, 10, nodes=(2, 1), processes=True)
    pids, nodes, sums = zip(*found, strict=True)
    assert len({os.getpid(), *pids}) == 4
    assert set(nodes) == {((0, 1), (2,))}
    assert [total.tolist() for total in sums] == [[0, 60, 120]] * 3


class OwnError(Exception):
    """An exception that needs two arguments."""

    def __init__(self, number: int, text: str) -> None:
        super().__init__(number, text)


def fail(comm):
    if comm.rank == 1:
        raise OwnError(7, "rank 1's own")
    comm.barrier()


@FORKS_OR_STARTS
def test_the_exception_of_a_rank_has_its_traceback():
    with pytest.raises(OwnError) as raised:
        rr.spawn(fail, 2, processes=True)
    assert raised.value.args == (7, "rank 1's own")
    assert str(raised.value.__cause__).lstrip().startswith("rank 1:\nTraceback")
    assert "in fail" in str(raised.value.__cause__)


def differ(comm):
    comm.all_reduce(np.ones(2 + comm.rank))


def end(comm, how, pipe):
    """Ends rank 1, whose child lives until the test closes the pipe."""
    if comm.rank == 1:
        if os.fork() == 0:
            os.close(pipe[1])
            os.read(pipe[0], 1)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL) if how == "kill" else os._exit(5)
    comm.barrier()


@pytest.mark.parametrize(
    ("how", "text"),
    [("kill", r"rank 1 was killed by signal 9 \(SIGKILL\)"), ("exit", "rank 1 ended with .* 5")],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of a fork beside threads
def test_a_rank_that_ends_is_named_though_its_child_lives(how, text):
    pipe = os.pipe()
    with pytest.raises(rr.PeerLostError, match=text) as raised:
        rr.spawn(end, 3, how, pipe, processes=True)
    for each in pipe:
        os.close(each)
    assert raised.value.ranks == (1,)


@pytest.mark.parametrize(
    ("forks", "function", "error", "text"),
    [
        (True, differ, rr.MismatchError, r"rank 0 passes float64\[2\]"),
        (True, lambda _: lambda: 0, TypeError, r"spawn: rank \d returns function, which cannot be"),
        (False, lambda _: None, TypeError, "spawn: processes=True .* cannot import .*<lambda>"),
    ],
    indirect=["forks"],
)
def test_an_error_is_raised_here(function, error, text):
    with pytest.raises(error, match=text):
        rr.spawn(function, 2, processes=True)


def test_a_program_forks_until_it_has_called_init(script, run):
    script("""
        import ringreduce as rr
        print(rr.spawn(lambda comm: comm.size, 2, processes=True), flush=True)
        rr.spawn(lambda comm: print("out"), 1, processes=True)
        if __name__ == "__main__":
            rr.init(rendezvous=lambda mine: [mine], rank=0, size=1)
            try:
                rr.spawn(lambda comm: comm.size, 2, processes=True)
            except TypeError:
                print("refused")
    """)
    assert run("script.py", command=[sys.executable]).stdout == "[2, 2]\nout\nrefused\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_rank_outlives_the_program(script, tmp_path, number):
    program = script("""
        import os, signal, time
        import ringreduce as rr
        def work(comm):
            open(f"{os.getpid()}.pid", "w").close()
            time.sleep(600)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        rr.spawn(work, 2, processes=True)
    """)
    parent = subprocess.Popen([sys.executable, program], cwd=tmp_path)
    deadline = time.monotonic() + 120
    while len(found := list(tmp_path.glob("*.pid"))) < 2:
        assert time.monotonic() < deadline, "the ranks do not start"
        time.sleep(0.02)
    parent.send_signal(number)
    parent.wait(60)
    assert alive_in_the_end([int(path.stem) for path in found]) == []
