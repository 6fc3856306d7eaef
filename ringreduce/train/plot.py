"""Draw a run: loss, accuracy, and the times of its steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ringreduce.picture.chart import Area, Line, Note, Panel, chart
from ringreduce.picture.output import check_writable, write
from ringreduce.picture.scales import Scale, linear, logarithmic
from ringreduce.picture.style import BLUE, GREEN, ORANGE, TINTS
from ringreduce.train.metrics import History
from ringreduce.train.results import Step

_BINS = 60
"""The most bars of times; a bar is the median of a group of steps."""
_MOST_STEPS = 4
"""The most numbers of steps that are written below a panel."""
_PALE = TINTS[0]


def check_place(path: Path) -> None:
    """Make the folder of `path`; raise OSError if no picture can be written there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    check_writable(path)


def draw(path: Path, title: str, facts: str, history: History) -> None:
    """Write the picture of at least one step to `path`, which ends in .svg or .png."""
    steps = history.all_steps
    scale = linear([steps[0].step, steps[-1].step], most=_MOST_STEPS)
    panels = [_loss(scale, steps), _accuracy(scale, history), _times(scale, steps)]
    write(path, chart(title, facts, panels, columns=3))


def _loss(steps: Scale, made: Sequence[Step]) -> Panel:
    points = [(step.step, step.loss) for step in made]
    width = max(1, len(made) // 50)
    means = np.convolve([step.loss for step in made], np.ones(width) / width, "valid")
    smooth = [(step.step, float(mean)) for step, mean in zip(made[width - 1 :], means, strict=True)]
    y = logarithmic([loss for _, loss in points])
    lines, words = [Line(points, BLUE)], "each step"
    if width > 1:
        lines, words = [Line(points, _PALE, width=1), Line(smooth, BLUE)], f"mean of {width} steps"
    note = Note((steps.high, y.high), words, BLUE, above=-14)
    return Panel("training loss", steps, y, lines, notes=[note], x_name="step")


def _accuracy(steps: Scale, history: History) -> Panel:
    points = [(step, 100 * epoch.accuracy) for step, epoch in history.all_epochs]
    y = linear([percent for _, percent in points] or [0, 100])
    # Below the line, which rises.
    notes = [Note(point, f"{point[1]:.1f} %", GREEN, above=-24) for point in points[-1:]]
    line = Line(points, GREEN, has_dots=len(points) < _BINS)
    return Panel("held-out accuracy, %", steps, y, [line], notes=notes, x_name="step")


def _times(steps: Scale, made: Sequence[Step]) -> Panel:
    """Draw medians of groups of steps, so that a step that was interrupted hides no others."""
    groups = np.array_split(np.arange(len(made)), min(_BINS, len(made)))
    compute, exposed = (
        [1e3 * float(np.median([getattr(made[i], name) for i in group])) for group in groups]
        for name in ("compute_s", "exposed_s")
    )
    both = [sum(pair) for pair in zip(compute, exposed, strict=True)]
    edges = np.linspace(steps.low, steps.high, len(groups) + 1).tolist()
    y = linear([0, 1.35 * max(both)])
    areas = [
        Area(edges, [0.0] * len(groups), compute, _PALE),
        Area(edges, compute, both, ORANGE),
    ]
    notes = [
        Note((steps.high, max(both)), "exposed communication", ORANGE),
        Note((edges[-2], 0), "compute", above=10, halo=_PALE),
    ]
    return Panel("time of a step, ms", steps, y, [], areas, notes, x_name="step")
