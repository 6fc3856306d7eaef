"""The parts of an arrow: its line, its head, and the label at its start."""

from __future__ import annotations

from ringreduce.picture.style import DASHED, PAPER
from ringreduce.picture.svg import element, text, text_width
from ringreduce.schedules.ranges import range_texts
from ringreduce.schedules.schedule import Chunks

LARGEST_HEAD = 5.5
"""Half the height of a head."""
_LABEL_SIZE, _LABEL_HEIGHT = 10.0, 14.0
_LONGEST_LABEL = 7


def line(
    start: tuple[float, float],
    end: tuple[float, float],
    paint: str,
    width: float,
    *,
    reduce: bool,
) -> str:
    """Return a curve that begins and ends horizontally, so that heads point to the right."""
    (x1, y1), (x2, y2) = start, end
    bend = (x2 - x1) / 2
    dashes = {} if reduce else {"stroke_dasharray": DASHED}
    return element(
        "path",
        d=f"M{x1:.6g},{y1:.6g}C{x1 + bend:.6g},{y1:.6g} {x2 - bend:.6g},{y2:.6g} {x2:.6g},{y2:.6g}",
        fill="none",
        stroke=paint,
        stroke_width=width,
        **dashes,
    )


def head(tip: tuple[float, float], size: float, paint: str, *, reduce: bool) -> str:
    """Return a disc with a plus for a message that reduces, else a hollow triangle."""
    x, y = tip
    if not reduce:
        points = f"M{x - 2 * size:.6g},{y - size:.6g}L{x:.6g},{y:.6g}l{-2 * size:.6g},{size:.6g}z"
        return element("path", d=points, fill=PAPER, stroke=paint, stroke_width=1.5)
    arm = size * 0.6
    plus = f"M{x - size - arm:.6g},{y:.6g}h{2 * arm:.6g}M{x - size:.6g},{y - arm:.6g}v{2 * arm:.6g}"
    return element("circle", cx=x - size, cy=y, r=size, fill=paint) + element(
        "path", d=plus, stroke=PAPER, stroke_width=size * 0.32
    )


def label(x: float, y: float, words: str, paint: str) -> str:
    frame = element(
        "rect",
        x=x,
        y=y - _LABEL_HEIGHT / 2,
        width=label_width(words),
        height=_LABEL_HEIGHT,
        rx=4,
        fill=PAPER,
        stroke=paint,
        stroke_width=1.5,
    )
    middle = x + label_width(words) / 2
    return frame + text(middle, y + 3.5, words, _LABEL_SIZE, text_anchor="middle")


def label_width(words: str) -> float:
    return text_width(words, _LABEL_SIZE) + 8


def label_of(chunks: Chunks) -> str:
    """Return text such as 3, 0-5 or 3,6; a long list is cut and ends in an ellipsis."""
    words = range_texts(chunks)
    whole = ",".join(words)
    return whole if len(whole) <= _LONGEST_LABEL or len(words) == 1 else f"{words[0]},…"
