"""Samples a second of a job that loses ranks, gets more and fewer, over 24 seconds.

    python -m benchmarks.recovery_timeline
    python -m benchmarks.recovery_timeline --draw

Starts ``ringreduce run -n 2 --elastic 1:4``.  Each rank computes its part of a global batch of 48
samples: it sleeps for a quarter of a millisecond for each sample, so that ranks help although they
share cores.  Then the ranks reduce a million float32, and commit.  Meanwhile ranks are killed, told
to end, and added.  Each sample of each step must have been counted once.

Writes a row to ``bench_results/recovery_timeline.jsonl`` for the MPI of this environment, and draws
``docs/recovery.svg`` from all rows.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import ringreduce as rr
from benchmarks import environments
from benchmarks.rows import RESULTS, environment, replace
from ringreduce.picture.chart import Line, Note, Panel, chart
from ringreduce.picture.scales import linear
from ringreduce.picture.style import BLUE, DASHED, GREEN, ORANGE, in_dark

NAME = "recovery_timeline"
PICTURE = environments.ROOT / "docs" / "recovery.svg"
_RANKS, _BATCH, _SAMPLE_S, _NUMBERS = 2, 48, 0.25e-3, 1_000_000
_PLAN = (
    (4.0, "kill", 1),
    (8.0, "scale", 4),
    (12.0, "kill", 2),
    (16.0, "notice", 1),
    (20.0, "scale", 3),
)
"""Seconds after the first step, what happens, and to how many ranks, or with how many."""
_END_S, _BIN_S = 24.0, 0.1


def main() -> None:
    if len(sys.argv) == 3:
        _train(Path(sys.argv[1]), Path(sys.argv[2]))
        return
    if sys.argv[1:] != ["--draw"]:
        with tempfile.TemporaryDirectory() as name:
            replace(NAME, [_measured(Path(name))], same=("mpi", "cpu"))
    rows = [json.loads(line) for line in (RESULTS / f"{NAME}.jsonl").read_text().splitlines()]
    PICTURE.write_text(_drawn(rows))
    PICTURE.with_name("recovery-dark.svg").write_text(in_dark(PICTURE.read_text()))


def _train(steps: Path, stop: Path) -> None:
    """Train, and write the time of each step to a file."""
    gradient = np.ones(_NUMBERS, np.float32)

    def train(comm: rr.Communicator, state: rr.State) -> None:
        mine = len(range(comm.rank, _BATCH, comm.size))
        while not state["stops"][0]:
            time.sleep(mine * _SAMPLE_S)
            comm.all_reduce(gradient)
            counts = comm.all_reduce(np.array([mine, stop.exists()], np.int64))
            with state.update():
                state["samples"] += counts[0]
                state["stops"] += counts[1]
            if comm.rank == 0:
                with open(steps, "a") as file:
                    file.write(f"{time.time()} {state.step}\n")
        if comm.rank == 0:
            assert state["samples"][0] == state.step * _BATCH
            print(json.dumps(environment(f"python -m benchmarks.{NAME}")), flush=True)

    zero = np.zeros(1, np.int64)
    rr.elastic(train, rr.State({"samples": zero, "stops": zero}))


def _measured(folder: Path) -> dict[str, Any]:
    """Run the job, and return its row."""
    steps, stop, events = folder / "steps", folder / "stop", folder / "events"
    ours = [sys.executable, "-m", "ringreduce"]
    job = subprocess.Popen(
        [
            *[*ours, "run", "-n", str(_RANKS), "--elastic", "1:4", "--events", str(events)],
            *["-m", f"benchmarks.{NAME}", str(steps), str(stop)],
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    while not steps.exists():
        if job.poll() is not None:
            sys.exit("the job has ended")
        time.sleep(0.01)
    begin, happened = time.time(), []
    for at, what, count in _PLAN:
        time.sleep(max(0.0, begin + at - time.time()))
        happened.append((round(time.time() - begin, 2), what, count))
        if what == "scale":
            subprocess.run([*ours, "scale", str(job.pid), str(count)], check=True)
        else:
            number = signal.SIGKILL if what == "kill" else signal.SIGTERM
            for pid in _ranks(events)[:count]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
    time.sleep(max(0.0, begin + _END_S - time.time()))
    stop.touch()
    output, _ = job.communicate(timeout=60)
    if job.returncode:
        sys.exit(f"the job ended with {job.returncode}")
    made = np.array([float(line.split()[0]) for line in steps.read_text().splitlines()]) - begin
    bins, _ = np.histogram(made, np.arange(0, _END_S + _BIN_S / 2, _BIN_S))
    row: dict[str, Any] = {"benchmark": NAME, "ranks": _RANKS, "bin_s": _BIN_S}
    row |= {"samples_per_s": [round(float(each) * _BATCH / _BIN_S) for each in bins]}
    row |= {"happened": happened, "resized": _resized(events)}
    origin = json.loads(output.splitlines()[-1])
    origin.pop("ranks")
    return row | origin


def _ranks(events: Path) -> list[int]:
    """Return the process ids of the present ranks."""
    lines = [json.loads(line) for line in events.read_text().splitlines()]
    pids: list[int] = [line for line in lines if line["event"] == "started"][-1]["pids"]
    return pids


def _resized(events: Path) -> list[dict[str, Any]]:
    """Return what the picture tells of each change."""
    lines = [json.loads(line) for line in events.read_text().splitlines()]
    kept = ("before", "after", "cause", "level", "recovered_s", "redone")
    return [{name: e[name] for name in kept} for e in lines if e["event"] == "resized"]


def _drawn(rows: Sequence[dict[str, Any]]) -> str:
    """Draw the rows below each other."""
    title = "Training goes on while 1 to 4 ranks are killed, leave and join"
    facts = (
        f"Samples a second, in bins of {1e3 * _BIN_S:g} ms, of a job with 1 to 4 ranks. A sample "
        f"takes {1e3 * _SAMPLE_S:g} ms, asleep; a step has {_BATCH} samples and reduces "
        f"{_NUMBERS // 10**6} million float32. {rows[0]['cpu']}, {rows[0]['cores']} cores. Every "
        "sample was counted once."
    )
    return chart(title, facts, [_panel(row) for row in rows], columns=1, panel_height=150)


def _panel(row: dict[str, Any]) -> Panel:
    rates = row["samples_per_s"]
    points = [((number + 0.5) * row["bin_s"], rate) for number, rate in enumerate(rates)]
    y = linear([0, 1.3 * max(rates)])
    words = {"kill": "{} killed", "scale": "scale {}", "notice": "SIGTERM to {}"}
    lines, notes = [Line(points, BLUE)], []
    for (at, what, count), resized in zip(row["happened"], row["resized"], strict=True):
        colour = GREEN if what == "scale" else ORANGE
        lines.append(Line([(at, 0), (at, y.high)], colour, dashes=DASHED, width=1.5))
        if what == "kill":  # as the job counted them: it may have ended one itself, after another
            count = resized["before"] - resized["after"]
        note = Note((at, y.high), f" {words[what].format(count)}", colour, "start", above=-12)
        notes.append(note)
    x = linear([0, _END_S])
    how = "new processes after a loss" if _relaunches(row) else "survivors go on in their processes"
    mpi = row["mpi"].split(" Version")[0]
    return Panel(f"samples/s, {mpi}: {how}", x, y, lines, notes=notes, x_name="seconds")


def _relaunches(row: dict[str, Any]) -> bool:
    return any(each["level"] == 2 for each in row["resized"])


if __name__ == "__main__":
    main()
