"""Draw the states of a job that goes on after losses: the phases of `supervisor.membership`."""

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
    element,
    text,
)
from ringreduce.supervisor.membership import Phase

TITLE = "The 6 states of a job that goes on after losses"
WIDTH, HEIGHT = 880.0, 668.0
BOX_WIDTH, BOX_HEIGHT = 150.0, 44.0
LINE_HEIGHT = 16.0
PLACES = {
    Phase.STARTING: (270.0, 150.0),
    Phase.RUNNING: (760.0, 150.0),
    Phase.SHRINKING: (480.0, 290.0),
    Phase.FENCING: (480.0, 430.0),
    Phase.WAITING: (130.0, 530.0),
    Phase.ENDED: (480.0, 610.0),
}
"""The middle of each state's box."""
Point = tuple[float, float]


class Edge(NamedTuple):
    """A step from one state to another: its line, and its words with their place."""

    points: Sequence[Point]
    words: Sequence[str]
    """The lines of its text."""
    at: Point
    """The place of the first line of the text."""
    anchor: str = "start"


EDGES = (
    Edge(  # starting -> running
        [(345, 142), (685, 142)],
        ["all ranks have the communicator and the arrays"],
        (515, 135),
        "middle",
    ),
    Edge(  # running -> starting
        [(685, 158), (345, 158)],
        ["all ranks have finished rr.elastic"],
        (515, 175),
        "middle",
    ),
    Edge(  # running -> shrinking
        [(730, 172), (730, 290), (555, 290)],
        ["a rank is lost or", "leaves (Open MPI)"],
        (722, 267),
        "end",
    ),
    Edge(  # running -> fencing
        [(770, 172), (770, 430), (555, 430)],
        ["a rank is lost, or all leave"],
        (762, 423),
        "end",
    ),
    Edge(  # running -> ended
        [(810, 172), (810, 610), (555, 610)],
        ["an exception, or an", "exit code other than 0"],
        (802, 587),
        "end",
    ),
    Edge(  # shrinking -> starting
        [(405, 280), (325, 280), (325, 172)],
        ["the others have", "a communicator"],
        (333, 246),
    ),
    Edge(  # starting -> shrinking
        [(295, 172), (295, 300), (405, 300)],
        ["a rank is lost", "after shrinking"],
        (303, 317),
    ),
    Edge(  # shrinking -> shrinking
        [(460, 268), (460, 242), (500, 242), (500, 268)],
        ["another rank is lost"],
        (508, 247),
    ),
    Edge(  # shrinking -> fencing
        [(480, 312), (480, 408)],
        ["3 s without a communicator,", "a crash, mpiexec is killed,", "or too few ranks are left"],
        (488, 344),
    ),
    Edge(  # starting -> fencing
        [(265, 172), (265, 420), (405, 420)],
        ["a rank is lost, or", "it takes too long"],
        (273, 397),
    ),
    Edge(  # fencing -> starting
        [(405, 440), (235, 440), (235, 172)],
        ["MIN ranks or more are", "left, or others take over"],
        (243, 457),
    ),
    Edge(  # fencing -> waiting
        [(430, 452), (430, 530), (205, 530)],
        ["fewer than MIN ranks are left"],
        (422, 523),
        "end",
    ),
    Edge(  # fencing -> ended
        [(480, 452), (480, 588)],
        [
            "SIGTERM to the launcher: 143",
            "too many losses, or one step lost twice:",
            "128 and the signal",
            "all ranks were told to leave: 75",
            "a bug: its exit code",
        ],
        (488, 486),
    ),
    Edge(  # waiting -> starting
        [(65, 508), (65, 160), (195, 160)],
        ["scale or --discover", "adds ranks"],
        (73, 330),
    ),
    Edge(  # waiting -> ended
        [(130, 552), (130, 600), (405, 600)],
        ["--wait-s are over: 75"],
        (138, 593),
    ),
    Edge(  # starting -> ended
        [(195, 140), (30, 140), (30, 620), (405, 620)],
        ["the program has ended: 0; a bug: its exit code"],
        (38, 637),
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
    facts = (
        "Those of its supervisor, what leads from one to another, and the exit code of the job.",
        "From each state, SIGINT to the launcher leads to ended (130). So does SIGTERM (143), "
        "unless ranks train: they end their step first.",
    )
    head = [text(MARGIN, 36, TITLE, TITLE_SIZE, font_weight="bold")]
    head += [
        text(MARGIN, 58 + row * LINE_HEIGHT, line, FACTS_SIZE, fill=FAINT)
        for row, line in enumerate(facts)
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
    for row, line in enumerate(edge.words):
        yield text(x, y + row * LINE_HEIGHT, line, FACTS_SIZE, text_anchor=edge.anchor, fill=INK)


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
