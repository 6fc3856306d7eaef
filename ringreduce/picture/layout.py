"""Where a picture puts what: lanes and frames from top to bottom, columns of time to the right."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ringreduce.picture.timeline import Timeline
from ringreduce.schedules.matching import Message, Place

MARGIN, TOP = 20.0, 106.0
NAME_WIDTH = 64.0
"""Of the ranks' names, which stand before their lanes."""
_LANE_GAP, _NODE_GAP, _NODE_HEAD, _NODE_FOOT = 8.0, 12.0, 24.0, 10.0
_LANE, _TALLEST_LANE = 28.0, 160.0
_PORT = 17.0
"""From one message at a lane's end to the next, where there is room."""
_CURVE, _WIDEST_COLUMN = 76.0, 1600.0
"""The width of a column that is left to arrows at least, and of a column at most."""


@dataclass(frozen=True, slots=True)
class Arrow:
    """One message: from the left of its column in the sender's lane to the right in the other's."""

    message: Message
    column: int
    start: tuple[float, float]
    end: tuple[float, float]
    room: tuple[float, float]
    """The height that it has for itself at its start, and at its end."""


class Layout:
    """A timeline with every rank's lane in its place, node by node."""

    def __init__(
        self,
        timeline: Timeline,
        nodes: Sequence[Sequence[int]],
        *,
        framed: bool,
        label_width: float,
    ) -> None:
        self.timeline = timeline
        self.lanes = self._lanes()
        """Rank -> the height of its lane."""
        self.tops: dict[int, float] = {}
        """Rank -> the top of its lane."""
        self.frames: list[tuple[float, float]] = []
        """Of each node its top and its bottom."""
        y = TOP
        for node in nodes:
            top, y = y, y + _NODE_HEAD * framed
            for rank in node:
                self.tops[rank], y = y, y + self.lanes[rank] + _LANE_GAP
            y += _NODE_FOOT * framed - _LANE_GAP
            self.frames.append((top, y))
            y += _NODE_GAP if framed else _LANE_GAP
        self.bottom = self.frames[-1][1]
        self.left = MARGIN + NAME_WIDTH
        # Not much narrower than high: arrows between many ranks would be a bundle.
        square = (self.bottom - TOP) / max(timeline.columns, 1)
        self.column = max(_CURVE + label_width, min(square, _WIDEST_COLUMN))
        self.right = self.x(timeline.columns)

    def _lanes(self) -> list[float]:
        """High enough for the most messages that ever leave or reach the rank in one column."""
        leaving = Counter((m.sender.rank, column) for m, column in self.timeline.messages.items())
        coming = Counter((m.receiver.rank, column) for m, column in self.timeline.messages.items())
        most = [0] * len(self.timeline.borders)
        for (rank, _), number in (*leaving.items(), *coming.items()):
            most[rank] = max(most[rank], number)
        return [min(max(_LANE, number * _PORT + 4), _TALLEST_LANE) for number in most]

    def x(self, column: float) -> float:
        """Where a column begins."""
        return self.left + column * self.column

    def y(self, rank: int) -> float:
        """The middle of a rank's lane."""
        return self.tops[rank] + self.lanes[rank] / 2

    def arrows(self) -> list[Arrow]:
        """Every message, in the order of time."""
        starts = self._ports(lambda message: message.sender, lambda message: message.receiver)
        ends = self._ports(lambda message: message.receiver, lambda message: message.sender)
        return [
            Arrow(
                message,
                column,
                (self.x(column), starts[message][0]),
                (self.x(column + 1), ends[message][0]),
                (starts[message][1], ends[message][1]),
            )
            for message, column in sorted(self.timeline.messages.items(), key=lambda item: item[1])
        ]

    def _ports(
        self, here: Callable[[Message], Place], there: Callable[[Message], Place]
    ) -> dict[Message, tuple[float, float]]:
        """Where on the lane of its rank `here` each message is, and the height that it has.

        Ordered by where they come from or go to, so that arrows do not cross at once.
        """
        groups: dict[tuple[int, int], list[Message]] = defaultdict(list)
        for message, column in self.timeline.messages.items():
            groups[here(message).rank, column].append(message)
        ports = {}
        for (rank, _), messages in groups.items():
            room = min(_PORT, (self.lanes[rank] - 4) / len(messages))
            first = self.y(rank) - room * (len(messages) - 1) / 2
            messages.sort(key=lambda message: self.y(there(message).rank))
            ports.update({m: (first + room * i, room) for i, m in enumerate(messages)})
        return ports
