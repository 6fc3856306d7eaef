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
from ringreduce.console.terminal import LiveLine, print_error, replace_unencodable
from ringreduce.errors import AllRanksEnd
from ringreduce.parallel.consensus import REFUSED, gather_words, nothing, said, together
from ringreduce.train import inputs
from ringreduce.train.compare import report
from ringreduce.train.compare.options import CompareOptions, read
from ringreduce.train.compare.report import StrategyRow
from ringreduce.train.loop import Trainer
from ringreduce.train.pace import ComputePace
from ringreduce.train.plot import check_place
from ringreduce.train.strategies import OneDevice

_PROG = "python -m ringreduce.train.compare"


def main(argv: Sequence[str] | None = None) -> int:
    """Compare by the options `argv`.  Returns 0, 1 if a strategy failed, 2 for a wrong option."""
    replace_unencodable()
    request = read(sys.argv[1:] if argv is None else argv, _PROG)
    with rr.init() as comm:
        speaks, code = comm.rank == 0, 2
        try:
            for path in filter(None, (request.json, request.picture)):
                together(comm, partial(check_place, path) if speaks else nothing)
            with LiveLine(sys.stdout) as live:
                rows = compare(comm, request, live.show if speaks else lambda text: None)
            if speaks:
                print(*report.table(rows), sep="\n", flush=True)
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
    comm: rr.Communicator, request: CompareOptions, show: Callable[[str], None] = lambda text: None
) -> list[StrategyRow]:
    """Return a row for each strategy, with figures on rank 0.  Collective.

    The first ranks compute, and the others are servers.  Strategies take turns, an epoch each.
    `show` receives the progress.  Raises ValueError if a strategy cannot be used.
    """
    ranks, settings = request.ranks or comm.size, request.given.settings()
    nodes = [[rank for rank in node if rank < ranks] for node in comm.nodes]
    found = request.rows([node for node in nodes if node])
    inputs.check_same(comm, together(comm, lambda: inputs.load(settings)))
    rows = [StrategyRow(s, 1 if s == OneDevice() else ranks, s.servers, request.to) for s in found]
    for seed in range(settings.seed, settings.seed + request.given.outputs().seeds):
        turns = [_Turns(comm, row, request, seed) for row in rows]
        for epoch in range(settings.epochs):
            for each in turns:
                show(f"seed {seed}, epoch {epoch + 1} of {settings.epochs}: {each.row.name}")
                each.together(each.train)
        for each in turns:
            each.together(each.end)
    return rows


class _Turns:
    """One strategy with one seed."""

    def __init__(
        self, comm: rr.Communicator, row: StrategyRow, request: CompareOptions, seed: int
    ) -> None:
        self._comm, self.row, self._request = comm, row, request
        self._settings = replace(request.given.settings(), seed=seed)
        self._part: Any = comm.split(0 if comm.rank < row.ranks + row.servers else None)
        self._points: list[tuple[float, float]] = []
        """Seconds and accuracy after each epoch."""
        self._staleness, self._discarded = Counter[int](), 0
        self.together(self._make)

    def together(self, do: Callable[[], object]) -> None:
        """Call `do` on the ranks of the strategy, unless it has failed; all ranks wait."""
        problem = ""
        if self._part is not None and not self.row.error:
            try:
                do()
            except (*REFUSED, FloatingPointError, rr.RingReduceError) as error:
                problem = said(error)
                self._part.__exit__(type(error), error, error.__traceback__)  # ends the others
        problems = [words[0] for words in gather_words(self._comm, [problem])]
        self.row.error = self.row.error or next(filter(None, problems), "")

    def _make(self) -> None:
        request, settings, rank, pace = self._request, self._settings, self._comm.rank, None
        split = inputs.load(settings)
        if request.compute_ms:
            weights = sum(a * b for a, b in pairwise(split.widths(settings.hidden)))
            unit_s = request.compute_ms / 1e3 / (3 * settings.batch * weights)
            slow, factor = request.slowdown
            factor = factor if rank == slow else 1.0
            pace = ComputePace(unit_s, factor, request.jitter, (settings.seed, rank))
        xp = inputs.module(request.given.outputs().device, self._comm)
        self._trainer = Trainer(self._part, split, settings, xp, self.row.strategy, pace=pace)

    def train(self) -> None:
        self._result = result = self._trainer.run(epochs=1)
        self._points.append((self._trainer.times[:, 1].sum(), result.accuracy))
        if (pushes := self._trainer.pushes) is not None and self._comm.rank < self.row.ranks:
            self._staleness.update(pushes.staleness)
            self._discarded += pushes.discarded

    def end(self) -> None:
        """Add the figures of all ranks to the row, and close the trainer."""
        result, trainer = self._result, self._trainer
        first, others = trainer.times
        _, step_s, _, *waits = others if others[0] else first
        mine = [result.sent_bytes, result.held_bytes, sum(waits) / (step_s or 1), self._discarded]
        words = json.dumps([*mine, [*self._staleness.items()]])
        every = [json.loads(text) for (text,) in gather_words(self._part, [words])]
        sent, held, idle, discarded, pushes = zip(*every, strict=True)
        staleness = sum((Counter(dict(each)) for each in pushes), Counter[int]())
        samples, has = len(inputs.load(self._settings).train_labels), trainer.pushes is not None
        to, workers = self._request.to, self.row.ranks
        self.row.parameters = result.parameters
        self.row.runs.append(
            {
                "points": self._points,
                "accuracy": result.accuracy,
                "samples_per_s": samples / (trainer.epoch_steps * result.step_s),
                "step_ms": 1e3 * result.step_s,
                "seconds_to": next((s for s, a in self._points if 100 * a >= to), None),
                "sent_bytes": max(sent),
                "held_bytes": max(held),
                "staleness_mean": sum(staleness.elements()) / staleness.total() if has else None,
                "staleness_max": max(staleness) if has else None,
                "discarded": sum(discarded) if has else None,
                "idle": sum(idle[:workers]) / workers,
            }
        )
        trainer.close()
        self._part.close()


if __name__ == "__main__":
    raise AllRanksEnd(main())
