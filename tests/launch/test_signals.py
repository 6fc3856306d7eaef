"""What a launcher knows of signals to it."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading

import pytest

from ringreduce.supervisor.signals import Signals, heed_again

DEADLINE_S = 60


def came(signals: Signals) -> list[tuple[int, bool]]:
    """Wait for a signal.  One that another thread gets may wake this one before."""
    found: list[tuple[int, bool]] = []
    while not found:
        assert select.select(signals.woken, [], [], DEADLINE_S)[0], "no signal has come"
        found = signals.taken()
    return found


@pytest.fixture
def others_thread():
    """A thread as those of a library: it blocks no signal."""
    ends = threading.Event()
    thread = threading.Thread(target=ends.wait)
    thread.start()
    yield thread
    ends.set()
    thread.join()


def test_signals_are_kept_in_their_order_until_they_are_taken():
    with Signals() as signals:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert came(signals) == [(signal.SIGUSR1, False)]
        assert signals.taken() == []
        assert select.select(signals.woken, [], [], 0)[0] == []


@pytest.mark.usefixtures("others_thread")
def test_a_signal_that_a_thread_of_a_library_gets_is_not_lost():
    with Signals() as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        assert came(signals) == [(signal.SIGTERM, False)]


def test_an_ignored_signal_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Signals() as signals:
            os.kill(os.getpid(), signal.SIGHUP)
            os.kill(os.getpid(), signal.SIGUSR2)
            assert came(signals) == [(signal.SIGUSR2, False)]
    finally:
        signal.signal(signal.SIGHUP, before)


def test_all_is_as_before_afterwards():
    def state():
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        return signal.getsignal(signal.SIGTERM), mask, set(os.listdir("/proc/self/fd"))

    before = state()
    with Signals():
        os.kill(os.getpid(), signal.SIGTERM)  # it comes too late for the job
    assert state() == before


def test_a_child_that_heeds_signals_again_ends_by_one():
    code = "import os, signal; os.kill(os.getpid(), signal.SIGTERM); print('goes on')"
    with Signals():
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, preexec_fn=heed_again, capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (-signal.SIGTERM, b"")
