"""Draw a run: loss, accuracy, and the times of its steps."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ringreduce.train.metrics import History

_LOSS, _SMOOTH, _ACCURACY = "#a8c7fa", "#1f6feb", "#2da44e"
_COMPUTE, _EXPOSED = "#9fb3c8", "#d1572a"
_GRID, _INK, _FAINT = "#d8dee4", "#1f2328", "#57606a"
_BINS = 60
"""The most bars of times; a bar is the median of a group of steps."""


def check() -> None:
    """Raise ImportError, with the command to install it, if matplotlib is missing."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ImportError("plot needs matplotlib: pip install 'ringreduce[plot]'") from None


def check_place(path: Path) -> None:
    """Make the folder of `path`; raise OSError if no picture can be written there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise PermissionError(f"{path} cannot be written")


def draw(path: Path, title: str, facts: str, history: History) -> None:
    """Write a PNG; `history` has at least one step."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.9), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    loss, accuracy, times = figure.subplots(1, 3)
    steps = np.array([step.step for step in history.all_steps])
    _draw_loss(loss, steps, np.array([step.loss for step in history.all_steps]))
    _draw_accuracy(accuracy, history)
    _draw_times(times, steps, history)
    for axes in (loss, accuracy, times):
        axes.set_xlabel("step", fontsize=9, color=_INK)
        axes.grid(True, color=_GRID, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.tick_params(colors=_INK, labelsize=9, length=0)
        for side in axes.spines.values():
            side.set_visible(False)
    figure.suptitle(title, x=0.01, ha="left", fontsize=14, fontweight="bold", color=_INK)
    figure.supxlabel(facts, x=0.01, ha="left", fontsize=8.5, color=_FAINT)
    figure.savefig(path)


def _draw_loss(axes: Any, steps: np.ndarray, losses: np.ndarray) -> None:
    axes.plot(steps, losses, color=_LOSS, linewidth=0.8, label="of each step")
    width = max(1, len(losses) // 50)
    if width > 1:
        mean = np.convolve(losses, np.ones(width) / width, "valid")
        axes.plot(steps[width - 1 :], mean, color=_SMOOTH, linewidth=2, label=f"mean of {width}")
        axes.legend(frameon=False, fontsize=9)
    axes.set_yscale("log")
    axes.tick_params(which="minor", length=0, labelsize=8, labelcolor=_FAINT)
    _name(axes, "training loss")


def _draw_accuracy(axes: Any, history: History) -> None:
    at = [step for step, _ in history.all_epochs]
    percent = [100 * epoch.accuracy for _, epoch in history.all_epochs]
    axes.plot(at, percent, color=_ACCURACY, linewidth=2, marker="o", markersize=3)
    if percent:
        at_the_end = {"transform": axes.transAxes, "ha": "right", "fontsize": 10, "color": _INK}
        axes.text(0.98, 0.05, f"{percent[-1]:.1f} % at the end", **at_the_end)
    _name(axes, "held-out accuracy, %")


def _draw_times(axes: Any, steps: np.ndarray, history: History) -> None:
    """Draw medians of groups of steps, so that a step that was interrupted hides no others."""
    groups: Sequence[Any] = np.array_split(np.arange(len(steps)), min(_BINS, len(steps)))
    compute, exposed = (
        1e3
        * np.array(
            [np.median([getattr(history.all_steps[i], name) for i in group]) for group in groups]
        )
        for name in ("compute_s", "exposed_s")
    )
    at = np.array([steps[group].mean() for group in groups])
    width = (steps[-1] - steps[0] + 1) / len(groups)
    # A little wider than their distance: no gaps between bars.
    style = {"width": 1.05 * width, "linewidth": 0}
    axes.bar(at, compute, color=_COMPUTE, label="compute", **style)
    axes.bar(at, exposed, bottom=compute, color=_EXPOSED, label="exposed communication", **style)
    axes.set_ylim(0, 1.35 * float((compute + exposed).max()))
    axes.legend(frameon=False, fontsize=9, loc="upper right")
    _name(axes, "time of a step, ms")


def _name(axes: Any, text: str) -> None:
    axes.set_title(text, loc="left", fontsize=10.5, color=_INK)
