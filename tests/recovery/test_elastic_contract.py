"""What the pages promise of jobs that go on: exit codes, refusals, hooks, budgets and outputs."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

import ringreduce as rr
from ringreduce.launch.mpiexec import Flavour, ask
from ringreduce.launch.ranks import status_of
from tests.support.mpi import ROOT, alive_in_the_end, is_alive, mpiexec

LIVE = ask(Path(mpiexec())).flavour is Flavour.OPEN_MPI
"""Whether ranks of this MPI can go on after a loss."""
RECOVERIES = ["auto", "relaunch"] if LIVE else ["auto"]
PATIENCE_S = 300.0
CODE = """
import dataclasses, json, os, sys, time
from pathlib import Path
import numpy as np, ringreduce as rr
here = Path(__file__).parent
{before}
def train(comm, state):
    while not state["stops"][0]:
        time.sleep(0.005)
        stops = comm.all_reduce(np.array([(here / "stop").exists()], np.int64))
        with state.update():
            state["stops"] += stops
    if comm.rank == 0:
        print(comm.size, "ranks have stopped", flush=True)
state = rr.State({{"stops": np.zeros(1, np.int64)}})
{after}
rr.elastic(train, state)
"""


@pytest.fixture
def steps(start, tmp_path):
    """Start a program that makes steps until `finish`, with more code before and after `train`."""

    def started(*words: str, before: str = "", after: str = ""):
        program = tmp_path / "steps.py"
        program.write_text(CODE.format(before=before, after=after))
        return start(*words, program=(str(program),))

    return started


# --- a rank that leaves ---


@pytest.mark.mpi
@pytest.mark.parametrize("recovery", RECOVERIES)
def test_a_rank_that_leaves_ends_with_exit_code_0(steps, finish, recovery):
    job = steps("-n", "2", "--elastic", "1", "--recovery", recovery)
    leaves = job.await_step(1)[1]
    process = os.pidfd_open(leaves)
    try:
        os.kill(leaves, signal.SIGTERM)
        job.await_step(2)
        assert alive_in_the_end([leaves]) == []
        status = status_of(leaves, process)
    finally:
        os.close(process)
    finish(job)
    if status is None:
        pytest.skip("this kernel does not keep the status of a process: Linux 6.15 does")
    assert os.waitstatus_to_exitcode(status) == 0


RAISES = """
train_all = train
def train(comm, state):
    try:
        train_all(comm, state)
    except SystemExit as left:
        print(f"leaves with {left.code}\\n", end="", flush=True)
        raise
    finally:
        if isinstance(sys.exc_info()[1], SystemExit):
            raise ValueError("while it leaves")
"""


@pytest.mark.mpi
def test_an_exception_while_a_rank_leaves_does_not_end_the_job(steps, finish):
    """Where other processes take over."""
    job = steps("-n", "2", "--elastic", "1", "--recovery", "relaunch", after=RAISES)
    os.kill(job.await_step(1)[1], signal.SIGTERM)
    job.await_step(2)
    output = finish(job)
    assert "1 ranks have stopped" in output
    assert "leaves with 0\n" in output  # the other rank may be killed meanwhile
    assert "ValueError: while it leaves" in output


# --- refusals ---


@pytest.mark.parametrize("state", [None, {"x": np.zeros(1)}, np.zeros(1), 3])
def test_a_state_that_is_none_is_refused(state):
    with pytest.raises(TypeError, match=r"elastic: state is .*; pass rr\.State\(\.\.\.\) of"):
        rr.elastic(lambda comm, state: None, state)


@pytest.mark.parametrize("train", [None, 3, "train"])
def test_a_train_that_cannot_be_called_is_refused(train):
    with pytest.raises(TypeError, match=r"elastic: train is .*; pass a function train\(comm, st"):
        rr.elastic(train, rr.State({"x": np.zeros(1)}))


@pytest.mark.mpi
@pytest.mark.parametrize("more", [(), ("--elastic", "1")])
def test_a_function_that_makes_no_state_is_refused(tmp_path, more):
    program = tmp_path / "makes.py"
    program.write_text(
        "import numpy as np, ringreduce as rr\n"
        "rr.elastic(lambda comm, state: print('trained'), lambda comm: {'rank': comm.rank})\n"
    )
    command = [sys.executable, "-m", "ringreduce", "run", "-n", "2", *more, str(program)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 1, done
    assert re.search(r"TypeError: elastic: state is dict; pass rr\.State", done.stderr)
    assert "trained" not in done.stdout


# --- hooks ---

FIELDS = ("before", "after", "lost", "joined", "cause", "level", "generation")
HOOK = """
def changed(change):
    fields = json.dumps(dataclasses.asdict(change))
    print(f"hook {fields}\\n", end="", flush=True)
state.on_resize(changed)
"""


def hooked(output: str) -> list[dict]:
    """What the hooks got, in the order of the output."""
    return [json.loads(found) for found in re.findall(r"hook (\{.*?\})", output)]


@pytest.mark.mpi
@pytest.mark.parametrize("recovery", RECOVERIES)
@pytest.mark.parametrize(("number", "cause"), [(9, "killed"), (15, "notice")])
def test_a_hook_gets_what_the_event_says(steps, finish, recovery, number, cause):
    job = steps("-n", "3", "--elastic", "1", "--recovery", recovery, after=HOOK)
    os.kill(job.await_step(1)[1], number)
    job.await_step(2)
    changes = hooked(finish(job))
    (event,) = job.events("resized")
    level = 3 if cause == "notice" else 1 if LIVE and recovery == "auto" else 2
    assert {name: event[name] for name in FIELDS} == {
        "before": 3,
        "after": 2,
        "lost": [1],
        "joined": 0,
        "cause": cause,
        "level": level,
        "generation": 2,
    }
    assert changes == [{name: event[name] for name in FIELDS}] * 2, "each rank calls the hook"


# --- the budget ---


@pytest.mark.mpi
@pytest.mark.parametrize("recovery", RECOVERIES)
def test_more_losses_than_are_allowed_end_the_job(steps, recovery):
    job = steps(*["-n", "3", "--elastic", "1", "--max-failures", "1", "--recovery"], recovery)
    os.kill(job.await_step(1)[2], signal.SIGKILL)
    pids = job.await_step(2)
    os.kill(pids[0], signal.SIGKILL)
    code, output = job.end()
    assert code == 128 + signal.SIGKILL, output
    told = re.search(
        r"ringreduce: 2 losses within an hour; --max-failures is 1; "
        r"in step (\d+) rank 0 was killed by signal 9 \(SIGKILL\); step (\d+) was the last",
        output,
    )
    assert told is not None, output
    assert int(told[1]) == int(told[2]) + 1
    assert len(job.events("started")) == 2
    assert alive_in_the_end(pids) == []


# --- SIGTERM that is no notice ---


@pytest.mark.mpi
def test_a_sigterm_that_follows_a_loss_is_no_notice(steps, finish):
    """MPI ends the others: Open MPI by SIGTERM first.  The launcher sees all of it afterwards."""
    job = steps("-n", "3", "--elastic", "1", "--recovery", "relaunch")
    pids = job.await_step(1)
    job.process.send_signal(signal.SIGSTOP)
    try:
        os.kill(pids[0], signal.SIGKILL)
        await_end_of(pids[0])
        with suppress(ProcessLookupError):  # MPI may have ended it already
            os.kill(pids[1], signal.SIGTERM)
        alive_in_the_end(pids)
    finally:
        job.process.send_signal(signal.SIGCONT)
    job.await_step(2)
    assert "2 ranks have stopped" in finish(job)
    (event,) = job.events("resized")
    assert (event["cause"], event["lost"], event["level"]) == ("killed", [0], 2)


def await_end_of(pid: int) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.001)


@pytest.mark.mpi
@pytest.mark.parametrize("launcher_first", [True, False])
def test_a_sigterm_to_the_launcher_and_a_rank_is_no_notice(steps, launcher_first):
    job = steps("-n", "2", "--elastic", "1", "--grace-s", "60")
    victims = [job.process.pid, job.await_step(1)[1]]
    for pid in victims if launcher_first else reversed(victims):
        os.kill(pid, signal.SIGTERM)
    code, output = job.end()
    assert code == 128 + signal.SIGTERM, output
    assert "ringreduce: signal 15 came; step" in output
    assert job.events("resized") == []
    assert len(job.events("started")) == 1


def await_that(holds, job) -> None:
    """Wait until something holds, while the job goes on."""
    while not holds():
        assert job.process.poll() is None, job.end()
        time.sleep(0.01)


HOLDS = """
(here / f"holds {os.getpid()}").touch()
while (here / "hold").exists():
    time.sleep(0.01)
"""


@pytest.mark.mpi
def test_a_sigterm_before_the_call_of_elastic_kills_the_rank(steps, finish, tmp_path):
    (tmp_path / "hold").touch()
    job = steps("-n", "2", "--elastic", "1", before=HOLDS)
    await_that(lambda: len(list(tmp_path.glob("holds *"))) == 2, job)
    os.kill(int(next(tmp_path.glob("holds *")).name.split()[1]), signal.SIGTERM)
    (tmp_path / "hold").unlink()
    job.await_step(2)
    assert "1 ranks have stopped" in finish(job)
    (event,) = job.events("resized")
    assert (event["cause"], event["level"], event["redone"]) == ("killed", 2, 0)


HANDLES = """
import signal
signal.signal(signal.SIGTERM, lambda *_: (here / "handled").touch())
"""


@pytest.mark.mpi
def test_a_sigterm_that_the_program_handles_is_no_notice(steps, finish, tmp_path):
    job = steps("-n", "2", "--elastic", "1", before=HANDLES)
    os.kill(job.await_step(1)[1], signal.SIGTERM)
    await_that((tmp_path / "handled").exists, job)
    assert "2 ranks have stopped" in finish(job)
    assert job.events("resized") == []


# --- a launcher that is late ---

HOLDS_AT_JOIN = """
join, update = rr.State.join, rr.State.update
def joins(state, *given):
    join(state, *given)
    (here / f"holds {os.getpid()}").touch()
    while (here / "hold").exists():
        time.sleep(0.01)
def updates(state):
    if state.step:
        (here / "stepped").touch()
    return update(state)
rr.State.join, rr.State.update = joins, updates
"""


@pytest.mark.mpi
def test_a_new_job_is_not_resumed_if_its_ranks_are_ahead_of_the_launcher(steps, finish, tmp_path):
    (tmp_path / "hold").touch()
    job = steps("-n", "2", "--elastic", "1", before=HOLDS_AT_JOIN)
    await_that(lambda: len(list(tmp_path.glob("holds *"))) == 2, job)
    job.process.send_signal(signal.SIGSTOP)
    try:
        (tmp_path / "hold").unlink()
        await_that((tmp_path / "stepped").exists, job)
    finally:
        job.process.send_signal(signal.SIGCONT)
    finish(job)
    assert len(job.events("started")) == 1
    assert job.events("resumed") == []


# --- outputs ---

DRAWS = """
import sys
from ringreduce.train import plot
from ringreduce.train.__main__ import main
draw = plot.draw
def drawn(path, title, facts, history):
    steps = [step.step for step in history.all_steps]
    epochs = [epoch.epoch for _, epoch in history.all_epochs]
    print("drawn", steps == [*range(1, len(steps) + 1)], len(steps), len(epochs), flush=True)
    draw(path, title, facts, history)
plot.draw = drawn
if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.mpi
def test_after_the_loss_of_rank_0_metrics_and_the_picture_have_each_step_once(start, tmp_path):
    program, metrics, picture = (tmp_path / name for name in ("draws.py", "m.jsonl", "p.svg"))
    program.write_text(DRAWS)
    words = f"--epochs 60 --metrics {metrics} --plot {picture}".split()
    job = start("-n", "2", "--elastic", "1", program=(str(program), *words))
    os.kill(job.await_step(1)[0], signal.SIGKILL)
    code, output = job.end()
    assert code == 0, output
    assert [event["lost"] for event in job.events("resized")] == [[0]]
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    steps = [line["step"] for line in lines if "step" in line]
    assert steps == [*range(1, len(steps) + 1)]
    assert {line["generation"] for line in lines if "step" in line} == {1, 2}
    assert output.count("drawn") == 1
    assert f"drawn True {len(steps)} 60" in output
    assert "training loss" in picture.read_text()


def test_an_mpiexec_that_cannot_start_ranks_ends_the_job(start, monkeypatch):
    monkeypatch.setenv("HYDRA_LAUNCHER", "nonexistent")  # of MPICH and Intel MPI
    monkeypatch.setenv("PRTE_MCA_rmaps_default_mapping_policy", "nonexistent")  # of Open MPI
    code, output = start("-n", "2", "--elastic", "1", program=("-m", "ringreduce.train")).end()
    assert code > 0
    assert f"mpiexec ended with exit code {code} before all ranks had connected" in output
