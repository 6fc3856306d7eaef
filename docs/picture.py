"""Draw the pictures of algorithms, from the very schedules that run, and all dark variants.

    python docs/picture.py [FOLDER]

Writes ring.svg, ring-animated.svg, hierarchical.svg and the pictures of `strategies.py` and
`recovery_states.py` into the folder, by default that of this file.  A picture adapts to the page by
its style sheet.  Where Markdown chooses the file, it needs one in dark colours alone: for each
picture X.svg in the folder this program writes X-dark.svg.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import recovery_states
import strategies

from ringreduce.algorithms import build
from ringreduce.picture import to_svg
from ringreduce.picture.drawing import title
from ringreduce.picture.layout import StepColumns
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
    in_dark,
    text,
)
from ringreduce.schedules.schedule import Schedule

RANKS = 4
WIDE, HIGH, GAP = 34.0, 20.0, 3.0
"""The size of a chunk's box, and the space between two boxes."""
PHASES = (
    ("reduce-scatter", "received chunks are added"),
    ("all-gather", "received chunks are stored"),
)
NOTE = (
    "A box is a chunk. It is filled as far as the contributions of the ranks are in; a solid box "
    "has them all."
)
Held = list[list[set[int]]]
"""rank -> chunk -> the ranks whose contribution is in."""


def ring_schedule() -> Schedule:
    return build("all_reduce", "ring", [list(range(RANKS))])


def states(schedule: Schedule) -> list[Held]:
    """Return what every rank holds before the first step and after each."""
    n = schedule.size
    held: Held = [[{rank} for _ in range(n)] for rank in range(n)]
    after = [held]
    for steps in zip(*(schedule.steps(rank) for rank in range(n)), strict=True):
        held = [[set(ranks) for ranks in chunks] for chunks in held]
        for rank, step in enumerate(steps):
            for recv in step.recvs:
                for chunk in recv.chunks:
                    came = after[-1][recv.peer][chunk]
                    held[rank][chunk] = came | held[rank][chunk] if recv.reduce else set(came)
        after.append(held)
    return after


def messages(schedule: Schedule, step: int) -> Iterator[tuple[int, int, int]]:
    """Yield (sender, receiver, chunk) for all messages of a step."""
    for rank in range(schedule.size):
        for send in list(schedule.steps(rank))[step].sends:
            for chunk in send.chunks:
                yield rank, send.peer, chunk


def box(x: float, y: float, chunk: int, share: float) -> str:
    """Return a chunk's box, filled as far as contributions are in; a complete one is solid."""
    size = {"x": x, "width": WIDE, "rx": 3}
    whole = share == 1
    filled = element("rect", y=y, height=HIGH, fill=PAPER, **size)
    top = y + HIGH * (1 - share)
    fill = PALETTE[chunk] if whole else TINTS[chunk]
    filled += element("rect", y=top, height=HIGH * share, fill=fill, **size)
    outline = {"fill": "none", "stroke": PALETTE[chunk], "stroke_width": 1.5}
    words = text(
        x + WIDE / 2,
        y + HIGH / 2 + 4.5,
        str(chunk),
        NAME_SIZE,
        fill=PAPER if whole else INK,
        text_anchor="middle",
        font_weight="bold",
    )
    return filled + element("rect", y=y, height=HIGH, **size, **outline) + words


# --- all steps side by side -----------------------------------------------------------------------

LEFT, TOP = 76.0, 116.0
COLUMN = 128.0
LANE = RANKS * (HIGH + GAP) + 18


def corner(step: int, rank: int, chunk: int) -> tuple[float, float]:
    """Return the upper left corner of a chunk's box, in the state before `step`."""
    return LEFT + step * COLUMN, TOP + rank * LANE + chunk * (HIGH + GAP)


def ring() -> str:
    """Return ring all-reduce: the state before and after each step, and its messages."""
    schedule = ring_schedule()
    held = states(schedule)
    last = len(held) - 1
    words = title(schedule, StepColumns.of(schedule), nodes=None)
    width = corner(last, 0, 0)[0] + WIDE + 2 * MARGIN
    height = corner(0, RANKS, 0)[1] + 4
    elements = [
        text(MARGIN, 34, words, TITLE_SIZE, font_weight="bold"),
        text(MARGIN, 56, NOTE, FACTS_SIZE, fill=FAINT),
        *_phases(last),
        *(
            box(*corner(step, rank, chunk), chunk, len(ranks) / RANKS)
            for step, now in enumerate(held)
            for rank, chunks in enumerate(now)
            for chunk, ranks in enumerate(chunks)
        ),
        # After the boxes, so that the heads are in front of them.
        *(arrow(step, *message) for step in range(last) for message in messages(schedule, step)),
    ]
    for rank in range(RANKS):
        y = TOP + rank * LANE + (LANE - 18) / 2 + 3
        elements.append(text(LEFT - 12, y, f"rank {rank}", NAME_SIZE, text_anchor="end"))
    return document(width, height, words, elements)


def _phases(last: int) -> Iterator[str]:
    """Yield the names of the phases, above their columns, and of the states."""
    half = last // 2
    for first, (name, does) in zip((0, half), PHASES, strict=True):
        left, right = corner(first, 0, 0)[0] + WIDE + 8, corner(first + half, 0, 0)[0] - 8
        line = f"M{left:g},80H{right:g}"
        yield element("path", d=line, stroke=FAINT)
        middle = {"x": (left + right) / 2, "text_anchor": "middle", "font_weight": "bold"}
        yield element(
            "text",
            f"{name}: {does}",
            y=84,
            font_size=NAME_SIZE,
            paint_order="stroke",
            stroke=PAPER,
            stroke_width=14,
            **middle,
        )
    for step in range(last + 1):
        words = "start" if step == 0 else f"after step {step - 1}"
        middle_of_box = corner(step, 0, 0)[0] + WIDE / 2
        style = {"fill": FAINT, "text_anchor": "middle"}
        yield text(middle_of_box, TOP - 10, words, 11, **style)


def arrow(step: int, sender: int, receiver: int, chunk: int) -> str:
    """Return the arrow of a message, from the box that it leaves to the box that it reaches."""
    x1, y1 = corner(step, sender, chunk)
    x2, y2 = corner(step + 1, receiver, chunk)
    x1, y1, x2, y2 = x1 + WIDE + 1, y1 + HIGH / 2, x2 - 1, y2 + HIGH / 2
    bend, head = (x2 - x1) / 2, 8
    colour = PALETTE[chunk]
    curve = f"M{x1:g},{y1:g}C{x1 + bend:g},{y1:g} {x2 - bend:g},{y2:g} {x2 - head:g},{y2:g}"
    line = element("path", d=curve, fill="none", stroke=colour, stroke_width=2)
    tip = element("path", d=f"M{x2:g},{y2:g}l-{head},-4.5v9z", fill=colour, class_="head")
    return element("g", line + tip, class_="arrow")


# --- one step after another -----------------------------------------------------------------------

BREADTH, HEIGHT = 760.0, 360.0
START_S, STEP_S, END_S = 1.5, 1.8, 3.0
"""How long the first state, a step, and the last state are shown."""
REST, MOVE = 0.1, 0.55
"""The shares of a step before its messages move, and in which they move."""
SWITCH_S = 0.01
"""The time in which an element appears."""


def place(rank: int, chunk: int) -> tuple[float, float]:
    """Return the upper left corner of a chunk's box: ranks are at the corners of a ring."""
    wide = RANKS * (WIDE + GAP) - GAP
    x = (60.0, BREADTH - 60 - wide)[rank in (1, 2)]
    y = (106.0, HEIGHT - 62)[rank in (2, 3)]
    return x + chunk * (WIDE + GAP), y


def ring_animated() -> str:
    """Return ring all-reduce as an animation; without motion it shows the result."""
    schedule = ring_schedule()
    held = states(schedule)
    last = len(held) - 1
    words = title(schedule, StepColumns.of(schedule), nodes=None)
    boxes = [
        box(*place(rank, chunk), chunk, len(ranks) / RANKS)
        for rank, chunks in enumerate(held[0])
        for chunk, ranks in enumerate(chunks)
    ]
    moving = []
    for step in range(last):
        for sender, receiver, chunk in messages(schedule, step):
            share = len(held[step + 1][receiver][chunk]) / RANKS
            changed = box(*place(receiver, chunk), chunk, share)
            boxes.append(element("g", changed, class_=f"after after{step}"))
            (x1, y1), (x2, y2) = place(sender, chunk), place(receiver, chunk)
            token = box(x1, y1, chunk, len(held[step][sender][chunk]) / RANKS)
            way = f"--x:{x2 - x1:g}px;--y:{y2 - y1:g}px"
            moving.append(element("g", token, class_=f"token token{step}", style=way))
    elements = [
        element("style", _style(last)),
        text(MARGIN, 34, words, TITLE_SIZE, font_weight="bold"),
        text(MARGIN, 56, NOTE, FACTS_SIZE, fill=FAINT),
        *_captions(last),
        *_neighbours(),
        *boxes,
        *moving,
    ]
    return document(BREADTH, HEIGHT, words, elements)


def _neighbours() -> Iterator[str]:
    """Yield the names of the ranks, and arrows from each rank to the next."""
    wide = RANKS * (WIDE + GAP) - GAP
    for rank in range(RANKS):
        x, y = place(rank, 0)
        above = y - 12 if rank in (0, 1) else y + HIGH + 22
        yield text(x + wide / 2, above, f"rank {rank}", 13, text_anchor="middle")
    (left, top), (right, bottom) = place(0, 0), place(2, 0)
    middle_left, middle_right = left + wide / 2, right + wide / 2
    upper, lower = top + HIGH / 2, bottom + HIGH / 2
    for line in (
        f"M{left + wide + 14:g},{upper:g}H{right - 14:g}l-8,-5m8,5l-8,5",
        f"M{middle_right:g},{top + HIGH + 14:g}V{bottom - 14:g}l-5,-8m5,8l5,-8",
        f"M{right - 14:g},{lower:g}H{left + wide + 14:g}l8,-5m-8,5l8,5",
        f"M{middle_left:g},{bottom - 14:g}V{top + HIGH + 14:g}l-5,8m5,-8l5,8",
    ):
        yield element("path", d=line, fill="none", stroke=FAINT, stroke_width=1.5)


def _captions(last: int) -> Iterator[str]:
    """Yield a caption for each state, in the middle of the ring."""
    captions = [("start", "each rank has its own values")]
    for step in range(last):
        phase = PHASES[2 * step // last]
        captions.append((f"step {step}", f"{phase[0]}: {phase[1]}"))
    captions.append(("end", "each rank has the sum of all ranks' values"))
    x, y = BREADTH / 2, (place(0, 0)[1] + place(2, 0)[1] + HIGH) / 2
    for number, (state, does) in enumerate(captions):
        lines = text(x, y - 4, state, 20, text_anchor="middle", font_weight="bold")
        lines += text(x, y + 20, does, 13, fill=FAINT, text_anchor="middle")
        yield element("g", lines, class_=f"caption state{number}")


def _style(last: int) -> str:
    """Return the style sheet: what is visible when.

    Without animation, which readers can ask for, the last state is visible.
    """
    begins = [START_S + step * STEP_S for step in range(last + 1)]
    whole = begins[-1] + END_S
    rules = []

    def animate(name: str, frames: dict[float, str]) -> None:
        keys = "".join(f"{100 * at / whole:.2f}%{{{css}}}" for at, css in sorted(frames.items()))
        rules.append(f"@keyframes {name}{{{keys}}}.{name}{{animation-name:{name}}}")

    for number, (begin, end) in enumerate(pairwise([0.0, *begins, whole])):
        hidden = {at: "opacity:0" for at in (0.0, begin - SWITCH_S, end, whole) if at >= 0}
        animate(f"state{number}", hidden | {begin: "opacity:1", end - SWITCH_S: "opacity:1"})
    for step, begin in enumerate(begins[:-1]):
        leaves = begin + REST * STEP_S
        arrives = leaves + MOVE * STEP_S
        here, there = "transform:none", "transform:translate(var(--x),var(--y))"
        token = {0.0: f"opacity:0;{here}", leaves - SWITCH_S: f"opacity:0;{here}"}
        token |= {leaves: f"opacity:1;{here}", arrives: f"opacity:1;{there}"}
        token |= {arrives + SWITCH_S: f"opacity:0;{there}", whole: f"opacity:0;{there}"}
        animate(f"token{step}", token)
        before = {0.0: "opacity:0", arrives - SWITCH_S: "opacity:0"}
        animate(f"after{step}", before | {arrives: "opacity:1", whole: "opacity:1"})
    every = ".token,.caption,.after"
    rules.append(f"{every}{{animation-duration:{whole:g}s;animation-iteration-count:infinite}}")
    rules.append(".token{animation-timing-function:ease-in-out}")
    rules.append(f".token,.caption:not(.state{last + 1}){{opacity:0}}")
    rules.append(f"@media (prefers-reduced-motion: reduce){{{every}{{animation:none}}}}")
    return "".join(rules)


def hierarchical() -> str:
    """Return hierarchical all-reduce with the path of one chunk, as `ringreduce explain` draws."""
    nodes = [[0, 1, 2], [3], [4, 5, 6, 7]]
    return to_svg(build("all_reduce", "hierarchical", nodes), nodes, follow=0)


PICTURES: dict[str, Callable[[], str]] = {
    "ring": ring,
    "ring-animated": ring_animated,
    "hierarchical": hierarchical,
    **strategies.PICTURES,
    **recovery_states.PICTURES,
}


def main(folder: Path) -> None:
    for name, draw in PICTURES.items():
        (folder / f"{name}.svg").write_text(draw(), encoding="utf-8")
    for path in sorted(folder.glob("*.svg")):
        if not path.stem.endswith("-dark"):
            dark = path.with_name(f"{path.stem}-dark.svg")
            dark.write_text(in_dark(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if sys.argv[1:] else Path(__file__).parent)
