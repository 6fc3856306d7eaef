"""All-reduce beside every baseline that one host has: Open MPI, MPICH, Intel MPI, and Gloo.

    python -m benchmarks.peers [--environments FOLDER] [--ranks 2 4] [--torch torch]

Makes an environment for each MPI, runs ``ringreduce bench`` in it at MPI's default thread level and
at `serialized` (not with more ranks than cores: there MPICH spins without yielding, and each of its
calls takes as long as the scheduler lets it), and writes ``bench_results/all_reduce.jsonl``.  Then,
or with ``--draw`` at once, draws ``docs/all_reduce.png`` and prints the tables of the pages.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import environments
from benchmarks.rows import RESULTS, replace

NAME = "all_reduce"
PICTURE = environments.ROOT / "docs" / "all_reduce.png"
OURS = "ringreduce"
_FLAGS = ("-b", "8", "-e", "128M", "-f", "4", "-n", "40")
_COLOURS = {
    "Open MPI": "#d1572a",
    "MPICH": "#1f6feb",
    "Intel MPI": "#2da44e",
    "Gloo": "#7d4cdb",
}
_SHOWN = (8, 2 << 10, 32 << 10, 512 << 10, 8 << 20, 128 << 20)
"""Sizes of the table, bytes."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    environments.add_options(parser, (2, 4))
    options = parser.parse_args()
    if not options.draw:
        for ranks, mpi, level in environments.runs(options):
            _measure(options.environments, mpi, ranks, level)
    rows = [json.loads(line) for line in (RESULTS / f"{NAME}.jsonl").read_text().splitlines()]
    measured = sorted({row["ranks"] for row in rows})
    runs = {ranks: _runs([row for row in rows if row["ranks"] == ranks]) for ranks in measured}
    _draw(runs, max(rows, key=lambda row: row["cores"]))
    for ranks, of in runs.items():
        print(f"\n{ranks} ranks:\n\n{_table(of)}")


def _measure(folder: Path, mpi: str, ranks: int, level: str) -> None:
    print(f"\n=== {mpi}, {ranks} ranks, thread level {level}", flush=True)
    rows = environments.bench(folder, mpi, ranks, level, _FLAGS)
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
    from ringreduce.bench.plot import size_text  # not before the runs: it starts MPI

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


def _draw(runs_of: dict[int, dict[str, Run]], row: dict[str, Any]) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from ringreduce.bench.plot import dress

    figure = Figure(figsize=(11, 4.6), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(runs_of), squeeze=False)[0]
    for axes, (ranks, runs) in zip(panels, runs_of.items(), strict=True):
        sizes = sorted(next(iter(runs.values()))[OURS])

        def line(series: dict[int, float], axes: Any = axes, ranks: int = ranks, **style: Any):
            rates = [2 * (ranks - 1) / ranks * n / us / 1e3 for n, us in sorted(series.items())]
            axes.plot(sorted(series), rates, **style)

        for mpi, run in runs.items():
            ours = {"linewidth": 2.4, "marker": "o", "markersize": 4, "zorder": 3}
            line(run[OURS], color=_COLOURS[mpi], label=f"ringreduce over {mpi}", **ours)
        for mpi, run in runs.items():
            line(run["MPI"], color=_COLOURS[mpi], linestyle=(0, (4, 2)), label=f"{mpi}'s own")
        gloo = {n: min(run["Gloo"][n] for run in runs.values()) for n in sizes}
        line(gloo, color=_COLOURS["Gloo"], linestyle=(0, (1, 2)), label="Gloo")
        dress(axes, f"{ranks} ranks: bus bandwidth, GB/s", sizes)
        axes.set_ylim(bottom=0)
    panels[0].legend(frameon=False, fontsize=9, loc="upper left")
    facts = f"{row['cpu']}, {row['cores']} cores, {row['date']}; bench_results/{NAME}.jsonl"
    figure.supxlabel(f"all-reduce of float32; {facts}", x=0.01, ha="left", fontsize=8.5)
    figure.savefig(PICTURE)


if __name__ == "__main__":
    main()
