"""The table of measurements: a line a size, with the columns of nccl-tests if it is wide."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ringreduce.bench.collectives import COLLECTIVES, IN_PLACE, OURS, OUT_OF_PLACE
from ringreduce.bench.measure import Timing
from ringreduce.bench.options import Options

_TYPES = {"float16": "half", "float32": "float", "float64": "double"}
_ALGORITHM = 16


@dataclass(frozen=True)
class SizeRow:
    algorithm: str
    timings: Sequence[Timing]

    def timing(self, contender: str, place: str) -> Timing | None:
        found = (t for t in self.timings if (t.contender, t.place) == (contender, place))
        return next(found, None)

    def fastest_baseline(self, place: str) -> Timing | None:
        baselines = [t for t in self.timings if t.contender != OURS and t.place == place]
        return min(baselines, key=lambda timing: timing.median_s, default=None)

    def speedup(self, place: str) -> float | None:
        """Return the time of the fastest baseline in `place` divided by ours; None without one."""
        ours, baseline = self.timing(OURS, place), self.fastest_baseline(place)
        return None if ours is None or baseline is None else baseline.median_s / ours.median_s


@dataclass(frozen=True)
class _Column:
    name: str
    unit: str
    width: int
    """Characters, with those that separate it from the column before."""
    cell: Callable[[SizeRow], str]


@dataclass(frozen=True)
class _ColumnGroup:
    title: str
    columns: Sequence[_Column]

    @property
    def width(self) -> int:
        return sum(column.width for column in self.columns)

    def line(self, text: Callable[[_Column], str]) -> str:
        return "".join(f"{text(column):>{column.width}}" for column in self.columns)


class Table:
    """Lines for a terminal; times in microseconds, rates in GB/s; at most 80 characters wide.

    Its columns are those for which `first`, the row of the first size, has measurements.
    `options.wide` shows all columns.
    """

    def __init__(self, options: Options, ranks: int, first: SizeRow) -> None:
        self._options = options
        self._busbw = COLLECTIVES[options.collective].busbw(ranks)
        self._names = list(dict.fromkeys((t.contender, t.place) for t in first.timings))
        self._places = [place for place in (OUT_OF_PLACE, IN_PLACE) if first.timing(OURS, place)]
        self._groups = self._wide() if options.wide else self._narrow()

    def legend(self) -> list[str]:
        """Return explanations of the columns whose names do not suffice."""
        baselines = dict.fromkeys(name for name, _ in self._names if name != OURS)
        lines = []
        if len(baselines) > 1 and not self._options.wide:
            lines.append(f"baselines: {' and '.join(baselines)}; --wide shows each")
        if baselines:
            lines.append("speedup: the time of the fastest baseline in the same place / our time")
        return lines

    def head(self) -> list[str]:
        titles = [f"{group.title:^{group.width}}" for group in self._groups]
        names = [group.line(lambda column: column.name) for group in self._groups]
        units = [group.line(lambda column: column.unit) for group in self._groups]
        return ["#" + "".join(texts)[1:].rstrip() for texts in (titles, names, units)]

    def line(self, row: SizeRow) -> str:
        texts = (group.line(lambda column: column.cell(row)) for group in self._groups)
        return "".join(texts).rstrip()

    # --- columns ---

    def _narrow(self) -> list[_ColumnGroup]:
        places = [_ColumnGroup(place, self._narrow_place(place)) for place in self._places]
        wrong = _Column("#wrong", "", 7, lambda row: self._wrong(row, self._places))
        last = _ColumnGroup(places[-1].title, [*places[-1].columns, wrong])
        return [_ColumnGroup("", [self._size(), self._algorithm()]), *places[:-1], last]

    def _narrow_place(self, place: str) -> list[_Column]:
        columns = [self._time(OURS, place, 7), self._rate(OURS, place, 8)]
        has_baseline = any(name != OURS and where == place for name, where in self._names)
        return [*columns, self._speedup(place)] if has_baseline else columns

    def _wide(self) -> list[_ColumnGroup]:
        dtype = _TYPES.get(self._options.dtype, self._options.dtype)
        first = [
            self._size(),
            _Column("count", "(elements)", 12, lambda row: str(row.timings[0].count)),
            _Column("type", "", 9, lambda row: dtype),
            _Column("redop", "", 7, lambda row: self._options.redop),
            self._algorithm(),
        ]
        baselines = [
            _ColumnGroup(f"{name}, {place}", self._wide_baseline(name, place))
            for name, place in self._names
            if name != OURS
        ]
        places = [_ColumnGroup(place, self._wide_place(place)) for place in self._places]
        return [_ColumnGroup("", first), *places, *baselines]

    def _wide_place(self, place: str) -> list[_Column]:
        def cell(write: Callable[[Timing], str]) -> Callable[[SizeRow], str]:
            return lambda row: _text(row.timing(OURS, place), write)

        columns = [
            _Column("min", "(us)", 11, cell(lambda timing: digits(1e6 * timing.min_s))),
            self._time(OURS, place, 9),
            _Column("p99", "(us)", 9, cell(lambda timing: digits(1e6 * timing.p99_s))),
            _Column("algbw", "(GB/s)", 9, cell(lambda timing: digits(timing.algbw() / 1e9))),
            self._rate(OURS, place, 9),
            _Column("#wrong", "", 8, lambda row: self._wrong(row, [place])),
        ]
        return [*columns, self._speedup(place)] if self._options.baselines else columns

    def _wide_baseline(self, name: str, place: str) -> list[_Column]:
        def marked(row: SizeRow) -> str:
            timing = row.timing(name, place)
            return "!!" if timing is not None and timing.wrong else ""

        rate = self._rate(name, place, 9)
        return [self._time(name, place, 11), rate, _Column("", "", 3, marked)]

    def _size(self) -> _Column:
        return _Column("size", "(B)", 10, lambda row: str(row.timings[0].nbytes))

    def _algorithm(self) -> _Column:
        def name(row: SizeRow) -> str:
            # One word, so that scripts can split the line.
            word = row.algorithm.replace(" ", "")
            return word if len(word) <= _ALGORITHM else f"{word[: _ALGORITHM - 1]}…"

        return _Column("algorithm", "", _ALGORITHM + 1, name)

    def _time(self, name: str, place: str, width: int) -> _Column:
        return _Column("time", "(us)", width, lambda row: _time_text(row.timing(name, place)))

    def _rate(self, name: str, place: str, width: int) -> _Column:
        def rate(timing: Timing) -> str:
            return digits(timing.algbw() * self._busbw / 1e9)

        return _Column("busbw", "(GB/s)", width, lambda row: _text(row.timing(name, place), rate))

    def _speedup(self, place: str) -> _Column:
        return _Column("speedup", "", 8, lambda row: digits(row.speedup(place)))

    def _wrong(self, row: SizeRow, places: Sequence[str]) -> str:
        found = [row.timing(OURS, place) for place in places]
        wrong = [timing.wrong for timing in found if timing is not None]
        if None in wrong:
            return "N/A"
        total = sum(each or 0 for each in wrong)
        return str(total) if total < 1_000_000 else digits(total)


def _time_text(timing: Timing | None) -> str:
    return _text(timing, lambda timing: digits(1e6 * timing.median_s))


def _text(timing: Timing | None, write: Callable[[Timing], str]) -> str:
    return "N/A" if timing is None else write(timing)


def digits(value: float | None) -> str:
    """Return `value` with three significant digits, in at most 7 characters; "N/A" for None."""
    if value is None:
        return "N/A"
    mantissa, exponent = f"{value:.2e}".split("e")
    decimals = 2 - int(exponent)
    if value and not -3 <= decimals <= 5:
        return f"{mantissa}e{int(exponent)}"
    return f"{float(f'{value:.2e}'):.{max(0, decimals)}f}"
