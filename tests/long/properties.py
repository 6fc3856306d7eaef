"""Many random cases through one persistent job, spread evenly over every cell there is.

    python -m tests.long.properties --cases 100000 --seed 1 --out bench_results/properties.json

The job runs under the MPI of the interpreter, or ``--without-mpi``.  Hypothesis draws; the cells
are visited in an order that the seed shuffles, so a run of a tenth of the cases is a random tenth.
Exits with 1 if any case fails, or if a cell stays empty although there are enough cases for all.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import fields
from itertools import islice
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st

from tests.support.case_job import CaseJob
from tests.support.case_strategies import Cell, Draw, case_in, cells, draws
from tests.support.cases import Case
from tests.support.mpi import MpiJobs

RANKS = 5
DRAWN_TOGETHER = 10
"""Cases in an example: Hypothesis takes less time for a case when it draws several."""
SENT_TOGETHER = 50
MOST_FAILURES = 10
"""After so many failures the run ends."""


class TooManyFailures(Exception):  # noqa: N818 - ends the run, and is reported as failures
    """Raised to end the run after `MOST_FAILURES`."""


class Feeder:
    """Sends cases to the job, a batch while the next one is drawn, and keeps the account."""

    def __init__(self, job: CaseJob, wanted: int) -> None:
        self.job, self.wanted = job, wanted
        self.done: Counter[Cell] = Counter()
        self.marginals: dict[str, Counter[Any]] = {
            axis: Counter() for axis in ("view", "out", "root", "dimensions", "sends")
        }
        self.failures: list[str] = []
        self._drawn: list[tuple[Cell, Case]] = []
        self._under_way: list[tuple[Cell, Case]] = []
        self._started = self._said = time.monotonic()

    def add(self, cell: Cell, case: Case) -> None:
        self._drawn.append((cell, case))
        if len(self._drawn) >= SENT_TOGETHER:
            self.flush()

    def flush(self) -> None:
        """Wait for the cases under way, and send the drawn ones."""
        self.settle()
        self._under_way, self._drawn = self._drawn, []
        if self._under_way:
            self.job.send([case for _, case in self._under_way])

    def settle(self) -> None:
        """Wait until no case is under way; cases behind a failed one are run again."""
        while self._under_way:
            failure = self.job.receive()
            ended = len(self._under_way) if failure is None else failure[0] + 1
            for cell, case in self._under_way[:ended]:
                self._count(cell, case)
            del self._under_way[:ended]
            if failure is not None:
                self.failures.append(failure[1])
                print(failure[1], file=sys.stderr)
                if len(self.failures) >= MOST_FAILURES:
                    raise TooManyFailures
            if self._under_way:
                self.job.send([case for _, case in self._under_way])
        self._say_how_far()

    def _count(self, cell: Cell, case: Case) -> None:
        self.done[cell] += 1
        self.marginals["view"][case.view] += 1
        self.marginals["out"][case.out] += 1
        self.marginals["root"][case.root] += 1
        self.marginals["dimensions"][len(case.shape)] += 1
        self.marginals["sends"]["synchronous" if case.synchronous else "standard"] += 1

    def _say_how_far(self) -> None:
        now = time.monotonic()
        if now - self._said > 10:
            self._said, done = now, self.done.total()
            left = (now - self._started) / done * (self.wanted - done)
            failed = f", {len(self.failures)} failed" if self.failures else ""
            print(f"{done} of {self.wanted} cases{failed}, {left:.0f} s left", file=sys.stderr)


def visits(count: int, seed: int) -> Iterator[Cell]:
    """`count` cells: all of them before any again, each time in another order."""
    every, rng = cells(range(1, RANKS + 1)), random.Random(seed)

    def endlessly() -> Iterator[Cell]:
        while True:
            rng.shuffle(every)
            yield from every

    return islice(endlessly(), count)


def run(feeder: Feeder, seed: int) -> None:
    """Draw and run as many cases as are wanted."""
    waiting = visits(feeder.wanted, seed)
    drawn = 0
    while drawn < feeder.wanted:

        @seeded(seed + drawn)
        @settings(
            max_examples=-(-(feeder.wanted - drawn) // DRAWN_TOGETHER),
            phases=[Phase.generate],
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(together=st.lists(draws, min_size=DRAWN_TOGETHER, max_size=DRAWN_TOGETHER))
        def draw_some(together: list[Draw]) -> None:
            nonlocal drawn
            for cell, draw in zip(islice(waiting, DRAWN_TOGETHER), together, strict=False):
                feeder.add(cell, case_in(cell, draw))
                drawn += 1

        draw_some()
    feeder.flush()
    feeder.settle()


def histogram(feeder: Feeder) -> dict[str, Any]:
    """How the cases are spread: by each axis alone, and over full cells."""
    every = cells(range(1, RANKS + 1))
    by_cell = [feeder.done[cell] for cell in every]
    by_axis = {
        field.name: Counter(getattr(cell, field.name) for cell in feeder.done.elements())
        for field in fields(Cell)
    }
    return {
        "axes_of_a_cell": [field.name for field in fields(Cell)],
        "cells": len(every),
        "empty_cells": by_cell.count(0),
        "cases_a_cell": {
            "least": min(by_cell),
            "median": statistics.median(by_cell),
            "most": max(by_cell),
        },
        "by_axis": {axis: dict(sorted(count.items())) for axis, count in by_axis.items()},
        "by_what_else_is_drawn": {
            axis: dict(sorted(count.items())) for axis, count in feeder.marginals.items()
        },
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.long.properties")
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--without-mpi", action="store_true", help="connect ranks by sockets")
    parser.add_argument("--out", type=Path, help="where to record the run, as JSON")
    options = parser.parse_args(argv)
    arguments = " ".join(sys.argv[1:] if argv is None else argv)
    command = f"python -m tests.long.properties {arguments}".strip()

    with tempfile.TemporaryDirectory() as folder:
        jobs = MpiJobs(Path(folder), options.without_mpi)
        (where, *_) = jobs.run_ok("call", RANKS, "benchmarks.rows:environment", command)
        started = time.monotonic()
        feeder = Feeder(CaseJob(jobs, RANKS), options.cases)
        try:
            run(feeder, options.seed)
            feeder.job.close()
        except TooManyFailures:
            print(f"gave up after {MOST_FAILURES} failures", file=sys.stderr)
        finally:
            jobs.sweep()
    record = {
        **where,
        "seed": options.seed,
        "cases": feeder.done.total(),
        "seconds": round(time.monotonic() - started, 1),
        "failures": feeder.failures,
        **histogram(feeder),
    }
    text = json.dumps(record, indent=1) + "\n"
    print(text, end="")
    if options.out:
        options.out.write_text(text)
    enough = options.cases >= record["cells"]
    return int(bool(feeder.failures) or (enough and record["empty_cells"] > 0))


if __name__ == "__main__":
    sys.exit(main())
