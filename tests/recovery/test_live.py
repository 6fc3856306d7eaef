"""Ranks that go on in their processes after a loss: under Open MPI."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ringreduce.supervisor.mpiexec import Flavour, ask
from tests.support.mpi import ROOT, environment, mpiexec

FLAVOUR = ask(Path(mpiexec())).flavour
LIVE = FLAVOUR is Flavour.OPEN_MPI
live = pytest.mark.skipif(not LIVE, reason="a lost rank ends the job under other MPIs")
pytestmark = pytest.mark.mpi


def levels(job) -> list[tuple[int, int]]:
    return [(event["after"], event["level"]) for event in job.events("resized")]


def await_losses(job, count: int) -> None:
    """Wait until so many ranks are lost."""
    job.wait_until(lambda: sum(len(event["lost"]) for event in job.events("resized")) == count)


AND_THEN = """
with rr.init() as comm: print(f"now {comm.size}\\n", end="", flush=True)
rr.elastic(lambda comm, state: print(f"then {comm.size}\\n", end=""), rr.State({"x": [1.0]}))
"""


@live
def test_after_two_kills_at_once_init_and_elastic_have_the_ranks_that_are_left(steps, finish):
    job = steps("-n", "4", "--elastic", "1", then=AND_THEN)
    pids = job.await_step(1)
    for victim in (1, 3):
        os.kill(pids[victim], signal.SIGKILL)
    await_losses(job, 2)
    output = finish(job)
    assert "2 ranks made each step once" in output
    assert (output.count("now 2"), output.count("then 2")) == (2, 2)


STOPS = "if comm.rank == 1 and once('stopped'): os.kill(os.getpid(), 19)"


def test_ranks_that_stop_in_a_step_or_when_others_have_finished_are_lost(steps, finish):
    """The others go on, in the same processes if the MPI lets them."""
    job = steps("-n", "3", "--elastic", "1", "--timeout-s", "1", at_end=STOPS)
    os.kill(job.await_step(1)[0], signal.SIGSTOP)
    job.await_step(2)
    assert levels(job) == [(2, 1 if LIVE else 2)]
    assert "1 ranks made each step once" in finish(job)
    assert [event["cause"] for event in job.events("resized")] == ["stopped"] * 2


def shrinking(first: str) -> str:
    """Code that makes a rank run the statement `first` before it shrinks its communicator."""
    return f"""
shrink = rr.Communicator.shrink
def shrinking(comm):
    {first}
    return shrink(comm)
rr.Communicator.shrink = shrinking
"""


HANGS = "if comm.rank == 0: time.sleep(600)\n    " + STOPS
SOON = "from ringreduce.supervisor import membership; membership._LIVE_S = 0.2"


@live
def test_a_shrink_that_hangs_or_stops_is_followed_by_a_new_job(steps, finish):
    job = steps("-n", "3", "--elastic", "1", before=shrinking(HANGS), launcher=SOON)
    os.kill(job.await_step(1)[2], signal.SIGKILL)
    job.await_step(2)
    assert "2 ranks made each step once" in finish(job)
    assert levels(job) == [(2, 2)]


@live
def test_ranks_that_die_while_the_others_shrink_or_have_finished(steps, finish):
    dies = shrinking("if comm.rank == 1 and once('died'): os.kill(os.getpid(), 9)")
    at_end = "if comm.rank == 1 and once('end'): time.sleep(0.3); os.kill(os.getpid(), 9)"
    job = steps("-n", "4", "--elastic", "1", before=dies, at_end=at_end)
    os.kill(job.await_step(1)[3], signal.SIGKILL)
    await_losses(job, 2)
    assert "1 ranks made each step once" in finish(job)


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
def test_the_others_go_on_after_a_rank_has_died_that_waited_for_them(steps, finish):
    """They go on for longer than the timeout, after which silent ranks would count as stopped."""
    job = steps("-n", "4", "--elastic", "1", "--timeout-s", "3", before=ASKS, step_s="0.05")
    os.kill(job.await_step(1)[3], signal.SIGKILL)
    await_losses(job, 2)
    time.sleep(3.5)
    assert "2 ranks made each step once" in finish(job)
    assert levels(job)[-1] == (2, 1)


def test_a_rank_that_leaves_before_the_others_finish_ends_the_job(steps, tmp_path):
    (tmp_path / "stop").touch()
    job = steps("-n", "2", "--elastic", "1", at_end="if comm.rank == 1: sys.exit(0)")
    code, output = job.end()
    assert code == 1, output
    assert "ended inside the call of elastic: 1" in output


@live
def test_a_rank_that_is_killed_after_elastic_is_replaced_by_a_new_job(steps, finish):
    dies = "if once('died'): time.sleep(0.2); os.kill(os.getpid(), 9)\ntime.sleep(0.5)"
    job = steps("-n", "2", "--elastic", "1", then=dies)
    finish(job)
    assert [event["level"] for event in job.events("resized")] in ([], [2])
    assert len(job.events("started")) == 2


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


@live
@pytest.mark.parametrize(
    ("then", "code"),
    [("print('at the end')", 0), ("sys.exit(3)", 3), ("raise KeyError('afterwards')", 1)],
)
def test_a_store_that_survives_a_killed_server_ends_with_the_code_of_the_program(mpi, then, code):
    how = {"servers": 2, "replicas": 2, "staleness": None, "count": 60, "then": then}
    words = json.dumps(how | {"victims": {3: ["update", 25]}})
    done = mpi.run("servers", 4, words, options=["--with-ft", "ulfm", "--bind-to", "none"])
    assert done.returncode == code, done.output
    assert "MPI_ABORT" not in done.output  # mpiexec may hang then
    if code != 1:  # mpiexec may end the other ranks before they end
        assert [found.get("lost") for found in done.results] == [[3], [3], [3], None]
        assert done.output.count("at the end") == (0 if code else 3)


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


@pytest.mark.skipif(LIVE, reason="it can")
def test_a_live_recovery_is_refused_before_a_rank_starts(refused):
    text = refused("run -n 2 --elastic 1 --recovery live -m ringreduce")
    assert f"--recovery live: {FLAVOUR} ends the whole job if a rank is lost" in text
