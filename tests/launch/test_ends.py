"""The launcher finds out which rank ended the job, and how."""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from ringreduce.launch.rank_main import Report
from ringreduce.recovery.wire import ADDRESS, TOKEN, Connection, connect
from ringreduce.supervisor import ranks
from ringreduce.supervisor.ends import End
from ringreduce.supervisor.generation import end_of_mpiexec
from ringreduce.supervisor.mpiexec import Flavour
from ringreduce.supervisor.ranks import Rank
from ringreduce.system.proc import is_exiting, status_of
from tests.support.watch import Watch

EXIT_OF_A_THREAD = {"x86_64": 60}.get(platform.machine(), 93)
"""Linux's number of the system call that ends one thread."""


@pytest.fixture
def watch():
    watching = Watch()
    watching.start()
    yield watching
    if watching._thread.is_alive():
        watching.stop()


def rank(watch: Watch, number: int, does) -> int:
    """Start a process that is rank `number`.  The launcher knows the rank before `does` runs."""
    waiting, going = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            launcher = {ADDRESS: watch.address, TOKEN: watch.token}
            report = Report(connect(launcher), {"PMI_RANK": str(number)})
            os.read(waiting, 1)
            does(report)
        finally:
            os._exit(0)
    try:
        await_rank(watch, str(number))
    finally:
        os.write(going, b"x")
        os.close(going)
        os.close(waiting)
    return child


def await_rank(watch: Watch, number: str) -> None:
    """Wait until the launcher knows a rank.  A watch that is not started will know it later."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        known = [each.number for each in watch._ranks.known()]
        if number in known or not watch._thread.is_alive():
            break
        time.sleep(0.001)
    else:
        pytest.fail("the launcher did not see the rank")


def killed(report: Report) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def ends(how: str):
    return lambda report: report.end(how)


def first(watch: Watch, *ranks) -> End | None:
    """Let ranks end one after another; return the end that counts."""
    for number, does in enumerate(ranks):
        os.waitpid(rank(watch, number, does), 0)
    watch.stop()
    return watch.first


def test_the_first_end_that_ends_the_job_counts(watch):
    found = first(watch, ends(""), ends("raised ValueError"), killed, ends("raised KeyError"))
    assert found == End("1", "raised ValueError")


def test_the_code_of_ranks_that_end_in_order_counts_although_mpiexec_kills_the_last(watch):
    found = first(watch, lambda report: report.end("", 2, in_order=True), killed)
    assert found == End("0", "", code=2)


def test_a_process_that_is_gone_without_a_report_is_an_end(watch):
    found = first(watch, ends(""), killed, ends("raised ValueError"))
    assert found is not None
    assert (found.rank, found.how) == ("1", "")


def test_the_status_of_a_process_is_read_while_its_parent_takes_no_note_of_it(watch):
    child = rank(watch, 0, killed)
    deadline = time.monotonic() + 10
    while watch.first is None and time.monotonic() < deadline:
        time.sleep(0.001)
    os.waitpid(child, 0)
    assert watch.first == End("0", "", int(signal.SIGKILL))


@pytest.mark.skipif(
    tuple(map(int, platform.release().split("-")[0].split(".")[:2])) < (6, 15),
    reason="older kernels forget the status of a process that its parent has taken note of",
)
def test_the_status_of_a_process_is_known_after_its_parent_has_taken_note_of_it():
    child = os.fork()
    if child == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    descriptor = os.pidfd_open(child)
    os.waitpid(child, 0)
    assert status_of(child, descriptor) == KILLED
    os.close(descriptor)


def test_the_order_of_ends_is_kept_where_the_launcher_is_late():
    watch = Watch()
    for number in (3, 1, 2):
        os.waitpid(rank(watch, number, ends(f"raised {number}")), 0)
    watch.start()
    watch.stop()
    assert watch.first == End("3", "raised 3")


def ends_slowly(report: Report) -> None:
    """Send a message, close the connection, and be gone a while later."""
    threading.Timer(0.3, killed, [report]).start()
    report._launcher.send("join")
    report._launcher.close()
    ctypes.CDLL(None).syscall(EXIT_OF_A_THREAD, 0)


@pytest.fixture
def patience(monkeypatch):
    """Wait for a rank that ends slowly as long as it takes."""
    monkeypatch.setattr(ranks, "ENDING_S", 60.0)


@pytest.mark.slow
@pytest.mark.usefixtures("patience")
def test_a_rank_that_has_begun_to_end_is_first_though_another_is_gone_before_it(watch):
    slow = rank(watch, 0, ends_slowly)
    while not is_exiting(slow):
        time.sleep(0.001)
    for child in (rank(watch, 1, killed), slow):
        os.waitpid(child, 0)
    watch.stop()
    assert watch.first is not None
    assert watch.first.rank == "0"


@pytest.mark.slow
@pytest.mark.usefixtures("patience")
def test_a_rank_that_has_begun_to_end_is_first_though_its_last_message_is_unread():
    watch = Watch()
    slow = rank(watch, 0, ends_slowly)
    while not is_exiting(slow):
        time.sleep(0.001)
    os.waitpid(rank(watch, 1, killed), 0)
    watch.start()
    os.waitpid(slow, 0)
    watch.stop()
    assert watch.first is not None
    assert watch.first.rank == "0"


def test_a_rank_that_has_closed_its_connection_and_goes_on_is_not_waited_for(watch):
    def goes_on(report: Report) -> None:
        report._launcher.close()
        time.sleep(30)

    going_on = rank(watch, 0, goes_on)
    os.waitpid(rank(watch, 1, killed), 0)
    watch.stop()
    os.kill(going_on, signal.SIGKILL)
    os.waitpid(going_on, 0)
    assert watch.first is not None
    assert watch.first.rank == "1"


def test_a_forked_child_reports_nothing(watch):
    def forks(report: Report) -> None:
        child = os.fork()
        if child == 0:
            report.end("raised ValueError")
            os._exit(1)
        os.waitpid(child, 0)
        report.end()

    assert first(watch, forks) is None


def test_watching_leaves_no_file_open():
    def opened():
        return set(os.listdir("/proc/self/fd"))

    before = opened()
    watch = Watch()
    watch.start()
    first(watch, ends(""), ends(""))
    assert opened() == before


def test_without_a_launcher_nothing_is_reported():
    for environment in ({}, {ADDRESS: ""}, {ADDRESS: "nobody listens here"}):
        Report(connect(environment), environment).end("raised ValueError")


KILLED, EXITED = int(signal.SIGKILL), 5 << 8
SAID = "rank 1 on HOST was killed by signal 9 (SIGKILL); this ended the job"


@pytest.mark.parametrize(
    ("flavour", "code", "status", "text", "number"),
    [
        (Flavour.OPEN_MPI, 137, None, SAID, 9),
        (Flavour.MPICH, 9, None, SAID, 9),
        (Flavour.INTEL, 9, KILLED, SAID, 9),
        (Flavour.INTEL, 255, KILLED, SAID, 9),
        (Flavour.INTEL, 255, None, "", 0),
        (Flavour.MPICH, 9, EXITED, "", 0),  # 9 is that of the others, which mpiexec killed
        (Flavour.MPICH, 5, None, "", 0),
        (Flavour.OPEN_MPI, 9, None, "", 0),
    ],
)
def test_a_signal_is_named_if_it_is_known(monkeypatch, flavour, code, status, text, number):
    monkeypatch.setattr("platform.node", lambda: "HOST")
    end = End("1", "", status)
    assert (end.text(code, flavour), end.signal(code, flavour)) == (text, number)


def test_what_a_rank_reports_is_no_signal():
    assert End("1", "called sys.exit(9)").signal(9, Flavour.MPICH) == 0


def test_a_process_that_ends_is_told_from_one_that_runs():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    here, there = socket.socketpair()
    with here, there:
        rank = Rank(Connection(here, ""), child.pid)
        assert not rank.is_exiting
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # its parent has not reaped it
        assert rank.is_exiting
        child.communicate()
        assert rank.is_exiting


DIES_SLOWLY = f"""
import ctypes, os, signal, threading
threading.Timer(0.3, os.kill, [os.getpid(), signal.SIGKILL]).start()
print("ends", flush=True)
ctypes.CDLL(None).syscall({EXIT_OF_A_THREAD}, 0)
"""


@pytest.mark.slow
def test_the_end_of_an_mpiexec_is_awaited_once_it_has_begun():
    command = [sys.executable, "-c", DIES_SLOWLY]
    child = subprocess.Popen(command, stdout=subprocess.PIPE)
    child.stdout.readline()
    while not is_exiting(child.pid):
        time.sleep(0.001)
    assert child.poll() is None
    assert end_of_mpiexec(child) == -signal.SIGKILL
    child.communicate()


def test_an_mpiexec_that_runs_has_no_end():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert end_of_mpiexec(child) == 0
    child.communicate(b"\n")
    assert end_of_mpiexec(child) == 0
