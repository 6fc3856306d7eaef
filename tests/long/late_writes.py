"""Kill, stop and continue ranks that write to an array of a rank that has left the call.

    python -m tests.long.late_writes --times 200 --seed 1 --record

Each job has two ranks without MPI.  A rank is stopped while it writes, just before, or at any
moment.  The other rank's call raises, and it uses the memory of its array anew.  Counts jobs in
which a byte of that memory changed, in which the error was another one, or that did not end.  Exits
with 1 if there was any.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from benchmarks import rows
from tests.support.mpi import MpiJobs

ERRORS = {
    "killed": ("PeerLostError",),
    "stopped": ("PeerTimeoutError",),
    "continued": ("PeerTimeoutError",),
}
"""What becomes of the writer -> the errors that the other rank may get."""
WHERE = ("in a write", "before a write", "at any moment")
KINDS = ("registered", "ordinary")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.long.late_writes")
    parser.add_argument("--times", type=int, default=200, help="jobs of each kind")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--record", action="store_true", help="in bench_results")
    options = parser.parse_args(argv)
    found = []
    with tempfile.TemporaryDirectory() as folder:
        jobs = MpiJobs(Path(folder), without_mpi=True)
        command = f"python -m tests.long.late_writes --times {options.times}"
        (where, *_) = jobs.run_ok("call", 1, "benchmarks.rows:environment", command)
        for fate in ERRORS:
            wrong = Counter(
                each
                for index in range(options.times)
                for each in wrong_of(jobs, fate, f"{options.seed}-{fate}-{index}")
            )
            row = {"test": "late writes", "writer": fate, "jobs": options.times}
            row |= {name: wrong[name] for name in ("changed", "errors", "hangs")}
            found.append({**row, **where, "ranks": 2, "seed": options.seed})
            print(json.dumps(found[-1]), flush=True)
    if options.record:
        rows.replace("late_writes", found, same=("test", "writer"))
    return int(any(row["changed"] or row["errors"] or row["hangs"] for row in found))


def wrong_of(jobs: MpiJobs, fate: str, seed: str) -> list[str]:
    """Run a job; return what was wrong."""
    rng = random.Random(seed)
    try:
        done = jobs.run("late_writer", 2, rng.choice(WHERE), rng.choice(KINDS), fate, seed)
    except AssertionError as error:
        print(f"{seed}: {error}", file=sys.stderr)
        return ["hangs"]
    first = done.results[0] or {}
    wrong = ["changed"] * (first.get("changed") != 0)
    wrong += ["errors"] * (first.get("error") not in ERRORS[fate])
    if wrong:
        print(f"{seed}: {wrong}\n{done.results}\n{done.output}", file=sys.stderr)
    return wrong


if __name__ == "__main__":
    sys.exit(main())
