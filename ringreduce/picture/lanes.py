"""Draw what ranks do over time: lanes with bars, idle gaps with their share, and messages.

Several charts in one picture are below each other, on one scale of time.

>>> from ringreduce.picture.style import BLUE
>>> bars = [LaneBar(0.0, 1.0, "F0", BLUE, "forward"), LaneBar(3.0, 4.0, "B0", BLUE, "backward")]
>>> chart = LaneChart("Half of the time is idle", "1 rank", [Lane("rank 0", bars)], arrows=[])
>>> svg = draw_lanes([chart], fills=[Sample(BLUE, "work")], arrows=[])
>>> "50 %" in svg, svg.count('class="bar"')
(True, 2)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ringreduce.picture.layout import NAME_WIDTH
from ringreduce.picture.scales import linear
from ringreduce.picture.style import (
    FACTS_SIZE,
    FAINT,
    GRID,
    LANE,
    MARGIN,
    NAME_SIZE,
    NUMBER_SIZE,
    TITLE_SIZE,
    document,
    element,
    text,
    text_width,
    tooltip,
)

_LANE, _GAP = 28.0, 16.0
"""The height of a lane, and the space between two lanes, which has the arrows."""
_HEAD, _FOOT = 88.0, 24.0
"""Space above the lanes of a chart, for its words and its numbers, and space below them."""
_LABEL_SIZE, _LABEL_PAD = 11.0, 3.5
_LINE = 11.5
_WIDEST = 1500.0
"""The most width of the lanes.  Where it is too little for the labels, they are left out."""
_SHARE_WIDTH = 76.0
_SHIFT = 2.5
"""Arrows down are this much to the left of their times, and arrows up to the right."""
_STROKE, _TIP = 1.25, 4.0
"""The width of the line of an arrow, and the length of its head."""
_STUB = 11.0
"""The length of the two parts of an arrow between the first lane and the last one."""


@dataclass(frozen=True)
class LaneBar:
    begin: float
    end: float
    label: str
    """One line or two, in the bar if there is room."""
    colour: str
    words: str


@dataclass(frozen=True)
class Lane:
    name: str
    bars: Sequence[LaneBar]


@dataclass(frozen=True)
class LaneArrow:
    """A message from a lane to a lane, each at its time.

    The lanes must be neighbours, or the first and the last one: then the arrow goes round the
    chart, and crosses no lane.
    """

    sender: tuple[int, float]
    """(index of the lane, time)."""
    receiver: tuple[int, float]
    colour: str
    words: str


@dataclass(frozen=True)
class LaneChart:
    """The lanes of several ranks.  `title` says what is found, `facts` how."""

    title: str
    facts: str
    lanes: Sequence[Lane]
    arrows: Sequence[LaneArrow]

    @property
    def time(self) -> float:
        return max((bar.end for lane in self.lanes for bar in lane.bars), default=0.0)


class Sample(NamedTuple):
    colour: str
    words: str
    upward: bool = False


def draw_lanes(
    charts: Sequence[LaneChart], fills: Sequence[Sample], arrows: Sequence[Sample]
) -> str:
    """Return an SVG document: charts on one scale of time, and the meaning of their colours."""
    time = max(chart.time for chart in charts)
    needed = max((_needed(chart) for chart in charts), default=0.0)
    words = max(
        max(text_width(chart.title, TITLE_SIZE, bold=True), text_width(chart.facts, FACTS_SIZE))
        for chart in charts
    )
    width = max(min(needed * time, _WIDEST), words - NAME_WIDTH - _SHARE_WIDTH)
    scale = width / time if time else 0.0
    elements: list[str] = []
    y = 0.0
    for chart in charts:
        drawn = _LaneDrawing(chart, y, scale, time)
        elements += drawn.elements()
        y = drawn.bottom
    wide = MARGIN + NAME_WIDTH + width + _SHARE_WIDTH + MARGIN
    legend, height = _legend(fills, arrows, y, wide - 2 * MARGIN)
    title = "; ".join(chart.title for chart in charts)
    return document(wide, y + height + MARGIN, title, [*elements, *legend])


def _needed(chart: LaneChart) -> float:
    """Return the least width of a unit of time with which every label fits into its bar."""
    return max(
        (
            (_label_width(bar) + _LABEL_PAD) / (bar.end - bar.begin)
            for lane in chart.lanes
            for bar in lane.bars
            if bar.end > bar.begin
        ),
        default=0.0,
    )


def _label_width(bar: LaneBar) -> float:
    return max(text_width(line, _LABEL_SIZE) for line in bar.label.split("\n"))


class _LaneDrawing:
    def __init__(self, chart: LaneChart, top: float, scale: float, time: float) -> None:
        self._chart, self._top, self._scale, self._time = chart, top, scale, time
        self._first = top + _HEAD
        self._left = MARGIN + NAME_WIDTH
        lanes = len(chart.lanes)
        self.bottom = self._first + lanes * _LANE + (lanes - 1) * _GAP + _FOOT

    def elements(self) -> Iterator[str]:
        chart = self._chart
        yield text(MARGIN, self._top + 34, chart.title, TITLE_SIZE, font_weight="bold")
        yield text(MARGIN, self._top + 54, chart.facts, FACTS_SIZE, fill=FAINT)
        yield from self._numbers()
        yield from map(self._lane, range(len(chart.lanes)))
        yield from map(self._arrow, chart.arrows)
        for number, lane in enumerate(chart.lanes):
            yield element("g", "".join(self._bars(number, lane)), class_="rank", data_rank=number)

    def _x(self, time: float) -> float:
        return self._left + time * self._scale

    def _y(self, lane: int) -> float:
        return self._first + lane * (_LANE + _GAP)

    def _numbers(self) -> Iterator[str]:
        """Yield a number, and a line through all lanes, for some times of this chart."""
        y = self._first - _STUB - 5
        yield text(self._left - 10, y, "time", NUMBER_SIZE, fill=FAINT, text_anchor="end")
        for value, words in linear([0.0, self._time], most=12).ticks:
            if value > self._chart.time:  # the idle shares are there
                break
            x = self._x(value)
            yield text(x, y, words, NUMBER_SIZE, fill=FAINT, text_anchor="middle")
            line = f"M{x:.6g},{y + 4:.6g}V{self.bottom - _FOOT:.6g}"
            yield element("path", d=line, stroke=GRID)

    def _lane(self, number: int) -> str:
        """Return a bar for the whole time, behind the others: what is seen of it is idle."""
        return element(
            "rect",
            x=self._left,
            y=self._y(number),
            width=self._chart.time * self._scale,
            height=_LANE,
            rx=4,
            fill=LANE,
        )

    def _bars(self, number: int, lane: Lane) -> Iterator[str]:
        middle, time = self._y(number) + _LANE / 2 + 4, self._chart.time
        yield text(self._left - 10, middle, lane.name, NAME_SIZE, text_anchor="end")
        end, idle = 0.0, 0.0
        for bar in [*lane.bars, LaneBar(time, time, "", "", "")]:
            idle += bar.begin - end
            yield from self._share(number, end, bar.begin)
            end = bar.end
            if bar.label:
                yield self._bar(number, bar)
        share = f"{_percent(idle / time if time else 0.0)} idle"
        yield text(self._x(time) + 10, middle, share, NUMBER_SIZE, fill=FAINT)

    def _bar(self, number: int, bar: LaneBar) -> str:
        width = (bar.end - bar.begin) * self._scale
        y = self._y(number)
        rect = element(
            "rect",
            x=self._x(bar.begin) + 0.5,
            y=y,
            width=max(width - 1, 0.5),
            height=_LANE,
            rx=3,
            fill=bar.colour,
        )
        return element("g", tooltip(bar.words) + rect + self._label(bar, y), class_="bar")

    def _label(self, bar: LaneBar, top: float) -> str:
        """Return the lines of the label of a bar, if the bar is wide enough."""
        width = (bar.end - bar.begin) * self._scale
        if _label_width(bar) + _LABEL_PAD / 2 > width:
            return ""
        lines = bar.label.split("\n")
        x = self._x((bar.begin + bar.end) / 2)
        y = top + _LANE / 2 + 4 - _LINE * (len(lines) - 1) / 2
        return "".join(
            text(x, y + _LINE * number, line, _LABEL_SIZE, text_anchor="middle")
            for number, line in enumerate(lines)
        )

    def _share(self, number: int, begin: float, end: float) -> Iterator[str]:
        time = self._chart.time
        words = _percent((end - begin) / time) if time else ""
        if end > begin and text_width(words, _LABEL_SIZE) + 4 <= (end - begin) * self._scale:
            x, y = self._x((begin + end) / 2), self._y(number) + _LANE / 2 + 3.5
            yield text(x, y, words, _LABEL_SIZE, fill=FAINT, text_anchor="middle", class_="idle")

    def _arrow(self, arrow: LaneArrow) -> str:
        """Return a curve that begins and ends upright, and its head; or two lines with heads."""
        (source, sent), (target, received) = arrow.sender, arrow.receiver
        leaves = abs(target - source) > 1
        down = 1 if (target > source) != leaves else -1
        x1, x2 = (self._x(time) - down * _SHIFT for time in (sent, received))
        y1 = self._y(source) + (_LANE if down > 0 else 0)
        y2 = self._y(target) + (0 if down > 0 else _LANE)
        if leaves:
            drawn = _upright(x1, y1, down, arrow.colour)
            drawn += _upright(x2, y2 - down * _STUB, down, arrow.colour)
        else:
            middle, end = (y1 + y2) / 2, y2 - down * _TIP
            curve = (
                f"M{x1:.6g},{y1:.6g}C{x1:.6g},{middle:.6g} {x2:.6g},{middle:.6g} {x2:.6g},{end:.6g}"
            )
            drawn = element("path", d=curve, fill="none", stroke=arrow.colour, stroke_width=_STROKE)
            drawn += _head(x2, y2, down, arrow.colour)
        return element("g", tooltip(arrow.words) + drawn, class_="message")


def _upright(x: float, y: float, down: int, colour: str, length: float = _STUB) -> str:
    line = f"M{x:.6g},{y:.6g}V{y + (length - _TIP) * down:.6g}"
    stroke = element("path", d=line, stroke=colour, stroke_width=_STROKE)
    return stroke + _head(x, y + length * down, down, colour)


def _head(x: float, y: float, down: int, colour: str) -> str:
    back, half = y - down * (_TIP + 1), 0.6 * _TIP
    points = f"M{x - half:.6g},{back:.6g}L{x:.6g},{y:.6g}L{x + half:.6g},{back:.6g}z"
    return element("path", d=points, fill=colour)


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _legend(
    fills: Sequence[Sample], arrows: Sequence[Sample], top: float, width: float
) -> tuple[list[str], float]:
    """Return a sample and its meaning for each colour, in rows from `top`, and their height."""
    elements: list[str] = []
    x, y = MARGIN, top + 12
    for drawn, sample in [
        *((_box, fill) for fill in fills),
        *((_arrow, each) for each in arrows),
    ]:
        needed = 28 + text_width(sample.words, FACTS_SIZE) + 20
        if x > MARGIN and x + needed > MARGIN + width:
            x, y = MARGIN, y + 24
        elements.append(drawn(x, y, sample))
        elements.append(text(x + 28, y + 4, sample.words, FACTS_SIZE, fill=FAINT))
        x += needed
    return elements, y - top


def _box(x: float, y: float, sample: Sample) -> str:
    return element("rect", x=x, y=y - 8, width=20, height=16, rx=3, fill=sample.colour)


def _arrow(x: float, y: float, sample: Sample) -> str:
    down = -1 if sample.upward else 1
    return _upright(x + 10, y - 8 * down, down, sample.colour, length=16)
