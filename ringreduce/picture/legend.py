"""The colours of chunks, and the legend: a sample of each kind of mark, and of each colour.

There are at most eight colours, which colour-blind people can tell apart too.

>>> in_parts(chunks=3)
[0, 1, 2]
>>> in_parts(chunks=12)
[0, 0, 1, 2, 2, 3, 4, 4, 5, 6, 6, 7]
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from ringreduce.picture.layout import LARGEST_HEAD, Nodes, StepColumns, head, line
from ringreduce.picture.style import FAINT, LANE, PALETTE, element, text, text_width
from ringreduce.schedules.ranges import range_texts
from ringreduce.schedules.schedule import Chunks, Schedule, chunk_of, source_of


def in_parts(chunks: int) -> list[int]:
    """Return the colour of each chunk: its own, or that of its neighbours if there are too few."""
    colours = min(chunks, len(PALETTE))
    return [chunk * colours // chunks for chunk in range(chunks)]


def in_rails(chunks: int, timeline: StepColumns, nodes: Nodes | None) -> list[int] | None:
    """Return the rail of each chunk, or None if the rails get no colours of their own.

    Chunks on one rail cross between nodes from and to the same ranks.  None: there is one rail,
    there are more rails than colours, or a chunk never crosses.
    """
    crossing: dict[int, set[int]] = defaultdict(set)
    for message in timeline.crossing(nodes):
        for chunk in message.chunks:
            crossing[chunk_of(chunk)] |= {message.sender.rank, message.receiver.rank}
    ranks = [frozenset(crossing[chunk]) for chunk in range(chunks)]
    numbers = {each: number for number, each in enumerate(dict.fromkeys(ranks))}
    if frozenset() in numbers or not 1 < len(numbers) <= len(PALETTE):
        return None
    return [numbers[each] for each in ranks]


class Paints:
    def __init__(self, chunks: int, timeline: StepColumns, nodes: Nodes | None) -> None:
        rails = in_rails(chunks, timeline, nodes)
        self.has_rails = rails is not None
        self.numbers = rails if rails is not None else in_parts(chunks)
        """Chunk -> the number of its colour."""
        self._gradients: dict[tuple[str, ...], str] = {}

    def of(self, chunks: Chunks) -> str:
        """Return the value of a ``stroke`` or ``fill``; a copy has the colour of its chunk."""
        colours = tuple(dict.fromkeys(PALETTE[self.numbers[chunk_of(chunk)]] for chunk in chunks))
        if len(colours) < 2:
            return colours[0] if colours else FAINT
        return f"url(#{self._gradients.setdefault(colours, f'paint{len(self._gradients)}')})"

    def definitions(self) -> Iterable[str]:
        for colours, name in self._gradients.items():
            stops = "".join(
                element("stop", offset=round(i / (len(colours) - 1), 3), stop_color=colour)
                for i, colour in enumerate(colours)
            )
            yield element("linearGradient", stops, id=name)


_SIZE, _ROW, _GAP = 12.0, 26.0, 24.0
_SAMPLE = 46.0
_SWATCH = 16.0
_LONGEST_RANGES = 40
"""Letters."""
_Sample = Callable[[float, float], str]
"""(left, middle) -> an element, at most `_SAMPLE` wide."""


def legend(
    schedule: Schedule, timeline: StepColumns, paints: Paints, width: float
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
        found, y = _colours(moved, paints, y + _ROW * bool(elements), width)
        elements += found
    return elements, y + _ROW / 2


def _entries(schedule: Schedule, timeline: StepColumns) -> Iterator[tuple[_Sample, str]]:
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


def _colours(
    moved: Sequence[int], paints: Paints, y: float, width: float
) -> tuple[list[str], float]:
    chunks_of: dict[int, list[int]] = {}
    for chunk in moved:
        chunks_of.setdefault(paints.numbers[chunk], []).append(chunk)
    what = "chunk" if len(moved) == 1 else "chunks"
    if paints.has_rails:
        what = "chunks of each rail"
    elements = [text(0, y + 4, what, _SIZE, fill=FAINT)]
    x = left = text_width(what, _SIZE) + 12
    for number, chunks in chunks_of.items():
        words = _shortened(", ".join(range_texts(chunks)))
        needed = _SWATCH + 6 + text_width(words, _SIZE)
        if x > left and x + needed > width:
            x, y = left, y + _ROW
        swatch = {"x": x, "y": y - _SWATCH / 2, "width": _SWATCH, "height": _SWATCH, "rx": 4}
        elements.append(element("rect", **swatch, fill=PALETTE[number], class_="colour"))
        elements.append(text(x + _SWATCH + 6, y + 4, words, _SIZE))
        x += needed + 14
    return elements, y


def _shortened(words: str) -> str:
    return words if len(words) <= _LONGEST_RANGES else words[: _LONGEST_RANGES - 1] + "…"
