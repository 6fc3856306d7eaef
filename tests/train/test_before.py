"""What an older version has written is read, and goes on: checkpoints, settings and states.

The files in ``tests/data/before`` were written at commit e9d08e2, with MPICH:

- The folder of each strategy in `WRITTEN`, by ``ringreduce train -n RANKS --hidden 4 --batch 300
  --lr 0.01 --epochs 2 --checkpoint-every 7 --checkpoint-dir FOLDER``, with the flags of the
  strategy.  More flags: ``default`` has ``--batch-norm``, ``one_device`` ``--optimizer adam``,
  ``multi_worker_mirrored`` ``--batch-per-rank 150 --ramp-steps 2``, ``central_storage`` ``--dtype
  float64``, ``zero`` ``--optimizer adam --clip 1``, ``pipeline`` ``--hidden 4 4 4``, ``tensor``
  ``--data synthetic --samples 1500 --inputs 9 --classes 3``.  The checkpoint of the last step, 10,
  was removed, as if the run had been killed in its second epoch.
- ``elastic_trainer``, by ``ringreduce train -n 2 --elastic 1 --hidden 4 --batch 300 --lr 0.01
  --epochs 100000 --checkpoint-every 10000000 --checkpoint-dir FOLDER``, ended by SIGTERM.
- ``elastic_state``, by ``ringreduce run -n 2 --elastic 1 --state-dir FOLDER
  tests/support/programs/counts_samples.py 120 30 2 0``.
- ``settings.toml``: what ``ringreduce train -n 1 --verbose`` prints below the heading, with flags
  for the values in it.

The ``.lock`` of each folder was removed.  Strategy tpu is left out: it needs JAX.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest

from ringreduce.train import Trainer, strategies
from ringreduce.train.strategies import to_plain
from tests.support.mpi import DEADLINE_S, PROGRAMS, environment
from tests.support.trainer import command

BEFORE = Path(__file__).parents[1] / "data" / "before"
EPOCH_STEPS = 5
PIPELINE = strategies.Pipeline(
    split_size=50, schedule="interleaved", virtual=2, cut=(1, 1, 1, 1), stages=4
)
HYBRID = strategies.Hybrid(data=1, pipeline=2, tensor=2, splits=4, schedule="gpipe")
WRITTEN = {
    "default": (2, strategies.Mirrored()),
    "one_device": (1, strategies.OneDevice()),
    "mirrored": (2, strategies.Mirrored("two_shot")),
    "multi_worker_mirrored": (2, strategies.MultiWorkerMirrored("hierarchical")),
    "central_storage": (2, strategies.CentralStorage()),
    "zero": (2, strategies.Zero(3)),
    "pipeline": (2, PIPELINE),
    "tensor": (2, strategies.Tensor()),
    "hybrid": (4, HYBRID),
    "elastic_trainer": (2, strategies.Mirrored()),
}
"""Folder -> the number of ranks and the strategy that wrote it."""


@pytest.fixture
def begun(monkeypatch):
    """A list of what each rank begins to train with: settings, strategy, progress, arrays."""
    found, run = [], Trainer.run

    def recorded(trainer, *how):
        arrays = {name: array.copy() for name, array in trainer.arrays().items()}
        found.append((to_plain(trainer.settings), trainer.strategy, trainer.state, arrays))
        return run(trainer, *how)

    monkeypatch.setattr(Trainer, "run", recorded)
    return found


@pytest.mark.parametrize("name", WRITTEN)
def test_a_checkpoint_goes_on(name, begun, tmp_path, monkeypatch):
    from safetensors.numpy import load_file

    ranks, strategy = WRITTEN[name]
    folder = Path(shutil.copytree(BEFORE / name, tmp_path / name))
    header = json.loads(next(folder.glob("*.json")).read_bytes())
    stored = load_file(folder / header["tensors"])
    epochs = -(-header["step"] // EPOCH_STEPS) + 1
    flags = "--checkpoint-dir", str(folder), "--resume", "--epochs", str(epochs)
    assert command(monkeypatch, ranks, *flags) == [0] * ranks
    # A launcher stores the progress and the last steps among the arrays.
    losses = stored.pop("progress", [header.get("epoch_loss"), header.get("last_loss")])
    stretch = stored.pop("stretch", header.get("stretch"))
    stored.pop("rows", None)
    settings = header["settings"] | {"epochs": epochs}
    assert len(begun) == ranks
    for values, its_strategy, state, arrays in begun:
        assert {setting: values[setting] for setting in settings} == settings
        assert its_strategy == strategy
        assert (state.step, state.epoch_loss, state.last_loss) == (header["step"], *losses[:2])
        assert state.stretch == tuple(stretch)
        assert arrays.keys() == stored.keys()
        assert all(np.array_equal(arrays[each], stored[each]) for each in stored)
    after = json.loads(max(folder.glob("*.json")).read_bytes())
    assert after["step"] == epochs * EPOCH_STEPS
    assert header.keys() - {"call"} <= after.keys()  # which a launcher writes
    assert after["strategy"] == header["strategy"]


def test_settings_in_toml_are_read(begun, monkeypatch):
    path = BEFORE / "settings.toml"
    assert command(monkeypatch, 1, "--config", str(path)) == [0]
    written = tomllib.loads(path.read_text())
    assert {setting: begun[0][0][setting] for setting in written} == written


@pytest.mark.mpi
def test_a_state_of_an_elastic_job_goes_on(tmp_path):
    folder = shutil.copytree(BEFORE / "elastic_state", tmp_path / "states")
    program = PROGRAMS / "counts_samples.py", 120, 30, 3, 0
    words = "-n", 2, "--elastic", 1, "--state-dir", folder, "--resume", *program
    ours = [sys.executable, "-m", "ringreduce", "run", *map(str, words)]
    env = environment(TMPDIR=str(tmp_path))
    job = subprocess.run(ours, capture_output=True, text=True, timeout=DEADLINE_S, env=env)
    assert job.returncode == 0, job.stdout + job.stderr
    assert "2 ranks, step 12: counted [3] times" in job.stdout
