"""Run `bench` and `train` on a pseudo-terminal, many times, under the interpreter's MPI.

    python -m tests.long.terminals --times 20 --out bench_results/terminals.json

Replays what each run wrote.  Counts the runs that end with a line in which progress and results are
mixed, the runs that never showed the live line, and the runs that did not end well.  Exits with 1
if there was any.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.long.faults import record
from tests.support.mpi import MpiJobs, environment
from tests.support.terminal import (
    BENCH,
    TRAIN,
    Screen,
    faults_of_bench,
    faults_of_training,
    on_a_terminal,
    ours,
)

COLUMNS = 110
RANKS = 2


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--times", type=int, default=20, help="runs of each command")
    parser.add_argument("--out", type=Path, help="where to record the runs, as JSON")
    options = parser.parse_args(argv)
    arguments = " ".join(sys.argv[1:] if argv is None else argv)
    faulty = {"bench": 0, "train": 0}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = f"python -m tests.long.terminals {arguments}".strip()
        (where, *_) = MpiJobs(folder).run_ok("call", 1, "benchmarks.rows:environment", command)
        del where["ranks"]
        started = time.monotonic()
        for _ in range(options.times):
            for run, faults_of in ((BENCH, faults_of_bench), (TRAIN, faults_of_training)):
                found = faults_of_run(run, faults_of, folder)
                faulty[run[0]] += bool(found)
                for fault in found:
                    print(f"{run[0]}: {fault}", flush=True)
    row = {"proof": "terminals", **where, "ranks": RANKS, "runs_of_each": options.times}
    row |= {f"faulty_{name}": count for name, count in faulty.items()}
    row["seconds"] = round(time.monotonic() - started, 1)
    print(json.dumps(row), flush=True)
    if options.out:
        record(options.out, [row])
    return int(any(faulty.values()))


def faults_of_run(
    run: Sequence[str], faults_of: Callable[[Screen], list[str]], folder: Path
) -> list[str]:
    """Return what is wrong with one run of `bench` or `train`."""
    code, said = on_a_terminal(ours(run, RANKS), COLUMNS, folder, environment())
    screen = Screen(COLUMNS)
    screen.feed(said)
    return faults_of(screen) if code == 0 else [f"exit code {code}: {said}"]


if __name__ == "__main__":
    sys.exit(main())
