"""Let a host fail in the middle of calls, with the MPI of this environment and without one.

    python -m tests.long.hosts --times 40 --seed 1 --record

Each job has two ranks on one host, and one on another, which are network namespaces.  The other
host is killed, stopped, or its link goes down, while calls of one compiled program or of several
slices run.  The ranks of the first host must name the lost rank; if the host is killed, an MPI ends
the whole job.  Counts jobs with another outcome, jobs that did not end, and jobs of which a process
is left.  Exits with 1 if there was any.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections import Counter
from pathlib import Path

from benchmarks import rows
from tests.support.hosts import JobsOnHosts, jobs_on_hosts
from tests.support.mpi import alive_in_the_end
from tests.support.over_hosts import LONG, LONG_S, SHORT

ERRORS = {
    "kill": "PeerLostError",
    "stop": "PeerTimeoutError",
    "disconnect": "PeerTimeoutError",
}
_TIMEOUT_S = 1.0
_LATEST_S = 0.3
"""Seconds after the first call within which the host fails."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.long.hosts")
    parser.add_argument("--times", type=int, default=40, help="jobs of each kind")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--record", action="store_true", help="in bench_results")
    options = parser.parse_args()
    found = []
    with tempfile.TemporaryDirectory() as folder, jobs_on_hosts(Path(folder)) as plain:
        (Path(folder) / "mpi").mkdir()
        over_mpi = plain.by_mpi(Path(folder) / "mpi")
        command = f"python -m tests.long.hosts --times {options.times}"
        (where, *_) = over_mpi.run_ok("call", 3, "benchmarks.rows:environment", command)
        for way, jobs in (("MPI", over_mpi), ("none", plain)):
            for fault in ERRORS:
                wrong = Counter(
                    each
                    for index in range(options.times)
                    for each in wrong_of(jobs, way, fault, f"{options.seed}-{fault}-{index}")
                )
                row = {"test": "hosts", "fault": fault, "connects": way, "jobs": options.times}
                row |= {name: wrong[name] for name in ("outcomes", "hangs", "left")}
                found.append({**row, **where, "ranks": 3, "seed": options.seed})
                print(json.dumps(found[-1]), flush=True)
        over_mpi.sweep()
    if options.record:
        rows.replace("host_faults", found, same=("test", "fault", "connects", "mpi"))
    return int(any(row[name] for row in found for name in ("outcomes", "hangs", "left")))


def wrong_of(jobs: JobsOnHosts, way: str, fault: str, seed: str) -> list[str]:
    """Run a job; return what was wrong."""
    rng = random.Random(seed)
    ends = way == "MPI" and fault == "kill"
    wanted = (None, "PeerLostError") if ends else (ERRORS[fault],)
    count, after_s = rng.choice((SHORT, LONG)), rng.uniform(0, _LATEST_S)
    timeout_s = LONG_S if fault == "kill" else _TIMEOUT_S
    try:
        found = jobs.let_fail(fault, timeout_s, count, after_s)
    except AssertionError as error:
        print(f"{seed}: {error}", file=sys.stderr)
        return ["hangs"]
    errors = [each and each["error"] for each in found]
    named = all(each is None or each["ranks"] == [2] for each in found)
    wrong = ["outcomes"] * (not named or any(error not in wanted for error in errors))
    wrong += ["left"] * (alive_in_the_end(jobs.processes(1) + jobs.processes(2)) != [])
    if wrong:
        print(f"{seed}: {wrong}\n{found}", file=sys.stderr)
    return wrong


if __name__ == "__main__":
    sys.exit(main())
