"""Draw the states of a job that goes on after losses: those of `ringreduce.recovery.membership`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from ringreduce.picture.style import (
    FACTS_SIZE,
    FAINT,
    INK,
    MARGIN,
    NAME_SIZE,
    PALETTE,
    PAPER,
    TINTS,
    TITLE_SIZE,
    document,
)
from ringreduce.picture.svg import element, text
from ringreduce.recovery.membership import Phase

TITLE = "The 6 states of a job that goes on after losses"
WIDTH, HEIGHT = 880.0, 440.0
BOX_WIDTH, BOX_HEIGHT = 150.0, 44.0
PLACES = {
    Phase.WAITING: (120.0, 120.0),
    Phase.STARTING: (440.0, 120.0),
    Phase.SHRINKING: (760.0, 200.0),
    Phase.FENCING: (120.0, 280.0),
    Phase.RUNNING: (440.0, 280.0),
    Phase.ENDED: (440.0, 395.0),
}
"""The middle of each state's box."""
Point = tuple[float, float]


class Edge(NamedTuple):
    """A step from one state to another: its line, and its words with their place."""

    points: Sequence[Point]
    words: str
    at: Point
    anchor: str = "middle"


def _side(phase: Phase, x: float, y: float) -> Point:
    """A point of a box: (-1, 0) is the middle of its left side."""
    middle_x, middle_y = PLACES[phase]
    return middle_x + x * BOX_WIDTH / 2, middle_y + y * BOX_HEIGHT / 2


EDGES = (
    Edge(
        [_side(Phase.STARTING, 0, 1), _side(Phase.RUNNING, 0, -1)],
        "all ranks have the arrays",
        (450, 204),
        "start",
    ),
    Edge(
        [_side(Phase.RUNNING, 1, -0.5), _side(Phase.SHRINKING, -1, 0.5)],
        "a rank is lost or leaves (Open MPI)",
        (752, 287),
        "end",
    ),
    Edge(
        [_side(Phase.SHRINKING, -1, -0.5), _side(Phase.STARTING, 1, 0.5)],
        "the others have a communicator",
        (705, 136),
    ),
    Edge(
        [_side(Phase.RUNNING, -1, 0), _side(Phase.FENCING, 1, 0)],
        "a rank is lost, or all leave",
        (280, 274),
    ),
    Edge(
        [_side(Phase.FENCING, 0.6, -1), _side(Phase.STARTING, -1, 0.6)],
        "all processes are gone",
        (262, 222),
        "start",
    ),
    Edge(
        [_side(Phase.FENCING, 0, -1), _side(Phase.WAITING, 0, 1)],
        "fewer than MIN",
        (130, 204),
        "start",
    ),
    Edge(
        [_side(Phase.WAITING, 1, 0), _side(Phase.STARTING, -1, 0)],
        "ranks are added",
        (280, 114),
    ),
    Edge(
        [(45, 120), (30, 120), (30, 395), _side(Phase.ENDED, -1, 0)],
        "--wait-s are over: exit code 75",
        (200, 389),
    ),
    Edge(
        [_side(Phase.RUNNING, 0, 1), _side(Phase.ENDED, 0, -1)],
        "the program has ended, or a signal came",
        (450, 360),
        "start",
    ),
    Edge(
        [(760, 222), (760, 330), (160, 330), (160, 302)],
        "a rank crashes, or 3 s without a communicator",
        (752, 324),
        "end",
    ),
)
WORDS = {
    Phase.STARTING: "processes begin",
    Phase.RUNNING: "ranks train",
    Phase.SHRINKING: "ranks shrink",
    Phase.FENCING: "processes end",
    Phase.WAITING: "too few ranks",
    Phase.ENDED: "nothing follows",
}


def recovery_states() -> str:
    """Draw the states and the steps between them."""
    head = [
        text(MARGIN, 36, TITLE, TITLE_SIZE, font_weight="bold"),
        text(
            MARGIN,
            58,
            "Those of its supervisor, and what leads from one to another.",
            FACTS_SIZE,
            fill=FAINT,
        ),
    ]
    elements = [*head, *(each for edge in EDGES for each in _drawn(edge))]
    elements += [each for phase in PLACES for each in _box(phase)]
    return document(WIDTH, HEIGHT, TITLE, elements)


def _drawn(edge: Edge) -> Iterator[str]:
    points = " ".join(f"{x:g},{y:g}" for x, y in edge.points)
    yield element("polyline", points=points, fill="none", stroke=FAINT, stroke_width=1.5)
    (x1, y1), (x2, y2) = edge.points[-2:]
    length = math.hypot(x2 - x1, y2 - y1)
    along = (x2 - x1) / length, (y2 - y1) / length
    back = x2 - 9 * along[0], y2 - 9 * along[1]
    sides = [(back[0] - side * along[1], back[1] + side * along[0]) for side in (4.5, -4.5)]
    head = " ".join(f"{x:.1f},{y:.1f}" for x, y in [(x2, y2), *sides])
    yield element("polygon", points=head, fill=FAINT)
    x, y = edge.at
    halo = {"stroke": PAPER, "stroke_width": 4, "paint_order": "stroke"}
    how = {"text_anchor": edge.anchor, "fill": INK, **halo}
    yield text(x, y, edge.words, FACTS_SIZE, **how)


def _box(phase: Phase) -> Iterator[str]:
    x, y = PLACES[phase]
    good = phase in (Phase.STARTING, Phase.RUNNING)
    fill, stroke = (TINTS[0], PALETTE[0]) if good else (TINTS[1], PALETTE[1])
    if phase is Phase.ENDED:
        fill, stroke = PAPER, FAINT
    yield element(
        "rect",
        x=x - BOX_WIDTH / 2,
        y=y - BOX_HEIGHT / 2,
        width=BOX_WIDTH,
        height=BOX_HEIGHT,
        rx=6,
        fill=fill,
        stroke=stroke,
        stroke_width=1.5,
    )
    words = {"text_anchor": "middle"}
    yield text(x, y - 3, str(phase), NAME_SIZE, font_weight="bold", **words)
    yield text(x, y + 14, WORDS[phase], FACTS_SIZE, **words)


PICTURES: dict[str, Callable[[], str]] = {"recovery-states": recovery_states}
