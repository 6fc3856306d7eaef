"""Every collective on one host beside Open MPI's, MPICH's and Intel MPI's own, two ways.

    python -m benchmarks.collectives [--environments FOLDER] [--ranks 2 4] [--factor 8]

Makes an environment for each MPI, runs `benchmarks.collectives_run` in it at each thread level,
and writes ``bench_results/collectives.jsonl``.  A call is timed in two ways:

* after a barrier, from the entry of the last rank to the exit of the last rank;
* in loops of 100 calls, where ranks that wait for nobody run ahead of the others.

Then, or with ``--draw`` at once, prints a table for each number of ranks and each way: how many
times as fast as the fastest MPI, in that MPI's own run.  After a barrier the last column is the
mean from the entry of the first rank.  With more ranks than cores the two means differ: the second
one counts the work before the last rank gets a core as well.
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
from ringreduce.picture.scales import size_text

NAME = "collectives"
TARGETED = (
    *("reduce_scatter", "all_gather", "gather", "scatter", "broadcast", "reduce", "all_to_all"),
    "barrier",
)
MEASURED = (*TARGETED, "all_reduce")
"""All-reduce is measured for orientation: `benchmarks.one_host` has its targets."""
AFTER_A_BARRIER, IN_LOOPS = "after a barrier", "in loops of 100"
WAYS = (AFTER_A_BARRIER, IN_LOOPS)
_TARGETS = {2: 1.0, 4: 1.2}
"""Ranks -> geometric mean that each collective is to reach after a barrier."""
_LOWEST = 0.7
"""The ratio that each single size is to reach after a barrier."""
_LEAST_BYTES, _MOST_BYTES = 8, 16 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    environments.add_options(parser, (2, 4))
    parser.add_argument("--collectives", nargs="+", default=MEASURED, choices=MEASURED)
    parser.add_argument("--factor", type=int, default=8, help="from size to size")
    parser.add_argument("--smallest", type=int, default=_LEAST_BYTES, help="bytes")
    parser.add_argument("--largest", type=int, default=_MOST_BYTES, help="bytes")
    options = parser.parse_args()
    if not options.draw:
        for ranks, mpi, level in environments.runs(options):
            for collective in options.collectives:
                _measure(options, mpi, ranks, level, collective)
    rows = [json.loads(line) for line in (RESULTS / f"{NAME}.jsonl").read_text().splitlines()]
    print(summary(rows))


def _measure(
    options: argparse.Namespace, mpi: str, ranks: int, level: str, collective: str
) -> None:
    print(f"=== {collective}, {mpi}, {ranks} ranks, thread level {level}", flush=True)
    sizes = [options.smallest]
    while sizes[-1] * options.factor <= options.largest:
        sizes.append(sizes[-1] * options.factor)
    run = ["run", "-n", str(ranks), "-m", "benchmarks.collectives_run"]
    rows = environments.measured(options, mpi, level, run, collective, *map(str, sizes))
    # Both ways of a size are measured together, and take the place of all older rows of that size.
    replace(NAME, rows, same=("mpi_wheel", "ranks", "thread_level", "collective", "bytes"))


Runs = dict[int, dict[tuple[str, str], dict[str, float]]]
"""Bytes -> (wheel, thread level) -> contender -> microseconds, in the faster place."""


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """A table for each number of ranks and each way."""
    texts = []
    for ranks in sorted({row["ranks"] for row in rows}):
        for way in WAYS:
            chosen = [row for row in rows if (row["ranks"], row.get("way")) == (ranks, way)]
            if chosen:
                texts.append(f"{ranks} ranks, each call {way}:\n\n{_table(chosen, ranks, way)}")
    return "\n\n".join(texts)


def _table(rows: Sequence[dict[str, Any]], ranks: int, way: str) -> str:
    ratios = {name: ratio for name in MEASURED if (ratio := _ratios(_runs(rows, name)))}
    # With 4 ranks of float32 the least that can be divided is 16 B, and has a column of its own.
    sizes = sorted({size for name, of in ratios.items() if name != "barrier" for size in of})
    heads = ["collective", *map(size_text, sizes), "geometric mean", "lowest"]
    if way == AFTER_A_BARRIER:
        heads.append("mean from the first entry")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    missed = []
    for name, of in ratios.items():
        cells = [f"{of[size]:.2f}" if size in of else "" for size in sizes]
        mean, lowest = statistics.geometric_mean(of.values()), min(of, key=lambda size: of[size])
        where = f"{of[lowest]:.2f}" if name == "barrier" else _at(of, lowest)
        cells = [name, *cells, f"{mean:.2f}", where]
        if way == AFTER_A_BARRIER:
            longer = _ratios(_runs(rows, name, "from_first_us"))
            cells.append(f"{statistics.geometric_mean(longer.values()):.2f}")
        lines.append(f"| {' | '.join(cells)} |")
        if name in TARGETED and mean < _TARGETS.get(ranks, 0):
            missed.append(f"{name}: mean {mean:.2f}")
        if name in TARGETED and of[lowest] < _LOWEST:
            missed.append(f"{name}: {where}")
    if way == AFTER_A_BARRIER and ranks in _TARGETS:
        text = "; ".join(missed) or "nothing"
        lines += ["", f"targets: mean {_TARGETS[ranks]}, lowest {_LOWEST}; missed: {text}"]
    return "\n".join(lines)


def _at(ratios: dict[int, float], size: int) -> str:
    return f"{ratios[size]:.2f} at {size_text(size)}"


def _runs(rows: Sequence[dict[str, Any]], collective: str, figure: str = "median_us") -> Runs:
    runs: Runs = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        if row["collective"] == collective:
            times = runs[row["bytes"]][row["mpi_wheel"], row["thread_level"]]
            name = row["contender"]
            times[name] = min(times.get(name, float("inf")), row[figure])
    return runs


def _ratios(runs: Runs) -> dict[int, float]:
    """Bytes -> how many times as fast ours is as the fastest MPI, in that MPI's own run."""
    ratios = {}
    for nbytes, of in runs.items():
        fastest = min(of.values(), key=lambda times: times["MPI"])
        ratios[nbytes] = fastest["MPI"] / fastest["ringreduce"]
    return ratios


if __name__ == "__main__":
    main()
