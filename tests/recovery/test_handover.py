"""Jobs that get another number of ranks: no step is lost or made twice."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from ringreduce.launch.cli import main
from ringreduce.launch.mpiexec import Flavour, ask
from tests.support.mpi import DEADLINE_S, ROOT, alive_in_the_end, mpiexec

pytestmark = pytest.mark.mpi
LIVE = ask(Path(mpiexec())).flavour is Flavour.OPEN_MPI
"""Whether ranks of this MPI can go on after others have left."""
COUNTS = "-m", "tests.long_recovery.counting"
"""A program that counts samples until a file exists."""
CODE = """
import os, signal, sys, time, numpy as np, ringreduce as rr
from pathlib import Path
here = Path(__file__).parent
{before}
def train(comm, state):
    while not state["stops"][0]:
        time.sleep({step_s})
        made = comm.all_reduce(np.ones(1)) / comm.size
        stops = comm.all_reduce(np.array([(here / "stop").exists()], np.int64))
        with state.update():
            state["made"] += made
            state["stops"] += stops
    if comm.rank == 0:
        print(f"{{comm.size}} ranks {{state['made'].item() == state.step}}\\n", end="", flush=True)
{call}
"""
CALL = "rr.elastic(train, rr.State({'made': np.zeros(1), 'stops': np.zeros(1, np.int64)}))"


@pytest.fixture
def counts(start, tmp_path):
    """Start the program that counts samples; or one with some code before, or another call."""

    def started(*words: str, before: str = "", call: str = CALL, step_s: str = "0.005"):
        if not before and call == CALL and step_s == "0.005":
            return start(*words, program=(*COUNTS, str(tmp_path / "stop")))
        program = tmp_path / "program.py"
        program.write_text(CODE.format(before=before, call=call, step_s=step_s))
        return start(*words, program=(str(program),))

    return started


@pytest.fixture
def scaling(tmp_path):
    """Start `ringreduce scale` for a job, or for a process id."""

    def started(job, size: int | str) -> subprocess.Popen[str]:
        pid = job if isinstance(job, int) else job.process.pid
        return subprocess.Popen(
            [sys.executable, "-m", "ringreduce", "scale", str(pid), str(size)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "TMPDIR": str(tmp_path)},
        )

    return started


@pytest.fixture
def scale(scaling):
    """Run `ringreduce scale` for a job, or for a process id."""

    def scaled(job, size: int | str) -> subprocess.CompletedProcess[str]:
        return ended(scaling(job, size))

    return scaled


def ended(command: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
    """Wait for the end of a command."""
    output, errors = command.communicate(timeout=120)
    return subprocess.CompletedProcess(command.args, command.returncode, output, errors)


def sizes(job) -> list[tuple[int, int, str]]:
    """(before, after, cause) of each change; each is planned, and no step is made twice."""
    events = job.events("resized")
    assert [event["level"] for event in events] == [3] * len(events)
    assert [event["redone"] for event in events] == [0] * len(events)
    return [(event["before"], event["after"], event["cause"]) for event in events]


def test_a_job_grows_and_shrinks_by_command(counts, scale, finish, tmp_path):
    job = counts("-n", "2", "--elastic", "1:3")
    pids = job.await_step(1)
    for size in (3, 1, 2):
        done = scale(job, size)
        assert done.returncode == 0, done
        assert f"-> {size} ranks from step" in done.stdout
    pids += [pid for event in job.events("started") for pid in event["pids"]]
    assert "2 ranks, as before" in scale(job, 2).stdout
    found = json.loads(finish(job).splitlines()[-1])
    assert found["least"] == found["most"] == found["epochs"]
    assert sizes(job) == [(2, 3, "command"), (3, 1, "command"), (1, 2, "command")]
    assert [event["lost"] for event in job.events("resized")] == [[], [1, 2], []]
    assert alive_in_the_end(pids) == []
    assert [name for name in os.listdir(tmp_path) if name.startswith("ringreduce-")] == []


def test_a_job_prints_its_number_and_is_listed_and_wrong_commands_change_nothing(
    counts, scale, finish, monkeypatch, tmp_path, capsys
):
    job = counts("-n", "2", "--elastic", "1:3")
    job.await_step(1)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert main(["scale"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{job.process.pid}  ")
    assert "--elastic 1:3" in " ".join(line.strip() for line in lines)
    assert max(map(len, lines)) <= 80
    refused = scale(job, 4)
    assert refused.returncode == 2
    assert "wanted ranks: 4; --elastic allows 1 to 3" in refused.stderr
    assert scale(job, "some").returncode == 2
    other = scale(os.getpid(), 2)
    assert other.returncode == 2
    assert "is a launcher with --elastic" in other.stderr
    assert f"job {job.process.pid}; `ringreduce scale {job.process.pid} N`" in finish(job)
    assert sizes(job) == []


def test_a_rank_that_gets_sigterm_leaves(counts, finish):
    job = counts("-n", "3", "--elastic", "1")
    pids = job.await_step(1)
    os.kill(pids[1], signal.SIGTERM)
    job.await_step(2)
    found = json.loads(finish(job).splitlines()[-1])
    assert found["least"] == found["most"] == found["epochs"]
    assert sizes(job) == [(3, 2, "notice")]
    assert job.events("resized")[0]["lost"] == [1]
    stays = [pids[0], pids[2]]
    assert (job.events("started")[1]["pids"] == stays) == LIVE, "nothing starts if the MPI goes on"


def test_notices_to_several_ranks_are_one_change(counts, finish):
    job = counts("-n", "4", "--elastic", "1")
    pids = job.await_step(1)
    for victim in (0, 2):
        os.kill(pids[victim], signal.SIGTERM)
    job.await_step(2)
    finish(job)
    assert sizes(job) == [(4, 2, "notice")]


def test_a_rank_that_leaves_is_replaced(counts, finish):
    job = counts("-n", "2", "--elastic", "2", "--replace")
    os.kill(job.await_step(1)[0], signal.SIGTERM)
    job.await_step(2)
    finish(job)
    assert sizes(job) == [(2, 2, "notice")]
    assert job.events("resized")[0]["joined"] == 1


def test_too_few_ranks_wait_for_a_command(counts, scale, finish):
    job = counts("-n", "2", "--elastic", "2")
    os.kill(job.await_step(1)[1], signal.SIGTERM)
    time.sleep(0.5)
    assert scale(job, 2).returncode == 0
    finish(job)
    assert [event["generation"] for event in job.events("started")] == [1, 2]


def test_all_ranks_get_sigterm(counts, tmp_path):
    folder = str(tmp_path / "states")
    job = counts("-n", "2", "--elastic", "1", "--state-dir", folder)
    for pid in job.await_step(1):
        os.kill(pid, signal.SIGTERM)
    code, output = job.end()
    assert code == 75, output
    assert "all ranks were told to end; rank 0, rank 1 left; step" in output
    assert f"is saved in {folder}" in output


FINALLY = """
train_all = train
def train(comm, state):
    try:
        train_all(comm, state)
    finally:
        print(f"rank {comm.rank} of {comm.size} cleans up\\n", end="", flush=True)
"""


def test_ranks_that_leave_run_their_finally_clauses(counts, scale, finish):
    job = counts("-n", "2", "--elastic", "1:3", call=FINALLY + CALL)
    job.await_step(1)
    assert scale(job, 3).returncode == 0
    output = finish(job)
    assert output.count("of 2 cleans up") == 2
    assert output.count("of 3 cleans up") == 3
    assert "3 ranks True" in output


def test_a_signal_to_the_launcher_lets_the_step_end(counts):
    job = counts("-n", "2", "--elastic", "1", call=FINALLY + CALL)
    job.await_step(1)
    job.process.send_signal(signal.SIGTERM)
    code, output = job.end()
    assert code == 143, output
    assert output.count("of 2 cleans up") == 2


def test_a_step_that_takes_longer_than_the_grace_is_given_up(counts):
    job = counts("-n", "2", "--elastic", "1", "--grace-s", "0.5", step_s="600")
    job.await_generation(1)
    job.process.send_signal(signal.SIGTERM)
    code, output = job.end()
    assert code == 143, output


def test_a_rank_that_does_not_leave_in_time_is_lost(counts, finish, tmp_path):
    slow = "600 if comm.rank == 1 and (here / 'slow').exists() else 0.005"
    job = counts("-n", "2", "--elastic", "1", "--grace-s", "0.5", step_s=slow)
    pids = job.await_step(1)
    (tmp_path / "slow").touch()
    time.sleep(0.1)
    os.kill(pids[1], signal.SIGTERM)
    job.await_step(2)
    assert "1 ranks True" in finish(job)
    assert [event["cause"] for event in job.events("resized")] == ["notice"]


JOINS_LATE = """
if (here / 'late').exists():
    (here / 'joins').touch()
    while not (here / 'go').exists():
        time.sleep(0.01)
"""


def ask_for_newcomers_that_wait(job, scaling, folder):
    """Start a command that a job gets a third rank; return it once processes have started."""
    (folder / "late").touch()
    asked = scaling(job, 3)
    deadline = time.monotonic() + DEADLINE_S
    while not (folder / "joins").exists():
        assert time.monotonic() < deadline, "no newcomer starts"
        time.sleep(0.01)
    return asked


def test_a_loss_while_others_start_is_survived(counts, scaling, finish, tmp_path):
    """The newcomers come late: a rank is lost before they are ready."""
    job = counts("-n", "2", "--elastic", "1:3", "--recovery", "relaunch", before=JOINS_LATE)
    pids = job.await_step(1)
    asked = ask_for_newcomers_that_wait(job, scaling, tmp_path)
    os.kill(pids[0], signal.SIGKILL)
    assert alive_in_the_end([pids[0]]) == []
    (tmp_path / "go").touch()
    done = ended(asked)
    assert done.returncode == 0
    assert "-> 3 ranks from step" in done.stdout
    assert "3 ranks True" in finish(job)
    (event,) = job.events("resized")
    assert (event["before"], event["after"], event["lost"]) == (2, 3, [0])
    assert (event["level"], event["cause"], event["redone"]) == (2, "killed", 1)


BUG = "if (here / 'bug').exists(): raise ValueError('no data here')\n"
DIES = "if (here / 'bug').exists(): os.kill(os.getpid(), 9)\n"


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("bug", "text"), [(BUG, "raised ValueError"), (DIES, "was killed by signal 9")]
)
def test_newcomers_that_cannot_start_leave_the_job_as_it_is(
    counts, scale, finish, tmp_path, bug, text
):
    job = counts("-n", "2", "--elastic", "1:3", before=bug)
    job.await_step(1)
    (tmp_path / "bug").touch()
    done = scale(job, 3)
    assert done.returncode == 1, done
    assert "no other ranks can start" in done.stderr
    assert text in done.stderr
    assert "2 ranks True" in finish(job)
    assert sizes(job) == []
    assert len(job.events("not_resized")) == 1


def test_training_that_ends_while_others_start(counts, scaling, tmp_path):
    job = counts("-n", "2", "--elastic", "1:3", before=JOINS_LATE)
    job.await_step(1)
    asked = ask_for_newcomers_that_wait(job, scaling, tmp_path)
    (tmp_path / "stop").touch()
    code, output = job.end()
    assert code == 0, output
    done = ended(asked)
    assert done.returncode == 1
    assert "the job has ended" in done.stderr


TWICE = CALL + "\n(here / 'second').touch()\n" + CALL.replace("train,", "again,")
AGAIN = """
def again(comm, state):
    while not state["stops"][0]:
        time.sleep(0.005)
        stops = comm.all_reduce(np.array([(here / "stop again").exists()], np.int64))
        with state.update():
            state["stops"] += stops
    if comm.rank == 0:
        print("again", comm.size, flush=True)
"""


def test_a_job_grows_in_its_second_call_of_elastic(counts, scale, tmp_path):
    job = counts("-n", "2", "--elastic", "1:3", before=AGAIN, call=TWICE)
    job.await_step(1)
    (tmp_path / "stop").touch()
    while not (tmp_path / "second").exists():
        time.sleep(0.01)
    assert scale(job, 3).returncode == 0
    (tmp_path / "stop again").touch()
    code, output = job.end()
    assert code == 0, output
    assert "again 3" in output


def test_the_ranks_follow_a_command_that_discovers_room(counts, finish, tmp_path):
    slots = tmp_path / "slots"
    slots.write_text("localhost:1\n")
    job = counts("-n", "2", "--elastic", "1:3", "--discover", f"cat {slots}")
    assert len(job.await_step(1)) == 1
    slots.write_text("localhost:9\n")
    assert len(job.await_step(2)) == 3
    finish(job)
    assert sizes(job) == [(1, 3, "discover")]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("--discover false", "--discover 'false' ended with exit code 1"),
        ("--discover 'echo localhost:x'", "printed 'localhost:x'; wanted host:slots"),
        ("--discover 'echo far:2'", "printed 'far:2'; all ranks run on this host"),
        ("--discover true", "has room for ranks: 0; --elastic wants at least 1"),
        ("--grace-s -1", "--grace-s is -1; wanted a finite number of at least 0 seconds"),
        ("--slow never", "invalid choice: 'never'"),
    ],
)
def test_wrong_options_are_refused_before_a_rank_starts(words, text):
    command = f"{sys.executable} -m ringreduce run -n 2 --elastic 1 {words} -m ringreduce"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2, done
    assert text in done.stderr


@pytest.mark.few(1)
@pytest.mark.parametrize("slow", ["report", "drop"])
def test_a_rank_that_computes_slowly_is_named(counts, finish, slow):
    step_s = "0.02 if comm.rank == 1 and comm.size == 3 else 0.002"
    job = counts("-n", "3", "--elastic", "2:3", "--slow", slow, step_s=step_s)
    job.await_generation(1)
    while not job.events("slow"):
        assert job.process.poll() is None, job.end()
        time.sleep(0.05)
    if slow == "drop":
        job.await_step(2)
    finish(job)
    event = job.events("slow")[0]
    assert (event["rank"], event["generation"]) == (1, 1)
    assert event["compute_s"] > 2 * event["median_s"]
    assert sizes(job) == ([(3, 2, "slow")] if slow == "drop" else [])
