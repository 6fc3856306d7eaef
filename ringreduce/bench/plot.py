"""Draw a run: time and bus bandwidth over size, of ours, of the baselines and of the model."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from ringreduce.bench.collectives import IN_PLACE, OURS
from ringreduce.bench.fit import Fit
from ringreduce.bench.measure import Timing
from ringreduce.errors import counted
from ringreduce.picture.chart import Line, Panel, chart
from ringreduce.picture.output import write
from ringreduce.picture.scales import linear, logarithmic, powers_of_two, size_text
from ringreduce.picture.style import BLUE, DASHED, DOTTED, FAINT, GREEN, ORANGE

_COLOURS = {OURS: BLUE, "MPI": ORANGE, "Gloo": GREEN}
_MOST_SIZES = 5
_Rows = Sequence[Sequence[Timing]]


def plot(path: Path, what: str, facts: str, rows: _Rows, fitted: Fit | None, busbw: float) -> None:
    """Write the picture to `path`, which ends in .svg or .png.

    `what` names the collective, dtype and ranks; `busbw` is a multiple of size / time.  Raises
    ImportError, with the command to install it, if a PNG needs a library.
    """

    def bandwidth(nbytes: float, seconds: float) -> float:
        return busbw * nbytes / seconds / 1e9

    time = _lines(rows, fitted, lambda _, seconds: 1e6 * seconds)
    rate = _lines(rows, fitted, bandwidth)
    sizes = powers_of_two([row[0].nbytes for row in rows], size_text, most=_MOST_SIZES)
    panels = [
        Panel("median time of a call, µs", sizes, logarithmic(_values(time)), time),
        Panel("bus bandwidth, GB/s", sizes, linear([0, *_values(rate)]), rate),
    ]
    write(path, chart(finding(rows), f"{what}. {facts}", panels))


def finding(rows: _Rows) -> str:
    """Return a sentence: our speed beside the fastest baseline's, or our highest speed alone."""
    ratios = []
    for row in rows:
        ours = [t.median_s for t in row if t.contender == OURS]
        others = [t.median_s for t in row if t.contender != OURS]
        if ours and others:
            ratios.append(min(others) / min(ours))
    if not ratios:
        fastest = max((t for row in rows for t in row), key=lambda t: t.algbw())
        return (
            f"{OURS} handles {fastest.algbw() / 1e9:.2g} GB/s at most, at "
            f"{size_text(fastest.nbytes)}"
        )
    mean = statistics.geometric_mean(ratios)
    won = sum(ratio > 1 for ratio in ratios)
    return (
        f"{OURS} has {mean:.2f} times the speed of the fastest baseline (geometric mean) and is "
        f"faster at {won} of {counted(len(ratios), 'size')}"
    )


def _lines(rows: _Rows, fitted: Fit | None, value: Callable[[float, float], float]) -> list[Line]:
    lines = []
    for name, place in dict.fromkeys((t.contender, t.place) for row in rows for t in row):
        series = [t for row in rows for t in row if (t.contender, t.place) == (name, place)]
        lines.append(
            Line(
                [(t.nbytes, value(t.nbytes, t.median_s)) for t in series],
                _COLOURS.get(name, FAINT),
                f"{name}, {place}",
                dashes="" if place == IN_PLACE else DASHED,
                width=2.4 if name == OURS else 1.6,
                has_dots=place == IN_PLACE,
            )
        )
    if fitted is not None:
        points = sorted([*fitted.fitted, *fitted.checked])
        values = [(nbytes, value(nbytes, seconds)) for nbytes, seconds in points]
        lines.append(Line(values, FAINT, "cost model, fitted", dashes=DOTTED))
    return lines


def _values(lines: Sequence[Line]) -> list[float]:
    return [y for line in lines for _, y in line.points]
