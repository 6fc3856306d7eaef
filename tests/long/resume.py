"""Training that is killed at random moments and resumed ends with the same bits.

    python -m tests.long.resume --times 50 --seed 1 --out bench_results/resume.json

Kills all processes of a job by SIGKILL, or one rank, at a random moment between its first step and
its last; starts it again with ``--resume``; now and then kills that too; and lets it end.  Counts
runs whose last checkpoint is not, bit for bit, that of a run that was not interrupted, or whose
metrics tell something else; checkpoints that were damaged; and runs that did not end well.  Exits
with 1 if any was seen.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.long.faults import record
from tests.support.mpi import MpiJobs, processes_of

RANKS = 2
RUN = (
    *("--epochs", "6", "--batch", "100", "--hidden", "400", "200", "--optimizer", "adam"),
    *("--lr", "0.002", "--checkpoint-every", "2", "--keep", "2", "--check-every", "5"),
)
STEPS = 90
"""Steps that the settings of `RUN` make."""
LIMIT_S = 300.0
COUNTED = ("other_parameters", "other_metrics", "damaged", "failed")
AGAIN = 0.3
"""Probability that a resumed run is killed as well."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--times", type=int, default=50, help="kills in all")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="where to record the run, as JSON")
    options = parser.parse_args(argv)
    arguments = " ".join(sys.argv[1:] if argv is None else argv)
    rng = random.Random(options.seed)
    wrong: Counter[str] = Counter()
    kills: list[int] = []
    runs = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        jobs = MpiJobs(folder)
        command = f"python -m tests.long.resume {arguments}".strip()
        (where, *_) = jobs.run_ok("call", 1, "benchmarks.rows:environment", command)
        started = time.monotonic()
        whole = folder / "whole"
        done = jobs.run("train", RANKS, *flags(whole))
        assert done.returncode == 0, done.output
        seconds = spent_training(whole)
        wanted = outcome(whole)
        while len(kills) < options.times:
            wrong.update(one_run(jobs, folder / f"run{runs}", wanted, seconds, rng, kills))
            runs += 1
        jobs.sweep()
    row = {
        **where,
        "fault": "SIGKILL while training",
        "error": "resumed",
        "ranks": RANKS,
        "seed": options.seed,
        "runs": runs,
        "kills": len(kills),
        "kills_before_the_first_checkpoint": kills.count(0),
        "steps": STEPS,
        "steps_saved_at_a_kill": [min(kills, default=0), max(kills, default=0)],
        "seconds": round(time.monotonic() - started, 1),
        **{name: wrong[name] for name in COUNTED},
    }
    print(json.dumps(row))
    if options.out:
        record(options.out, [row])
    return int(any(row[name] for name in COUNTED))


def one_run(
    jobs: MpiJobs, here: Path, wanted: Any, seconds: float, rng: random.Random, kills: list[int]
) -> list[str]:
    """Kill a run at random moments, let it go on to the end; what was wrong with it.

    The steps that were saved at each kill are added to `kills`.
    """
    found, said = [], ""
    job = jobs.start("train", RANKS, *flags(here))
    while kill(job, here, rng.uniform(0, seconds), rng):
        jobs.kill(job)
        said += job.communicate()[0]
        kills.append(steps_saved(here))
        job = jobs.start("train", RANKS, *flags(here), "--resume")
        if rng.random() > AGAIN:
            break
    try:
        done = jobs.finish(job, LIMIT_S)
        said += done.output
        if done.returncode != 0:
            found.append("failed")
    except AssertionError as hung:
        said += str(hung)
        found.append("failed")
    if "passed over" in said:
        found.append("damaged")
    found += differences(here, wanted)
    if found:
        print(said, file=sys.stderr)
    return found


def differences(here: Path, wanted: Any) -> list[str]:
    """Return how a run that has ended differs from the wanted outcome."""
    names = ("other_parameters", "other_metrics")
    found = zip(names, outcome(here), wanted, strict=True)
    return [name for name, ours, theirs in found if ours != theirs]


def kill(job: subprocess.Popen[str], here: Path, after_s: float, rng: random.Random) -> bool:
    """So long after the first step that it makes, kill one rank or leave that to the caller.

    False if the job had made all its steps before.
    """
    before = steps_told(here)
    while steps_told(here) <= before and job.poll() is None:
        time.sleep(0.002)
    time.sleep(after_s)
    if job.poll() is not None or steps_saved(here) == STEPS:
        return False
    ranks = [pid for pid in processes_of(job.pid) if is_rank(pid)]
    if ranks and rng.random() < 0.5:
        os.kill(rng.choice(ranks), signal.SIGKILL)
        time.sleep(0.05)
    return True


def is_rank(pid: int) -> bool:
    """Whether a process is Python with the trainer, and not the launcher."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        return command[0] == sys.executable.encode() and command[1].endswith(b"programs/train.py")
    except OSError:
        return False


def flags(here: Path) -> list[str]:
    return [*RUN, "--checkpoint-dir", str(here / "c"), "--metrics", str(here / "m.jsonl")]


def told(here: Path) -> list[dict[str, Any]]:
    """The metrics; a line that is only partly written does not count."""
    if not (here / "m.jsonl").exists():
        return []
    lines = (here / "m.jsonl").read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def steps_told(here: Path) -> int:
    return max((each.get("step", 0) for each in told(here)), default=0)


def steps_saved(here: Path) -> int:
    saved = sorted((here / "c").glob("step-*.json"))
    return int(saved[-1].name[5:14]) if saved else 0


def spent_training(here: Path) -> float:
    return float(sum(each.get("step_s", 0.0) for each in told(here)))


def outcome(here: Path) -> tuple[str, list[Any]]:
    """The hash of the last checkpoint's arrays, and what is told that does not depend on time."""
    manifests = sorted((here / "c").glob("step-*.json"))
    names = ("step", "epoch", "loss", "lr", "accuracy")
    metrics = [[each.get(name) for name in names] for each in told(here)]
    return (json.loads(manifests[-1].read_bytes())["sha256"] if manifests else "none"), metrics


if __name__ == "__main__":
    sys.exit(main())
