"""The times, positions and marks of a schedule's picture: columns, lanes, frames and arrows.

Every message takes one column of time, and no rank is late.

>>> from ringreduce.algorithms import build
>>> timeline = StepColumns.of(build("all_reduce", "ring", nodes=[[0, 1, 2]]))
>>> timeline.columns, len(timeline.messages)
(4, 12)
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ringreduce.picture.style import DASHED, MARGIN, PAPER, element, text, text_width
from ringreduce.schedules.matching import Message, RankStep, match, other_end, posts, progress
from ringreduce.schedules.ranges import range_texts
from ringreduce.schedules.schedule import Chunks, Schedule

Nodes = Sequence[Sequence[int]]


@dataclass(frozen=True)
class StepColumns:
    """The columns of a schedule's steps and messages.

    A message is in the first column in which both its ranks have entered their steps.  A step lasts
    from the end of the step before until the column after its last message, at least one column.
    """

    borders: Sequence[Sequence[int]]
    """Rank -> the column in which each step begins, then the column after its last step."""
    messages: Mapping[Message, int]

    @classmethod
    def of(cls, schedule: Schedule) -> StepColumns:
        """Raises ScheduleError for unmatched messages and deadlocks."""
        ranks = [list(schedule.steps(rank)) for rank in range(schedule.size)]
        messages: dict[Message, int] = {}
        posted = posts(match(ranks))
        borders: list[list[int]] = [[] for _ in ranks]
        for place in progress(ranks, posted):
            before = posted.get(RankStep(place.rank, place.step - 1), ())
            begun = borders[place.rank][-1] + 1 if place.step else 0
            borders[place.rank].append(max([begun, *(messages[m] + 1 for m in before)]))
            for message in posted.get(place, ()):
                other = other_end(message, place.rank)
                if other.step < len(borders[other.rank]):
                    both = borders[place.rank][place.step], borders[other.rank][other.step]
                    messages[message] = max(both)
        return cls(borders, messages)

    @property
    def columns(self) -> int:
        return max((borders[-1] for borders in self.borders), default=0)

    @property
    def steps(self) -> int:
        return max((len(borders) - 1 for borders in self.borders), default=0)

    def crossing(self, nodes: Nodes | None) -> list[Message]:
        node_of = {rank: number for number, node in enumerate(nodes or ()) for rank in node}
        ends = (
            (m, node_of.get(m.sender.rank), node_of.get(m.receiver.rank)) for m in self.messages
        )
        return [message for message, sender, receiver in ends if sender != receiver]

    @property
    def in_lockstep(self) -> bool:
        """Whether column k is step k of every rank that has a step k."""
        return all(list(borders) == list(range(len(borders))) for borders in self.borders)


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
        """Rank -> the height of its lane."""
        self.tops: dict[int, float] = {}
        """Rank -> the top of its lane."""
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

        The messages of a lane are ordered by their other ends, so that arrows do not cross at once.
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


LARGEST_HEAD = 5.5
"""Half the height of a head."""
_LABEL_SIZE, _LABEL_HEIGHT = 10.0, 14.0
_LONGEST_LABEL = 7
"""Letters."""


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
