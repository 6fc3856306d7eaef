"""Whether a process has ended, and what the kernel says of processes of any name.

Names of processes are bytes, which the kernel may cut in the middle of a letter.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from ringreduce.console.terminal import terminal_of
from ringreduce.launch import doctor
from ringreduce.picture import output
from ringreduce.supervisor import cleanup
from ringreduce.system import place
from ringreduce.system.proc import command_of, is_exiting, name_of, start_of, stat_of
from tests.support.mpi import environment

FIRST_THREAD_ENDS = """
import ctypes, threading, time
threading.Thread(target=time.sleep, args=(60,)).start()
print("here", flush=True)
ctypes.CDLL(None).pthread_exit(None)
"""


def wait_for_zombie(process: int) -> None:
    deadline = time.monotonic() + 120
    while stat_of(process)[0] != b"Z":
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_process_keeps_its_start():
    begun = start_of(os.getpid())
    assert begun is not None
    time.sleep(0.02)
    assert start_of(os.getpid()) == begun


def test_a_later_process_has_another_start_also_when_it_is_stopped():
    with subprocess.Popen(["sleep", "60"]) as process:
        process.send_signal(signal.SIGSTOP)
        assert start_of(process.pid) > start_of(os.getpid())
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


# --- names ----------------------------------------------------------------------------------------

NAMES = ["запустить".encode()[:15], b"\xff) R 1 (\n", b"a) Z 0 0 (b", b"", b"two words"]


@contextlib.contextmanager
def named(name: bytes) -> Iterator[int]:
    """Run a process of this name."""
    code = f"import ctypes, sys; ctypes.CDLL(None).prctl(15, {name!r}); print(flush=True)"
    argv = [sys.executable, "-c", f"{code}; sys.stdin.read()"]  # 15 is PR_SET_NAME
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process.pid
        process.communicate()


@pytest.fixture(params=NAMES, ids=repr)
def process(request: pytest.FixtureRequest) -> Iterator[int]:
    with named(request.param) as process:
        yield process


def test_fields_are_found_behind_any_name(process):
    assert int(stat_of(process)[1]) == os.getpid()
    assert start_of(process) is not None
    assert not is_exiting(process)
    assert isinstance(name_of(process), str)
    assert sys.executable in command_of(process)


def test_a_clean_up_passes_processes_of_any_name(process, tmp_path):
    left = tmp_path / "mpich_shm_1_0"
    left.write_bytes(b"0")
    cleanup.clean_up_job(process, since=0, directory=tmp_path, hydra_files=tmp_path, dying_s=0)
    assert not left.exists()


def test_a_parent_of_any_name_is_passed_or_is_the_launcher(process, monkeypatch, tmp_path):
    monkeypatch.setattr(os, "getppid", lambda: process)
    found = place.of_launcher({"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0"})
    assert found[place.SET_BY] == str(process)  # it does not have the variables itself
    with open(tmp_path / "file", "w") as file:
        assert terminal_of(file) is None


def test_an_error_in_a_clean_up_is_reported_and_not_raised(monkeypatch, tmp_path, capsys):
    def fail(**_: object) -> None:
        raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")

    monkeypatch.setattr(cleanup, "remove_abandoned_files", fail)
    cleanup.clean_up_job(os.getpid(), since=0, directory=tmp_path)
    assert f"left in {tmp_path}: UnicodeDecodeError" in capsys.readouterr().err


def test_a_check_of_doctor_that_raises_is_a_finding_and_the_others_go_on(monkeypatch, capsys):
    def broken():
        raise ValueError("odd")
        yield

    monkeypatch.setattr(doctor, "CHECKS", (broken, doctor.this_process))
    assert doctor.main() == 0
    printed = capsys.readouterr().out
    assert "raised ValueError('odd')" in printed
    assert "Python" in printed


def test_a_picture_replaces_what_no_xml_can_hold(tmp_path):
    output.write(tmp_path / "a.svg", "<svg>\udcd0\x01é</svg>")
    assert (tmp_path / "a.svg").read_text("utf-8") == "<svg>??é</svg>"


@pytest.mark.mpi
def test_a_job_keeps_its_exit_code_beside_a_process_of_any_name(tmp_path):
    program = tmp_path / "program.py"
    program.write_text("import sys, ringreduce as rr\nwith rr.init(): pass\nsys.exit(7)\n")
    with named(NAMES[0]):
        argv = [sys.executable, "-m", "ringreduce", "run", "-n", "2", str(program)]
        ended = subprocess.run(argv, env=environment(), check=False, timeout=300)
    assert ended.returncode == 7
