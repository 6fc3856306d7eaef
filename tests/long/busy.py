"""Run the tests that start jobs or measure time beside processes that keep every core busy.

    python -m tests.long.busy --times 5 --out bench_results/busy.json
    python -m tests.long.busy --ci CHECKOUT --out bench_results/busy.json

Starts a busy loop for each core, then runs the tests again and again, or once all that `.ci/run`
of another checkout runs.  Exits with 1 if a test fails: no test may depend on how busy the machine
is.
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
from ringreduce.system.cores import usable
from tests.long.faults import record
from tests.support.mpi import ROOT

CLOCKS = ["calls", "control", "launch", "point_to_point"]
CLOCKS += ["recovery", "rendezvous", "shm", "transports"]
"""Packages whose tests start jobs, or wait."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--times", type=int, default=5, help="runs of all these tests")
    parser.add_argument("--ci", type=Path, help="a checkout, of which to run .ci/run once instead")
    parser.add_argument("--out", type=Path, help="where to record the runs, as JSON")
    options = parser.parse_args(argv)
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(usable())]
    how = "--ci CHECKOUT" if options.ci else f"--times {options.times}"
    origin = environment(f"python -m tests.long.busy {how}")
    cases = [["jobs", *tests("full and mpi")], ["clocks", *tests("full and not mpi", *CLOCKS)]]
    if options.ci:
        cases, options.times = [[".ci/run", str(options.ci / ".ci/run")]], 1
    rows = []
    try:
        for turn in range(options.times):
            for name, *command in cases:
                rows.append({**origin, "tests": name, "turn": turn, **run(command)})
                print(json.dumps(rows[-1]), flush=True)
    finally:
        for loop in loops:
            loop.kill()
    if options.out:
        record(options.out, rows, ("cpu", "mpi", "tests", "turn"))
    return int(any(row["failed"] for row in rows))


def tests(marks: str, *folders: str) -> list[str]:
    """Return the command that runs tests on four workers."""
    words = ["-q", "-n", "4", "--dist", "loadfile", "-m", marks, *(f"tests/{f}" for f in folders)]
    return [sys.executable, "-m", "pytest", *words]


def run(command: Sequence[str]) -> dict[str, object]:
    """Run a command.  Return how many tests passed, which failed, and the seconds."""
    begin = time.monotonic()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.M)
    if done.returncode:
        print(done.stdout, done.stderr, sep="\n", file=sys.stderr)
        failed = failed or ["the command failed"]
    return {
        "passed": sum(map(int, re.findall(r"(\d+) passed", done.stdout))),
        "failed": failed,
        "seconds": round(time.monotonic() - begin),
    }


if __name__ == "__main__":
    sys.exit(main())
