"""All-reduce on one host beside the best of Open MPI, MPICH, Intel MPI and Gloo, size by size.

    python -m benchmarks.one_host [--environments FOLDER] [--ranks 2 3 4 8] [--dtypes float32 ...]

Makes an environment for each MPI, runs `benchmarks.one_host_run` in it at MPI's default thread
level and at `serialized` (not with more ranks than cores: there MPICH spins without yielding), and
writes ``bench_results/one_host.jsonl``.  Then, or with ``--draw`` at once, prints a table for each
dtype and number of ranks: how many times as fast ours is as the best baseline, in the run of that
baseline; our time in units of one copy of the same bytes by all ranks at once; and for floats of 16
bits in units of the time of float32 of the same bytes.  Draws ``docs/all_reduce.svg`` and its dark
variant.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from benchmarks import environments
from benchmarks.rows import RESULTS, replace
from ringreduce.picture.chart import Line, Panel, chart
from ringreduce.picture.scales import powers_of_two, size_text
from ringreduce.picture.style import BLUE, INK, ORANGE, in_dark

NAME = "one_host"
BASELINES = ("MPI", "Gloo")
SAME_BYTES = "as float32"
"""The name in `one_host_run` of our calls on float32 of the same bytes."""
OURS = {
    "call": "ringreduce",
    "planned": "ringreduce planned",
    "registered": "registered",
    "both": "registered planned",
}
"""Column of the table -> contender."""
PICTURE = environments.ROOT / "docs" / "all_reduce.svg"
DRAWN = (2, 4)
"""Numbers of ranks in the picture."""
SHOWN = {"call": (BLUE, "NumPy arrays"), "registered": (ORANGE, "comm.empty arrays")}
"""Column of the table -> its colour and name in the picture."""
_ALL_BUFFERS = 8 << 30
_SIZES = [8 << i for i in range(28)]
_SPARSE = [8 << i for i in range(0, 28, 3)]
_TARGETS = {2: (1.25, 1.5), 4: (1.8, 2.3)}
"""Ranks -> geometric means to be reached, with ordinary and with registered arrays."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    environments.add_options(parser, (2, 3, 4, 8))
    parser.add_argument("--dtypes", nargs="+", default=["float32", "float16", "bfloat16"])
    parser.add_argument("--smallest", type=int, default=8, help="bytes")
    parser.add_argument("--largest", type=int, default=1 << 30, help="bytes")
    options = parser.parse_args()
    if not options.draw:
        for dtype in options.dtypes:
            for ranks, mpi, level in environments.runs(options):
                _measure(options, mpi, ranks, dtype, level)
    rows = [json.loads(line) for line in (RESULTS / f"{NAME}.jsonl").read_text().splitlines()]
    for dtype in sorted({row["dtype"] for row in rows}):
        for ranks in sorted({row["ranks"] for row in rows if row["dtype"] == dtype}):
            of = [row for row in rows if (row["dtype"], row["ranks"]) == (dtype, ranks)]
            print(f"\n{dtype}, {ranks} ranks:\n\n{_table(of, ranks, dtype)}")
    _draw([row for row in rows if row["dtype"] == "float32"])


def _measure(options: argparse.Namespace, mpi: str, ranks: int, dtype: str, level: str) -> None:
    print(f"=== {dtype}, {ranks} ranks, {mpi}, thread level {level}", flush=True)
    fits = min(options.largest, _ALL_BUFFERS // (4 * ranks))
    few = dtype != "float32" or ranks not in _TARGETS
    some = _SPARSE if few else _SIZES
    sizes = [size for size in some if options.smallest <= size <= fits]
    run = ["run", "-n", str(ranks), "-m", "benchmarks.one_host_run"]
    rows = environments.measured(options, mpi, level, run, dtype, *map(str, sizes))
    replace(NAME, rows, same=("mpi_wheel", "ranks", "dtype", "thread_level", "bytes"))


Times = dict[str, float]
"""Contender -> microseconds, in or out of place, whichever is faster."""


def _runs(rows: Sequence[dict[str, Any]]) -> dict[int, dict[tuple[str, str], Times]]:
    """Bytes -> (MPI, thread level) -> times."""
    runs: dict[int, dict[tuple[str, str], Times]] = defaultdict(lambda: defaultdict(dict))
    mpi_of = {wheel: mpi for mpi, wheel in environments.WHEELS.items()}
    for row in rows:
        times = runs[row["bytes"]][mpi_of[row["mpi_wheel"]], row["thread_level"]]
        name = row["contender"]
        times[name] = min(times.get(name, float("inf")), row["median_us"])
    return runs


def _best(runs: dict[tuple[str, str], Times]) -> tuple[float, str, Times]:
    """The best baseline's time and name, and all times of its run."""
    baselines = {(times[p], p, run) for run, times in runs.items() for p in BASELINES if p in times}
    best, baseline, run = min(baselines)
    return best, run[0] if baseline == "MPI" else baseline, runs[run]


def _table(rows: Sequence[dict[str, Any]], ranks: int, dtype: str) -> str:
    short = dtype in ("float16", "bfloat16")
    heads = " | ".join([*OURS, "copies", *(["float32", "registered float32"] if short else [])])
    lines = [f"| size | best baseline, µs | {heads} |", "|" + "---|" * (heads.count("|") + 3)]
    runs = _runs(rows)
    ratios = {name: speedups(runs, contender) for name, contender in OURS.items()}
    for nbytes in sorted(runs):
        best, who, times = _best(runs[nbytes])
        cells = [f"{ratios[name][nbytes]:.2f}" for name in OURS]
        cells.append(f"{times[OURS['call']] / times['memcpy']:.1f}")
        for name in ("call", "registered") if short else ():
            same = times[f"{'registered ' if name == 'registered' else ''}{SAME_BYTES}"]
            cells.append(f"{times[OURS[name]] / same:.2f}")
        lines.append(f"| {size_text(nbytes)} | {best:,.1f} {who} | {' | '.join(cells)} |")
    lines.append("")
    for name, of_size in ratios.items():
        mean = statistics.geometric_mean(of_size.values())
        below = [size_text(nbytes) for nbytes, ratio in of_size.items() if ratio < 0.95]
        at = ", ".join(below) or "no size"
        lines.append(f"{name}: geometric mean {mean:.2f}; below 0.95 at {at}")
    if ranks in _TARGETS and dtype == "float32":
        ordinary, registered = _TARGETS[ranks]
        lines.append(f"targets: call {ordinary}, registered {registered}")
    return "\n".join(lines)


def _draw(rows: Sequence[dict[str, Any]]) -> None:
    shown = [row for row in rows if row["ranks"] in DRAWN]
    svg = picture(shown)
    PICTURE.write_text(svg, encoding="utf-8")
    PICTURE.with_name("all_reduce-dark.svg").write_text(in_dark(svg), encoding="utf-8")


def picture(rows: Sequence[dict[str, Any]]) -> str:
    """Return the picture of our speed beside that of the fastest baseline, as SVG."""
    panels, means = [], []
    for ranks in sorted({row["ranks"] for row in rows}):
        runs = _runs([row for row in rows if row["ranks"] == ranks])
        ratios = {name: speedups(runs, OURS[name]) for name in SHOWN}
        mean = statistics.geometric_mean(ratios["call"].values())
        times = f"{mean:.1f} times" + ("" if means else " the speed of the fastest baseline")
        means.append(f"{times} with {ranks} ranks")
        panels.append(_panel(ranks, ratios))
    row = rows[0]
    dates = " to ".join(dict.fromkeys((min(r["date"] for r in rows), max(r["date"] for r in rows))))
    facts = (
        f"All-reduce of {row['dtype']} on one host. The baseline at each size is the fastest of "
        f"{_baselines(rows)}. The title has the geometric means for NumPy arrays. "
        f"{row['cpu']}, {row['cores']} cores, {dates}; bench_results/{NAME}.jsonl."
    )
    title = "ringreduce has " + " and ".join(means)
    return chart(title, facts, panels)


def _baselines(rows: Sequence[dict[str, Any]]) -> str:
    """Return the names of all baselines in `rows`, such as MPICH, Intel MPI and Gloo."""
    names = [
        mpi if contender == "MPI" else contender
        for contender in BASELINES
        for mpi, wheel in environments.WHEELS.items()
        if any((row["contender"], row["mpi_wheel"]) == (contender, wheel) for row in rows)
    ]
    *others, last = dict.fromkeys(names)
    return f"{', '.join(others)} and {last}" if others else last


def speedups(runs: dict[int, dict[tuple[str, str], Times]], contender: str) -> dict[int, float]:
    """Return bytes -> how many times as fast `contender` is as the best baseline in its run."""
    found = {nbytes: _best(runs[nbytes]) for nbytes in sorted(runs)}
    return {nbytes: best / times[contender] for nbytes, (best, _, times) in found.items()}


def _panel(ranks: int, ratios: dict[str, dict[int, float]]) -> Panel:
    sizes = sorted(ratios["call"])
    lines = [
        Line(list(ratios[name].items()), colour, words, has_dots=True)
        for name, (colour, words) in SHOWN.items()
    ]
    lines.append(Line([(sizes[0], 1), (sizes[-1], 1)], INK, "fastest baseline", width=1.5))
    every = [1.0, *(ratio for line in ratios.values() for ratio in line.values())]
    x = powers_of_two(sizes, size_text, most=5)
    y = powers_of_two([min(every), 1.05 * max(every)], lambda times: f"{times}x")
    return Panel(f"{ranks} ranks: times the speed of the fastest baseline", x, y, lines)


if __name__ == "__main__":
    main()
