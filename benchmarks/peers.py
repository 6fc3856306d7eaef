"""All-reduce beside every baseline that one host has: Open MPI, MPICH, Intel MPI, and Gloo.

    python -m benchmarks.peers [--environments FOLDER] [--ranks 2 4] [--torch torch]

Makes an environment for each MPI, runs ``ringreduce bench`` in it at MPI's default thread level and
at `serialized` (not with more ranks than cores: there MPICH spins without yielding, and each of its
calls takes as long as the scheduler lets it), and writes ``bench_results/all_reduce.jsonl``.  Then,
or with ``--draw`` at once, draws ``docs/bus_bandwidth.svg`` and prints the tables of the pages.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks import environments
from benchmarks.rows import RESULTS, replace
from ringreduce.bench.collectives import OURS
from ringreduce.picture.chart import Line, Panel, chart
from ringreduce.picture.scales import linear, powers_of_two, size_text
from ringreduce.picture.style import BLUE, DASHED, DOTTED, GREEN, ORANGE

NAME = "all_reduce"
PICTURE = environments.ROOT / "docs" / "bus_bandwidth.svg"
FLAGS = ("-b", "8", "-e", "128M", "-f", "4", "--iters", "40")
_SHOWN = (8, 2 << 10, 32 << 10, 512 << 10, 8 << 20, 128 << 20)
"""Sizes of the table, bytes."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    environments.add_options(parser, (2, 4))
    options = parser.parse_args()
    if not options.draw:
        for ranks, mpi, level in environments.runs(options):
            _measure(options, mpi, ranks, level)
    rows = [json.loads(line) for line in (RESULTS / f"{NAME}.jsonl").read_text().splitlines()]
    measured = sorted({row["ranks"] for row in rows})
    runs = {ranks: _runs([row for row in rows if row["ranks"] == ranks]) for ranks in measured}
    PICTURE.write_text(picture(runs, max(rows, key=lambda row: row["cores"])), encoding="utf-8")
    for ranks, of in runs.items():
        print(f"\n{ranks} ranks:\n\n{_table(of)}")


def _measure(options: argparse.Namespace, mpi: str, ranks: int, level: str) -> None:
    print(f"\n=== {mpi}, {ranks} ranks, thread level {level}", flush=True)
    run = ["bench", "--ranks", str(ranks), *FLAGS, "--json"]
    rows = environments.measured(options, mpi, level, run)
    for row in rows:
        row["benchmark"] = NAME
    replace(NAME, rows, same=("mpi_wheel", "ranks", "thread_level"))


Run = dict[str, dict[int, float]]
"""Contender -> bytes -> microseconds, in or out of place, whichever is faster."""


def _runs(rows: Sequence[dict[str, Any]]) -> dict[str, Run]:
    """MPI -> the run at the thread level at which it is faster, by the geometric mean."""
    levels: dict[str, dict[str, Run]] = {}
    mpi_of = {wheel: mpi for mpi, wheel in environments.WHEELS.items()}
    for row in rows:
        run = levels.setdefault(mpi_of[row["mpi_wheel"]], {}).setdefault(row["thread_level"], {})
        series = run.setdefault(row["contender"], {})
        series[row["bytes"]] = min(series.get(row["bytes"], float("inf")), row["median_us"])
    return {
        mpi: min(runs.values(), key=lambda run: statistics.geometric_mean(run["MPI"].values()))
        for mpi, runs in levels.items()
    }


def _table(runs: dict[str, Run]) -> str:
    heads = " | ".join(f"over {mpi} / its own" for mpi in runs)
    lines = [f"| size | {heads} | Gloo | the fastest |", "|" + "---|" * (len(runs) + 3)]
    for nbytes in _SHOWN:
        pairs = [
            f"{_microseconds(run[OURS][nbytes])} / {_microseconds(run['MPI'][nbytes])}"
            for run in runs.values()
        ]
        gloo = min(run["Gloo"][nbytes] for run in runs.values())
        all_times = {"Gloo": gloo}
        for mpi, run in runs.items():
            all_times |= {f"ours over {mpi}": run[OURS][nbytes], mpi: run["MPI"][nbytes]}
        fastest = min(all_times, key=lambda name: all_times[name])
        cells = " | ".join(pairs)
        lines.append(f"| {size_text(nbytes)} | {cells} | {_microseconds(gloo)} | {fastest} |")
    return "\n".join(lines)


def _microseconds(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def picture(runs_of: dict[int, dict[str, Run]], row: dict[str, Any]) -> str:
    """Return the picture of ranks -> MPI -> run, as SVG; `row` says where it was measured."""
    panels, ahead, all_sizes = [], 0, 0
    for mpi in next(iter(runs_of.values())):
        for ranks, runs in runs_of.items():
            panels.append(_panel(mpi, ranks, runs[mpi]))
            ours, own = runs[mpi][OURS], runs[mpi]["MPI"]
            ahead += sum(ours[nbytes] < own[nbytes] for nbytes in ours)
            all_sizes += len(ours)
    sizes = [n for runs in runs_of.values() for run in runs.values() for n in run[OURS]]
    facts = (
        f"All-reduce of float32 on one host, from {size_text(min(sizes))} to "
        f"{size_text(max(sizes))}. {row['cpu']}, {row['cores']} cores, {row['date']}; "
        f"bench_results/{NAME}.jsonl."
    )
    title = (
        f"ringreduce over an MPI is faster than that MPI's own all-reduce in {ahead} of "
        f"{all_sizes} cases"
    )
    return chart(title, facts, panels, columns=len(runs_of), panel_height=150)


def _panel(mpi: str, ranks: int, run: Run) -> Panel:
    factor = 2 * (ranks - 1) / ranks

    def rates(name: str) -> list[tuple[float, float]]:
        return [(nbytes, factor * nbytes / us / 1e3) for nbytes, us in sorted(run[name].items())]

    lines = [
        Line(rates(OURS), BLUE, OURS, width=2.4, has_dots=True),
        Line(rates("MPI"), ORANGE, f"{mpi}'s own", dashes=DASHED),
        Line(rates("Gloo"), GREEN, "Gloo", dashes=DOTTED),
    ]
    x = powers_of_two(run[OURS], size_text, most=5)
    y = linear([0, *(rate for line in lines for _, rate in line.points)])
    return Panel(f"{mpi}, {ranks} ranks: bus bandwidth, GB/s", x, y, lines)


if __name__ == "__main__":
    main()
