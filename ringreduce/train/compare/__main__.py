"""Compare: ``python -m ringreduce.train.compare``, under mpirun, on every rank."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import ringreduce as rr
from ringreduce.errors import AllRanksEnd
from ringreduce.parallel.together import REFUSED, gather_words, nothing, said, together
from ringreduce.terminal import LiveLine, print_error, replace_unencodable
from ringreduce.train import inputs
from ringreduce.train.compare import report
from ringreduce.train.compare.options import Request, read, servers_of
from ringreduce.train.compare.report import Row
from ringreduce.train.loop import Trainer
from ringreduce.train.pace import Pace
from ringreduce.train.plot import check_place
from ringreduce.train.results import Epoch, Result, Step
from ringreduce.train.strategies import OneDevice

_PROG = "python -m ringreduce.train.compare"
_FAILURES = (*REFUSED, FloatingPointError, rr.RingReduceError)
"""Errors that end one strategy, and not the others."""


def main(argv: Sequence[str] | None = None) -> int:
    """Compare by the options `argv`.  Returns 0, 1 if a strategy failed, 2 for a wrong option."""
    replace_unencodable()
    request = read(sys.argv[1:] if argv is None else argv, _PROG)
    with rr.init() as comm:
        speaks, code = comm.rank == 0, 2
        try:
            for path in filter(None, (request.json, request.plot)):
                together(comm, partial(check_place, path) if speaks else nothing)
            with LiveLine(sys.stdout) as live:
                rows = compare(comm, request, live.show if speaks else lambda text: None)
            if speaks:
                print(*report.table(rows, request.to), sep="\n", flush=True)
            write = partial(report.write_all, rows, request)
            together(comm, write if speaks else nothing)
            code = int(any(row.error for row in rows))
        except ValueError as error:
            if isinstance(error, rr.RingReduceError):
                raise
            if speaks:
                print_error(f"{_PROG}: error: {error}")
        comm.barrier()  # the first rank that ends with a code stops the job: wait for the text
        return code


def compare(
    comm: rr.Communicator, request: Request, show: Callable[[str], None] = lambda text: None
) -> list[Row]:
    """Return a row for each strategy, the same on all ranks but for `parameters`.  Collective.

    The first ranks compute, and the others are servers.  Strategies take turns, an epoch each.
    `show` receives the progress.  Raises ValueError if a strategy cannot be used.
    """
    ranks, settings = request.ranks or comm.size, request.given.settings()
    nodes = [[rank for rank in node if rank < ranks] for node in comm.nodes]
    found = request.rows([node for node in nodes if node])
    together(comm, lambda: inputs.load(settings))
    inputs.check_same(comm, inputs.load(settings))
    rows = [Row(each, 1 if each == OneDevice() else ranks, servers_of(each)) for each in found]
    for seed in range(settings.seed, settings.seed + request.given.outputs().seeds):
        turns = [_Turns(comm, row, request, seed) for row in rows]
        for epoch in range(settings.epochs):
            for each in turns:
                show(f"seed {seed}, epoch {epoch + 1} of {settings.epochs}: {each.row.name}")
                each.together(each.train)
        for each in turns:
            each.end()
    return rows


class _Turns:
    """One strategy with one seed, and a watcher of its steps.  All ranks make the same calls."""

    def __init__(self, comm: rr.Communicator, row: Row, request: Request, seed: int) -> None:
        self._comm, self.row, self._request = comm, row, request
        self._settings = replace(request.given.settings(), seed=seed)
        self._part = comm.split(0 if comm.rank < row.ranks + row.servers else None)
        self._result: Result | None = None
        self._seconds, self._discarded = 0.0, 0
        self._points: list[tuple[float, float]] = []
        self._staleness = Counter[int]()
        self.together(self._make)

    def together(self, do: Callable[[], object]) -> None:
        """Call `do` on the ranks of the strategy, unless it has failed; all ranks wait."""
        problem = ""
        if self._part is not None and not self.row.error:
            try:
                do()
            except _FAILURES as error:
                problem = said(error)
        problems = [words[0] for words in gather_words(self._comm, [problem])]
        self.row.error = self.row.error or next(filter(None, problems), "")

    def _make(self) -> None:
        assert self._part is not None
        request, settings, pace = self._request, self._settings, None
        split, rank = inputs.load(settings), self._comm.rank
        if request.compute_ms:
            weights = sum(a * b for a, b in pairwise(split.widths(settings.hidden)))
            unit_s = request.compute_ms / 1e3 / (3 * settings.batch * weights)
            slow, factor = request.slowdown
            key = settings.seed, rank
            pace = Pace(unit_s, factor if rank == slow else 1.0, request.jitter, key)
        xp = inputs.module(request.given.outputs().device, self._part)
        self._trainer = Trainer(self._part, split, settings, xp, self.row.strategy, pace=pace)

    def train(self) -> None:
        """Train for an epoch."""
        watchers = [self] if self._comm.rank == 0 else []
        self._result = self._trainer.run(watchers, epochs=1)
        if (pushes := self._trainer.pushes) is not None and self._comm.rank < self.row.ranks:
            self._staleness.update(pushes.staleness)
            self._discarded += pushes.discarded

    def steps(self, steps: Sequence[Step]) -> None:
        self._seconds += sum(step.step_s for step in steps)

    def epoch(self, epoch: Epoch) -> None:
        self._points.append((self._seconds, epoch.accuracy))

    def end(self) -> None:
        """Add the figures of all ranks to the row, and close the trainer."""
        facts: dict[str, Any] = {}
        if (result := self._result) is not None and not self.row.error:
            self.row.parameters, trainer = result.parameters, self._trainer
            samples = len(inputs.load(self._settings).train_labels)
            facts = {"points": self._points, "accuracy": result.accuracy, "step_s": result.step_s}
            facts["samples_per_s"] = samples / (trainer.epoch_steps * result.step_s)
            facts |= {"sent": result.sent_bytes, "held": result.held_bytes}
            facts |= {"idle": trainer.idle} if self._comm.rank < self.row.ranks else {}
            if trainer.pushes is not None:
                staleness = [*self._staleness.items()]
                facts |= {"staleness": staleness, "discarded": self._discarded}
        words = gather_words(self._comm, [json.dumps(facts)])
        self.together(self._close)
        if not self.row.error:
            self.row.runs.append([facts for word in words if (facts := json.loads(word[0]))])

    def _close(self) -> None:
        assert self._part is not None
        self._trainer.close()
        self._part.close()


if __name__ == "__main__":
    raise AllRanksEnd(main())
