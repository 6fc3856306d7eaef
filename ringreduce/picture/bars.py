"""Draw amounts as horizontal bars, in groups on one scale, each with its name and its value.

>>> from ringreduce.picture.style import BLUE, ORANGE
>>> bars = [Bar("ours", 2.0, "2 MiB", BLUE), Bar("theirs", 4, "4 MiB", ORANGE)]
>>> svg = draw_bars("Half the memory", "measured on 4 ranks", [BarGroup("4 ranks", bars)])
>>> svg.count('class="bar"'), ">2 MiB</text>" in svg
(2, True)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ringreduce.picture.style import (
    FACTS_SIZE,
    FAINT,
    LANE,
    MARGIN,
    NAME_SIZE,
    NUMBER_SIZE,
    TITLE_SIZE,
    document,
    element,
    text,
    text_width,
)

_HEAD, _ROW, _BAR = 74.0, 19.0, 13.0
"""Space above the first group, and the heights of a row and of the bar in it."""
_GAP = 12.0
"""Space between groups, and between a bar and its words."""
_WIDEST = 420.0


@dataclass(frozen=True)
class Bar:
    name: str
    value: float
    words: str
    colour: str


@dataclass(frozen=True)
class BarGroup:
    name: str
    bars: Sequence[Bar]


def draw_bars(title: str, facts: str, groups: Sequence[BarGroup]) -> str:
    """Return an SVG document: `title` says what was found, `facts` where and how.

    All bars are on one scale, from 0 to the largest value.
    """
    bars = [bar for group in groups for bar in group.bars]
    largest = max((bar.value for bar in bars), default=0)
    first = MARGIN + max(text_width(group.name, NAME_SIZE, bold=True) for group in groups) + _GAP
    left = first + max((text_width(bar.name, NAME_SIZE) for bar in bars), default=0.0) + _GAP
    values = max((text_width(bar.words, NUMBER_SIZE) for bar in bars), default=0.0)
    elements = [
        text(MARGIN, 34, title, TITLE_SIZE, font_weight="bold"),
        text(MARGIN, 56, facts, FACTS_SIZE, fill=FAINT),
    ]
    y = _HEAD
    for group in groups:
        name = text(MARGIN, y + _ROW / 2 + 4, group.name, NAME_SIZE, font_weight="bold")
        elements.append(name)
        for bar in group.bars:
            share = bar.value / largest if largest else 0.0
            elements += _drawn(bar, left, y, share)
            y += _ROW
        y += _GAP
    head = max(text_width(title, TITLE_SIZE, bold=True), text_width(facts, FACTS_SIZE))
    width = max(left + _WIDEST + _GAP + values, MARGIN + head) + MARGIN
    return document(width, y + MARGIN - _GAP, title, elements)


def _drawn(bar: Bar, left: float, top: float, share: float) -> Iterator[str]:
    y, base = top + (_ROW - _BAR) / 2, top + _ROW / 2 + 4
    at = {"x": left, "y": y, "height": _BAR, "rx": 3}
    yield text(left - _GAP, base, bar.name, NAME_SIZE, text_anchor="end")
    yield element("rect", **at, width=_WIDEST, fill=LANE)
    yield element("rect", **at, width=share * _WIDEST, fill=bar.colour, class_="bar")
    yield text(left + _WIDEST + _GAP, base, bar.words, NUMBER_SIZE, fill=FAINT)
