"""Kill servers and workers of a parameter store at random moments, and within updates.

    python -m tests.long.servers --times 200 --seed 1 --record

Jobs run without MPI.  Servers with replicas lose all but one, perhaps with a worker; without
replicas a worker is killed.  A job that ends before its first kill is repeated with earlier kills.

Counts what must not be: jobs that end with an error, or not at all; numbers that are not in the
parameters exactly once; ranks that are said to be lost and are not; replicas that differ.  Exits
with 1 if any was seen, or if the median of the pauses is longer than half a second.  A pause lasts
from the kill to the end of the next push of the slowest worker.

Then measures how busy a server is whose worker sleeps: the share of a core, at most 20 %.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import rows
from tests.support.mpi import Finished, MpiJobs

MODES: tuple[dict[str, Any], ...] = (
    {"staleness": 0},
    {"staleness": 0, "backup_workers": 1},
    {"staleness": 2},
    {"staleness": None},
)
COUNT = 150
LATEST_S = 0.4
"""Seconds from the beginning to a kill, at most."""
LIMIT_S = 100.0
"""Seconds; a job that takes longer hangs."""
PAUSE_S = 0.5
IDLE = {"servers": 1, "count": 1, "victims": {}, "idle_s": 10.0}
BUSY_SHARE = 0.2
COUNTED = ("codes", "hangs", "wrong_numbers", "wrong_losses", "different_replicas")


def drawn(rng: random.Random) -> tuple[int, dict[str, Any]]:
    """Return how many ranks a job has, and its store with its victims."""
    workers, servers = rng.choice((2, 3)), rng.choice((1, 2, 3))
    replicas = rng.randint(1, servers)
    victims = rng.sample(range(workers, workers + servers), replicas - 1)
    if not victims or rng.random() < 0.3:
        victims.append(rng.randrange(workers))
    moments: dict[int, Any] = {}
    for rank in victims:
        moments[rank] = rng.uniform(0.01, LATEST_S)
        if rank >= workers and rng.random() < 0.5:
            moments[rank] = ["update", rng.randint(1, 2 * COUNT)]
    what = {"servers": servers, "replicas": replicas, **rng.choice(MODES)}
    return workers + servers, {**what, "count": COUNT, "victims": moments}


def sooner(moment: Any) -> Any:
    """Return half of a moment: of its seconds, or of its number of updates."""
    return moment / 2 if isinstance(moment, float) else ["update", max(1, moment[1] // 2)]


def judge(done: Finished, how: dict[str, Any]) -> list[str]:
    """Return what was wrong, of `COUNTED`."""
    killed = {rank for rank, found in enumerate(done.results) if "killed_at" in (found or {})}
    living = [found or {} for rank, found in enumerate(done.results) if rank not in killed]
    wrong = ["codes"] * (done.returncode != 0)
    wrong += ["wrong_numbers"] * any(found.get("wrong") for found in living)
    wrong += ["wrong_losses"] * any(
        not killed.issuperset(found.get("lost", ())) for found in living
    )
    first = len(done.results) - how["servers"]
    if min(killed, default=first) >= first:  # else a push of that worker may be on some alone
        of_servers = [found.get("replicas", {}).items() for found in living]
        pairs = {pair for replicas in of_servers for pair in replicas}
        wrong += ["different_replicas"] * (len(pairs) > how["servers"])
    return wrong


def pause_of(done: Finished) -> float | None:
    """Return the seconds from the last kill to the end of the next push of the slowest worker."""
    results = [found or {} for found in done.results]
    killed_at = max((found["killed_at"] for found in results if "killed_at" in found), default=None)
    if killed_at is None:
        return None
    ends = [
        [end for began, end in found.get("pushes", ()) if began > killed_at] for found in results
    ]
    return max((min(each) - killed_at for each in ends if each), default=None)


def waiting(command: str) -> dict[str, Any]:
    """Measure the share of a core of a server that waits, over shared memory and over MPI."""
    with tempfile.TemporaryDirectory() as folder:
        jobs = MpiJobs(Path(folder))
        (where, *_) = jobs.run_ok("call", 1, "benchmarks.rows:environment", command)
        shares = {}
        for name, transport in (("busy_share_shared_memory", "auto"), ("busy_share_mpi", "mpi")):
            _, server = jobs.run_ok("servers", 2, json.dumps(IDLE | {"transport": transport}))
            shares[name] = server["busy"]
    return {"test": "a server that waits", **shares, **where, "ranks": 2}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.long.servers")
    parser.add_argument("--times", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--record", action="store_true", help="into bench_results/servers.jsonl")
    options = parser.parse_args(argv)
    wrong, pauses, kills = Counter[str](), [], 0
    with tempfile.TemporaryDirectory() as folder:
        jobs = MpiJobs(Path(folder), without_mpi=True)
        command = f"python -m tests.long.servers --times {options.times}"
        (where, *_) = jobs.run_ok("call", 1, "benchmarks.rows:environment", command)
        for index in range(options.times):
            ranks, how = drawn(random.Random(f"{options.seed}-{index}"))
            killed = 0
            while True:
                try:
                    done = jobs.finish(jobs.start("servers", ranks, json.dumps(how)), LIMIT_S)
                    found = judge(done, how)
                    killed = sum("killed_at" in (each or {}) for each in done.results)
                    pauses += [pause] if (pause := pause_of(done)) is not None else []
                    output = f"{done.results}\n{done.output}"
                except AssertionError as error:
                    found, output = ["hangs"], str(error)
                if killed or found:
                    break
                how["victims"] = {rank: sooner(at) for rank, at in how["victims"].items()}
            kills += killed
            wrong.update(found)
            if found:
                print(f"{index}: {', '.join(found)}\n{how}\n{output}", file=sys.stderr)
    row = {
        "test": "servers",
        "jobs": options.times,
        "kills": kills,
        "pause_median_s": round(statistics.median(pauses), 3),
        "pause_longest_s": round(max(pauses), 3),
        **{name: wrong[name] for name in COUNTED},
        **where,
        "seed": options.seed,
    }
    idle = waiting(command)
    print(json.dumps([row, idle], indent=1))
    if options.record:
        rows.replace("servers", [row, idle], same=("test",))
    is_busy = max(idle["busy_share_shared_memory"], idle["busy_share_mpi"]) > BUSY_SHARE
    return int(bool(wrong) or row["pause_median_s"] > PAUSE_S or is_busy)


if __name__ == "__main__":
    sys.exit(main())
