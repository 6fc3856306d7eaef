"""Search: ``python -m ringreduce.train.search``, under mpirun, on every rank."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from statistics import median
from types import ModuleType

import ringreduce as rr
from ringreduce.picture import output
from ringreduce.picture.words import counted
from ringreduce.terminal import LiveLine, print_error
from ringreduce.train import inputs
from ringreduce.train.plot import check_place
from ringreduce.train.search import prices, report
from ringreduce.train.search.candidates import KINDS, Candidate, Place, fitting
from ringreduce.train.search.halving import halve
from ringreduce.train.search.measuring import Bench, most_at_once
from ringreduce.train.search.options import Request, read
from ringreduce.train.search.report import Row
from ringreduce.train.together import REFUSED, from_rank_0, nothing, said, together

_PROG = "python -m ringreduce.train.search"
_MOST_MEASURED = 32
"""The most candidates that are measured: those of the best predictions."""
_NEAR = 0.05
"""Candidates whose time for a sample is at most this share above the best are measured on, and of
batches the smallest of them is chosen."""
_SHARE_OF_PRICES, _TURNS = 0.1, 3
"""Share of the budget for the candidates to which prices are fitted, and its turns."""


def main(argv: Sequence[str] | None = None) -> int:
    """Search by the options `argv`.  Returns 0, or 2 if nothing fits or can be written.

    Raises SystemExit with code 2 for errors that are found before there is a communicator.
    """
    request = read(sys.argv[1:] if argv is None else argv, _PROG)
    try:
        if request.picture is not None:
            output.check(request.picture)
        inputs.load(request.given.settings())
    except REFUSED as error:
        print(f"{_PROG}: error: {said(error)}", file=sys.stderr)
        raise SystemExit(2) from None
    with rr.init() as comm:
        try:
            return _search(comm, request)
        except ValueError as error:
            if isinstance(error, rr.RingReduceError):
                raise
            if comm.rank == 0:
                print_error(f"{_PROG}: error: {error}")
            comm.barrier()  # the first rank that ends with a code stops the job: wait for the text
            return 2


def _search(comm: rr.Communicator, request: Request) -> int:
    picture, speaks = request.picture, comm.rank == 0
    if picture is not None:
        together(comm, partial(check_place, picture) if speaks else nothing)
    with LiveLine(sys.stdout) as live:
        rows = find(comm, request, live if speaks else None)
    chosen = choose(rows, request.kind)
    if speaks:
        title, facts = _words(chosen, rows, comm, request)
        print(facts, *report.table(rows), title, sep="\n")
        if picture is not None:
            report.draw(picture, title, facts, rows, KINDS[request.kind].x_name)
        print(report.command(chosen.candidate, comm.size, request.job), flush=True)
    return 0


def find(comm: rr.Communicator, request: Request, live: LiveLine | None = None) -> list[Row]:
    """Return what is predicted and measured of every candidate, the best first.  Collective.

    Raises ValueError, on all ranks, if no candidate fits.
    """
    settings = request.given.settings()
    split = together(comm, lambda: inputs.load(settings))
    inputs.check_same(comm, split)
    xp = together(comm, lambda: inputs.module(request.given.outputs().device, comm))
    place = Place(comm.nodes, split.widths(settings.hidden), len(split.train_labels))
    candidates = fitting(request.kind, request.given, place)
    with closing(Bench(comm, split, xp)) as bench:

        def measure(candidate: Candidate, seconds: float) -> list[float]:
            if live is not None:
                live.show(f"{bench.seconds:3.0f} of {request.budget_s:.0f} s: {candidate.name}")
            return bench.measure(candidate, seconds)

        def in_turns(some: Sequence[Candidate]) -> list[float]:
            times: list[list[float]] = [[] for _ in some]
            for candidate in some:
                measure(candidate, 0.0)  # the first steps of a job may compile
            for _ in range(_TURNS):
                for candidate, of_candidate in zip(some, times, strict=True):
                    seconds = _SHARE_OF_PRICES * request.budget_s / (_TURNS * len(some))
                    of_candidate += measure(candidate, seconds)
            return [median(each) for each in times]

        predicted = _predict(comm, request.kind, place, candidates, in_turns, xp)
        promising = sorted(candidates, key=lambda each: predicted[each] / each.settings.batch)
        most = min(_MOST_MEASURED, most_at_once(comm, place.sizes, settings))
        for candidate in promising[most:]:
            bench.drop(candidate)
        last, times = halve(
            promising[:most],
            lambda each, s: [step_s / each.settings.batch for step_s in measure(each, s)],
            bench.clock,
            max(request.budget_s / 2, request.budget_s - bench.clock()),
            near=_NEAR,
            drop=bench.drop,
        )
    never = [each for each in promising if each not in times]
    return [
        *(_measured(each, predicted[each], times[each], bench, each in last) for each in times),
        *(Row(each, predicted[each]) for each in never),
    ]


def _predict(
    comm: rr.Communicator,
    kind: str,
    place: Place,
    candidates: Sequence[Candidate],
    measure: prices.Measure,
    xp: ModuleType,
) -> dict[Candidate, float]:
    """Return the predicted seconds of a step of each candidate, alike on all ranks.  Collective."""
    if kind == "batch":
        found = prices.of_batches(candidates, measure)
    else:
        priced = prices.Prices(comm, place, candidates, measure, xp)
        found = {each: priced.predict(each) for each in candidates}
    # The ranks of different nodes may predict different times.
    return dict(zip(candidates, from_rank_0(comm, [*found.values()]), strict=True))


def _measured(
    candidate: Candidate, predicted_s: float, times: Sequence[float], bench: Bench, is_last: bool
) -> Row:
    """Return a row; `times` are seconds a sample."""
    step_s = median(times) * candidate.settings.batch
    held_bytes = bench.held_bytes[candidate]
    return Row(candidate, predicted_s, len(times), step_s, held_bytes, is_last)


def choose(rows: Sequence[Row], kind: str) -> Row:
    """Return the row of the fastest candidate, which is the first.

    Of batches it is the smallest that trains with nearly as many samples a second as the first.
    """
    if kind != "batch":
        return rows[0]
    least = rows[0].samples_per_s / (1 + _NEAR)
    enough = [row for row in rows if row.is_last and row.samples_per_s >= least]
    return min(enough, key=lambda row: row.candidate.settings.batch)


def _words(
    chosen: Row, rows: Sequence[Row], comm: rr.Communicator, request: Request
) -> tuple[str, str]:
    """Return what was found, and where and how."""
    found = (
        f"{chosen.candidate.name}: {1e3 * chosen.step_s:.3g} ms a step, "
        f"{chosen.samples_per_s:,.0f} samples/s"
    )
    measured = sum(row.steps > 0 for row in rows)
    facts = (
        f"{counted(len(rows), 'candidate')} for {request.kind} on {counted(comm.size, 'rank')}, "
        f"{measured} of them measured in {request.budget_s:g} s."
    )
    return found, facts


if __name__ == "__main__":
    sys.exit(main())
