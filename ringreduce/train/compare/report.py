"""The results of a comparison: a table, sentences, lines of JSON and a picture."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from ringreduce.picture.chart import Area, Line, Panel, chart
from ringreduce.picture.output import write
from ringreduce.picture.scales import Scale, linear
from ringreduce.picture.style import PALETTE
from ringreduce.train.compare.options import CompareOptions
from ringreduce.train.strategies import Strategy, to_plain

_NEAR = 0.95
"""One device is as fast as the fastest if it has at least this share of its samples/s."""
_FIGURES = (
    *("accuracy", "accuracy_range", "samples_per_s", "step_ms", "seconds_to", "sent_bytes"),
    *("held_bytes", "staleness_mean", "staleness_max", "discarded", "idle"),
)
_COLUMNS = {
    "ranks": "{where}",
    "accu- racy": "{accuracy:.1%}",
    "range": "{accuracy_range:.1%}",
    "samples /s": "{samples_per_s:,.0f}",
    "step ms": "{step_ms:.2f}",
    "s to {to:g}%": "{seconds_to:.2f}",
    "sent KiB": "{sent:,.1f}",
    "held KiB": "{held:,.1f}",
    "stale- ness": "{staleness_mean:.2f}/{staleness_max}",
    "drop- ped": "{discarded:.0f}",
    "idle": "{idle:.0%}",
}
"""Head of a column, in two lines -> its text."""


@dataclass
class StrategyRow:
    """The figures of a strategy, or its error."""

    strategy: Strategy
    ranks: int
    servers: int
    to: float
    """The accuracy in percent that was to be reached."""
    error: str = ""
    runs: list[dict[str, Any]] = field(default_factory=list)
    """The figures of each seed, and its `points`: seconds and accuracy after each epoch."""
    parameters: Any = None

    @property
    def options(self) -> dict[str, Any]:
        return {n: value for n, value in to_plain(self.strategy).items() if n != "strategy"}

    @property
    def name(self) -> str:
        words = ((n, v if isinstance(v, list) else [v]) for n, v in self.options.items())
        return ":".join([self.strategy.name, *(f"{n}={' '.join(map(str, v))}" for n, v in words)])

    @property
    def record(self) -> dict[str, Any]:
        """The line of JSON: means over the seeds, of bytes and staleness the largest."""
        figures: dict[str, Any] = dict.fromkeys(_FIGURES)
        for name in () if self.error else _FIGURES:
            values = [run[name.removesuffix("_range")] for run in self.runs]
            if name.endswith("_range"):
                figures[name] = max(values) - min(values)
            elif None not in values:
                largest = name in ("sent_bytes", "held_bytes", "staleness_max")
                figures[name] = max(values) if largest else fmean(values)
        where = {"options": self.options, "ranks": self.ranks, "servers": self.servers}
        return {"strategy": self.strategy.name, **where, **figures, "error": self.error or None}

    def cells(self) -> list[str]:
        """Return the texts of all columns; "" where this row has no figure."""
        record, found = self.record, []
        more: dict[str, Any] = {"where": f"{self.ranks}+{self.servers}".removesuffix("+0")}
        for name in ("sent", "held") if not self.error else ():
            more[name] = record[f"{name}_bytes"] / 2**10
        for text in _COLUMNS.values():
            found.append("")
            with suppress(TypeError, KeyError):  # None has no format
                found[-1] = text.format(**record, **more)
        return found


def table(rows: Sequence[StrategyRow]) -> list[str]:
    """Return rows, errors and sentences; columns that are empty or equal are left out."""
    columns = []
    for head, *cells in zip(_COLUMNS, *(row.cells() for row in rows), strict=True):
        if len({*cells}) > 1:
            first, _, second = head.format(to=rows[0].to).rpartition(" ")
            columns.append([first, second, *cells])
    widths = [max(map(len, column)) for column in columns]
    most = 80 - sum(widths) - len(widths)
    names = [_wrapped(name, most) for name in ("", "strategy", *(row.name for row in rows))]
    longest, lines = max(len(part) for name in names for part in name), []
    for (first, *others), *cells in zip(names, *columns, strict=True):
        right = [f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True)]
        lines += [" ".join([f"{first:<{longest}}", *right]).rstrip(), *others]
    below = [f"{row.name} failed: {row.error}" for row in rows if row.error] + _sentences(rows)
    return [*filter(None, lines)] + [line for text in below for line in textwrap.wrap(text, 80)]


def _wrapped(name: str, most: int) -> list[str]:
    """Return the lines of a name, which is divided after `_`, `:` and `=`."""
    lines = [""]
    for piece in re.findall(rf"[^_:=]{{1,{max(1, most - 3)}}}[_:=]?", name):
        if lines[-1].strip() and len(lines[-1] + piece) > most:
            lines.append("  ")
        lines[-1] += piece
    return lines


def _sentences(rows: Sequence[StrategyRow]) -> list[str]:
    """Return sentences on the fastest strategy, on one device, and on the one that holds least."""
    known = [(row.record, row) for row in rows if not row.error]
    if len(known) < 2:
        return []
    most, fastest = max(known, key=lambda pair: pair[0]["samples_per_s"])
    least, smallest = min(known, key=lambda pair: pair[0]["held_bytes"])
    found = [
        f"{fastest.name} was fastest: {most['samples_per_s']:,.0f} samples/s.",
        f"{smallest.name} holds least: {least['held_bytes'] / 2**10:,.1f} KiB on a rank.",
    ]
    if not rows[0].error:
        share = known[0][0]["samples_per_s"] / most["samples_per_s"]
        alone = f"One device has {100 * share:.0f} % of this speed."
        as_fast = "One device was as fast: do not distribute this."
        found.insert(1, as_fast if share >= _NEAR else alone)
    return found


def write_all(rows: Sequence[StrategyRow], request: CompareOptions) -> None:
    """Write the lines of JSON and the picture that are asked for."""
    if request.json is not None:
        request.json.write_text("".join(f"{json.dumps(row.record)}\n" for row in rows), "utf-8")
    known = [row for row in rows if not row.error]
    if request.picture is not None and known:
        write(request.picture, picture(known))


def picture(rows: Sequence[StrategyRow]) -> str:
    facts = "Strategies took turns, an epoch each. Bars have the numbers of the lines."
    title = " ".join(_sentences(rows)[:1]) or rows[0].name
    return chart(title, facts, _panels(rows), columns=1)


def _panels(rows: Sequence[StrategyRow]) -> list[Panel]:
    x = Scale(0.5, len(rows) + 0.5, [(n, str(n)) for n in range(1, len(rows) + 1)])
    lines = [
        Line(
            [(s, 100 * a) for s, a in row.runs[0]["points"]],
            PALETTE[n % len(PALETTE)],
            f"{n + 1} {row.name}",
        )
        for n, row in enumerate(rows)
    ]
    seconds, percent = ([point[at] for line in lines for point in line.points] for at in (0, 1))
    over = linear([0.0, *seconds])
    panels = [Panel("accuracy, %", over, linear(percent), lines, x_name="seconds")]
    for name, head, factor in (
        ("samples_per_s", "samples/s", 1.0),
        ("sent_bytes", "KiB that a rank sends in a step", 2**-10),
        ("held_bytes", "KiB that a rank holds", 2**-10),
    ):
        bars = [
            Area([n + 0.6, n + 1.4], [0.0], [factor * row.record[name]], lines[n].colour)
            for n, row in enumerate(rows)
        ]
        y = linear([0.0, *(bar.high[0] for bar in bars)])
        panels.append(Panel(head, x, y, [], bars))
    return panels
