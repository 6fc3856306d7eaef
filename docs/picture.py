"""Draws the pages' pictures, from the very schedules that run.

python docs/picture.py > docs/ring.svg                          ring all-reduce among four ranks
python docs/picture.py hierarchical > docs/hierarchical.svg     as `ringreduce explain` draws it
"""

from __future__ import annotations

import sys

from ringreduce.algorithms import build
from ringreduce.picture import to_svg
from ringreduce.schedules.schedule import Schedule

COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7")
"""Okabe and Ito's, which colour-blind people can tell apart: one a chunk."""
INK, FAINT, PAPER = "#24292f", "#8c959f", "#ffffff"
BOX, GAP, LEFT, TOP = 26, 4, 84, 84
COLUMN, ROW = 150, 66
Held = list[list[set[int]]]
"""rank -> chunk -> the ranks whose contribution is in."""


def states(schedule: Schedule) -> list[Held]:
    """What every rank holds before the first step and after each."""
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


def text(
    x: float, y: float, words: str, size: int = 13, anchor: str = "middle", **more: str
) -> str:
    """A line of text; `more` are SVG attributes, with _ for -."""
    style = "".join(f' {key.replace("_", "-")}="{value}"' for key, value in more.items())
    return f'<text x="{x}" y="{y}" font-size="{size}" text-anchor="{anchor}"{style}>{words}</text>'


def box(x: float, y: float, chunk: int, share: float, whole: bool) -> str:
    """One chunk, filled as far as contributions are in; a complete one is ticked."""
    filled = BOX * share
    parts = [
        f'<rect x="{x}" y="{y}" width="{BOX}" height="{BOX}" rx="3" fill="{COLOURS[chunk]}22"/>',
        f'<rect x="{x}" y="{y + BOX - filled}" width="{BOX}" height="{filled}" rx="3" '
        f'fill="{COLOURS[chunk]}"/>',
        f'<rect x="{x}" y="{y}" width="{BOX}" height="{BOX}" rx="3" fill="none" '
        f'stroke="{COLOURS[chunk]}" stroke-width="1.5"/>',
    ]
    if whole:
        parts.append(text(x + BOX / 2, y + BOX / 2 + 5, "✓", 14, fill=PAPER, font_weight="bold"))
    return "".join(parts)


def left_of(step: int) -> float:
    return LEFT + step * COLUMN


def top_of(rank: int) -> float:
    return TOP + rank * ROW


def boxes(held: Held, step: int) -> list[str]:
    n = len(held)
    return [
        box(left_of(step) + chunk * (BOX + GAP), top_of(rank), chunk, len(have) / n, len(have) == n)
        for rank, chunks in enumerate(held)
        for chunk, have in enumerate(chunks)
    ]


def arrows(schedule: Schedule, step: int) -> list[str]:
    """Who sends which chunk to whom in a step: from the box it leaves to the box it reaches."""
    drawn = []
    for rank in range(schedule.size):
        taken = list(schedule.steps(rank))[step]
        for send in taken.sends:
            for chunk in send.chunks:
                x1 = left_of(step) + chunk * (BOX + GAP) + BOX
                y1 = top_of(rank) + BOX / 2
                x2 = left_of(step + 1) + chunk * (BOX + GAP) - 3
                y2 = top_of(send.peer) + BOX / 2
                bend = (x2 - x1) / 2
                drawn.append(
                    f'<path d="M{x1},{y1} C{x1 + bend},{y1} {x2 - bend},{y2} {x2},{y2}" '
                    f'fill="none" stroke="{COLOURS[chunk]}" stroke-width="2" opacity="0.75" '
                    f'marker-end="url(#head{chunk})"/>'
                )
    return drawn


def picture(schedule: Schedule) -> str:
    held = states(schedule)
    n, last = schedule.size, len(held) - 1
    width, height = left_of(last) + n * (BOX + GAP) + 24, top_of(n - 1) + BOX + 52
    heads = "".join(
        f'<marker id="head{chunk}" viewBox="0 0 8 8" refX="6" refY="4" markerWidth="5" '
        f'markerHeight="5" orient="auto"><path d="M0,0 L8,4 L0,8 z" fill="{colour}"/></marker>'
        for chunk, colour in enumerate(COLOURS)
    )
    middle = (left_of(0) + left_of(n - 1) + n * (BOX + GAP)) / 2
    later = (left_of(n) + left_of(last) + n * (BOX + GAP)) / 2
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="system-ui, sans-serif" fill="{INK}">',
        f'<rect width="{width}" height="{height}" fill="{PAPER}"/><defs>{heads}</defs>',
        text(middle, 28, "reduce-scatter: what comes is added in", 15, font_weight="bold"),
        text(later, 28, "all-gather: what comes replaces", 15, font_weight="bold"),
    ]
    for step in range(last + 1):
        label = "start" if step == 0 else f"after step {step - 1}"
        centre = left_of(step) + (n * (BOX + GAP) - GAP) / 2
        parts.append(text(centre, 62, label, 12, fill=FAINT))
    for step in range(last):
        parts += arrows(schedule, step)
    for step, now in enumerate(held):
        parts += boxes(now, step)
    for rank in range(n):
        parts.append(text(LEFT - 18, top_of(rank) + BOX / 2 + 5, f"rank {rank}", 13, "end"))
    note = (
        "A box is a chunk, filled as far as contributions are in; ✓ holds all of them. "
        "Every arrow is one message to the right-hand neighbour."
    )
    parts.append(text(LEFT, height - 16, note, 12, "start", fill=FAINT))
    return "\n".join([*parts, "</svg>"]) + "\n"


def hierarchical() -> str:
    nodes = [[0, 1, 2], [3], [4, 5, 6, 7]]
    return to_svg(build("all_reduce", "hierarchical", nodes), nodes)


if __name__ == "__main__":
    if sys.argv[1:] == ["hierarchical"]:
        print(hierarchical(), end="")
    else:
        print(picture(build("all_reduce", "ring", [[0, 1, 2, 3]])), end="")
