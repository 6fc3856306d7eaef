"""A drawing as text has each action at its time, and marks the failed ones."""

from __future__ import annotations

import doctest
import importlib
import re

import pytest
from hypothesis import given, settings

import ringreduce as rr
from ringreduce.pipeline import Costs, PipelineSchedule, Timeline, draw, schedule, timeline
from ringreduce.pipeline.text import draw_failed
from tests.support.pipelines import schedules


def lanes(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("rank")]


def test_two_ranks() -> None:
    assert draw(schedule("1f1b", ranks=2, splits=2)).splitlines() == [
        "1f1b of 2 ranks and 2 microbatches: time 9, 33 % idle",
        "rank 0  F0 F1       B0───    B1───   33 % idle",
        "rank 1     F0 B0─── F1 B1───         33 % idle",
        "F: forward; B: backward; behind it the microbatch",
    ]


def test_the_halves_of_a_backward_are_named() -> None:
    legend = draw(schedule("zero_bubble", ranks=2, splits=1)).splitlines()[-1]
    assert legend == (
        "F: forward; I: gradient of the input; W: gradient of the weights; behind it the microbatch"
    )


def test_several_stages_a_rank_are_told_apart() -> None:
    text = draw(schedule("interleaved", ranks=2, splits=2, virtual=2))
    assert "rank 1      1F0 1F1 3F0 3B0──── 3F1 3B1──── 1B0──── 1B1────" in text
    assert text.endswith("behind it the microbatch, before it the stage")


@given(schedules(most_ranks=4, most_splits=6))
@settings(max_examples=40)
def test_every_action_is_drawn_in_the_lane_of_its_rank(shown: PipelineSchedule) -> None:
    for rank, lane in enumerate(lanes(draw(shown))):
        names = re.findall(r"\b\d*[FBIW]\d+", lane)
        whole = [n if shown.virtual > 1 else f"{rank}{n}" for n in names]
        assert whole == [str(action) for action in shown.acts(rank)]


@given(schedules(most_ranks=4, most_splits=6))
@settings(max_examples=40)
def test_actions_begin_at_their_times(shown: PipelineSchedule) -> None:
    """The forward of a stage has as many letters as the longest name, and a space."""
    times = timeline(shown)
    found = [[*re.finditer(r"\b\d*[FBIW]\d+", lane)] for lane in lanes(draw(times))]
    letters = shown.virtual * (1 + max(len(match[0]) for lane in found for match in lane))
    for lane, begins in zip(found, times.begins, strict=True):
        starts = [match.start() - len("rank 0  ") for match in lane]
        assert starts == [round(begin * letters) for begin in begins]


def test_a_lane_is_cut_at_the_width() -> None:
    first, *_ = lanes(draw(schedule("1f1b", ranks=2, splits=8), width=20))
    assert first == "rank 0  F0 F1       B0─── F…  11 % idle"


def test_measured_times_are_drawn_alike() -> None:
    shown = schedule("gpipe", ranks=1, splits=1)
    text = draw(Timeline(shown, begins=[[0.0, 2.0]], ends=[[1.0, 4.0]]))
    assert lanes(text) == ["rank 0  F0    B0───   25 % idle"]


def test_actions_without_time_have_no_room() -> None:
    text = draw(timeline(schedule("gpipe", ranks=1, splits=2), Costs(forward=0.0)))
    assert "0 % idle" in text


@pytest.mark.parametrize("module", ["text"])
def test_the_examples_in_the_docstring_are_true(module: str) -> None:
    tested = doctest.testmod(
        importlib.import_module(f"ringreduce.pipeline.{module}"), extraglobs={"rr": rr}
    )
    assert tested.attempted > 0
    assert tested.failed == 0


# --- errors ---------------------------------------------------------------------------------------


def drawn_failed(shown: PipelineSchedule, failed: dict[int, int]) -> list[str]:
    return draw_failed(shown, [shown.acts(r) for r in range(shown.ranks)], failed).splitlines()


def test_failed_actions_are_marked_and_listed() -> None:
    assert drawn_failed(schedule("1f1b", ranks=2, splits=2), {0: 2, 1: 1}) == [
        "rank 0   0F0   0F1  !0B0   0B1",
        "rank 1   1F0  !1B0   1F1   1B1",
        "! 0B0 on rank 0, 1B0 on rank 1",
    ]


def test_nothing_failed_marks_nothing() -> None:
    assert not any("!" in line for line in drawn_failed(schedule("1f1b", 2, 2), {}))


def test_a_large_schedule_is_drawn_around_what_failed() -> None:
    lines = drawn_failed(schedule("gpipe", ranks=20, splits=30), {12: 40})
    assert [line.split()[1] for line in lines[:8]] == [str(rank) for rank in range(8, 16)]
    assert "!12B10" in lines[4]
    assert lines[-3:] == [
        "… 12 of 20 ranks are not drawn",
        "… 48 of 60 actions are not drawn",
        "! 12B10 on rank 12",
    ]


def test_actions_left_out_between_two_failed_ones_are_an_ellipsis() -> None:
    first = drawn_failed(schedule("gpipe", ranks=2, splits=30), {0: 1, 1: 50})[0]
    assert first.split().count("…") == 1
