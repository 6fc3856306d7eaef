"""Search: ``python -m ringreduce.train.search``, under mpirun, on every rank."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial

import ringreduce as rr
from ringreduce.console.terminal import LiveLine, print_error, replace_unencodable
from ringreduce.errors import AllRanksEnd, counted
from ringreduce.parallel.consensus import REFUSED, nothing, said, together
from ringreduce.picture import output
from ringreduce.train import inputs
from ringreduce.train.plot import check_place
from ringreduce.train.search import report
from ringreduce.train.search.candidates import KINDS, Candidate
from ringreduce.train.search.finding import choose, find
from ringreduce.train.search.options import SearchOptions, read
from ringreduce.train.search.report import CandidateRow

_PROG = "python -m ringreduce.train.search"


def main(argv: Sequence[str] | None = None) -> int:
    """Search by the options `argv`.  Returns 0, or 2 if nothing fits or can be written."""
    replace_unencodable()
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


def _search(comm: rr.Communicator, request: SearchOptions) -> int:
    picture, speaks = request.picture, comm.rank == 0
    if picture is not None:
        together(comm, partial(check_place, picture) if speaks else nothing)
    with LiveLine(sys.stdout) as live:

        def watch(candidate: Candidate, seconds: float) -> None:
            if speaks:
                live.show(f"{seconds:3.0f} of {request.budget_s:.0f} s: {candidate.name}")

        rows = find(comm, request, watch)
    chosen = choose(rows)
    title, facts = _words(chosen, rows, comm, request)
    if speaks:
        print(facts, *report.table(rows), title, sep="\n", flush=True)
    try:
        if picture is not None:
            draw = partial(report.draw, picture, title, facts, rows, KINDS[request.kind])
            together(comm, draw if speaks else nothing)
    finally:
        if speaks:
            print(report.command(chosen.candidate, comm.size, request.job), flush=True)
    return 0


def _words(
    chosen: CandidateRow,
    rows: Sequence[CandidateRow],
    comm: rr.Communicator,
    request: SearchOptions,
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
    raise AllRanksEnd(main())
