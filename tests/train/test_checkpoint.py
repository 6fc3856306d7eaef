"""Checkpoints: complete or absent, damaged files named, and runs that continue from one."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from ringreduce.recovery.checkpoint import Checkpoint, CheckpointError, Folder, _own_hash
from tests.long import resume
from tests.support.damage import flipped
from tests.support.mpi import MpiJobs
from tests.support.trainer import RUN, command


def checkpoint(step: int) -> Checkpoint:
    rng = np.random.default_rng(step)
    arrays = {
        "0.weight": rng.normal(size=(3, 2)).astype(np.float32),
        "v/0.bias": rng.normal(size=2),
    }
    return Checkpoint(step, arrays, {"loss": step / 3, "settings": {"hidden": [1, 2]}})


@contextlib.contextmanager
def opened(path: Path, keep: int = 3):
    folder = Folder(path, keep)
    try:
        yield folder
    finally:
        folder.close()


def last(folder: Folder, fits=lambda found: None):
    refused: list[str] = []
    return folder.last(fits, refused.append), refused


def equal(a: Checkpoint, b: Checkpoint) -> bool:
    return a.arrays.keys() == b.arrays.keys() and all(
        a.arrays[n].dtype == b.arrays[n].dtype and np.array_equal(a.arrays[n], b.arrays[n])
        for n in a.arrays
    )


# --- files ----------------------------------------------------------------------------------------


def test_what_is_saved_comes_back(tmp_path):
    with opened(tmp_path / "a" / "b") as folder:
        folder.save(checkpoint(7))
        found, refused = last(folder)
    assert found.step == 7
    assert equal(found, checkpoint(7))
    assert (found.facts["loss"], found.facts["settings"]) == (7 / 3, {"hidden": [1, 2]})
    assert refused == []


@pytest.mark.parametrize("dtype", ["bfloat16", "complex64", "complex128", "longdouble", "bool"])
def test_arrays_of_any_dtype_and_shape_come_back(tmp_path, dtype):
    arrays = {str(n): np.arange(n).astype(dtype).reshape(n, 1) for n in (0, 1, 5)}
    arrays |= {"": np.ones((), dtype), "turned": np.arange(6).astype(dtype).reshape(2, 3).T}
    folder = Folder(tmp_path, keep=1)
    folder.save(Checkpoint(3, arrays, {}))
    found = folder.last(lambda _: None, pytest.fail).arrays
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
        assert np.array_equal(found[name], array)


@pytest.mark.parametrize("keep", [1, 3])
def test_the_last_ones_are_kept(keep, tmp_path):
    with opened(tmp_path, keep) as folder:
        for step in range(1, 6):
            folder.save(checkpoint(step))
    kept = sorted(path.name for path in tmp_path.glob("step-*"))
    assert kept == [
        f"step-{step:09d}.{kind}" for step in range(6 - keep, 6) for kind in ("json", "safetensors")
    ]


def test_one_that_was_saved_before_is_written_again(tmp_path):
    with opened(tmp_path) as folder:
        for _ in range(2):
            folder.save(checkpoint(4))
        assert equal(last(folder)[0], checkpoint(4))


def test_a_later_one_of_another_time_is_left_alone(tmp_path):
    """A run that continues from an earlier step keeps its own checkpoints besides the later one."""
    with opened(tmp_path, keep=1) as folder:
        folder.save(checkpoint(9))
        folder.save(checkpoint(2))
        assert [path.stem for path in folder.manifests()] == ["step-000000009", "step-000000002"]


def with_a_flipped_bit(path: Path) -> None:
    path.write_bytes(flipped(path.read_bytes()))


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def made_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def changed(path: Path) -> None:
    manifest = json.loads(path.read_bytes())
    path.write_text(json.dumps(manifest | {"loss": 0.5}))


def foreign(path: Path) -> None:
    path.write_text(json.dumps({"format": "somebody else's", "step": 5}))


def no_object(path: Path) -> None:
    path.write_text("[1, 2]")


@pytest.mark.parametrize(
    ("kind", "damage", "complaint"),
    [
        ("safetensors", with_a_flipped_bit, "step-000000005.safetensors is damaged: "),
        ("safetensors", truncated, "step-000000005.safetensors is damaged: "),
        ("safetensors", emptied, "step-000000005.safetensors is damaged: 0 bytes"),
        ("safetensors", made_a_folder, "step-000000005.safetensors is damaged: "),
        ("json", made_a_folder, "step-000000005.json is damaged: "),
        ("safetensors", os.unlink, "step-000000005.safetensors is missing"),
        ("json", with_a_flipped_bit, "step-000000005.json is "),
        ("json", truncated, "step-000000005.json is damaged: "),
        ("json", emptied, "step-000000005.json is damaged: "),
        ("json", changed, "is damaged: it does not have the hash that it states"),
        ("json", foreign, "step-000000005.json is no ringreduce checkpoint 1"),
        ("json", no_object, "step-000000005.json is no ringreduce checkpoint 1"),
    ],
)
def test_a_damaged_one_is_refused_by_name_and_the_one_before_taken(
    kind, damage, complaint, tmp_path
):
    with opened(tmp_path) as folder:
        folder.save(checkpoint(3))
        folder.save(checkpoint(5))
        damage(tmp_path / f"step-000000005.{kind}")
        found, refused = last(folder)
    assert found.step == 3
    assert len(refused) == 1
    assert complaint in refused[0]
    assert str(tmp_path) in refused[0]


def test_every_flipped_bit_is_noticed(tmp_path):
    with opened(tmp_path) as folder:
        manifest = folder.save(checkpoint(5))
        for path in (manifest, manifest.with_suffix(".safetensors")):
            whole = path.read_bytes()
            for place in range(len(whole)):
                damaged = bytearray(whole)
                damaged[place] ^= 4
                path.write_bytes(damaged)
                with pytest.raises(CheckpointError, match=r"none of the 1 .* in .* can be used"):
                    last(folder)
            path.write_bytes(whole)
        assert last(folder)[0].step == 5


def test_one_of_another_run_is_refused(tmp_path):
    def fits(found):
        if found.step == 5:
            raise CheckpointError("it is another network's")

    with opened(tmp_path) as folder:
        folder.save(checkpoint(3))
        folder.save(checkpoint(5))
        found, refused = last(folder, fits)
    assert found.step == 3
    assert refused == [f"{tmp_path}/step-000000005.json: it is another network's"]


def test_one_that_is_removed_meanwhile_is_no_damaged_one(tmp_path):
    with opened(tmp_path, keep=1) as folder:
        folder.save(checkpoint(3))

        def fits(found):
            if found.step == 3:  # the run that goes on saves the next one, and removes this
                folder.save(checkpoint(5))
                raise CheckpointError("it is gone")

        found, refused = last(folder, fits)
    assert found.step == 5
    assert refused == [f"{tmp_path}/step-000000003.json: it is gone"]


def test_what_was_not_finished_is_cleared_away_and_other_files_are_not(tmp_path):
    (tmp_path / "step-000000004.safetensors.unfinished").write_text("half")
    (tmp_path / "notes.unfinished").write_text("mine")
    (tmp_path / "model.json").write_text("{}")
    with opened(tmp_path) as folder:
        assert last(folder) == (None, [])
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".lock",
        "model.json",
        "notes.unfinished",
    ]


def test_a_folder_is_one_run_s_at_a_time(tmp_path):
    with opened(tmp_path), pytest.raises(CheckpointError, match="is in use by another run"):
        Folder(tmp_path, 3)
    Folder(tmp_path, 3).close()


@pytest.mark.parametrize("stops_before", ["write", "fsync", "replace", "second replace", "folder"])
def test_stopping_at_any_moment_of_saving_leaves_the_one_before(
    stops_before, tmp_path, monkeypatch
):
    """The second save is interrupted before one of the calls that write, sync or rename files."""
    calls = {"replace": 0}

    def stop(*_):
        raise KeyboardInterrupt

    def replace(a, b, real=os.replace):
        calls["replace"] += 1
        if calls["replace"] == (2 if stops_before == "second replace" else 1):
            raise KeyboardInterrupt
        real(a, b)

    with opened(tmp_path) as folder:
        folder.save(checkpoint(3))
        with monkeypatch.context() as patch:
            if stops_before in ("write", "fsync"):
                patch.setattr(os, "fsync", stop)
            elif stops_before == "folder":
                patch.setattr(os, "open", stop)
            else:
                patch.setattr(os, "replace", replace)
            with pytest.raises(KeyboardInterrupt):
                folder.save(checkpoint(5))
    with opened(tmp_path) as folder:
        found, refused = last(folder)
    assert equal(found, checkpoint(3))
    assert refused == []


# --- runs -----------------------------------------------------------------------------------------


def parameters(folder: Path) -> str:
    """Return the hash of the arrays of the last checkpoint."""
    return json.loads(sorted(folder.glob("step-*.json"))[-1].read_bytes())["sha256"]


def stop_after(folder: Path, step: int) -> None:
    """Leave the files of a run that was killed before the next checkpoint."""
    for path in folder.glob("step-*"):
        if int(path.name[5:14]) > step:
            path.unlink()


@pytest.mark.few(5)
@pytest.mark.slow
@pytest.mark.parametrize(
    "flags", ["--optimizer sgd", "--optimizer adam", "--batch-norm --clip 0.1"]
)
@pytest.mark.parametrize("step", [4, 8, 20, 32])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_that_goes_on_ends_as_one_that_was_not_interrupted(
    flags, step, ranks, tmp_path, monkeypatch, capsys
):
    how = (*RUN, "--batch", "200", *flags.split(), "--lr", "0.01", "--checkpoint-every", "4")
    how += ("--keep", "99", "--checkpoint-dir", str(tmp_path / "c"))
    metrics = tmp_path / "m.jsonl"
    command(monkeypatch, ranks, *how, "--metrics", str(metrics))
    wanted, lines = parameters(tmp_path / "c"), outcome(metrics)
    printed = final_accuracy(capsys.readouterr().out)
    stop_after(tmp_path / "c", step)
    with metrics.open("a") as file:
        file.write('{"step": 33, "los')  # killed in the middle of a line
    command(monkeypatch, ranks, *how, "--metrics", str(metrics), "--resume")
    shown = capsys.readouterr()
    assert f"goes on after step {step} of 32" in shown.out
    assert final_accuracy(shown.out) == printed
    assert parameters(tmp_path / "c") == wanted
    assert outcome(metrics) == lines


def without_settings(path: Path, *names: str) -> None:
    """Take settings and the strategy out of a manifest, as versions before these wrote it."""
    manifest = json.loads(path.read_bytes())
    del manifest["manifest_sha256"], manifest["strategy"]
    for name in names:
        del manifest["settings"][name]
    path.write_text(json.dumps(manifest | {"manifest_sha256": _own_hash(manifest)}))


def test_a_checkpoint_from_before_a_setting_goes_on_with_the_default(tmp_path, monkeypatch, capsys):
    how = (*RUN, "--checkpoint-dir", str(tmp_path / "c"))
    command(monkeypatch, 1, *how)
    wanted = parameters(tmp_path / "c")
    stop_after(tmp_path / "c", 45)
    for path in (tmp_path / "c").glob("step-*.json"):
        without_settings(path, "batch_norm", "clip")
    assert command(monkeypatch, 1, *how, "--resume", "--batch-norm") == [2]
    words = "batch_norm is True, but the checkpoint was made with False"
    assert words in capsys.readouterr().err
    assert command(monkeypatch, 1, *how, "--resume", "--no-batch-norm") == [0]
    assert parameters(tmp_path / "c") == wanted


def test_a_run_goes_on_with_its_strategy_or_a_named_one(tmp_path, monkeypatch, capsys):
    how = (*RUN[: RUN.index("--epochs")], "--checkpoint-dir", str(tmp_path / "c"), "--keep", "9")
    command(monkeypatch, 1, *how, "--epochs", "1")  # names none: any number of nodes can go on
    command(monkeypatch, 2, *how, "--epochs", "2", "--resume", "--strategy", "zero", "--zero", "2")
    capsys.readouterr()
    command(monkeypatch, 2, *how, "--epochs", "3", "--resume")
    assert "strategy zero, zero 2" in capsys.readouterr().out


def test_an_option_of_another_strategy_is_refused_and_no_older_checkpoint_taken(
    tmp_path, monkeypatch, capsys
):
    how = (*RUN[: RUN.index("--epochs")], "--checkpoint-dir", str(tmp_path / "c"), "--keep", "9")
    command(monkeypatch, 1, *how, "--epochs", "1", "--strategy", "pipeline")
    command(monkeypatch, 1, *how, "--epochs", "2", "--resume", "--strategy", "mirrored")
    wanted = parameters(tmp_path / "c")
    assert command(monkeypatch, 1, *how, "--epochs", "3", "--resume", "--splits", "2") == [2]
    words = "splits is an option of strategy pipeline and hybrid; strategy is mirrored"
    assert words in capsys.readouterr().err
    assert parameters(tmp_path / "c") == wanted


def final_accuracy(printed: str) -> str:
    """Return the accuracy in the last line of a run."""
    found = re.match(r"accuracy \S+ %", printed.splitlines()[-1])
    assert found, printed
    return found[0]


def outcome(metrics: Path) -> list[tuple]:
    """Return the lines of a file of metrics without the times."""
    told = map(json.loads, metrics.read_text().splitlines())
    return [(t.get("step"), t["epoch"], t["loss"], t.get("accuracy"), t.get("lr")) for t in told]


@pytest.mark.slow
def test_another_number_of_ranks_goes_on_with_the_same_global_batches(
    tmp_path, monkeypatch, capsys
):
    how = (*RUN, "--dtype", "float64", "--checkpoint-dir", str(tmp_path / "c"), "--keep", "9")
    metrics = tmp_path / "m.jsonl"
    command(monkeypatch, 2, *how, "--metrics", str(metrics))
    wanted = outcome(metrics)
    stop_after(tmp_path / "c", 30)
    command(monkeypatch, 3, "--checkpoint-dir", str(tmp_path / "c"), "--resume", "--keep", "9",
            "--metrics", str(metrics))  # fmt: skip
    found = outcome(metrics)
    assert "saved by 2 ranks" in capsys.readouterr().out
    assert [told[:2] for told in found] == [told[:2] for told in wanted]
    # The order of additions differs, nothing else: losses stay together for 30 steps in float64.
    assert [told[2] for told in found] == pytest.approx([told[2] for told in wanted], rel=1e-6)


def test_settings_come_from_the_checkpoint_and_what_is_asked_for_goes_before(
    tmp_path, monkeypatch, capsys
):
    where = ("--checkpoint-dir", str(tmp_path))
    command(monkeypatch, 1, *RUN, "--lr", "0.125", *where)
    capsys.readouterr()
    command(monkeypatch, 1, *where, "--resume", "--epochs", "5")
    out = " ".join(capsys.readouterr().out.split())
    assert "lr = 0.125" in out
    assert "goes on after step 60 of 75" in out


def test_resuming_where_there_is_nothing_begins_anew(tmp_path, monkeypatch, capsys):
    codes = command(monkeypatch, 2, *RUN, "--checkpoint-dir", str(tmp_path / "new"), "--resume")
    assert codes == [0, 0]
    assert "goes on" not in capsys.readouterr().out
    assert parameters(tmp_path / "new")


def test_a_damaged_checkpoint_is_named_and_the_one_before_taken(tmp_path, monkeypatch, capsys):
    how = (*RUN, "--checkpoint-dir", str(tmp_path))
    command(monkeypatch, 2, *how)
    wanted = parameters(tmp_path)
    with_a_flipped_bit(tmp_path / "step-000000060.safetensors")
    assert command(monkeypatch, 2, *how, "--resume") == [0, 0]
    shown = capsys.readouterr()
    assert "passed over: " in shown.err
    assert "step-000000060.safetensors is damaged" in shown.err
    assert "goes on after step 45" in shown.out
    assert parameters(tmp_path) == wanted


def test_the_same_checkpoint_can_be_copied_and_gone_on_from_elsewhere(tmp_path, monkeypatch):
    command(monkeypatch, 1, *RUN, "--checkpoint-dir", str(tmp_path / "a"))
    wanted = parameters(tmp_path / "a")
    stop_after(tmp_path / "a", 30)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    command(monkeypatch, 1, "--checkpoint-dir", str(tmp_path / "b"), "--resume")
    assert parameters(tmp_path / "b") == wanted


@pytest.mark.mpi
def test_the_long_proof_notices_what_differs(tmp_path):
    """Compare a killed run with the right result, and with a wrong one."""
    jobs = MpiJobs(tmp_path)
    flags = resume.flags(tmp_path / "whole")
    assert jobs.run("train", resume.RANKS, *flags).returncode == 0
    wanted = resume.outcome(tmp_path / "whole")
    kills: list[int] = []
    rng = random.Random(3)
    assert resume.one_run(jobs, tmp_path / "a", wanted, 0.3, rng, kills) == []
    assert kills
    other = resume.differences(tmp_path / "a", ("other", wanted[1][:-1]))
    assert other == ["other_parameters", "other_metrics"]
