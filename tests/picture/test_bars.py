"""Bars of amounts: their lengths, their words, and their place in the picture."""

from __future__ import annotations

import pytest

from ringreduce.picture.bars import Bar, BarGroup, draw_bars
from ringreduce.picture.style import BLUE, ORANGE
from tests.support.pictures import box, number, parse, shapes, whole

GROUPS = [
    BarGroup("few", [Bar("ours", 1, "1 MiB", BLUE), Bar("theirs", 4, "4 MiB", ORANGE)]),
    BarGroup("many", [Bar("ours", 0, "0 MiB", BLUE)]),
]


def bars(groups: list[BarGroup]) -> list[float]:
    """The widths of the bars."""
    rects = parse(draw_bars("title", "facts", groups)).iter("rect")
    return [number(rect, "width") for rect in rects if rect.get("class") == "bar"]


def test_all_bars_are_on_one_scale() -> None:
    first, second, third = bars(GROUPS)
    assert first * 4 == second > 0
    assert third == 0


def test_bars_without_a_value_have_no_length() -> None:
    assert bars([GROUPS[1]]) == [0]


def test_bars_are_below_each_other() -> None:
    picture = parse(draw_bars("title", "facts", GROUPS))
    drawn = [box(rect) for rect in picture.iter("rect") if rect.get("class") == "bar"]
    assert not any(a.meets(b) for a in drawn for b in drawn if a is not b)


@pytest.mark.parametrize("words", ["short", "a long title " * 12])
def test_nothing_is_cut_off(words: str) -> None:
    picture = parse(draw_bars(words, words, GROUPS))
    assert all(whole(picture).holds(shape) for shape in shapes(picture))
