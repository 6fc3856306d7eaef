"""All-reduce beside every peer that one host has: Open MPI, MPICH, Intel MPI, and Gloo.

    python -m benchmarks.peers [--environments FOLDER] [--ranks 2 4] [--torch torch]

Makes an environment for each MPI, runs ``ringreduce bench`` in it at MPI's default thread level and
at `serialized` (not with more ranks than cores: MPICH then spins without yielding, and takes 0.2 s
for a barrier), and writes ``bench_results/all_reduce.jsonl``.  Then, or with ``--draw`` at once,
draws ``docs/all_reduce.png`` and prints the table of the README.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks import environments
from benchmarks.rows import RESULTS, replace

NAME = "all_reduce"
PICTURE = environments.ROOT / "docs" / "all_reduce.png"
LEVELS = {"multiple": {}, "serialized": {"MPI4PY_RC_THREAD_LEVEL": "serialized"}}
OURS = "ringreduce"
_FLAGS = ("-b", "8", "-e", "128M", "-f", "4", "-n", "40")
_COLOURS = {
    OURS: "#1f6feb",
    "Open MPI": "#d1572a",
    "MPICH": "#2da44e",
    "Intel MPI": "#bf8700",
    "Gloo": "#7d4cdb",
}
_SHOWN = (8, 2 << 10, 32 << 10, 512 << 10, 8 << 20, 128 << 20)
"""Sizes of the table, bytes."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--environments", type=Path, default=environments.ROOT / ".environments")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--torch", default="torch", help="what to install for Gloo")
    parser.add_argument("--draw", action="store_true", help="from the results that there are")
    options = parser.parse_args()
    if not options.draw:
        for mpi in environments.WHEELS:
            environments.make(options.environments, mpi, [options.torch])
        for ranks in options.ranks:
            for mpi in environments.WHEELS:
                for level in LEVELS if ranks <= len(os.sched_getaffinity(0)) else ["multiple"]:
                    _measure(options.environments, mpi, ranks, level)
    rows = [json.loads(line) for line in (RESULTS / f"{NAME}.jsonl").read_text().splitlines()]
    best = {ranks: _best(row for row in rows if row["ranks"] == ranks) for ranks in options.ranks}
    _draw(best, rows[-1])
    for ranks, times in best.items():
        print(f"\n{ranks} ranks:\n\n{_table(times)}")


def _measure(folder: Path, mpi: str, ranks: int, level: str) -> None:
    print(f"\n=== {mpi}, {ranks} ranks, thread level {level}", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "rows.jsonl"
        bench = ["ringreduce.cli", "bench", "--ranks", str(ranks), *_FLAGS, "--json", str(file)]
        subprocess.run(
            [environments.command(folder, mpi, "python"), "-m", *bench],
            env={**os.environ, **LEVELS[level], "OMP_NUM_THREADS": "1"},
            check=True,
        )
        rows = [json.loads(line) for line in file.read_text().splitlines()]
    typed = f"python -m benchmarks.peers --ranks {ranks}"
    for row in rows:
        row |= {"benchmark": NAME, "mpi_wheel": environments.WHEELS[mpi], "command": typed}
        row["thread_level"] = level
    replace(NAME, rows, same=("mpi_wheel", "ranks", "thread_level"))


Times = dict[str, dict[int, float]]
"""Contender -> bytes -> microseconds."""


def _best(rows: Iterable[dict[str, Any]]) -> Times:
    """Of every contender the best: of thread levels, places, and, ours and Gloo's, of MPIs."""
    mpi_of = {wheel: mpi for mpi, wheel in environments.WHEELS.items()}
    times: Times = {name: {} for name in _COLOURS}
    for row in rows:
        name = mpi_of[row["mpi_wheel"]] if row["contender"] == "MPI" else row["contender"]
        seen = times[name].get(row["bytes"], float("inf"))
        times[name][row["bytes"]] = min(seen, row["median_us"])
    return times


def _table(times: Times) -> str:
    lines = [
        f"| size | {' | '.join(times)} | times as fast as the best peer |",
        "|" + "---|" * (len(times) + 2),
    ]
    for nbytes in _SHOWN:
        peers = [series[nbytes] for name, series in times.items() if name != OURS]
        cells = " | ".join(_microseconds(series[nbytes]) for series in times.values())
        ratio = min(peers) / times[OURS][nbytes]
        lines.append(f"| {_size(nbytes)} | {cells} | {ratio:.2f} |")
    return "\n".join(lines)


def _microseconds(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def _size(nbytes: int) -> str:
    for unit, size in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= size:
            return f"{nbytes // size} {unit}"
    return f"{nbytes} B"


def _draw(best: dict[int, Times], row: dict[str, Any]) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from ringreduce.bench.plot import dress

    figure = Figure(figsize=(11, 4.6), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (ranks, times) in zip(
        figure.subplots(1, len(best), squeeze=False)[0], best.items(), strict=True
    ):
        for name, series in times.items():
            sizes = sorted(series)
            rate = [2 * (ranks - 1) / ranks * size / series[size] / 1e3 for size in sizes]
            axes.plot(
                sizes,
                rate,
                label=name,
                color=_COLOURS[name],
                linewidth=2.4 if name == OURS else 1.5,
                marker="o" if name == OURS else "",
                markersize=4,
                zorder=3 if name == OURS else 2,
            )
        dress(axes, f"{ranks} ranks: bus bandwidth, GB/s", sorted(times[OURS]))
        axes.set_ylim(bottom=0)
    figure.axes[0].legend(frameon=False, fontsize=9, loc="upper left")
    facts = f"{row['cpu']}, {row['cores']} cores, {row['date']}; bench_results/{NAME}.jsonl"
    figure.supxlabel(f"all-reduce of float32; {facts}", x=0.01, ha="left", fontsize=8.5)
    figure.savefig(PICTURE)


if __name__ == "__main__":
    main()
