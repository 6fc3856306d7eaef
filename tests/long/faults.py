"""Each kind of fault many times, at random moments of random calls.

    python -m tests.long.faults --times 50 --seed 1 --out bench_results/faults.json

The job runs under the MPI of the interpreter, or ``--without-mpi``.  A rank stops, is killed, never
calls, raises or exits; the others catch the error and return, or do not.  Counts what must not be:
jobs that end before the fault, or not at all; processes that are left; ranks that name the wrong
one; ranks whose errors differ; wrong results.  Exits with 1 if any was seen.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support.mpi import Finished, MpiJobs, with_environment

FAULTS = ("stop", "kill", "never", "raise", "exit")
ENDINGS = ("caught", "uncaught")
RANKS = (2, 3, 4)
STARTS = 3
NEVER_STARTED = ("listener thread failed to start", "internal_Init_thread")
"""Messages of Open MPI's mpiexec and of MPICH when they cannot start a job, which happens now and
then and is no fault of a rank."""
LIMIT_S = 30.0
"""Seconds; a job that takes longer hangs."""
LINGERING_S = 3.0
"""Seconds; a process that lives longer after the end of its job is left over."""
TOGETHER_S = 0.5
"""Within this time of each other all ranks raise."""
COUNTED = (
    "ended_before",
    "hangs",
    "left_over",
    "wrong_culprits",
    "differing_errors",
    "wrong_results",
)


def run_once(
    jobs: MpiJobs, how: str, ending: str, seed: str, transport: str = "auto"
) -> tuple[float, list[str], str]:
    """Seconds from the fault to the end of the job, what was wrong of `COUNTED`, and its output."""
    rng = random.Random(seed)
    ranks = rng.choice(RANKS)
    victim = rng.randrange(ranks)
    variables = {"TRANSPORT_OF_FAULTS": transport}
    for _ in range(STARTS):
        job = jobs.start("random_fault", ranks, seed, how, ending, str(victim), **variables)
        try:
            done = jobs.finish(job, LIMIT_S)
        except AssertionError as error:
            return LIMIT_S, ["hangs"], str(error)
        if not any(words in done.output for words in NEVER_STARTED):
            break
    ended_at = time.time()
    wrong = judge(done, how, victim)
    while left := with_environment(str(job.results)):
        if time.time() - ended_at > LINGERING_S:
            wrong.append("left_over")
            for pid in left:
                os.kill(pid, signal.SIGKILL)
            break
        time.sleep(0.02)
    failed_at = (done.results[victim] or {}).get("failed_at")
    if failed_at is None:
        wrong.append("ended_before")
    return ended_at - (failed_at or ended_at), wrong, f"{done.results}\n{done.output}"


def judge(done: Finished, how: str, victim: int) -> list[str]:
    """The wrong results and errors of ranks.  A rank that ended with its job has none."""
    results = [r for rank, r in enumerate(done.results) if rank != victim and r is not None]
    wrong = ["wrong_results"] * any("wrong_result" in r for r in results)
    errors = [r for r in results if "error" in r]
    if not errors:
        return wrong
    said = {(r["error"], r["text"]) for r in errors}
    raised_at = [r["raised_at"] for r in errors]
    if len(said) > 1 or max(raised_at) - min(raised_at) > TOGETHER_S:
        wrong.append("differing_errors")
    if not all(names_the_victim(r, how, victim) for r in errors):
        wrong.append("wrong_culprits")
    return wrong


def names_the_victim(result: dict[str, Any], how: str, victim: int) -> bool:
    error, text = result["error"], result["text"]
    if how in ("stop", "never"):
        return error == "PeerTimeoutError" and result["ranks"] == [victim]
    if error == "PeerLostError":
        return text.startswith(f"rank {victim} has left") or how == "kill"
    ended = f"rank {victim} reached the end of the program"
    return how == "exit" and error == "MismatchError" and ended in text


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.long.faults")
    parser.add_argument("--times", type=int, default=50, help="runs of each kind")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=FAULTS, metavar="NAME")
    parser.add_argument("--transport", choices=("auto", "shm", "sockets"), default="auto")
    parser.add_argument("--without-mpi", action="store_true", help="connect ranks by sockets")
    parser.add_argument("--out", type=Path, help="where to record the runs, as JSON")
    options = parser.parse_args(argv)
    arguments = " ".join(sys.argv[1:] if argv is None else argv)
    command = f"python -m tests.long.faults {arguments}".strip()

    rows = []
    with tempfile.TemporaryDirectory() as folder:
        jobs = MpiJobs(Path(folder), options.without_mpi)
        (where, *_) = jobs.run_ok("call", 1, "benchmarks.rows:environment", command)
        del where["ranks"]
        for how in options.faults:
            for ending in ENDINGS:
                row = {"fault": how, "error": ending, **where, "seed": options.seed}
                row["transport"] = options.transport
                rows.append({**row, **repeat(jobs, how, ending, options)})
                print(json.dumps(rows[-1]), flush=True)
    if options.out:
        record(options.out, rows)
    return int(any(row[name] for row in rows for name in COUNTED))


def repeat(jobs: MpiJobs, how: str, ending: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run one kind `options.times` times; print each failure with the seed that repeats it."""
    wrong: Counter[str] = Counter()
    worst_s, started = 0.0, time.monotonic()
    for index in range(options.times):
        seed = f"{options.seed}-{how}-{ending}-{index}"
        seconds, found, output = run_once(jobs, how, ending, seed, options.transport)
        worst_s = max(worst_s, seconds)
        wrong.update(found)
        if found:
            print(f"{seed}: {', '.join(found)}\n{output}", file=sys.stderr)
    return {
        "runs": options.times,
        "ranks": list(RANKS),
        "worst_seconds_to_the_end": round(worst_s, 2),
        "seconds": round(time.monotonic() - started, 1),
        **{name: wrong[name] for name in COUNTED},
    }


def record(
    path: Path,
    rows: list[dict[str, Any]],
    what: Sequence[str] = ("mpi", "fault", "error", "transport"),
) -> None:
    """Put the rows into the file, in place of those that are alike in `what`."""
    new = {tuple(row.get(key) for key in what) for row in rows}
    kept = json.loads(path.read_text()) if path.exists() else []
    kept = [row for row in kept if tuple(row.get(key) for key in what) not in new]
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(row) for row in kept + rows)
    path.write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    sys.exit(main())
