"""The launcher names the rank that a signal killed, and the signal."""

from __future__ import annotations

import os
import signal
import socket
import time
from contextlib import ExitStack

import pytest

from ringreduce.launch.deaths import WATCH, Connection, End, RankWatch, report

WHERE = f"rank 1 (process 77 on {socket.gethostname()})"
KILLED, LEFT = End(1, 77, None), End(1, 77, 9)


@pytest.mark.parametrize(
    ("first", "code", "sentence", "reported"),
    [
        (KILLED, 9, f"{WHERE} was killed by signal 9 (SIGKILL)", 137),  # MPICH
        (KILLED, 139, f"{WHERE} was killed by signal 11 (SIGSEGV)", 139),  # Open MPI
        (KILLED, 255, f"{WHERE} was killed", 255),  # Intel MPI
        (KILLED, 1, "", 1),
        (KILLED, 0, "", 0),
        (LEFT, 9, "", 9),
        (None, 9, "", 9),
    ],
)
def test_a_signal_is_told_from_an_exit_code(first, code, sentence, reported):
    assert report(first, code) == (sentence, reported)


@pytest.fixture
def watch():
    with RankWatch() as watch:
        watch.start()
        yield watch


def rank(watch, number, code=None):
    """Fork a process that connects as that rank and ends, with or without its exit code."""
    pid = os.fork()
    if pid == 0:
        connection = Connection({WATCH: watch.name, "PMI_RANK": str(number)})
        if code is not None:
            connection.send_exit_code(code)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    return pid


def first_of(watch):
    deadline = time.monotonic() + 5
    while watch.first is None and time.monotonic() < deadline:
        time.sleep(0.01)
    return watch.first


@pytest.mark.parametrize("code", [None, 3])
def test_the_first_rank_that_fails_is_noted(watch, code):
    rank(watch, 0, code=0)
    pid = rank(watch, 2, code=code)
    rank(watch, 1)
    assert first_of(watch) == End(2, pid, code)


def test_a_child_of_a_rank_does_not_hide_its_death(watch):
    with ExitStack() as cleanup:
        pid = os.fork()
        if pid == 0:
            os.setpgid(0, 0)
            Connection({WATCH: watch.name, "PMI_RANK": "4"})
            if os.fork() == 0:
                time.sleep(60)
            os._exit(1)
        os.waitpid(pid, 0)
        cleanup.callback(os.killpg, pid, signal.SIGKILL)
        assert first_of(watch) == End(4, pid, None)


@pytest.mark.parametrize(
    "environment", [{}, {WATCH: "nobody listens here", "PMI_RANK": "0"}, {WATCH: "no rank"}]
)
def test_a_rank_without_a_launcher_goes_on(environment):
    Connection(environment).send_exit_code(0)
