"""What the pages promise of jobs that go on: exit codes, refusals, hooks, budgets and outputs."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

import ringreduce as rr
from ringreduce.supervisor.mpiexec import Flavour, ask
from ringreduce.system.proc import status_of
from tests.support.mpi import alive_in_the_end, is_alive, mpiexec

LIVE = ask(Path(mpiexec())).flavour is Flavour.OPEN_MPI
"""Whether ranks of this MPI can go on after a loss."""
PATIENCE_S = 300.0

# --- a rank that leaves ---

FIELDS = ("before", "after", "lost", "joined", "cause", "level", "generation")
HOOK = """
def changed(change):
    with open(here / "changes", "a") as file:
        file.write(json.dumps(dataclasses.asdict(change)) + "\\n")
state.on_resize(changed)
"""


def hooked(folder: Path) -> list[dict]:
    """Return the arguments that the hooks of all ranks got."""
    return [json.loads(line) for line in (folder / "changes").read_text().splitlines()]


@pytest.mark.mpi
def test_ranks_with_a_notice_leave_together_with_exit_code_0(steps, finish, tmp_path):
    """No step is made twice, and the hook of the other rank gets what the event says."""
    job = steps("-n", "3", "--elastic", "1", first=HOOK)
    pids = job.await_step(1)
    leave = {pid: os.pidfd_open(pid) for pid in (pids[0], pids[2])}
    try:
        for pid in leave:
            os.kill(pid, signal.SIGTERM)
        job.await_step(2)
        assert alive_in_the_end([*leave]) == []
        statuses = {status_of(*each) for each in leave.items()}
    finally:
        for process in leave.values():
            os.close(process)
    assert "1 ranks made each step once" in finish(job)
    (event,) = job.events("resized")
    assert event["redone"] == 0
    change = {name: event[name] for name in FIELDS}
    assert change == {
        "before": 3,
        "after": 1,
        "lost": [0, 2],
        "joined": 0,
        "cause": "notice",
        "level": 3,
        "generation": 2,
    }
    assert hooked(tmp_path) == [change]
    stays = [pids[1]]
    assert (job.events("started")[1]["pids"] == stays) == LIVE, "nothing starts if the MPI goes on"
    assert statuses <= {0, None}, "a kernel before Linux 6.15 does not keep the status"


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
    job = steps("-n", "2", "--elastic", "1", "--recovery", "relaunch", first=RAISES)
    os.kill(job.await_step(1)[1], signal.SIGTERM)
    job.await_step(2)
    output = finish(job)
    assert "1 ranks made each step once" in output
    assert "leaves with 0" in output  # the other rank, which is killed meanwhile, may end the line
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


# --- losses ---


@pytest.mark.mpi
def test_more_losses_than_are_allowed_end_the_job(steps, tmp_path):
    """After the first, which is allowed, the hook of each rank gets what the event says."""
    job = steps("-n", "3", "--elastic", "1", "--max-failures", "1", first=HOOK)
    os.kill(job.await_step(1)[1], signal.SIGKILL)
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
    (event,) = job.events("resized")
    change = {name: event[name] for name in FIELDS}
    assert change == {
        "before": 3,
        "after": 2,
        "lost": [1],
        "joined": 0,
        "cause": "killed",
        "level": 1 if LIVE else 2,
        "generation": 2,
    }
    assert hooked(tmp_path) == [change] * 2


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
    assert "2 ranks made each step once" in finish(job)
    (event,) = job.events("resized")
    assert (event["cause"], event["lost"], event["level"]) == ("killed", [0], 2)


def await_end_of(pid: int) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.001)


HOLDS = """
(here / f"holds {os.getpid()}").touch()
while (here / "hold").exists():
    time.sleep(0.01)
"""


@pytest.mark.mpi
def test_a_sigterm_before_the_call_of_elastic_kills_the_rank(steps, finish, tmp_path):
    (tmp_path / "hold").touch()
    job = steps("-n", "2", "--elastic", "1", before=HOLDS)
    job.wait_until(lambda: len(list(tmp_path.glob("holds *"))) == 2)
    os.kill(int(next(tmp_path.glob("holds *")).name.split()[1]), signal.SIGTERM)
    (tmp_path / "hold").unlink()
    job.await_step(2)
    assert "1 ranks made each step once" in finish(job)
    (event,) = job.events("resized")
    assert (event["cause"], event["level"], event["redone"]) == ("killed", 2, 0)


# --- outputs ---

DRAWS = """
from ringreduce.train import plot
draw = plot.draw
def drawn(path, title, facts, history):
    steps = [step.step for step in history.all_steps]
    epochs = [epoch.epoch for _, epoch in history.all_epochs]
    print("drawn", steps == [*range(1, len(steps) + 1)], len(steps), len(epochs), flush=True)
    draw(path, title, facts, history)
plot.draw = drawn
"""


@pytest.mark.mpi
def test_after_losses_of_rank_0_metrics_and_the_picture_have_each_step_and_epoch_once(
    trains, tmp_path
):
    """The kills come inside the second and the fourth epoch of 45 steps."""
    metrics, picture, folder = (tmp_path / name for name in ("m.jsonl", "p.svg", "checkpoints"))
    words = f"--epochs 4 --metrics {metrics} --plot {picture} --checkpoint-dir {folder}"
    for step in (70, 140):
        (tmp_path / f"hold {step}").touch()
    job = trains("-n", "3", "--elastic", "1", options=words, before=DRAWS)
    for generation, step in ((1, 70), (2, 140)):
        pids = job.await_generation(generation)
        job.wait_until((tmp_path / f"at {step}").exists, f"step {step}")
        os.kill(pids[0], signal.SIGKILL)
        (tmp_path / f"hold {step}").unlink()
    code, output = job.end()
    assert code == 0, output
    assert [event["lost"] for event in job.events("resized")] == [[0], [0]]
    assert "on 1 rank\n" in output
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    steps = [line for line in lines if "step" in line]
    assert [step["step"] for step in steps] == [*range(1, 181)]
    assert [line["epoch"] for line in lines if "step" not in line] == [1, 2, 3, 4]
    generations = [step["generation"] for step in steps]
    assert generations == sorted(generations)
    assert set(generations) == {1, 2, 3}
    manifest = max(folder.glob("*.json"))
    assert json.loads(manifest.read_text())["generation"] == 3
    assert output.count("drawn") == 1
    assert "drawn True 180 4" in output
    assert "training loss" in picture.read_text()
