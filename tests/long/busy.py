"""Run the tests that start jobs or measure time beside processes that keep every core busy.

    python -m tests.long.busy --times 5 --out bench_results/busy.json

Starts a busy loop for each core, then runs the tests again and again.  Exits with 1 if a test
fails: no test may depend on how busy the machine is.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from ringreduce.bench.environment import environment
from ringreduce.cores import usable
from tests.long.faults import record
from tests.support.mpi import ROOT

CLOCKS = ["calls", "control", "launch", "point_to_point"]
CLOCKS += ["recovery", "rendezvous", "shm", "transports"]
"""Packages whose tests start jobs, or wait."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--times", type=int, default=5, help="runs of all these tests")
    parser.add_argument("--out", type=Path, help="where to record the runs, as JSON")
    options = parser.parse_args(argv)
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(usable())]
    origin = environment(f"python -m tests.long.busy --times {options.times}")
    rows = []
    try:
        for turn in range(options.times):
            for name, *words in (["jobs", "full and mpi"], ["clocks", "full and not mpi", *CLOCKS]):
                rows.append({**origin, "tests": name, "turn": turn, **run(*words)})
                print(json.dumps(rows[-1]), flush=True)
    finally:
        for loop in loops:
            loop.kill()
    if options.out:
        record(options.out, rows, ("cpu", "mpi", "tests", "turn"))
    return int(any(row["failed"] for row in rows))


def run(marks: str, *folders: str) -> dict[str, object]:
    """Run tests on four workers.  Return how many passed, which failed, and the seconds."""
    words = ["-q", "-n", "4", "--dist", "loadfile", "-m", marks, *(f"tests/{f}" for f in folders)]
    begin = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words], cwd=ROOT, capture_output=True, text=True
    )
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.M)
    passed = re.search(r"(\d+) passed", done.stdout)
    if done.returncode:
        print(done.stdout, file=sys.stderr)
        failed = failed or ["no test ran to its end"]
    return {
        "passed": int(passed[1]) if passed else 0,
        "failed": failed,
        "seconds": round(time.monotonic() - begin),
    }


if __name__ == "__main__":
    sys.exit(main())
