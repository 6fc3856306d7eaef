"""A picture has every action and message once, at its place, and nothing is cut off."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import combinations
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given, settings

from ringreduce.picture.style import BLUE, ORANGE, TINTS, in_dark, in_light
from ringreduce.pipeline import (
    Costs,
    PipelineSchedule,
    Timeline,
    schedule,
    timeline,
    to_png,
    to_svg,
)
from ringreduce.pipeline.generators import SCHEDULES
from tests.support.pictures import Box, box, contrasts, groups, parse, shapes, text_box, whole
from tests.support.pipelines import of_result, schedules

FOUR = [schedule(name, 4, 8, 2 if name == "interleaved" else 1) for name in SCHEDULES]


def bars(picture: ET.Element) -> list[list[ET.Element]]:
    """The bars of each rank."""
    return [groups(rank, "bar") for rank in groups(picture, "rank")]


def rect(bar: ET.Element) -> Box:
    return box(next(bar.iter("rect")))


def titles(elements: list[ET.Element]) -> list[str]:
    return [element.findtext("title") or "" for element in elements]


def ends(message: ET.Element) -> tuple[float, float, float, float]:
    """The ends of an arrow: x1, y1, x2, y2."""
    line, head = message.iter("path")
    numbers = [float(word) for word in re.findall(r"-?[\d.]+", line.get("d", ""))]
    tip = [float(word) for word in re.findall(r"-?[\d.]+", head.get("d", ""))]
    return numbers[0], numbers[1], tip[2], tip[3]


# --- any picture ----------------------------------------------------------------------------------


@given(schedules(most_ranks=5, most_splits=6))
@settings(max_examples=40)
def test_every_action_is_a_bar_in_the_lane_of_its_rank(shown: PipelineSchedule) -> None:
    drawn = bars(parse(to_svg(shown)))
    for rank, lane in enumerate(drawn):
        assert [title.partition(":")[0] for title in titles(lane)] == [*map(str, shown.acts(rank))]


@given(schedules(most_ranks=5, most_splits=6))
@settings(max_examples=40)
def test_bars_do_not_overlap_and_all_is_in_sight(shown: PipelineSchedule) -> None:
    picture = parse(to_svg(shown))
    every = [rect(bar) for lane in bars(picture) for bar in lane]
    assert not any(a.meets(b) for a, b in combinations(every, 2))
    assert all(whole(picture).holds(shape) for shape in shapes(picture))


@given(schedules(most_ranks=5, most_splits=6))
@settings(max_examples=40)
def test_every_message_is_an_arrow(shown: PipelineSchedule) -> None:
    picture = parse(to_svg(shown))
    wanted = 0
    if shown.ranks > 1:
        acts = [action for rank in range(shown.ranks) for action in shown.acts(rank)]
        wanted = sum(of_result(action, shown) is not None for action in acts)
    found = titles(groups(picture, "message"))
    assert len(found) == len(set(found)) == wanted


def test_an_arrow_runs_from_the_end_of_an_action_to_the_begin_of_another() -> None:
    picture = parse(to_svg(schedule("1f1b", ranks=2, splits=2)))
    of = {
        title[:3]: rect(bar)
        for lane in bars(picture)
        for bar, title in zip(lane, titles(lane), strict=True)
    }
    arrows = dict(
        zip(titles(messages := groups(picture, "message")), map(ends, messages), strict=True)
    )
    x1, y1, x2, y2 = arrows["the output of 0F1, from rank 0 to rank 1"]
    assert abs(x1 - of["0F1"].right) < 4
    assert abs(x2 - of["1F1"].left) < 4
    assert (y1, y2) == (of["0F1"].bottom, of["1F1"].top)
    x1, y1, x2, y2 = arrows["the gradient of 0F1, from rank 1 to rank 0"]
    assert abs(x1 - of["1B1"].right) < 4
    assert abs(x2 - of["0B1"].left) < 4
    assert (y1, y2) == (of["1B1"].top, of["0B1"].bottom)


def test_widths_are_times() -> None:
    times = timeline(schedule("1f1b", ranks=2, splits=2), Costs(forward=[1, 2], backward=[4, 3]))
    scales = {
        round((rect(bar).right - rect(bar).left + 1) / (end - begin), 3)
        for lane, begins, ends_ in zip(
            bars(parse(to_svg(times))), times.begins, times.ends, strict=True
        )
        for bar, begin, end in zip(lane, begins, ends_, strict=True)
    }
    assert max(scales) - min(scales) < 0.02


# --- idle time ------------------------------------------------------------------------------------


def texts(picture: ET.Element) -> list[str]:
    return [text.text or "" for text in picture.iter("text")]


def test_gaps_have_their_share() -> None:
    times = Timeline(schedule("gpipe", ranks=1, splits=1), begins=[[2.0, 8.0]], ends=[[3.0, 9.0]])
    picture = parse(to_svg(times))
    idle = [t.text for t in picture.iter("text") if t.get("class") == "idle"]
    assert idle == ["22 %", "56 %"]
    assert "78 % idle" in texts(picture)


def test_the_title_has_the_idle_share_of_all_ranks() -> None:
    assert texts(parse(to_svg(schedule("zero_bubble", ranks=4, splits=8))))[:2] == [
        "zero_bubble: 11 % idle",
        "4 ranks · 8 microbatches · time 27 · a rank holds 4 activations",
    ]


# --- colours and the legend -----------------------------------------------------------------------


def test_kinds_have_colours() -> None:
    picture = parse(to_svg(schedule("zero_bubble", 2, 3), schedule("1f1b", 2, 3)))
    found = {
        (title[1], next(bar.iter("rect")).get("fill"))
        for lane in bars(picture)
        for bar, title in zip(lane, titles(lane), strict=True)
    }
    assert found == {*zip("FBWI", TINTS, strict=True)}


def test_outputs_and_gradients_have_colours() -> None:
    messages = groups(parse(to_svg(schedule("1f1b", ranks=3, splits=3))), "message")
    found = {
        (title.split()[1], next(message.iter("path")).get("stroke"))
        for message, title in zip(messages, titles(messages), strict=True)
    }
    assert found == {("output", BLUE), ("gradient", ORANGE)}


@pytest.mark.parametrize(
    ("name", "ranks", "words"),
    [
        ("1f1b", 2, ["forward", "backward", "output of a stage", "gradient of an output"]),
        ("1f1b", 1, ["forward", "backward"]),
        ("zero_bubble", 1, ["forward", "gradient of the input", "gradient of the weights"]),
    ],
)
def test_the_legend_has_what_is_drawn(name: str, ranks: int, words: list[str]) -> None:
    assert texts(parse(to_svg(schedule(name, ranks, 2))))[-len(words) :] == words


@pytest.mark.parametrize("page", [in_light, in_dark])
@pytest.mark.parametrize("shown", FOUR, ids=str)
def test_texts_can_be_read(page: Callable[[str], str], shown: PipelineSchedule) -> None:
    picture = parse(page(to_svg(shown)))
    assert min(value for _, value in contrasts(picture)) >= 4.5


def test_labels_fit_into_their_bars() -> None:
    for shown in FOUR:
        for lane in bars(parse(to_svg(shown))):
            for bar in lane:
                for label in bar.iter("text"):
                    assert rect(bar).left - 1 <= text_box(label).left
                    assert text_box(label).right <= rect(bar).right + 1


def test_where_there_is_no_room_there_are_no_labels() -> None:
    drawn = bars(parse(to_svg(schedule("1f1b", ranks=8, splits=64))))
    assert not any(
        [*bar.iter("text")] for lane in drawn for bar in lane if "forward" in titles([bar])[0]
    )


# --- several, and files ---------------------------------------------------------------------------


def test_several_pipelines_share_a_scale() -> None:
    picture = parse(to_svg(*FOUR))
    lanes = groups(picture, "rank")
    assert len(lanes) == 4 * len(FOUR)
    widths = {
        round(rect(bar).right - rect(bar).left, 1)
        for lane in bars(picture)[:8]  # gpipe and 1f1b
        for bar in lane
        if "forward" in titles([bar])[0]
    }
    assert len(widths) == 1


def test_no_pipeline_is_refused() -> None:
    with pytest.raises(ValueError, match="got no pipeline"):
        to_svg()


def test_a_png_is_a_picture_of_the_svg() -> None:
    pytest.importorskip("resvg_py")
    assert to_png(schedule("1f1b", ranks=2, splits=2)).startswith(b"\x89PNG")
