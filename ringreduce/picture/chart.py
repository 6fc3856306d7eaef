"""Draw charts as SVG: panels with lines and areas, and names beside them in place of a legend.

>>> from ringreduce.picture.scales import linear
>>> from ringreduce.picture.style import BLUE
>>> ours = Line([(1, 10.0), (2, 20.0)], BLUE, name="ours")
>>> panel = Panel("time, µs", linear([1, 2]), linear([0, 20]), [ours])
>>> svg = chart("Twice the ranks take twice the time", "measured on 2 cores", [panel])
>>> svg.count(">ours</text>")
1
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import starmap
from typing import NamedTuple

from ringreduce.picture.scales import Scale
from ringreduce.picture.style import (
    FACTS_SIZE,
    FAINT,
    GRID,
    INK,
    MARGIN,
    NAME_SIZE,
    NUMBER_SIZE,
    PALETTE,
    PAPER,
    TITLE_SIZE,
    document,
    element,
    text,
    text_width,
)

WIDTH = 880.0
"""The width of a chart, which a page of GitHub shows without shrinking it."""
_HEIGHT = 220.0
_GAP = 28.0
_HEAD, _FOOT, _X_NAME = 30.0, 28.0, 16.0
"""Space of a panel for its title, for the numbers below it, and for the name of its x axis."""
_TITLE_ROW, _FACTS_ROW, _NAME_ROW = 24.0, 17.0, 15.0
"""Distances of two lines of text."""
_MOST_POINTS = 600
"""The most points of a line; of longer lines every n-th point is drawn."""

Point = tuple[float, float]


@dataclass(frozen=True)
class Line:
    """A line through `points`, named at its right end."""

    points: Sequence[Point]
    colour: str
    name: str = ""
    dashes: str = ""
    """`style.DASHED`, `style.DOTTED`, or "" for a solid line."""
    width: float = 2.0
    has_dots: bool = False
    is_hollow: bool = False
    """Whether the dots are rings."""


@dataclass(frozen=True)
class Area:
    """Bars without gaps: bar i is from ``edges[i]`` to ``edges[i + 1]``, and from low to high."""

    edges: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]
    colour: str


@dataclass(frozen=True)
class Note:
    """Words in the panel, `above` units of the picture above the point `at`."""

    at: Point
    words: str
    colour: str = INK
    anchor: str = "end"
    above: float = 8.0
    halo: str = PAPER
    """The colour around the letters: that of what is behind them."""


@dataclass(frozen=True)
class Panel:
    """One pair of axes.  `title` names the quantity, with its unit, that `y` measures."""

    title: str
    x: Scale
    y: Scale
    lines: Sequence[Line]
    areas: Sequence[Area] = ()
    notes: Sequence[Note] = ()
    x_name: str = ""


def chart(
    title: str,
    facts: str,
    panels: Sequence[Panel],
    columns: int = 2,
    panel_height: float = _HEIGHT,
) -> str:
    """Return an SVG document; `title` says what was found, `facts` where and how.

    The panels are in rows of `columns`; `panel_height` is that of their values, in units of SVG.
    """
    inner = WIDTH - 2 * MARGIN
    elements, y = _head(title, facts, inner)
    width = (inner - _GAP * (columns - 1)) / columns
    row_height = _HEAD + panel_height + _FOOT + _X_NAME * any(panel.x_name for panel in panels)
    for number, panel in enumerate(panels):
        row, column = divmod(number, columns)
        left, top = MARGIN + column * (width + _GAP), y + row * row_height
        elements += _PanelDrawing(panel, left, top, width, panel_height).elements()
    height = y + -(-len(panels) // columns) * row_height + MARGIN / 2
    return document(WIDTH, height, title, elements)


def _head(title: str, facts: str, width: float) -> tuple[list[str], float]:
    """Return the title and the facts, in lines at most `width` wide, and the y below them."""
    elements, y = [], 12.0
    for row in _balanced(title, width, TITLE_SIZE):
        y += _TITLE_ROW
        elements.append(text(MARGIN, y, row, TITLE_SIZE, font_weight="bold"))
    y += 4
    for row in _filled(facts, width, FACTS_SIZE):
        y += _FACTS_ROW
        elements.append(text(MARGIN, y, row, FACTS_SIZE, fill=FAINT))
    return elements, y + 16


def _balanced(words: str, width: float, size: float) -> list[str]:
    rows = _filled(words, width, size, bold=True)
    while width > size:
        width -= size
        narrower = _filled(words, width, size, bold=True)
        if len(narrower) > len(rows):
            break
        rows = narrower
    return rows


def _filled(words: str, width: float, size: float, *, bold: bool = False) -> list[str]:
    """Return the words in lines, each as full as `width` allows; a word is never cut."""
    rows = [""]
    for word in words.split():
        longer = f"{rows[-1]} {word}".strip()
        if not rows[-1] or text_width(longer, size, bold=bold) <= width:
            rows[-1] = longer
        else:
            rows.append(word)
    return rows


class _Frame(NamedTuple):
    left: float
    top: float
    right: float
    bottom: float


class _PanelDrawing:
    def __init__(self, panel: Panel, left: float, top: float, width: float, height: float) -> None:
        self._panel, self._left, self._top = panel, left, top
        numbers = max((text_width(words, NUMBER_SIZE) for _, words in panel.y.ticks), default=0)
        names = [text_width(line.name, NAME_SIZE) + 12 for line in panel.lines if line.name]
        self._frame = _Frame(
            left + numbers + 8,
            top + _HEAD,
            left + width - max(names, default=12.0),
            top + _HEAD + height,
        )
        self._drawn = [(line, self._points(line)) for line in panel.lines]

    def elements(self) -> Iterator[str]:
        panel = self._panel
        yield text(self._left, self._top + 14, panel.title, NAME_SIZE, font_weight="bold")
        yield from self._grid()
        yield from map(self._area, panel.areas)
        yield from starmap(_line, self._drawn)
        yield from self._names()
        yield from map(self._note, panel.notes)

    def _at(self, point: Point) -> Point:
        frame, panel = self._frame, self._panel
        return (
            frame.left + panel.x.share(point[0]) * (frame.right - frame.left),
            frame.bottom - panel.y.share(point[1]) * (frame.bottom - frame.top),
        )

    def _grid(self) -> Iterator[str]:
        left, top, right, bottom = self._frame
        panel = self._panel
        for value, words in panel.y.ticks:
            y = self._at((panel.x.low, value))[1]
            yield element("path", d=f"M{left:.6g},{y:.6g}H{right:.6g}", stroke=GRID)
            yield text(left - 8, y + 4, words, NUMBER_SIZE, fill=FAINT, text_anchor="end")
        for value, words in panel.x.ticks:
            x = self._at((value, panel.y.low))[0]
            yield element("path", d=f"M{x:.6g},{top:.6g}V{bottom:.6g}", stroke=GRID)
            yield text(x, bottom + 16, words, NUMBER_SIZE, fill=FAINT, text_anchor="middle")
        if panel.x_name:
            middle = (left + right) / 2
            yield text(
                middle, bottom + 33, panel.x_name, NUMBER_SIZE, fill=FAINT, text_anchor="middle"
            )

    def _points(self, line: Line) -> list[Point]:
        panel = self._panel
        found = [(x, y) for x, y in line.points if panel.x.has(x) and panel.y.has(y)]
        every = -(-len(found) // _MOST_POINTS) or 1
        return [self._at(point) for point in found[::every]]

    def _area(self, area: Area) -> str:
        """Return the outline: the tops from left to right, then the bottoms back."""
        edges = [(x, x) for x in area.edges]
        xs = [x for pair in edges for x in pair][1:-1]
        tops = [y for y in area.high for _ in range(2)]
        bottoms = [y for y in area.low for _ in range(2)]
        corners = [*zip(xs, tops, strict=True), *reversed([*zip(xs, bottoms, strict=True)])]
        path = "L".join("{:.6g},{:.6g}".format(*self._at(corner)) for corner in corners)
        return element("path", d=f"M{path}z", fill=area.colour, class_="area")

    def _names(self) -> Iterator[str]:
        """Yield the name of each line, beside its right end; names do not overlap."""
        named = [(line, points[-1][1]) for line, points in self._drawn if line.name and points]
        ends = [end for _, end in named]
        places = spread(ends, _NAME_ROW, self._frame.top, self._frame.bottom)
        x = self._frame.right
        for (line, end), y in zip(named, places, strict=True):
            if abs(y - end) > 2:
                leader = f"M{x + 3:.6g},{end:.6g}L{x + 10:.6g},{y:.6g}"
                yield element("path", d=leader, stroke=line.colour, fill="none")
            ink = INK if line.colour in PALETTE[4:] else line.colour  # some are too pale for text
            yield text(x + 12, y + 4, line.name, NAME_SIZE, fill=ink, class_="name")

    def _note(self, note: Note) -> str:
        x, y = self._at(note.at)
        return text(
            x,
            y - note.above,
            note.words,
            NAME_SIZE,
            fill=note.colour,
            text_anchor=note.anchor,
            stroke=note.halo,
            stroke_width=3,
            paint_order="stroke",
        )


def _line(line: Line, points: Sequence[Point]) -> str:
    style: dict[str, float | str] = {"stroke": line.colour, "stroke_width": line.width}
    if line.dashes:
        style["stroke_dasharray"] = line.dashes
    path = "L".join(f"{x:.1f},{y:.1f}" for x, y in points)
    drawn = element(
        "path", d=f"M{path}", fill="none", stroke_linejoin="round", class_="line", **style
    )
    if line.has_dots:
        dot: dict[str, float | str] = {"r": line.width + 0.6, "fill": line.colour}
        if line.is_hollow:
            dot = {"r": line.width + 1.6, "fill": PAPER, "stroke": line.colour}
        drawn += "".join(element("circle", cx=x, cy=y, **dot) for x, y in points)
    return drawn


def spread(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Move the numbers `wanted` apart to at least `gap`, from `low` to `high` if there is room.

    >>> spread([10.0, 12.0, 50.0], gap=10, low=0, high=100)
    [6.0, 16.0, 50.0]
    """

    def within(middle: float, members: int) -> float:
        reach = gap * (members - 1) / 2
        return max(low + reach, min(high - reach, middle))

    order = sorted(range(len(wanted)), key=wanted.__getitem__)
    groups: list[tuple[float, int]] = []
    # A group is (its middle, its members), evenly spaced; groups that overlap become one.
    for index in order:
        middle, members = within(wanted[index], 1), 1
        while groups and groups[-1][0] + gap * (groups[-1][1] + members) / 2 > middle:
            before, count = groups.pop()
            middle = (before * count + middle * members) / (count + members)
            members += count
            middle = within(middle, members)
        groups.append((middle, members))
    places = [
        middle + gap * (i - (members - 1) / 2) for middle, members in groups for i in range(members)
    ]
    return [places[order.index(index)] for index in range(len(wanted))]
