"""How long the first call with a new size waits for the choice of ``algorithm="auto"``.

    python -m benchmarks.first_choice [--repeats 3]

Each case runs in a process of its own.  It times the first `planning.select.choose` after the
imports, and for 100,000 ranks the command `ringreduce explain`, with the start of Python.  Writes
the median of each case to ``bench_results/first_choice.jsonl``.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Iterator
from statistics import median

from benchmarks.rows import environment, replace
from ringreduce.config import Config
from ringreduce.planning.select import choose
from ringreduce.system.topology import parse_nodes

NODES = (
    *("12x8", "24x4", "96x1", "1x96", "16x8", "2x64", "128x1", "1x128", "32x8", "4x64", "256x1"),
    *("125x8", "1000x1", "128x8", "16x64", "8x128", "1024x1", "1x1024"),
)
"""Nodes, and ranks on each."""
BYTES = (8, 64 << 10, 1 << 20, 64 << 20, 1 << 30)
LARGE = "12500x8"
LARGE_BYTES = {"8": 8, "1M": 1 << 20, "1G": 1 << 30}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is not None:
        print(*_time_one(*options.one))
        return
    command = f"python -m benchmarks.first_choice {' '.join(sys.argv[1:])}".strip()
    where, rows = environment(command), []
    for nodes, nbytes, program in _cases():
        times = []
        for _ in range(options.repeats):
            begin = time.perf_counter()
            run = subprocess.run([sys.executable, *program], stdout=subprocess.PIPE, check=True)
            took_s = time.perf_counter() - begin
            times.append(took_s if nodes == LARGE else float(run.stdout.split()[0]))
        row = {"benchmark": "first_choice", "nodes": nodes, "bytes": nbytes}
        row |= {"seconds": round(median(times), 4), "longest_s": round(max(times), 4)}
        rows.append(row | where)
        print(*row.values(), flush=True)
    replace("first_choice", rows, same=("nodes", "bytes"))


def _cases() -> Iterator[tuple[str, int, list[str]]]:
    """Yield the nodes and bytes of each case, and the arguments of Python that time it."""
    for nodes in NODES:
        for nbytes in BYTES:
            yield nodes, nbytes, ["-m", "benchmarks.first_choice", "--one", nodes, str(nbytes)]
    explain = ["-m", "ringreduce", "explain", "--nodes", LARGE, "--link", "400gbit,2us", "--bytes"]
    for text, nbytes in LARGE_BYTES.items():
        yield LARGE, nbytes, [*explain, text]


def _time_one(nodes: str, nbytes: str) -> tuple[float, str]:
    count, each = map(int, nodes.split("x"))
    layout = parse_nodes((each,) * count, count * each)
    begin = time.perf_counter()
    choice = choose("all_reduce", layout, int(nbytes), Config())
    return time.perf_counter() - begin, choice.algorithm


if __name__ == "__main__":
    main()
