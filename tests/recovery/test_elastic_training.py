"""`ringreduce train --elastic`: what a run writes and computes after losses of ranks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
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

EPOCHS, EPOCH_STEPS = 4, 45


def lines_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


FULL = """
written = os.fsync
def sync(file):
    if (here / "full").exists():
        (here / "tried").touch()
        raise OSError(28, "No space left on device")
    written(file)
os.fsync = sync
"""


@pytest.mark.mpi
def test_ranks_that_are_replaced_change_no_bit_and_a_full_disk_is_not_forgotten(trains, tmp_path):
    """One rank is lost, which alone has met the full disk, and one leaves."""
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    for name in ("full", "hold 70", "hold 140"):
        (tmp_path / name).touch()
    options = f"--epochs {EPOCHS} --checkpoint-dir {folder} --checkpoint-every 50"
    job = trains("-n", "2", "--elastic", "1", "--replace", options=options, before=FULL)
    pids = job.await_generation(1)
    for name in ("at 70", "tried"):
        job.wait_until((tmp_path / name).exists, name)
    (tmp_path / "full").unlink()
    os.kill(pids[0], signal.SIGKILL)
    (tmp_path / "hold 70").unlink()
    pids = job.await_generation(2)
    job.wait_until((tmp_path / "at 140").exists, "step 140")
    os.kill(pids[0], signal.SIGTERM)
    code, output = job.end()
    assert code == 1, output
    assert output.count("no checkpoint after step") == 1
    assert list(folder.glob("*.json")), output
    killed, left = job.events("resized")
    assert (killed["cause"], killed["joined"], killed["after"]) == ("killed", 1, 2)
    assert (left["cause"], left["joined"], left["after"]) == ("notice", 1, 2)
    assert killed["redone"] <= 1
    assert left["redone"] == 0
    assert parameters(output) == parameters(undisturbed())


@cache
def undisturbed() -> str:
    command = [sys.executable, "-m", "ringreduce", "train", "-n", "2", "--epochs", str(EPOCHS)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT).stdout


@pytest.mark.few(1)
@pytest.mark.mpi
@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        ("--elastic 1", 143, "ringreduce: signal 15 came; step"),
        ("--elastic 2 --wait-s 0", 75, "ranks left: 1; --elastic wants at least 2"),
    ],
)
def test_a_run_that_ends_too_early_is_saved_and_resumed(trains, tmp_path, words, code, text):
    folder, metrics = tmp_path / "checkpoints", tmp_path / "steps.jsonl"
    options = f"--epochs {EPOCHS} --metrics {metrics} --checkpoint-dir {folder}"
    options += " --checkpoint-every 1000000"
    (tmp_path / "hold 70").touch()
    job = trains("-n", "2", *words.split(), options=options)
    pids = job.await_generation(1)
    job.wait_until((tmp_path / "at 70").exists, "step 70")
    os.kill(job.process.pid if code == 143 else pids[0], signal.SIGTERM if code == 143 else 9)
    ended, output = job.end()
    assert ended == code, output
    assert text in output
    assert f"is saved in {folder}" in output
    (manifest,) = folder.glob("*.json")
    facts = json.loads(manifest.read_text())
    assert (facts["step"], facts["generation"]) == (71 if code == 143 else 70, 1)
    (tmp_path / "hold 70").unlink()
    job = trains("-n", "2", "--elastic", "1", options=f"{options} --resume")
    ended, output = job.end()
    assert ended == 0, output
    assert f"goes on after step {facts['step']} of" in output
    (resumed,) = job.events("resumed")
    assert resumed["step"] == facts["step"]
    assert parameters(output) == parameters(undisturbed())
    steps = [line["step"] for line in lines_of(metrics) if "step" in line]
    assert steps == list(range(1, EPOCHS * EPOCH_STEPS + 1))


@pytest.mark.mpi
def test_without_a_folder_a_run_that_ends_too_early_says_that_nothing_is_saved(start):
    job = start("-n", "1", "--elastic", "1", "--epochs", "100000", command="train")
    job.await_generation(1)
    job.process.send_signal(signal.SIGTERM)
    code, output = job.end()
    assert code == 143, output
    assert "was the last; nothing is saved, for no folder is named" in output


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("--strategy zero", "strategy zero divides the model or keeps it elsewhere; --elastic"),
        ("--strategy local_sgd", "strategy local_sgd lets replicas differ; --elastic goes on with"),
        ("--strategy parameter_server", "one_device, mirrored and multi_worker_mirrored"),
        ("--strategy pipeline", "one_device, mirrored and multi_worker_mirrored"),
        ("--device cuda", "device is cuda; --elastic goes on with arrays on the cpu"),
        ("--seeds 2", "seeds is 2; --elastic is for one run"),
        ("--plot run.svg", "plot needs metrics with --elastic"),
        ("--batch-shards 1", "batch_shards is 1; --elastic allows up to 2 ranks"),
    ],
)
def test_runs_that_cannot_go_on_are_refused_before_a_rank_starts(refused, given, text):
    assert text in refused(f"train -n 2 --elastic 1 {given}")


@pytest.mark.long
@pytest.mark.mpi
def test_with_shards_no_loss_and_no_change_of_the_ranks_changes_a_bit(start, scale, tmp_path):
    """A kill, ranks that join, and a rank that leaves; each step is reported once."""
    epochs = 90
    more = f"--epochs {epochs} --batch-shards 4".split()
    command = [sys.executable, "-m", "ringreduce.train", *more]
    alone = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    metrics, folder = tmp_path / "steps.jsonl", tmp_path / "checkpoints"
    more += ["--metrics", str(metrics), "--checkpoint-dir", str(folder)]
    job = start("-n", "3", "--elastic", "1:4", *more, command="train")
    os.kill(job.await_generation(1)[0], signal.SIGKILL)
    job.await_step(2)
    assert scale(job.process.pid, 4)[0] == 0
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
def test_a_batch_that_follows_the_ranks_has_each_sample_once_an_epoch(trains, scale, tmp_path):
    metrics = tmp_path / "steps.jsonl"
    options = f"--epochs 3 --batch-per-rank 16 --ramp-steps 20 --metrics {metrics}"
    (tmp_path / "hold 70").touch()
    job = trains("-n", "1", "--elastic", "1:3", options=options)
    job.wait_until((tmp_path / "at 70").exists, "step 70")
    assert scale(job.process.pid, 3)[0] == 0
    code, output = job.end()
    assert code == 0, output
    (event,) = job.events("resized")
    assert (event["batch"], event["before"], event["after"]) == (48, 1, 3)
    lines = lines_of(metrics)
    samples = dict.fromkeys((1, 2, 3), 0)
    for line in lines:
        if "step" in line:
            samples[line["epoch"]] += line["samples"]
    assert set(samples.values()) == {1438}
    assert [line["epoch"] for line in lines if "step" not in line] == list(samples)


@pytest.mark.few(2)
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
    program = "-m", "ringreduce.train", "--epochs", "1", *given.split()
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
