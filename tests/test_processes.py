"""Whether a process has ended, and whether it is the same process as before."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from ringreduce.processes import start_of

FIRST_THREAD_ENDS = """
import ctypes, threading, time
threading.Thread(target=time.sleep, args=(60,)).start()
print("here", flush=True)
ctypes.CDLL(None).pthread_exit(None)
"""


def state_of(process: int) -> str:
    with open(f"/proc/{process}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]


def wait_for_zombie(process: int) -> None:
    deadline = time.monotonic() + 10
    while state_of(process) != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_process_keeps_its_start():
    begun = start_of(os.getpid())
    assert begun is not None
    time.sleep(0.02)
    assert start_of(os.getpid()) == begun


def test_a_later_process_has_another_start():
    with subprocess.Popen(["sleep", "60"]) as process:
        assert start_of(process.pid) > start_of(os.getpid())
        process.kill()


def test_a_stopped_process_has_not_ended():
    with subprocess.Popen(["sleep", "60"]) as process:
        process.send_signal(signal.SIGSTOP)
        assert start_of(process.pid) is not None
        process.kill()


def test_a_killed_process_has_ended_before_it_is_reaped():
    with subprocess.Popen(["sleep", "60"]) as process:
        process.kill()
        wait_for_zombie(process.pid)
        assert start_of(process.pid) is None


def test_a_process_that_is_reaped_has_ended():
    with subprocess.Popen(["true"]) as process:
        process.wait()
    assert start_of(process.pid) is None


def test_a_process_whose_first_thread_has_ended_still_runs():
    command = [sys.executable, "-c", FIRST_THREAD_ENDS]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        wait_for_zombie(process.pid)
        assert start_of(process.pid) is not None
        process.kill()


def test_the_name_of_a_program_may_have_spaces_and_parentheses(tmp_path):
    named = tmp_path / "a) R 1 (b"
    named.symlink_to("/bin/sleep")
    with subprocess.Popen([named, "60"]) as process:
        assert start_of(process.pid) > start_of(os.getpid())
        process.kill()
