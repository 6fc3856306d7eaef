"""The run as a picture: time and bus bandwidth over size, ours, the baselines' and the model's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ringreduce.bench.collectives import IN_PLACE
from ringreduce.bench.fit import Fit
from ringreduce.bench.measure import Timing
from ringreduce.bench.table import OURS

_COLOURS = {OURS: "#1f6feb", "MPI": "#d1572a", "Gloo": "#7d4cdb"}
_MOST_TICKS = 7
_MODEL, _GRID, _INK = "#57606a", "#d8dee4", "#1f2328"


def plot(
    path: Path,
    title: str,
    facts: str,
    rows: Sequence[Sequence[Timing]],
    fitted: Fit | None,
    busbw: float,
) -> None:
    """Write a PNG.  `busbw` is bus bandwidth as a multiple of size / time.

    Raises ImportError, saying what to install, without matplotlib.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError("--plot needs matplotlib: pip install 'ringreduce[plot]'") from None
    figure = Figure(figsize=(11, 5.2), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    time, rate = figure.subplots(1, 2)
    for name, place in dict.fromkeys((t.contender, t.place) for row in rows for t in row):
        series = [t for row in rows for t in row if (t.contender, t.place) == (name, place)]
        sizes = [t.nbytes for t in series]
        style: dict[str, Any] = {
            "color": _COLOURS.get(name, _INK),
            "linestyle": "-" if place == IN_PLACE else (0, (4, 2)),
            "marker": "o" if place == IN_PLACE else "",
            "markersize": 3.5,
            "linewidth": 2.2 if name == OURS else 1.5,
            "zorder": 3 if name == OURS else 2,
            "label": f"{name}, {place}",
        }
        time.plot(sizes, [1e6 * t.median_s for t in series], **style)
        rate.plot(sizes, [busbw * t.nbytes / t.median_s / 1e9 for t in series], **style)
    if fitted is not None:
        _draw_model(time, rate, fitted, busbw)
    time.set_yscale("log")
    for axes, name in ((time, "median time of a call, µs"), (rate, "bus bandwidth, GB/s")):
        dress(axes, name, [row[0].nbytes for row in rows])
    rate.set_ylim(bottom=0)
    rate.legend(frameon=False, fontsize=9, loc="upper left")
    figure.suptitle(title, x=0.01, ha="left", fontsize=14, fontweight="bold", color=_INK)
    figure.supxlabel(facts, x=0.01, ha="left", fontsize=8.5, color=_MODEL)
    figure.savefig(path)


def _draw_model(time: Any, rate: Any, fitted: Fit, busbw: float) -> None:
    points = sorted([*fitted.fitted, *fitted.checked])
    sizes = [nbytes for nbytes, _ in points]
    style = {"color": _MODEL, "linestyle": ":", "linewidth": 1.6, "zorder": 1}
    time.plot(sizes, [1e6 * seconds for _, seconds in points], **style)
    rates = [busbw * nbytes / seconds / 1e9 for nbytes, seconds in points]
    rate.plot(sizes, rates, label="the cost model, fitted", **style)


def dress(axes: Any, name: str, sizes: Sequence[int]) -> None:
    """Make axes over sizes in bytes look as all pictures of measurements do."""
    axes.set_xscale("log", base=2)
    step = -(-len(sizes) // _MOST_TICKS)
    axes.set_xticks(sizes[::step], [size_text(size) for size in sizes[::step]])
    axes.minorticks_off()
    axes.set_title(name, loc="left", fontsize=10.5, color=_INK)
    axes.grid(True, color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_INK, labelsize=9, length=0)
    for side in axes.spines.values():
        side.set_visible(False)


def size_text(nbytes: int) -> str:
    """A size as people say it: 8 B, 64 KiB, 1.5 MiB."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= size:
            return f"{nbytes / size:g} {unit}"
    return f"{nbytes} B"
