"""Run many calls through shared memory with random delays, under the interpreter's MPI.

    python -m tests.long.rounds --calls 100000 --seed 1 --out bench_results/rounds.json

Calls of random collectives and sizes among 2, 3 and 4 ranks, with ordinary and registered
arrays, staged and single-copy.  Exits with 1 if any result was wrong or a job did not end.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.long.faults import record
from tests.support.mpi import MpiJobs

RANKS = (2, 3, 4)
PARTS = 4
"""Jobs for each number of ranks, each with settings of its own."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=100_000, help="in all")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="where to record the run, as JSON")
    options = parser.parse_args(argv)
    arguments = " ".join(sys.argv[1:] if argv is None else argv)
    calls = rounds = wrong = 0
    with tempfile.TemporaryDirectory() as name:
        jobs = MpiJobs(Path(name))
        command = f"python -m tests.long.rounds {arguments}".strip()
        (where, *_) = jobs.run_ok("call", 1, "benchmarks.rows:environment", command)
        del where["ranks"]
        started = time.monotonic()
        for ranks in RANKS:
            for part in range(PARTS):
                count = -(-options.calls // (len(RANKS) * PARTS))
                seed = 100 * options.seed + part
                done = jobs.run_ok(
                    "delayed_rounds", ranks, str(count), str(seed), timeout_s=60 + count / 50
                )
                calls += count
                rounds += done[0]["rounds"]
                wrong += sum(each["wrong"] for each in done)
        seconds = round(time.monotonic() - started, 1)
    row = {"proof": "rounds", **where, "seed": options.seed, "ranks": list(RANKS)}
    row |= {"calls": calls, "rounds": rounds, "wrong": wrong, "seconds": seconds}
    print(json.dumps(row), flush=True)
    if options.out:
        record(options.out, [row])
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
