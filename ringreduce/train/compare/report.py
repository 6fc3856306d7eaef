"""The results of a comparison: a table, sentences, lines of JSON and a picture."""

from __future__ import annotations

import json
import re
import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from ringreduce.picture.chart import Area, Line, Panel, chart
from ringreduce.picture.output import write
from ringreduce.picture.scales import Scale, linear
from ringreduce.picture.style import PALETTE
from ringreduce.train.compare.options import Request
from ringreduce.train.strategies import Strategy, to_plain

_NEAR = 0.95
"""One device is as fast as the fastest if it has at least this share of its samples/s."""
_COLUMNS = {
    "accuracy": ("accu- racy%", ".1f", 100),
    "accuracy_range": ("range %", ".1f", 100),
    "samples_per_s": ("samples /s", ",.0f", 1),
    "step_ms": ("step ms", ".2f", 1),
    "seconds_to": ("s to {to:g}%", ".2f", 1),
    "sent_bytes": ("sent KiB", ",.1f", 2**-10),
    "held_bytes": ("held KiB", ",.1f", 2**-10),
    "staleness_mean": ("stale mean", ".2f", 1),
    "staleness_max": ("stale max", "d", 1),
    "discarded": ("dis- carded", "d", 1),
    "idle": ("idle %", ".0f", 100),
}
"""Figure -> its head in two lines, its format, and its factor in the table."""


@dataclass
class Row:
    """What is known of a strategy."""

    strategy: Strategy
    ranks: int
    servers: int
    error: str = ""
    runs: list[list[dict[str, Any]]] = field(default_factory=list)
    """For each seed, the facts of each rank that the strategy has."""
    parameters: Any = None
    """Those of the last seed, on ranks that the strategy has."""

    @property
    def options(self) -> dict[str, Any]:
        return {n: value for n, value in to_plain(self.strategy).items() if n != "strategy"}

    @property
    def name(self) -> str:
        return ":".join([self.strategy.name, *(f"{n}={v}" for n, v in self.options.items())])

    def record(self, to: float) -> dict[str, Any]:
        """Return the line of JSON; `to` is the accuracy in percent that was to be reached."""
        where = {"ranks": self.ranks, "servers": self.servers}
        figures = dict.fromkeys(_COLUMNS) | ({} if self.error else self._figures(to))
        first = {"strategy": self.strategy.name, "options": self.options}
        return {**first, **where, **figures, "error": self.error or None}

    def _figures(self, to: float) -> dict[str, Any]:
        every, first = [rank for run in self.runs for rank in run], [run[0] for run in self.runs]
        accuracy = [facts["accuracy"] for facts in first]
        reached = [next((s for s, a in each["points"] if 100 * a >= to), None) for each in first]
        seconds = [s for s in reached if s is not None]
        found = {
            "accuracy": fmean(accuracy),
            "accuracy_range": max(accuracy) - min(accuracy),
            "samples_per_s": fmean(facts["samples_per_s"] for facts in first),
            "step_ms": 1e3 * fmean(facts["step_s"] for facts in first),
            "seconds_to": fmean(seconds) if len(seconds) == len(reached) else None,
            "sent_bytes": max(facts["sent"] for facts in every),
            "held_bytes": max(facts["held"] for facts in every),
            "idle": fmean(facts["idle"] for facts in every if "idle" in facts),
        }
        if "staleness" in first[0]:
            pushes = Counter[int]()
            for facts in every:
                pushes.update(dict(facts["staleness"]))
            found["staleness_mean"] = sum(s * n for s, n in pushes.items()) / pushes.total()
            found["staleness_max"] = max(pushes)
            found["discarded"] = sum(facts["discarded"] for facts in every)
        return found


def table(rows: Sequence[Row], to: float) -> list[str]:
    """Return the lines of the rows, the errors, and what follows from the figures.

    Columns that are empty or equal in all rows are left out.
    """
    records = [row.record(to) for row in rows]
    ranks = [f"{row.ranks}+{row.servers}" if row.servers else f"{row.ranks}" for row in rows]
    columns = [["", "ranks", *ranks]]
    for name, (head, form, factor) in _COLUMNS.items():
        values = [record[name] for record in records]
        cells = ["" if value is None else format(factor * value, form) for value in values]
        if len({*cells}) > 1:
            columns.append([*head.format(to=to).rsplit(" ", 1), *cells])
    widths = [max(map(len, column)) for column in columns]
    numbers = [
        "".join(f" {cell:>{width}}" for cell, width in zip(line, widths, strict=True))
        for line in zip(*columns, strict=True)
    ]
    names = [
        _wrapped(name, 80 - len(numbers[0]))
        for name in ["", "strategy", *(row.name for row in rows)]
    ]
    most = max(len(part) for name in names for part in name)
    lines = []
    for (first, *others), figures in zip(names, numbers, strict=True):
        lines += [f"{first:<{most}}{figures}".rstrip(), *others]
    errors = [f"{row.name} failed: {row.error}" for row in rows if row.error]
    below = (*errors, *_sentences(rows, records))
    return lines + [line for text in below for line in textwrap.wrap(text, 80)]


def _wrapped(name: str, most: int) -> list[str]:
    """Return the lines of a name, which is divided after `_`, `:` and `=`."""
    lines = [""]
    for piece in re.findall(r"[^_:=]+[_:=]?", name):
        if len(lines[-1] + piece) > most:
            lines.append("  ")
        lines[-1] += piece
    return lines


def _sentences(rows: Sequence[Row], records: Sequence[dict[str, Any]]) -> list[str]:
    """Return what was fastest, whether one device was as fast, and what holds least."""
    known = [pair for pair in zip(rows, records, strict=True) if not pair[0].error]
    if len(known) < 2:
        return []
    fastest, most = max(known, key=lambda pair: pair[1]["samples_per_s"])
    smallest, least = min(known, key=lambda pair: pair[1]["held_bytes"])
    found = [
        f"{fastest.name} was fastest: {most['samples_per_s']:,.0f} samples/s.",
        f"{smallest.name} holds least: {least['held_bytes'] / 2**10:,.1f} KiB on a rank.",
    ]
    if not rows[0].error:
        share = records[0]["samples_per_s"] / most["samples_per_s"]
        alone = f"One device has {100 * share:.0f} % of this speed."
        as_fast = "One device was as fast: do not distribute this."
        found.insert(1, as_fast if share >= _NEAR else alone)
    return found


def write_all(rows: Sequence[Row], request: Request) -> None:
    """Write the lines of JSON and the picture that are asked for."""
    records, known = [row.record(request.to) for row in rows], [r for r in rows if not r.error]
    if request.json is not None:
        request.json.write_text("".join(f"{json.dumps(record)}\n" for record in records), "utf-8")
    if request.plot is not None and known:
        title = " ".join(_sentences(rows, records)[:1]) or known[0].name
        facts = "Strategies took turns, an epoch each. Each has a number, and a colour."
        write(request.plot, chart(title, facts, _panels(known, request.to), panel_height=300))


def _panels(rows: Sequence[Row], to: float) -> list[Panel]:
    """Return panels of accuracy over seconds, samples/s, and bytes sent and held."""
    x = Scale(0.5, len(rows) + 0.5, [(n, str(n)) for n in range(1, len(rows) + 1)])
    lines, bars = [], []
    for number, row in enumerate(rows):
        points = [(s, 100 * accuracy) for s, accuracy in row.runs[0][0]["points"]]
        lines.append(Line(points, PALETTE[number % len(PALETTE)], f"{number + 1} {row.name}"))
    seconds, percent = ([point[at] for line in lines for point in line.points] for at in (0, 1))
    over = Panel("accuracy, %", linear([0.0, *seconds]), linear(percent), lines, x_name="seconds")
    for name, (head, _, factor) in _COLUMNS.items():
        if name in ("samples_per_s", "sent_bytes", "held_bytes"):
            values = [factor * row.record(to)[name] for row in rows]
            areas = [
                Area([n + 0.6, n + 1.4], [0.0], [value], lines[n].colour)
                for n, value in enumerate(values)
            ]
            bars.append(Panel(head, x, linear([0.0, *values]), [], areas))
    return [over, *bars]
