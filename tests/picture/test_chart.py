"""A chart is in sight, its names do not overlap, and its scales cover the values."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import combinations, pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ringreduce.picture.chart import Area, Line, Note, Panel, chart, spread
from ringreduce.picture.scales import (
    Scale,
    linear,
    logarithmic,
    number_text,
    powers_of_two,
    size_text,
)
from ringreduce.picture.style import BLUE, GREEN, ORANGE, TINTS, in_dark, in_light
from tests.support.pictures import contrasts, parse, placed, shapes, text_box, whole

VALUES = st.lists(st.floats(1e-9, 1e12), min_size=1, max_size=20)


# --- scales ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale_of", [linear, logarithmic])
@given(VALUES, st.integers(2, 9))
def test_a_scale_covers_its_values(scale_of: Callable[..., Scale], values, most) -> None:
    scale = scale_of(values, most=most)
    assert all(-1e-9 <= scale.share(value) <= 1 + 1e-9 for value in values)
    assert len(scale.ticks) <= most
    at = [scale.share(tick) for tick, _ in scale.ticks]
    assert at == sorted(at)
    assert all(-1e-9 <= share <= 1 + 1e-9 for share in at)


@given(st.lists(st.integers(1, 1 << 40), min_size=1), st.integers(2, 9))
def test_sizes_have_few_ticks_within_them(sizes, most) -> None:
    scale = powers_of_two(sizes, size_text, most=most)
    assert len(scale.ticks) <= most
    assert all(0 <= scale.share(tick) <= 1 for tick, _ in scale.ticks)


@pytest.mark.parametrize(
    ("values", "ticks"),
    [
        ([0, 1], ["0", "0.2", "0.4", "0.6", "0.8", "1"]),
        ([0, 1350], ["0", "200", "400", "600", "800", "1,000", "1,200"]),
        ([98.1, 98.9], ["98.2", "98.4", "98.6", "98.8"]),
        ([5, 5], ["4.6", "4.8", "5", "5.2", "5.4"]),
        ([math.nan, 1, 2, math.inf], ["1", "1.2", "1.4", "1.6", "1.8", "2"]),
    ],
    ids=str,
)
def test_linear_ticks_are_round(values, ticks) -> None:
    assert [words for _, words in linear(values).ticks] == ticks


@pytest.mark.parametrize(
    ("values", "ticks"),
    [
        ([1, 100], ["1", "2", "5", "10", "20", "50", "100"]),
        ([1, 900], ["1", "3", "10", "30", "100", "300"]),
        ([3e-4, 2e5], ["0.001", "0.1", "10", "1,000", "100,000"]),
        ([1e-6, 2e-5], ["1e-6", "2e-6", "5e-6", "1e-5", "2e-5"]),
    ],
    ids=str,
)
def test_logarithmic_ticks_are_round(values, ticks) -> None:
    assert [words for _, words in logarithmic(values).ticks] == ticks


@pytest.mark.parametrize(
    ("value", "words"), [(0, "0"), (0.25, "0.25"), (1500, "1,500"), (-2, "-2"), (1e-7, "1e-7")]
)
def test_numbers_are_written_in_short(value, words) -> None:
    assert number_text(value) == words


# --- charts ---------------------------------------------------------------------------------------


def names(*ends: float) -> list[Line]:
    return [Line([(0, 0), (1, end)], BLUE, f"line {i}") for i, end in enumerate(ends)]


def drawn(*panels: Panel, **how) -> str:
    return chart("What was found", "where and how", panels, **how)


def panel(lines, **more) -> Panel:
    return Panel("time, µs", linear([0, 1]), linear([0, 10]), lines, **more)


EVERYTHING = drawn(
    panel(names(1, 1, 1, 10, 0, 0), x_name="step"),
    panel(
        [Line([(0, 1), (0.5, 3), (1, 2)], ORANGE, "a longer name", dashes="5 3", has_dots=True)],
        areas=[Area([0, 0.5, 1], [0, 0], [4, 5], TINTS[0])],
        notes=[Note((1, 2), "a note", GREEN), Note((1, 0), "inside", halo=TINTS[0])],
    ),
    panel([]),
)


def test_a_chart_is_in_sight() -> None:
    picture = parse(EVERYTHING)
    assert all(whole(picture).holds(shape) for shape in shapes(picture))


@pytest.mark.parametrize("page", [in_light, in_dark])
def test_texts_of_a_chart_can_be_read(page: Callable[[str], str]) -> None:
    assert min(value for _, value in contrasts(parse(page(EVERYTHING)))) >= 4.5


def test_texts_do_not_overlap() -> None:
    texts = [text_box(text) for text in parse(drawn(panel(names(1, 1, 1, 10, 0, 0)))).iter("text")]
    assert not any(a.meets(b) for a, b in combinations(texts, 2))


def test_a_name_is_beside_the_end_of_its_line() -> None:
    picture = parse(drawn(panel(names(2, 8))))
    ends = [boxes[-1] for shape, boxes in placed(picture) if shape.get("class") == "line"]
    labels = [text_box(text) for text in picture.iter("text") if text.get("class") == "name"]
    for end, label in zip(ends, labels, strict=True):
        assert label.left - end.right == pytest.approx(12, abs=0.1)
        assert label.top < end.top < label.bottom


def test_a_name_has_the_colour_of_its_line() -> None:
    lines = [Line([(0, 1), (1, 5)], colour, colour) for colour in (BLUE, ORANGE)]
    found = [text for text in parse(drawn(panel(lines))).iter("text") if text.get("class")]
    assert [(text.text, text.get("fill")) for text in found] == [(BLUE, BLUE), (ORANGE, ORANGE)]


def test_panels_do_not_overlap() -> None:
    picture = parse(drawn(*[panel(names(1, 9))] * 4))
    texts = [text_box(text) for text in picture.iter("text")]
    assert not any(a.meets(b) for a, b in combinations(texts, 2))


def test_values_without_a_position_are_left_out() -> None:
    scale = logarithmic([1, 10])
    line = Line([(0, 1), (1, 0), (2, math.nan), (3, 10), (4, math.inf)], BLUE, has_dots=True)
    svg = drawn(Panel("loss", linear([0, 4]), scale, [line]))
    assert svg.count("<circle") == 2


def test_a_line_without_points_has_no_name() -> None:
    assert "nothing" not in drawn(panel([Line([], BLUE, "nothing")]))


def test_a_long_line_is_thinned() -> None:
    line = Line([(i / 1e5, 1) for i in range(100_000)], BLUE)
    assert len(drawn(panel([line]))) < 20_000


def test_a_long_title_has_lines_of_about_the_same_length() -> None:
    picture = parse(chart("word " * 40, "", [panel([])]))
    rows = [text_box(text) for text in picture.iter("text") if (text.text or "").startswith("word")]
    lengths = [row.right - row.left for row in rows]
    assert len(rows) > 2
    assert min(lengths) > 0.7 * max(lengths)


def test_what_names_say_is_escaped() -> None:
    assert "<b> & c" in [
        t.text for t in parse(drawn(panel([Line([(0, 1)], BLUE, "<b> & c")]))).iter()
    ]


@given(st.lists(st.floats(0, 100), max_size=8))
@example([82, 98, 99])
def test_numbers_are_spread(wanted) -> None:
    places = sorted(spread(wanted, gap=10, low=0, high=100))
    assert all(b - a >= 10 - 1e-9 for a, b in pairwise(places))
    assert all(-1e-9 <= place <= 100 + 1e-9 for place in places)


def test_numbers_that_are_apart_stay() -> None:
    assert spread([50, 0, 20], gap=10, low=0, high=100) == [50, 0, 20]
