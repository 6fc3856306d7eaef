"""The results of a search: a table, a picture, and the command to train with."""

from __future__ import annotations

import math
import shlex
import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ringreduce.errors import counted
from ringreduce.picture.chart import Line, Panel, chart
from ringreduce.picture.output import write
from ringreduce.picture.scales import Scale, linear, powers_of_two
from ringreduce.picture.style import DASHED, PALETTE
from ringreduce.train.configuration import to_flags
from ringreduce.train.search.candidates import Candidate, Searched

_HEIGHT = 300.0
_OTHERS = 10
"""The most candidates without measured steps in the table."""
_COLUMNS = 80
"""The most characters of a line.  Columns of the table are two spaces apart if there is room."""


@dataclass(frozen=True)
class CandidateRow:
    """What is known of a candidate."""

    candidate: Candidate
    predicted_s: float
    steps: int = 0
    step_s: float = math.nan
    """Median of the measured seconds of a step; NaN without measured steps."""
    held_bytes: int = 0
    """The most bytes that a rank has held; 0: not counted."""
    is_last: bool = False
    """Whether it was measured to the end."""

    @property
    def samples_per_s(self) -> float:
        return self.candidate.settings.batch / self.step_s


def table(rows: Sequence[CandidateRow]) -> list[str]:
    """Return a line for each row that was measured, and for the best of the others, below the heads
    of the columns.  The last line counts the rows that are left out."""
    shown = rows[: sum(row.steps > 0 for row in rows) + _OTHERS]
    more = len(rows) - len(shown)
    heads = [*rows[0].candidate.columns, "predicted ms", "measured ms", "steps"]
    cells = [[*heads, "samples/s", "MiB held"]]
    cells += [[*row.candidate.columns.values(), *_numbers(row)] for row in shown]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    apart = "  " if sum(widths) + 2 * len(widths) - 2 <= _COLUMNS else " "
    lines = [
        apart.join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in cells
    ] + [f"and {counted(more, 'slower one')}"] * (more > 0)
    return [part for line in lines for part in textwrap.wrap(line, _COLUMNS)]


def _numbers(row: CandidateRow) -> list[str]:
    predicted = f"{1e3 * row.predicted_s:.3f}"
    held = f"{row.held_bytes / 2**20:.2f}" if row.held_bytes else "-"
    if not row.steps:
        return [predicted, "-", "0", "-", held]
    measured = f"{1e3 * row.step_s:.3f}"
    return [predicted, measured, str(row.steps), f"{row.samples_per_s:,.0f}", held]


def command(candidate: Candidate, ranks: int, job: str | None) -> str:
    """Return the command that trains with a candidate; `job` are options that start its ranks."""
    words = ["ringreduce", "train", *shlex.split(job or f"-n {ranks}")]
    return shlex.join([*words, *to_flags(candidate.values)])


def draw(path: Path, title: str, facts: str, rows: Sequence[CandidateRow], kind: Searched) -> None:
    """Write a picture of samples a second and of memory to `path`, .svg or .png.

    Of the candidates at one place of a line, the best is drawn.  A line of memory has one cut: of
    those of its candidates the one that most candidates have.
    """
    cuts = [cut for cut, _ in Counter(map(_cut, rows)).most_common()]
    best: dict[tuple[str, int], CandidateRow] = {}
    for row in rows:
        best.setdefault((row.candidate.series, row.candidate.x), row)
    lines: dict[str, list[CandidateRow]] = {}
    for (series, _), row in sorted(best.items()):
        lines.setdefault(series, []).append(row)
    rates: list[Line] = []
    memory: list[Line] = []
    for number, (series, of_line) in enumerate(lines.items()):
        colour = PALETTE[number % len(PALETTE)]
        expected = [(r.candidate.x, r.candidate.settings.batch / r.predicted_s) for r in of_line]
        measured = [(r.candidate.x, r.samples_per_s) for r in of_line if r.steps]
        alike = [row for row in rows if row.candidate.series == series]
        cut = min(map(_cut, alike), key=cuts.index)
        of_cut = [row for row in alike if row.held_bytes and _cut(row) == cut]
        held = sorted((row.candidate.x, row.held_bytes / 2**20) for row in of_cut)
        # A line without points has no name.
        name_of_expected = "" if measured else series
        rates += [
            Line(expected, colour, name_of_expected, DASHED, 1.5, has_dots=True, is_hollow=True),
            Line(measured, colour, series, has_dots=True),
        ]
        memory.append(Line(held, colour, series, has_dots=True))
    x = powers_of_two([row.candidate.x for row in rows], str)
    panels = [
        _panel("samples/s; dashed, hollow: predicted", kind.x_name, x, rates),
        _panel("MiB that a rank holds at most", kind.x_name, x, memory),
    ]
    words = f"{facts} {kind.lines}".strip()
    write(path, chart(title, words, panels, panel_height=_HEIGHT))


def _cut(row: CandidateRow) -> str | None:
    return row.candidate.columns.get("cut")


def _panel(title: str, x_name: str, x: Scale, lines: Sequence[Line]) -> Panel:
    y = linear([0.0, *(value for line in lines for _, value in line.points)])
    return Panel(title, x, y, lines, x_name=x_name)
