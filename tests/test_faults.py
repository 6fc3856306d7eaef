"""Ranks that stop, die, leave or never call: no other waits for ever, and all say the same."""

from __future__ import annotations

import os
import re
import signal
import threading
import time

import numpy as np
import pytest

import ringreduce as rr
from ringreduce.algorithms import build
from ringreduce.describe import describe_timeout
from ringreduce.devices.cpu import CpuDevice
from ringreduce.topology import Topology
from ringreduce.transports.thread import Switchboard, ThreadTransport
from tests.mpi import with_environment

TOGETHER_S = 0.5
"""Within this time of each other all ranks raise."""
GONE_S = 3.0
"""How long a process of a job that has ended may linger."""


# --- over MPI: what all tests look at -------------------------------------------------------------


def nothing_left(job) -> None:
    """Wait until no process of the job is left; fail if one stays."""
    deadline = time.monotonic() + GONE_S
    while left := with_environment(str(job.results)):
        assert time.monotonic() < deadline, f"processes {left} are left"
        time.sleep(0.02)


def run_to_its_end(mpi, program, ranks, *arguments, timeout_s=30.0):
    job = mpi.start(program, ranks, *arguments)
    done = mpi.finish(job, timeout_s)
    nothing_left(job)
    return done


def one_error(told, name, ranks=None):
    """The text of the error that these ranks got: one kind, one text, at about the same time."""
    assert {r["error"] for r in told} == {name}
    texts = {r["text"] for r in told}
    assert len(texts) == 1
    raised_at = [r["raised_at"] for r in told]
    assert max(raised_at) - min(raised_at) < TOGETHER_S
    assert all(r["ranks"] == ranks for r in told)
    return texts.pop()


def others(done, *victims):
    """What the ranks reported that are no victims.  Those may do anything when they are let go."""
    return [result for rank, result in enumerate(done.results) if rank not in victims]


def names(text, culprits, size):
    """Check that a text says of the culprits, and of nobody else, that they stopped, and draws."""
    head, *lines = text.splitlines()
    who = f"rank {culprits[0]}" if len(culprits) == 1 else f"ranks {culprits[0]} and {culprits[1]}"
    assert re.fullmatch(rf"{who} stopped answering: no progress for \d+\.\d s", head)
    assert not any("stopped" in line for line in lines)
    waiting = {int(m[1]) for line in lines if (m := re.match(r"  rank (\d+) is waiting for", line))}
    assert not waiting & set(culprits)
    assert any(line.startswith("step  rank 0") for line in lines)
    assert lines[-1].startswith("! did not finish: ")
    assert waiting <= set(range(size))


def later_calls_raise_the_same_at_once(told):
    for r in told:
        assert r["later"] == [r["text"]] * 3
        assert r["later_s"] < 0.2


# --- a rank that does not answer ------------------------------------------------------------------


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("how", "victims", "ranks"),
    [
        ("never", [0], 2),
        ("never", [1], 3),
        ("stop", [0], 3),
        ("stop", [1], 2),
        ("stop", [2], 3),
        ("stop", [1, 2], 4),
        ("stop", [0, 2], 4),
    ],
)
def test_a_rank_that_does_not_answer_is_named_by_all_others(mpi, how, victims, ranks):
    done = run_to_its_end(mpi, "fault", ranks, how, ",".join(map(str, victims)), "caught")
    told = others(done, *victims)
    names(one_error(told, "PeerTimeoutError", victims), victims, ranks)
    later_calls_raise_the_same_at_once(told)
    assert done.returncode != 0


@pytest.mark.mpi
@pytest.mark.parametrize("how", ["never", "stop"])
def test_an_uncaught_timeout_ends_the_job(mpi, how):
    done = run_to_its_end(mpi, "fault", 3, how, "1", "uncaught")
    assert "PeerTimeoutError: rank 1 stopped answering" in done.output
    assert done.seconds < 8
    assert done.returncode != 0


@pytest.mark.mpi
def test_the_least_patient_rank_speaks_for_all(mpi):
    done = run_to_its_end(mpi, "trouble", 3, "differing_timeouts")
    names(one_error(others(done, 1), "PeerTimeoutError", [1]), [1], 3)


@pytest.mark.mpi
def test_a_rank_that_is_busy_elsewhere_is_not_blamed(mpi):
    done = run_to_its_end(mpi, "trouble", 3, "bystander")
    zero, two = others(done, 1)
    assert two["ranks"] == [1]
    assert two["text"].startswith("rank 1 stopped answering")
    assert zero["text"] == two["text"]


@pytest.mark.mpi
def test_a_rank_that_stops_while_others_disagree_is_named(mpi):
    done = run_to_its_end(mpi, "trouble", 3, "stopped_in_a_disagreement")
    text = one_error(others(done, 2), "PeerTimeoutError", [2])
    assert "rank 2 stopped answering" in text
    assert "rank 0 is waiting for rank 2 in call 2" in text


@pytest.mark.mpi
@pytest.mark.parametrize("kind", ["never_init", "stopped_in_init"])
def test_a_rank_that_is_missing_from_init(mpi, kind):
    done = run_to_its_end(mpi, "trouble", 3, kind)
    zero, two = others(done, 1)
    assert zero["error"] == two["error"] == "PeerTimeoutError"
    if kind == "stopped_in_init":
        assert zero == two
        assert zero["ranks"] == [1]
    assert done.seconds < 10


@pytest.mark.mpi
def test_ranks_that_are_stopped_and_continued_go_on(mpi):
    job = mpi.start("trouble", 3, "paused")
    pids = read_pids(job)
    time.sleep(0.2)
    pause([pids[1]], 0.5)
    # Longer than the timeout, but all at once: nobody was there to wait.
    pause(pids, 1.5)
    done = mpi.finish(job, 30)
    assert done.results == [{"done": True}] * 3, done.output
    assert done.returncode == 0


def read_pids(job):
    """The process ids that the ranks of a job report at first."""
    deadline = time.monotonic() + 20
    while len(list(job.results.glob("*.json"))) < job.ranks:
        assert time.monotonic() < deadline, "the job does not start"
        time.sleep(0.02)
    finished = [job.results / f"{rank}.json" for rank in range(job.ranks)]
    return [int(re.search(r'"pid": (\d+)', path.read_text())[1]) for path in finished]


def pause(pids, seconds):
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(seconds)
    for pid in pids:
        os.kill(pid, signal.SIGCONT)


# --- a rank that ends -----------------------------------------------------------------------------


@pytest.mark.mpi
@pytest.mark.parametrize("ending", ["caught", "asleep"])
def test_a_killed_rank_takes_its_job_along(mpi, ending):
    done = run_to_its_end(mpi, "fault", 3, "kill", "1", ending)
    assert time.time() - done.results[1]["failed_at"] < 5
    assert done.returncode != 0


@pytest.mark.mpi
@pytest.mark.parametrize("ending", ["caught", "uncaught"])
def test_a_rank_that_vanishes_takes_its_job_along(mpi, ending):
    done = run_to_its_end(mpi, "fault", 3, "vanish", "1", ending)
    assert time.time() - done.results[1]["failed_at"] < 5


@pytest.mark.mpi
@pytest.mark.parametrize("how", ["exit", "return"])
def test_a_rank_that_exits_early_is_told_of_by_all_others(mpi, how):
    done = run_to_its_end(mpi, "fault", 3, how, "1", "caught")
    text = one_error(others(done, 1), "MismatchError")
    assert "rank 1 calls close(), ranks 0 and 2 call all_reduce" in text
    left = "rank 1 has left the communicator: its process ends"
    assert all(left in later for r in others(done, 1) for later in r["later"])
    assert time.time() - done.results[1]["failed_at"] < 8


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("how", "ending"),
    [("raise", "uncaught"), ("raise", "with"), ("raise", "asleep"), ("raise slowly", "with")],
)
def test_an_exception_ends_the_job_with_its_traceback(mpi, how, ending):
    done = run_to_its_end(mpi, "fault", 3, how, "1", ending)
    assert time.time() - done.results[1]["failed_at"] < 2
    assert 'raise ValueError("the victim\'s own error")' in done.output
    assert "ValueError: the victim's own error" in done.output
    assert done.returncode != 0


@pytest.mark.mpi
def test_an_exception_that_is_caught_outside_of_the_with_block(mpi):
    done = run_to_its_end(mpi, "trouble", 3, "left_and_caught")
    told = others(done, 1)
    assert {r["error"] for r in told} == {"PeerLostError"}
    assert all("rank 1 has left the communicator: KeyError: 'mine'" in r["text"] for r in told)
    later_calls_raise_the_same_at_once(told)
    assert done.seconds < 6


@pytest.mark.mpi
def test_an_interrupt_while_waiting_ends_the_job(mpi):
    done = run_to_its_end(mpi, "fault", 3, "interrupt", "1", "asleep")
    assert "KeyboardInterrupt" in done.output
    assert time.time() - done.results[1]["failed_at"] < 2.5


@pytest.mark.mpi
def test_the_death_of_mpiexec_is_the_end_of_its_ranks(mpi):
    job = mpi.start("trouble", 3, "blocked")
    read_pids(job)
    job.kill()
    job.wait()
    nothing_left(job)


@pytest.mark.mpi
def test_a_forked_child_is_refused_and_disturbs_nobody(mpi):
    for result in mpi.run_ok("trouble", 2, "forked"):
        assert result["total"] == [2.0, 2.0, 2.0]
        for answer in result["answers"]:
            seconds, _, text = answer.partition(" ")
            assert float(seconds) < 0.1
            assert text.startswith("this process was forked from the one that made")
