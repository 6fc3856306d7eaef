"""`ringreduce train --elastic`: what a run writes and computes after losses of ranks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

import numpy as np
import pytest

import ringreduce as rr
from ringreduce.train import Settings, Trainer
from ringreduce.train.strategies import Zero
from tests.long_recovery.jobs import parameters
from tests.support.mpi import ROOT
from tests.support.rounding import split_of

EPOCHS, EPOCH_STEPS = 90, 45


def lines_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def words(path: Path, *more: str) -> list[str]:
    return [*f"--epochs {EPOCHS} --metrics {path / 'steps.jsonl'}".split(), *more]


@pytest.mark.mpi
def test_each_step_and_epoch_is_reported_once_whoever_is_rank_0(start, tmp_path):
    folder = tmp_path / "checkpoints"
    more = ["--checkpoint-dir", str(folder)]
    job = start(*["-n", "3", "--elastic", "1"], *words(tmp_path, *more), command="train")
    for generation in (1, 2):
        pids = job.await_step(generation)
        os.kill(pids[0], signal.SIGKILL)
    code, output = job.end()
    assert code == 0, output
    assert [event["lost"] for event in job.events("resized")] == [[0], [0]]
    assert "on 1 rank\n" in output
    lines = lines_of(tmp_path / "steps.jsonl")
    steps = [line for line in lines if "step" in line]
    assert [step["step"] for step in steps] == list(range(1, EPOCHS * EPOCH_STEPS + 1))
    epochs = [line["epoch"] for line in lines if "step" not in line]
    assert epochs == list(range(1, EPOCHS + 1))
    generations = [step["generation"] for step in steps]
    assert generations == sorted(generations)
    assert set(generations) == {1, 2, 3}
    last = max(folder.glob("*.json"))
    assert json.loads(last.read_text())["generation"] == 3


@pytest.mark.mpi
def test_a_replaced_rank_changes_no_bit(start, tmp_path):
    job = start(*["-n", "2", "--elastic", "1", "--replace"], *words(tmp_path), command="train")
    pids = job.await_generation(1)
    time.sleep(0.1)
    os.kill(pids[1], signal.SIGKILL)
    code, output = job.end()
    assert code == 0, output
    assert job.events("resized")[0]["redone"] <= 1
    assert parameters(output) == parameters(undisturbed())


@cache
def undisturbed() -> str:
    command = [sys.executable, "-m", "ringreduce", "train", "-n", "2", "--epochs", str(EPOCHS)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT).stdout


@pytest.mark.few(1)
@pytest.mark.mpi
@pytest.mark.parametrize(
    ("options", "code", "text"),
    [
        ("--elastic 1", 143, "ringreduce: signal 15 came; step"),
        ("--elastic 2 --wait-s 0", 75, "ranks left: 1; --elastic wants at least 2"),
    ],
)
def test_a_run_that_ends_too_early_is_saved_and_resumed(start, tmp_path, options, code, text):
    folder = tmp_path / "checkpoints"
    given = words(tmp_path, "--checkpoint-dir", str(folder), "--checkpoint-every", "1000000")
    job = start("-n", "2", *options.split(), *given, command="train")
    pids = job.await_generation(1)
    time.sleep(0.1)
    os.kill(job.process.pid if code == 143 else pids[0], signal.SIGTERM if code == 143 else 9)
    ended, output = job.end()
    assert ended == code, output
    assert text in output
    assert f"is saved in {folder}" in output
    (manifest,) = folder.glob("*.json")
    facts = json.loads(manifest.read_text())
    assert 0 < facts["step"] < EPOCHS * EPOCH_STEPS
    assert facts["generation"] == 1
    job = start("-n", "2", "--elastic", "1", *given, "--resume", command="train")
    ended, output = job.end()
    assert ended == 0, output
    assert f"goes on after step {facts['step']} of" in output
    (resumed,) = job.events("resumed")
    assert resumed["step"] == facts["step"]
    assert parameters(output) == parameters(undisturbed())
    steps = [line["step"] for line in lines_of(tmp_path / "steps.jsonl") if "step" in line]
    assert steps == list(range(1, EPOCHS * EPOCH_STEPS + 1))


@pytest.mark.mpi
def test_without_a_folder_a_run_that_ends_too_early_says_that_nothing_is_saved(start, tmp_path):
    job = start("-n", "2", "--elastic", "1", *words(tmp_path), command="train")
    job.await_generation(1)
    job.process.send_signal(signal.SIGTERM)
    code, output = job.end()
    assert code == 143, output
    assert "was the last; nothing is saved, for no folder is named" in output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("--strategy zero", "strategy zero divides the model or keeps it elsewhere; --elastic"),
        ("--strategy pipeline", "one_device, mirrored and multi_worker_mirrored"),
        ("--device cuda", "device is cuda; --elastic goes on with arrays on the cpu"),
        ("--seeds 2", "seeds is 2; --elastic is for one run"),
        ("--plot run.svg", "plot needs metrics with --elastic"),
        ("--batch-shards 1", "batch_shards is 1; --elastic allows up to 2 ranks"),
    ],
)
def test_runs_that_cannot_go_on_are_refused_before_a_rank_starts(given, text):
    command = [sys.executable, "-m", "ringreduce", *["train", "-n", "2", "--elastic", "1"]]
    done = subprocess.run([*command, *given.split()], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2, done
    assert text in done.stderr


def scaled(job, size: int, folder: Path) -> None:
    """Change the number of ranks of a job, whose temporary files are in a folder."""
    command = [sys.executable, "-m", "ringreduce", "scale", str(job.process.pid), str(size)]
    environment = {**os.environ, "TMPDIR": str(folder)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done


@pytest.mark.long
@pytest.mark.mpi
def test_with_shards_no_loss_and_no_change_of_the_ranks_changes_a_bit(start, tmp_path):
    """A kill, ranks that join, and a rank that leaves; each step is reported once."""
    epochs = 90
    more = f"--epochs {epochs} --batch-shards 4".split()
    command = [sys.executable, "-m", "ringreduce.train", *more]
    alone = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    metrics, folder = tmp_path / "steps.jsonl", tmp_path / "checkpoints"
    more += ["--metrics", str(metrics), "--checkpoint-dir", str(folder)]
    job = start("-n", "3", "--elastic", "1:4", *more, command="train")
    os.kill(job.await_step(1)[0], signal.SIGKILL)
    job.await_step(2)
    scaled(job, 4, tmp_path)
    started = job.events("started")[-1]
    os.kill(started["pids"][0], signal.SIGTERM)
    job.await_step(started["generation"] + 1)
    code, output = job.end()
    assert code == 0, output
    assert [event["after"] for event in job.events("resized")] == [2, 4, 3]
    assert parameters(output) == parameters(alone.stdout)
    steps = [line["step"] for line in lines_of(metrics) if "step" in line]
    assert steps == list(range(1, epochs * EPOCH_STEPS + 1))


@pytest.mark.mpi
def test_a_batch_that_follows_the_ranks_has_each_sample_once_an_epoch(start, tmp_path):
    metrics = tmp_path / "steps.jsonl"
    more = f"--epochs {EPOCHS} --batch-per-rank 16 --ramp-steps 20 --metrics {metrics}"
    job = start("-n", "1", "--elastic", "1:3", *more.split(), command="train")
    job.await_step(1)
    scaled(job, 3, tmp_path)
    code, output = job.end()
    assert code == 0, output
    (event,) = job.events("resized")
    assert (event["batch"], event["before"], event["after"]) == (48, 1, 3)
    lines = lines_of(metrics)
    samples = dict.fromkeys(range(1, EPOCHS + 1), 0)
    for line in lines:
        if "step" in line:
            samples[line["epoch"]] += line["samples"]
    assert set(samples.values()) == {1438}
    assert [line["epoch"] for line in lines if "step" not in line] == list(samples)


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("given", "code", "text"),
    [
        ("--lr 1e30", 1, "take a smaller lr"),
        ("--seeds 2", 2, "seeds is 2; --elastic is for one run"),
        ("--strategy zero", 2, "strategy zero divides the model"),
    ],
)
def test_a_mistake_ends_the_job_as_without_elastic(start, given, code, text):
    program = "-m", "ringreduce.train", "--epochs", "2", *given.split()
    ended, output = start("-n", "2", "--elastic", "1", program=program).end()
    assert ended == code, output
    assert output.count(text) == 1


@pytest.mark.slow
@pytest.mark.parametrize(("samples", "made"), [(40, 3), (40, 5), (1200, 128), (1200, 130)])
def test_a_trainer_continues_from_the_state_of_another(samples, made):
    """Before and at the end of an epoch, and with as many steps as are kept, or more."""
    options = {"batch_norm": True, "optimizer": "adam", "check_every": 0}
    settings = Settings(hidden=(8,), epochs=160 // (samples // 8), batch=8, **options)
    rng = np.random.default_rng(0)
    split = split_of(rng.normal(size=(samples, 64)), rng.integers(0, 10, samples))

    def program(comm):
        undisturbed = Told()
        whole = Trainer(comm, split, settings).run([undisturbed])
        told = Told()
        first = Trainer(comm, split, settings, elastic=True)
        for _ in range(made):
            if first._journal.is_full:
                first._report_steps([told])
            first._make_step()
        second = Trainer(comm, split, settings, elastic=True)
        second.store.restore({name: first.store[name] for name in first.store}, first.store.step)
        result = second.run([told])
        assert [step for step, _ in told.steps_and_losses] == [*range(1, second.steps + 1)]
        assert told.steps_and_losses == undisturbed.steps_and_losses
        assert told.epochs == undisturbed.epochs == [*range(1, settings.epochs + 1)]
        assert (result.digest, result.loss) == (whole.digest, whole.loss)

    rr.spawn(program, 2)


class Told:
    """A watcher that keeps the numbers and the losses of steps, and the numbers of epochs."""

    def __init__(self) -> None:
        self.steps_and_losses: list[tuple[int, float]] = []
        self.epochs: list[int] = []

    def steps(self, steps):
        self.steps_and_losses += [(step.step, step.loss) for step in steps]

    def epoch(self, epoch):
        self.epochs.append(epoch.epoch)


def test_a_trainer_that_divides_the_model_has_no_state():
    settings = Settings(hidden=(8,))

    def program(comm):
        with pytest.raises(ValueError, match="strategy zero divides the model"):
            Trainer(comm, rr.train.load(settings), settings, strategy=Zero(1), elastic=True)

    rr.spawn(program, 2)
