"""Ranks that go on in their processes after a loss: under Open MPI."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ringreduce.launch.mpiexec import Flavour, ask
from tests.support.mpi import ROOT, environment, mpiexec

FLAVOUR = ask(Path(mpiexec())).flavour
live = pytest.mark.skipif(
    FLAVOUR is not Flavour.OPEN_MPI, reason="a lost rank ends the job under other MPIs"
)
pytestmark = pytest.mark.mpi

COUNTS = """
import os, sys, time
from pathlib import Path
import numpy as np, ringreduce as rr
{before}
def train(comm, state):
    while state.step < 60:
        time.sleep({step_s})
        total = comm.all_reduce(np.ones(1))
        with state.update():
            state["made"] += total / comm.size
    {at_end}
    if comm.rank == 0:
        print(comm.size, "ranks counted", state["made"].item(), flush=True)
rr.elastic(train, rr.State({{"made": np.zeros(1)}}))
{after}
"""
ONCE = """
def once(name):
    try:
        os.close(os.open(Path(__file__).with_name(name), os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True
"""


@pytest.fixture
def counts(start, tmp_path):
    """Start a program that counts steps, with more code before, at the end and after."""

    def started(
        *words: str, before: str = "", at_end: str = "", after: str = "", step_s: str = "0.005"
    ):
        program = tmp_path / "counts.py"
        more = {"before": ONCE + before, "at_end": at_end, "after": after}
        text = COUNTS.format(**more, step_s=step_s)
        program.write_text(text)
        return start(*words, program=(str(program),))

    return started


def levels(job) -> list[tuple[int, int]]:
    return [(event["after"], event["level"]) for event in job.events("resized")]


@live
def test_two_ranks_that_are_killed_at_once(counts):
    job = counts("-n", "4", "--elastic", "1")
    pids = job.await_step(1)
    for victim in (1, 3):
        os.kill(pids[victim], signal.SIGKILL)
    code, output = job.end()
    assert code == 0, output
    assert "2 ranks counted 60.0" in output
    assert sum(len(event["lost"]) for event in job.events("resized")) == 2


@live
def test_a_stopped_rank_is_killed_and_the_others_go_on(counts):
    job = counts("-n", "3", "--elastic", "1", "--timeout-s", "1")
    os.kill(job.await_step(1)[0], signal.SIGSTOP)
    code, output = job.end()
    assert code == 0, output
    assert "2 ranks counted 60.0" in output
    assert levels(job) == [(2, 1)]


def shrinking(first: str) -> str:
    """Code that makes a rank run the statement `first` before it shrinks its communicator."""
    return f"""
shrink = rr.Communicator.shrink
def shrinking(comm):
    {first}
    return shrink(comm)
rr.Communicator.shrink = shrinking
"""


@live
def test_a_shrink_that_hangs_is_followed_by_a_new_job(counts):
    job = counts(
        "-n", "3", "--elastic", "1", before=shrinking("if comm.rank == 0: time.sleep(600)")
    )
    os.kill(job.await_step(1)[2], signal.SIGKILL)
    code, output = job.end()
    assert code == 0, output
    assert "2 ranks counted 60.0" in output
    assert levels(job) == [(2, 2)]


@live
def test_a_rank_that_dies_while_the_others_shrink(counts):
    dies = shrinking("if comm.rank == 1 and once('died'): os.kill(os.getpid(), 9)")
    job = counts("-n", "4", "--elastic", "1", before=dies)
    os.kill(job.await_step(1)[3], signal.SIGKILL)
    code, output = job.end()
    assert code == 0, output
    assert "2 ranks counted 60.0" in output
    assert sorted(job.events("resized")[-1]["lost"]) in ([1, 3], [1])


ASKS = """
from ringreduce.recovery import elastic
ask = elastic._answer
def asking(launcher, kind, **fields):
    if kind == "shrunk" and os.environ["OMPI_COMM_WORLD_RANK"] == "1" and once("died"):
        import threading
        threading.Timer(0.05, os.kill, (os.getpid(), 9)).start()
    return ask(launcher, kind, **fields)
elastic._answer = asking
shrink = rr.Communicator.shrink
def late(comm):
    made = shrink(comm)
    if made.rank == 0:
        time.sleep(0.3)
    return made
rr.Communicator.shrink = late
"""


@live
def test_the_others_go_on_after_a_rank_has_died_that_waited_for_them(counts):
    """Longer than the timeout, after which ranks that others wait for count as stopped."""
    job = counts("-n", "4", "--elastic", "1", "--timeout-s", "1", before=ASKS, step_s="0.05")
    os.kill(job.await_step(1)[3], signal.SIGKILL)
    code, output = job.end()
    assert code == 0, output
    assert "2 ranks counted 60.0" in output
    assert levels(job)[-1] == (2, 1)


@live
def test_a_rank_that_dies_when_others_have_finished(counts):
    dies = "if comm.rank == 1 and once('died'): time.sleep(0.3); os.kill(os.getpid(), 9)"
    job = counts("-n", "3", "--elastic", "1", at_end=dies)
    code, output = job.end()
    assert code == 0, output
    assert "2 ranks counted 60.0" in output


STOPS = "if comm.rank == 1 and once('stopped'): os.kill(os.getpid(), 19)"


def test_a_rank_that_stops_when_others_have_finished_is_replaced(counts):
    job = counts("-n", "3", "--elastic", "1", "--timeout-s", "1", at_end=STOPS)
    code, output = job.end()
    assert code == 0, output
    assert "2 ranks counted 60.0" in output
    assert [event["cause"] for event in job.events("resized")] == ["stopped"]


@live
def test_a_rank_that_stops_while_the_others_shrink_is_lost_too(counts):
    job = counts("-n", "3", "--elastic", "1", "--timeout-s", "60", before=shrinking(STOPS))
    os.kill(job.await_step(1)[2], signal.SIGKILL)
    code, output = job.end()
    assert code == 0, output
    assert "ranks counted 60.0" in output


def test_a_rank_that_leaves_before_the_others_finish_ends_the_job(counts):
    job = counts("-n", "2", "--elastic", "1", at_end="if comm.rank == 1: sys.exit(0)")
    code, output = job.end()
    assert code == 1, output
    assert "ended inside the call of elastic: 1" in output


@live
def test_a_rank_that_is_killed_after_elastic_is_replaced_by_a_new_job(counts):
    dies = "if once('died'): time.sleep(0.2); os.kill(os.getpid(), 9)\ntime.sleep(0.5)"
    job = counts("-n", "2", "--elastic", "1", after=dies)
    code, output = job.end()
    assert code == 0, output
    assert [event["level"] for event in job.events("resized")] in ([], [2])
    assert len(job.events("started")) == 2


@live
def test_after_a_loss_init_and_elastic_have_the_ranks_that_are_left(counts):
    after = "with rr.init() as comm: print('now', comm.size, flush=True)\n"
    after += "rr.elastic(lambda comm, state: print('then', comm.size), rr.State({'x': [1.0]}))"
    job = counts("-n", "3", "--elastic", "1", after=after)
    os.kill(job.await_step(1)[1], signal.SIGKILL)
    code, output = job.end()
    assert code == 0, output
    assert (output.count("now 2"), output.count("then 2")) == (2, 2)


SHRINKS = """
import os, signal, sys, numpy as np, ringreduce as rr
comm = rr.init()
part = comm.split(0)
try:
    for step in range(1000):
        if comm.rank == 1 and step == 20:
            os.kill(os.getpid(), signal.SIGKILL)
        part.all_reduce(np.ones(10))
except rr.PeerLostError:
    left = part.shrink()
    print(left.rank, left.size, left.all_reduce(1).item(), part, flush=True)
    left.barrier()
    sys.stdout.flush()
    os._exit(0)
"""


@live
def test_a_program_shrinks_its_communicator(tmp_path):
    program = tmp_path / "shrinks.py"
    program.write_text(SHRINKS)
    words = ["--with-ft", "ulfm", "--bind-to", "none", "-n", "3", sys.executable, str(program)]
    done = subprocess.run(
        [mpiexec(), *words], capture_output=True, text=True, env=environment(), timeout=60
    )
    assert "0 2 2 <" in done.stdout, done
    assert "1 2 2 <" in done.stdout, done
    assert done.stdout.count("superseded") == 2, done


def test_an_mpi_that_cannot_shrink_says_why(start, tmp_path):
    program = tmp_path / "cannot.py"
    program.write_text("import ringreduce as rr\nrr.init().shrink()")
    command = [sys.executable, "-m", "ringreduce", "run", "-n", "2", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    why = "was started without fault tolerance; use `mpiexec --with-ft ulfm`"
    if FLAVOUR is not Flavour.OPEN_MPI:
        why = "ends the whole job if a rank is lost; Open MPI 5 does not"
    assert "NotImplementedError: shrink: " in done.stderr
    assert why in done.stderr
    assert done.returncode == 1


@pytest.mark.skipif(FLAVOUR is Flavour.OPEN_MPI, reason="it can")
def test_a_live_recovery_is_refused_before_a_rank_starts():
    words = ["-n", "2", "--elastic", "1", "--recovery", "live", "-m", "ringreduce"]
    command = [sys.executable, "-m", "ringreduce", "run", *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2, done
    assert f"--recovery live: {FLAVOUR} ends the whole job if a rank is lost" in done.stderr
