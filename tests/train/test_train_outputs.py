"""Outputs of a run: lines of JSON, TensorBoard's files, a picture, a summary."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import subprocess
import sys
import threading

import numpy as np
import pytest

from ringreduce.picture.style import in_dark, in_light
from ringreduce.recovery.checkpoint import Folder
from ringreduce.train import Epoch, Step
from ringreduce.train.metrics import History, JsonLines, Parameters, TensorBoard
from ringreduce.train.plot import check_place, draw
from tests.support.pictures import contrasts, parse, shapes, whole
from tests.support.trainer import RUN, command


def step(number: int) -> Step:
    return Step(
        step=number,
        epoch=(number + 1) // 2,
        loss=1 / number,
        lr=0.1,
        samples=32,
        step_s=0.004,
        compute_s=0.003,
        communication_s=0.002,
        exposed_s=0.001,
    )


def epoch(number: int) -> Epoch:
    figures = {"samples_per_s": 1000.0, "exposed": 0.25}
    stale = {"staleness_mean": 1.5, "staleness_max": 3} if number == 2 else {}
    return Epoch(number, 1 / number, 0.5 + number / 10, **figures, **stale)


def tell(watcher, first: int, last: int) -> None:
    """Tell a watcher epochs `first` to `last`, of two steps each."""
    for number in range(first, last + 1):
        watcher.steps([step(2 * number - 1), step(2 * number)])
        watcher.epoch(epoch(number))
    watcher.close()


# --- lines of JSON --------------------------------------------------------------------------------


def test_every_step_and_epoch_is_a_line(tmp_path):
    path = tmp_path / "deep" / "m.jsonl"
    tell(JsonLines(path, 0, 0), 1, 2)
    told = list(map(json.loads, path.read_text().splitlines()))
    assert [line.get("step") for line in told] == [1, 2, None, 3, 4, None]
    assert told[0] == {
        "step": 1,
        "epoch": 1,
        "loss": 1.0,
        "lr": 0.1,
        "samples": 32,
        "step_s": 0.004,
        "compute_s": 0.003,
        "communication_s": 0.002,
        "exposed_s": 0.001,
        "generation": 1,
    }
    assert told[2] == {
        "epoch": 1,
        "loss": 1.0,
        "accuracy": 0.6,
        "samples_per_s": 1000.0,
        "exposed": 0.25,
        "generation": 1,
    }


def test_a_new_run_begins_a_new_file(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 9}\n')
    tell(JsonLines(path, 0, 0), 1, 1)
    assert '"step": 9' not in path.read_text()


@pytest.mark.parametrize(("made", "epochs"), [(2, 1), (3, 1), (4, 2)])
def test_going_on_each_line_is_there_once(made, epochs, tmp_path):
    whole, path = tmp_path / "whole", tmp_path / "m.jsonl"
    tell(JsonLines(whole, 0, 0), 1, 3)
    tell(JsonLines(path, 0, 0), 1, 3)
    with path.open("a") as file:
        file.write('{"step": 1')
    watcher = JsonLines(path, made, epochs)
    for number in range(made + 1, 7):
        watcher.steps([step(number)])
        if number % 2 == 0:
            watcher.epoch(epoch(number // 2))
    watcher.close()
    assert path.read_text() == whole.read_text()


def test_lines_of_others_and_links_are_left_alone(tmp_path):
    real, link = tmp_path / "real", tmp_path / "link"
    link.symlink_to(real)
    tell(JsonLines(link, 0, 0), 1, 1)
    real.write_text("note\n" + real.read_text())
    tell(JsonLines(link, 2, 1), 2, 2)
    assert link.is_symlink()
    told = real.read_text().splitlines()
    assert told[0] == "note"
    assert [json.loads(line).get("step") for line in told[1:]] == [1, 2, None, 3, 4, None]


def test_a_file_with_nothing_of_ours_keeps_what_it_has(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_bytes(b"note \xff\n")
    tell(JsonLines(path, 2, 1), 2, 2)
    first, *told = path.read_bytes().splitlines()
    assert first == b"note \xff"
    assert len(told) == 3


def test_what_is_no_file_is_written_to_and_not_replaced(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    tell(JsonLines(pipe, 0, 0), 1, 1)
    assert os.read(reader, 1 << 16).count(b"\n") == 3
    os.close(reader)
    assert pipe.is_fifo()


# --- TensorBoard ----------------------------------------------------------------------------------


def scalars(folder) -> dict[str, dict[int, float]]:
    """Read event files as TensorBoard does."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"tensors": 0}).Reload()
    return {
        tag: {event.step: event.tensor_proto.float_val[0] for event in events.Tensors(tag)}
        for tag in events.Tags()["tensors"]
        if not tag.startswith("parameters/")
    }


def test_tensorboard_reads_what_was_written(tmp_path):
    tell(TensorBoard(tmp_path), 1, 2)
    found = scalars(tmp_path)
    assert found["train/loss"] == pytest.approx({n: 1 / n for n in range(1, 5)})
    assert found["time/exposed_s"] == pytest.approx(dict.fromkeys(range(1, 5), 0.001))
    assert found["epoch/accuracy"] == pytest.approx({2: 0.6, 4: 0.7})
    assert (found["epoch/staleness_mean"], found["epoch/staleness_max"]) == ({4: 1.5}, {4: 3.0})
    assert found.keys() == {
        *(f"train/{name}" for name in ("loss", "lr")),
        *(f"time/{name}_s" for name in ("step", "compute", "communication", "exposed")),
        *(f"epoch/{name}" for name in ("loss", "accuracy", "samples_per_s")),
        *(f"epoch/staleness_{name}" for name in ("mean", "max")),
    }


def test_tensorboard_shows_each_step_once_when_a_run_goes_on(tmp_path):
    from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator

    tell(TensorBoard(tmp_path), 1, 2)
    tell(TensorBoard(tmp_path, 2), 2, 2)
    events = EventAccumulator(str(tmp_path), size_guidance={"tensors": 0}).Reload()
    assert [event.step for event in events.Tensors("train/loss")] == [1, 2, 3, 4]
    assert [event.step for event in events.Tensors("epoch/loss")] == [2, 4]


@pytest.mark.parametrize("strategy", ["mirrored", "pipeline", "parameter_server"])
def test_tensorboard_has_a_histogram_of_every_parameter_once_an_epoch(
    strategy, tmp_path, monkeypatch
):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    trained: list[dict[str, np.ndarray]] = []
    epoch_of = Parameters.epoch

    def epoch(self, epoch):
        epoch_of(self, epoch)
        trained.append({name: array.copy() for name, array in self.arrays.items()})

    monkeypatch.setattr(Parameters, "epoch", epoch)
    words = ("--strategy", strategy, "--tensorboard", str(tmp_path))
    assert command(monkeypatch, 2, *RUN, *words) == [0, 0]
    events = EventAccumulator(str(tmp_path), size_guidance={"tensors": 0}).Reload()
    shown = events.PluginTagToContent("histograms")
    assert sorted(shown) == [
        f"parameters/{at}.{name}" for at in (0, 1) for name in ("bias", "weight")
    ]
    for tag in shown:
        assert [event.step for event in events.Tensors(tag)] == [15, 30, 45, 60]
        last = trained[-1][tag.removeprefix("parameters/")]
        rows = make_ndarray(events.Tensors(tag)[-1].tensor_proto)
        assert (rows[0, 0], rows[-1, 1], rows[:, 2].sum()) == (last.min(), last.max(), last.size)
        in_range = (last >= rows[7, 0]) & (last < rows[7, 1])
        assert in_range.sum() == rows[7, 2]


def test_without_tensorboard_it_is_said_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard.summary", None)
    with pytest.raises(ImportError, match=r"pip install 'ringreduce\[tensorboard\]'"):
        TensorBoard(tmp_path)


# --- the picture ----------------------------------------------------------------------------------


@pytest.mark.parametrize("page", [in_light, in_dark])
@pytest.mark.parametrize("epochs", [1, 2, 200])
def test_the_picture_is_in_sight_and_can_be_read(epochs, page, tmp_path):
    history = History()
    tell(history, 1, epochs)
    check_place(tmp_path / "deep" / "p.svg")
    draw(tmp_path / "deep" / "p.svg", "digits", "2 ranks", history)
    picture = parse(page((tmp_path / "deep" / "p.svg").read_text()))
    assert all(whole(picture).holds(shape) for shape in shapes(picture))
    assert min(value for _, value in contrasts(picture)) >= 4.5


def test_the_picture_can_be_a_png(tmp_path):
    pytest.importorskip("resvg_py")
    history = History()
    tell(history, 1, 2)
    draw(tmp_path / "p.png", "digits", "2 ranks", history)
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_of_losses_that_are_no_numbers(tmp_path):
    history = History()
    steps = [Step(n, 1, loss, 0.1, 8, 1.0, 0.5, 0.5, 0.5) for n, loss in ((1, 2.0), (2, math.nan))]
    history.steps(steps)
    draw(tmp_path / "p.svg", "digits", "2 ranks", history)
    assert "nan" not in (tmp_path / "p.svg").read_text()


def test_a_history_remembers_when_an_epoch_ended():
    history = History()
    tell(history, 1, 3)
    assert [made for made, _ in history.all_epochs] == [2, 4, 6]


# --- a run ----------------------------------------------------------------------------------------


def test_a_run_leaves_all_of_them_and_a_summary(tmp_path, monkeypatch, capsys):
    names = {"--metrics": "m.jsonl", "--tensorboard": "t", "--plot": "p.svg"}
    flags = [text for flag, name in names.items() for text in (flag, str(tmp_path / name))]
    assert command(monkeypatch, 2, *RUN, *flags) == [0, 0]
    told = list(map(json.loads, (tmp_path / "m.jsonl").read_text().splitlines()))
    assert len(told) == 60 + 4
    assert len(scalars(tmp_path / "t")["train/loss"]) == 60
    title = parse((tmp_path / "p.svg").read_text()).findtext("title")
    exposed = "exposed communication is"
    assert re.match(rf"\d+\.\d % accuracy on the held-out digits; {exposed} \d+ % of a step", title)
    assert re.search(r"efficiency \d+ %$", capsys.readouterr().out.splitlines()[-1])


@pytest.mark.parametrize(
    ("module", "flag", "complaint"),
    [
        ("resvg_py", "--plot", "a PNG needs resvg_py: pip install 'ringreduce[plot]'"),
        ("tensorboard.summary", "--tensorboard", "TensorBoard's files need"),
    ],
)
def test_what_cannot_be_written_is_refused_before_the_start(
    module, flag, complaint, tmp_path, monkeypatch, capsys
):
    from ringreduce.train.__main__ import main

    monkeypatch.setattr("ringreduce.init", lambda: pytest.fail("started"))
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(SystemExit) as stop:
        main([flag, str(tmp_path / "x.png")])
    assert stop.value.code == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("flag", ["--metrics", "--tensorboard", "--plot", "--checkpoint-dir"])
def test_what_cannot_be_written_ends_all_ranks_alike(flag, tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    place = tmp_path / "file" / "x.png"
    assert command(monkeypatch, 2, *RUN, flag, str(place)) == [2, 2]
    assert str(tmp_path / "file") in capsys.readouterr().err


@pytest.mark.parametrize("ranks", [1, 2])
def test_metrics_and_a_picture_on_a_full_disk_leave_the_accuracy_and_are_named(
    ranks, tmp_path, monkeypatch, capsys
):
    def full(path, *rest):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr("ringreduce.train.plot.write", full)
    words = ("--plot", str(tmp_path / "x.svg"), "--metrics", "/dev/full")
    assert command(monkeypatch, ranks, *RUN, *words) == [1] * ranks
    shown = capsys.readouterr()
    assert shown.out.splitlines()[-1].startswith("accuracy ")
    assert "JsonLines cannot go on: [Errno 28] No space left on device" in shown.err
    assert re.search(
        r"not all was written that was asked for: JsonLines; \[Errno 28\] No space .*x\.svg'\n$",
        shown.err,
    )


def test_a_full_disk_is_reported_once_and_the_checkpoint_before_stays(
    tmp_path, monkeypatch, capsys
):
    save = Folder.save

    def full(self, checkpoint):
        if checkpoint.step > 15:
            raise OSError(28, "No space left on device")
        return save(self, checkpoint)

    monkeypatch.setattr(Folder, "save", full)
    assert command(monkeypatch, 2, *RUN, "--checkpoint-dir", str(tmp_path)) == [1, 1]
    shown = capsys.readouterr()
    assert shown.out.splitlines()[-1].startswith("accuracy ")
    assert shown.err.count("no checkpoint after step 30: [Errno 28]") == 1
    assert shown.err.count("no checkpoint after") == 1
    assert shown.err.endswith("asked for: checkpoints, the first that of step 30\n")
    assert [path.name for path in tmp_path.glob("*.json")] == ["step-000000015.json"]


@pytest.mark.mpi
def test_a_launched_run_that_could_not_write_all_ends_in_order():
    run = [sys.executable, "-m", "ringreduce", "train", "-n", "2", *RUN, "--metrics", "/dev/full"]
    done = subprocess.run(run, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1].startswith("accuracy ")
    assert done.stderr.count("asked for: JsonLines\n") == 1
    assert not re.search("abort|ended the job", done.stderr + done.stdout, re.IGNORECASE)


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path, monkeypatch):
    save, written, made = Folder.save, threading.Event(), []

    def slow(self, checkpoint):
        assert written.wait(60)
        return save(self, checkpoint)

    class Release:
        """A watcher that lets the first checkpoint be written after the second epoch."""

        def steps(self, steps):
            made.extend(step.step for step in steps)
            if made[-1] == 30:
                written.set()

        def epoch(self, epoch): ...
        def close(self): ...

    monkeypatch.setattr(Folder, "save", slow)
    monkeypatch.setattr("ringreduce.train.__main__.Progress", lambda *_: Release())
    assert command(monkeypatch, 1, *RUN, "--checkpoint-dir", str(tmp_path)) == [0]
    assert (tmp_path / "step-000000060.json").exists()


def test_going_on_the_picture_has_what_metrics_tell_of_before(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(
        "ringreduce.train.plot.draw", lambda *given: drawn.append(len(given[-1].all_steps))
    )
    flags = ("--checkpoint-dir", str(tmp_path / "c"), "--metrics", str(tmp_path / "m.jsonl"))
    flags += ("--plot", str(tmp_path / "p.png"))
    command(monkeypatch, 1, *RUN, *flags)
    command(monkeypatch, 1, *flags, "--resume", "--epochs", "5")
    assert drawn == [60, 75]


def test_parameters_that_are_no_numbers_are_never_saved(tmp_path, monkeypatch, capsys):
    flags = ("--epochs", "1", "--batch", "1438", "--lr", "1e300")
    codes = command(monkeypatch, 2, *flags, "--checkpoint-dir", str(tmp_path / "c"))
    assert codes == [1, 1]
    assert "parameters are infinite or no numbers after step 1" in capsys.readouterr().err
    assert not list((tmp_path / "c").glob("step-*"))


def test_a_rank_without_the_data_is_named(monkeypatch, tmp_path, capsys):

    from ringreduce.train import inputs

    load = inputs.load

    def lacking(settings):
        if threading.current_thread().name.endswith("1"):
            raise FileNotFoundError("no train-images")
        return load(settings)

    monkeypatch.setattr(inputs, "load", lacking)
    codes = command(monkeypatch, 2, *RUN, "--checkpoint-dir", str(tmp_path), "--resume")
    assert codes == [2, 2]
    assert "rank 1: no train-images" in capsys.readouterr().err
