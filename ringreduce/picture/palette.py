"""The colours of chunks: at most eight, which colour-blind people can tell apart too.

>>> in_parts(chunks=3)
[0, 1, 2]
>>> in_parts(chunks=12)
[0, 0, 1, 2, 2, 3, 4, 4, 5, 6, 6, 7]
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from ringreduce.picture.style import FAINT, PALETTE
from ringreduce.picture.svg import element
from ringreduce.picture.timeline import Nodes, StepColumns
from ringreduce.schedules.schedule import Chunks, chunk_of


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
