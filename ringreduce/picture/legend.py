"""The texts of a picture: its facts, above, and its legend, below."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from ringreduce.picture.marks import FAINT, LANE, LARGEST_HEAD, PAPER, head, line
from ringreduce.picture.palette import Paints
from ringreduce.picture.svg import element, text, text_width
from ringreduce.picture.timeline import Timeline
from ringreduce.schedules.schedule import Schedule, chunk_of, source_of

_SIZE, _ROW, _GAP = 12.0, 26.0, 24.0
_SAMPLE = 46.0
"""The width of a sample."""
_SWATCH, _SWATCH_HEIGHT = 26.0, 16.0
_MOST_SLIVERS, _LONGEST_STRIP = 120, 480.0
_Sample = Callable[[float, float], str]
"""(left, middle) -> an element, at most `_SAMPLE` wide."""


def facts(schedule: Schedule, nodes: Sequence[Sequence[int]] | None, timeline: Timeline) -> str:
    """Return text such as: 8 ranks on nodes of 3, 1 and 4 · 10 steps · 18 chunks · 92 messages."""
    steps = max((len(borders) - 1 for borders in timeline.borders), default=0)
    where = f" on {nodes_text([len(node) for node in nodes])}" if nodes else ""
    return " · ".join(
        [
            _counted(schedule.size, "rank") + where,
            _counted(steps, "step"),
            _counted(len(schedule.weights), "chunk"),
            _counted(len(timeline.messages), "message"),
        ]
    )


def nodes_text(sizes: Sequence[int]) -> str:
    """Return text such as 1 node, 4 nodes of 2, nodes of 3, 1 and 4, 40 nodes of 1 to 8."""
    if len(sizes) == 1:
        return "1 node"
    if min(sizes) == max(sizes):
        return f"{len(sizes)} nodes of {sizes[0]}"
    if len(sizes) > 6:
        return f"{len(sizes)} nodes of {min(sizes)} to {max(sizes)}"
    return f"nodes of {', '.join(map(str, sizes[:-1]))} and {sizes[-1]}"


def legend(
    schedule: Schedule, timeline: Timeline, paints: Paints, width: float
) -> tuple[list[str], float]:
    """Return the legend's elements, from (0, 0) down and `width` wide, and their height."""
    elements: list[str] = []
    x, y = 0.0, _ROW / 2
    for sample, meaning in _entries(schedule, timeline):
        needed = _SAMPLE + text_width(meaning, _SIZE)
        if x and x + needed > width:
            x, y = 0.0, y + _ROW
        elements += [sample(x, y), text(x + _SAMPLE, y + 4, meaning, _SIZE, fill=FAINT)]
        x += needed + _GAP
    moved = sorted({chunk_of(chunk) for message in timeline.messages for chunk in message.chunks})
    if moved:
        y += _ROW * bool(elements)
        elements += _chunks(moved, paints, y, width)
    return elements, y + _ROW / 2


def _entries(schedule: Schedule, timeline: Timeline) -> Iterator[tuple[_Sample, str]]:
    """Yield a sample and its meaning for each kind of element that this picture has."""
    carrying = [message for message in timeline.messages if message.chunks]
    if any(message.reduce for message in carrying):
        yield partial(_arrow, reduce=True), "is added in"
    apart = [m for m in carrying if any(source_of(chunk) is not None for chunk in m.chunks)]
    if any(not message.reduce and message not in apart for message in carrying):
        yield partial(_arrow, reduce=False), "replaces what is there"
    if apart:
        yield partial(_arrow, reduce=False), "is kept as a copy"
        yield _disc, "adds all copies up"
    if len(carrying) < len(timeline.messages):
        yield partial(_arrow, reduce=False), "an empty message"
    if len({sum(schedule.weights[chunk_of(chunk)] for chunk in m.chunks) for m in carrying}) > 1:
        yield _wedge, "thicker: more of the array"
    if not timeline.in_lockstep:
        yield _bar, "one step of one rank"


def _arrow(x: float, y: float, *, reduce: bool) -> str:
    tip = x + _SAMPLE - 10
    stroke = line((x, y), (tip - 2 * LARGEST_HEAD, y), FAINT, 2, reduce=reduce)
    return stroke + head((tip, y), LARGEST_HEAD, FAINT, reduce=reduce)


def _disc(x: float, y: float) -> str:
    return head((x + _SAMPLE - 10, y), LARGEST_HEAD, FAINT, reduce=True)


def _wedge(x: float, y: float) -> str:
    return element("path", d=f"M{x:g},{y:g}l36,-3v6z", fill=FAINT)


def _bar(x: float, y: float) -> str:
    return element("rect", x=x, y=y - 7, width=36, height=14, rx=5, fill=LANE)


def _chunks(chunks: Sequence[int], paints: Paints, y: float, width: float) -> list[str]:
    """Return a numbered swatch for each chunk; for many chunks, a strip of slivers."""
    number, top = len(chunks), y - _SWATCH_HEIGHT / 2
    elements = [text(0, y + 4, "chunks" if number > 1 else "chunk", _SIZE, fill=FAINT)]
    left = text_width("chunks", _SIZE) + 8
    if left + number * _SWATCH <= width:
        for i, chunk in enumerate(chunks):
            x = left + i * _SWATCH
            size = {"width": _SWATCH - 3, "height": _SWATCH_HEIGHT}
            elements.append(element("rect", x=x, y=top, rx=4, fill=paints.colours[chunk], **size))
            middle = x + (_SWATCH - 3) / 2
            style = {"fill": PAPER, "text_anchor": "middle", "font_weight": "bold"}
            elements.append(text(middle, y + 3.5, str(chunk), 10, **style))
        return elements
    slivers = min(number, _MOST_SLIVERS)
    left += text_width(f"{chunks[0]} ", _SIZE)
    sliver = min(_LONGEST_STRIP, width - left - text_width(f" {chunks[-1]}", _SIZE)) / slivers
    for i in range(slivers):
        colour, size = paints.colours[chunks[i * number // slivers]], {"height": _SWATCH_HEIGHT}
        elements.append(
            element("rect", x=left + i * sliver, y=top, width=sliver, fill=colour, **size)
        )
    ends = (
        (left - 6, chunks[0], "end"),
        (left + slivers * sliver + 6, chunks[-1], "start"),
    )
    return elements + [text(x, y + 4, str(n), _SIZE, fill=FAINT, text_anchor=a) for x, n, a in ends]


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"
