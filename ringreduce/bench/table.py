"""The table of measurements: the columns of nccl-tests, one line a size, then the baselines."""

from __future__ import annotations

from collections.abc import Sequence

from ringreduce.bench.collectives import IN_PLACE, OUT_OF_PLACE
from ringreduce.bench.measure import Timing
from ringreduce.bench.options import Options

OURS = "ringreduce"
_TYPES = {"float16": "half", "float32": "float", "float64": "double"}
_PLACES = (OUT_OF_PLACE, IN_PLACE)
_TIMES = ("min", "time", "p99")


class Table:
    """Lines for a terminal; all times in microseconds, all rates in GB/s."""

    def __init__(self, options: Options, ranks: int, baselines: Sequence[tuple[str, str]]) -> None:
        self._options, self._ranks, self._baselines = options, ranks, baselines

    def head(self) -> list[str]:
        """The lines above the columns: groups, names, units."""
        group = len(_TIMES) * 9 + 2 * 8 + 7
        baselines = len(self._baselines)
        groups = "".join(f"  {place:^{group}}" for place in _PLACES)
        groups += "".join(f"  {f'{name}, {place}':>20}" for name, place in self._baselines)
        ours = "  " + "".join(f"{name:>9}" for name in _TIMES)
        ours += f"{'algbw':>8}{'busbw':>8}{'#wrong':>7}"
        of_ours = "  " + f"{'(us)':>9}" * len(_TIMES) + f"{'(GB/s)':>8}" * 2 + f"{'':>7}"
        names = f"{'size':>11}{'count':>12}{'type':>9}{'redop':>7}"
        baseline, of_baseline = f"  {'time':>9}{'busbw':>8}   ", f"  {'(us)':>9}{'(GB/s)':>8}   "
        units = f"{'(B)':>11}{'(elements)':>12}{'':>9}{'':>7}"
        return [
            f"#{'':>39}{groups}",
            f"#{names}{ours * 2}{baseline * baselines}".rstrip(),
            f"#{units}{of_ours * 2}{of_baseline * baselines}".rstrip(),
        ]

    def line(self, timings: Sequence[Timing]) -> str:
        """Return the line of one size."""
        found = {(timing.contender, timing.place): timing for timing in timings}
        first, options = timings[0], self._options
        dtype = _TYPES.get(options.dtype, options.dtype)
        words = f"{first.nbytes:>12}{first.count:>12}{dtype:>9}{options.redop:>7}"
        for place in _PLACES:
            words += "  " + self._ours(found.get((OURS, place)))
        for baseline in self._baselines:
            words += "  " + self._baseline(found.get(baseline))
        return words.rstrip()

    def _ours(self, timing: Timing | None) -> str:
        if timing is None:
            return f"{'N/A':>9}" * len(_TIMES) + f"{'N/A':>8}" * 2 + f"{'N/A':>7}"
        times = (timing.min_s, timing.median_s, timing.p99_s)
        wrong = "N/A" if timing.wrong is None else str(timing.wrong)
        words = "".join(f"{_digits(1e6 * seconds):>9}" for seconds in times)
        return words + f"{self._rates(timing)}{wrong:>7}"

    def _baseline(self, timing: Timing | None) -> str:
        if timing is None:
            return f"{'N/A':>9}{'N/A':>8}   "
        wrong = " !!" if timing.wrong else "   "
        busbw = timing.busbw(self._options.collective, self._ranks)
        return f"{_digits(1e6 * timing.median_s):>9}{_digits(busbw / 1e9):>8}{wrong}"

    def _rates(self, timing: Timing) -> str:
        busbw = timing.busbw(self._options.collective, self._ranks)
        return f"{_digits(timing.algbw() / 1e9):>8}{_digits(busbw / 1e9):>8}"


def _digits(value: float) -> str:
    """About four figures."""
    return f"{value:.2f}" if value < 100 else f"{value:.1f}" if value < 10_000 else f"{value:.0f}"
