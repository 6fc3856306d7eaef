"""The positions of a picture: lanes and frames from top to bottom, columns of time to the right."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from ringreduce.picture.style import MARGIN
from ringreduce.picture.timeline import Nodes, StepColumns
from ringreduce.schedules.matching import Message, RankStep

TOP = 106.0
NAME_WIDTH = 64.0
_LANE_GAP, _NODE_GAP, _NODE_HEAD, _NODE_FOOT = 8.0, 12.0, 24.0, 10.0
_LANE, _TALLEST_LANE = 28.0, 160.0
_PORT = 17.0
"""The distance of two messages at the end of a lane, if the lane is high enough."""
_CURVE = 58.0
"""The least width of a column without its labels."""
_WIDEST_COLUMN = 1600.0
"""The width up to which a column grows with the height of the picture."""


@dataclass(frozen=True, slots=True)
class Arrow:
    message: Message
    column: int
    start: tuple[float, float]
    end: tuple[float, float]
    room: tuple[float, float]
    """The height for this message alone, at its start and at its end."""


class Layout:
    def __init__(
        self,
        timeline: StepColumns,
        nodes: Nodes,
        *,
        framed: bool,
        label_width: float,
        least_right: float,
    ) -> None:
        """Place the lanes of `nodes`; the last column ends at `least_right` or beyond."""
        self.timeline = timeline
        self.lanes = self._lanes()
        self.tops: dict[int, float] = {}
        self.frames: list[tuple[float, float]] = []
        """Node -> the top and the bottom of its frame."""
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
        # Not much narrower than high: steep arrows between many ranks could not be told apart.
        columns = max(timeline.columns, 1)
        square = min((self.bottom - TOP) / columns, _WIDEST_COLUMN)
        self.column = max(_CURVE + label_width, square, (least_right - self.left) / columns)
        self.right = self.x(columns)

    def _lanes(self) -> list[float]:
        """Return each rank's height: enough for all messages it sends or receives in a column."""
        leaving = Counter((m.sender.rank, column) for m, column in self.timeline.messages.items())
        coming = Counter((m.receiver.rank, column) for m, column in self.timeline.messages.items())
        most = [0] * len(self.timeline.borders)
        for (rank, _), number in (*leaving.items(), *coming.items()):
            most[rank] = max(most[rank], number)
        return [min(max(_LANE, number * _PORT + 4), _TALLEST_LANE) for number in most]

    def x(self, column: float) -> float:
        return self.left + column * self.column

    def y(self, rank: int) -> float:
        return self.tops[rank] + self.lanes[rank] / 2

    def arrows(self) -> list[Arrow]:
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
        self, here: Callable[[Message], RankStep], there: Callable[[Message], RankStep]
    ) -> dict[Message, tuple[float, float]]:
        """Return each message's y in the lane of its rank `here`, and the height that it has.

        The messages of a lane are ordered by their other ends, so that arrows do not cross
        at once.
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
