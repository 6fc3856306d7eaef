"""`ringreduce explain --pipeline` shows what the library's own functions find, and proves it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest

from ringreduce.launch import explain_pipeline
from ringreduce.pipeline import draw, prove, register, schedule, to_svg
from ringreduce.pipeline.generators import SCHEDULES
from tests.launch.conftest import Said
from tests.launch.test_explain import refused
from tests.support.pipelines import forget_own


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """No line is wrapped."""
    monkeypatch.setenv("COLUMNS", "500")


@pytest.fixture
def own() -> Iterator[None]:
    """Lets a test register schedules for itself alone."""
    yield
    forget_own()


@pytest.mark.parametrize("name", SCHEDULES)
def test_it_draws_the_schedule(said: Said, name: str) -> None:
    virtual = 2 if name == "interleaved" else 1
    heading, drawing, *_ = said(f"--pipeline {name} --stages 4 --splits 8 --virtual {virtual}")
    assert heading + drawing == draw(schedule(name, 4, 8, virtual)).splitlines()


def test_without_splits_there_are_as_many_as_ranks(said: Said) -> None:
    assert said("--pipeline 1f1b --stages 3")[0][0].startswith("1f1b of 3 ranks and 3 microbatches")


def test_it_compares_with_the_other_schedules(said: Said) -> None:
    assert said("--pipeline gpipe --stages 4 --splits 8")[2] == [
        "schedule                      time  idle  activations",
        "zero_bubble                     27  11 %            4",
        "interleaved, 2 stages a rank  28.5  16 %          5.5",
        "gpipe                           33  27 %            8  shown here",
        "1f1b                            33  27 %            4",
        "sequential                      96  75 %            1",
        "times: the layers of a rank take 1 forward and 2 backward, messages take none",
        "activations: of all layers of a rank, on the rank that holds the most",
    ]


@pytest.mark.parametrize("numbers", ["--stages 4 --splits 6", "--stages 1 --splits 6"])
def test_it_compares_with_those_that_fit_alone(said: Said, numbers: str) -> None:
    table = said(f"--pipeline 1f1b {numbers}")[2]
    assert not any(line.startswith("interleaved") for line in table)


def test_it_says_what_is_proven(said: Said) -> None:
    line = "--pipeline interleaved --stages 2 --splits 4 --virtual 2 --check"
    assert said(line)[3] == [
        "proven:",
        "  every microbatch passes once forward through every stage, then once backward",
        "  every output of a stage and every gradient meets the one receive that wants it",
        "  no deadlock, even when every send waits for its receive",
        "  receives are posted 1 step ahead",
        "  on every stage the gradients of microbatches are added in ascending order",
        "  ranks hold up to 5, 3 activations of a stage, as claimed",
        "  the time is 13.5, as claimed; 11 % of it is idle",
    ]


def test_without_check_nothing_is_said_to_be_proven(said: Said) -> None:
    assert len(said("--pipeline 1f1b --stages 4")) == 3


@pytest.mark.usefixtures("own")
def test_a_schedule_without_claims_claims_nothing(said: Said) -> None:
    register("mine", lambda ranks, rank, splits, virtual: [f"{rank}F0", f"{rank}B0"])
    proven = said("--pipeline mine --stages 2 --splits 1 --check")[3]
    assert not any("claimed" in line for line in proven)
    assert f"  the time is {prove(schedule('mine', 2, 1)).time:g}; 50 % of it is idle" in proven


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize("check", ["--check", ""])
def test_a_broken_schedule_exits_with_1_and_says_why(
    capsys: pytest.CaptureFixture[str], check: str
) -> None:
    register("mine", lambda ranks, rank, splits, virtual: [f"{rank}B0", f"{rank}F0"])
    text = refused(capsys, f"--pipeline mine --stages 2 --splits 1 {check}")
    assert "rank 0 has 0B0 before 0F0" in text
    assert ("NOT proven: pipeline mine of 2 ranks" in text) == bool(check)
    assert ("rank 0  !0B0   0F0" in text) == bool(check)


def test_a_drawing_fits_into_the_terminal(said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "get_terminal_size", lambda: os.terminal_size((60, 24)))
    monkeypatch.setenv("NO_COLOR", "1")
    drawing = said("--pipeline 1f1b --stages 4 --splits 8")[1]
    assert max(map(len, drawing[:4])) <= 60
    assert all("… " in line for line in drawing[:4])
    assert drawing[-1] == "--svg FILE draws all of it"


def test_a_whole_drawing_names_no_file(said: Said) -> None:
    assert "FILE" not in " ".join(said("--pipeline 1f1b --stages 4 --splits 8")[1])


def test_pictures_are_written(said: Said, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("resvg_py")
    drawn = []
    monkeypatch.setattr(explain_pipeline, "to_svg", lambda t: drawn.append(t) or to_svg(t))
    svg, png = tmp_path / "picture.svg", tmp_path / "picture.png"
    assert said(f"--pipeline 1f1b --stages 2 --svg {svg} --png {png}")[3:] == [
        [f"wrote {svg}"],
        [f"wrote {png}"],
    ]
    assert ElementTree.parse(svg).getroot().tag.endswith("svg")
    assert png.read_bytes().startswith(b"\x89PNG")
    assert len(drawn) == 1
