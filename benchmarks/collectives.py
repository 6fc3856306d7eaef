"""Every other collective on one host beside Open MPI's, MPICH's and Intel MPI's own.

    python -m benchmarks.collectives [--environments FOLDER] [--ranks 2 4]

Makes an environment for each MPI, runs ``ringreduce bench`` in it for each collective, and writes
``bench_results/collectives.jsonl``.  Then, or with ``--draw`` at once, prints a table for each
number of ranks: how many times as fast as the fastest MPI, in that MPI's own run.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import environments
from benchmarks.rows import RESULTS, replace

NAME = "collectives"
MEASURED = ("reduce_scatter", "all_gather", "broadcast", "reduce", "all_to_all", "barrier")
_FLAGS = ("-b", "8", "-e", "16M", "-f", "8", "-n", "40")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    environments.add_options(parser, (2, 4))
    parser.add_argument("--collectives", nargs="+", default=MEASURED, choices=MEASURED)
    options = parser.parse_args()
    if not options.draw:
        for ranks, mpi, level in environments.runs(options):
            for collective in options.collectives:
                _measure(options.environments, mpi, ranks, level, collective)
    rows = [json.loads(line) for line in (RESULTS / f"{NAME}.jsonl").read_text().splitlines()]
    for ranks in sorted({row["ranks"] for row in rows}):
        print(f"\n{ranks} ranks:\n\n{_table([row for row in rows if row['ranks'] == ranks])}")


def _measure(folder: Path, mpi: str, ranks: int, level: str, collective: str) -> None:
    print(f"=== {collective}, {mpi}, {ranks} ranks, thread level {level}", flush=True)
    flags = ["--collective", collective, *_FLAGS]
    rows = environments.bench(folder, mpi, ranks, level, flags)
    for row in rows:
        row["benchmark"] = NAME
    replace(NAME, rows, same=("mpi_wheel", "ranks", "thread_level", "collective"))


def _table(rows: Sequence[dict[str, Any]]) -> str:
    from ringreduce.bench.plot import size_text  # not before the runs: it starts MPI

    runs: dict[tuple[str, int], dict[tuple[str, str], dict[str, float]]]
    runs = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        times = runs[row["collective"], row["bytes"]][row["mpi_wheel"], row["thread_level"]]
        name = row["contender"]
        times[name] = min(times.get(name, float("inf")), row["median_us"])
    # With 4 ranks of float32 the least that can be divided is 16 B, and stands as such.
    sizes = sorted({nbytes for name, nbytes in runs if name != "barrier"})
    heads = " | ".join(map(size_text, sizes))
    lines = [f"| collective | {heads} | geometric mean |", "|" + "---|" * (len(sizes) + 2)]
    for collective in MEASURED:
        ratios = {}
        for (name, nbytes), of in runs.items():
            if name == collective:
                fastest = min(of.values(), key=lambda times: times["MPI"])
                ratios[nbytes] = fastest["MPI"] / fastest["ringreduce"]
        if not ratios:
            continue
        cells = [f"{ratios[size]:.2f}" if size in ratios else "" for size in sizes]
        mean = statistics.geometric_mean(ratios.values())
        lines.append(f"| {collective} | {' | '.join(cells)} | {mean:.2f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
