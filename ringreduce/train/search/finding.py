"""The search itself: price all candidates, and measure the best of them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from functools import partial
from statistics import median
from types import ModuleType

import ringreduce as rr
from ringreduce.train import inputs
from ringreduce.train.search import memory, prices
from ringreduce.train.search.candidates import Candidate, Place, fitting
from ringreduce.train.search.halving import halve
from ringreduce.train.search.measuring import Bench, Watch, most_at_once
from ringreduce.train.search.options import Request
from ringreduce.train.search.report import Row
from ringreduce.train.together import from_rank_0, together

_MOST_MEASURED = 32
"""The most candidates that are measured: those of the best predictions."""
_NEAR = 0.05
"""Candidates whose time for a sample is at most this share above the best are measured on, and of
batches the smallest of them is chosen."""
_SHARE_OF_LAYERS, _SHARE_OF_FITS = 0.1, 0.1
"""Shares of the budget: for the times of layers, and for the steps to which prices are fitted."""
_LEAST_SHARE = 0.5
"""The least share of the budget for the rounds, however long pricing took."""
_SHARE_OF_BYTES = 0.1
"""Share of the budget in which bytes are counted even if the rest of it is over."""


def find(
    comm: rr.Communicator, request: Request, watch: Watch = lambda candidate, seconds: None
) -> list[Row]:
    """Return what is predicted and measured of every candidate, the best first.  Collective.

    `watch` is that of `Bench`.  Raises ValueError, on all ranks, if no candidate fits.
    """
    settings, budget_s = request.given.settings(), request.budget_s
    split = together(comm, lambda: inputs.load(settings))
    inputs.check_same(comm, split)
    xp = together(comm, lambda: inputs.module(request.given.outputs().device, comm))
    place = Place(comm.nodes, split.widths(settings.hidden), len(split.train_labels))
    candidates = [*fitting(request.kind, request.given, place)]
    with closing(Bench(comm, split, xp, watch)) as bench:
        predicted = _predict(comm, request, place, candidates, bench, xp)
        promising = sorted(candidates, key=lambda each: predicted[each] / each.settings.batch)
        most = min(_MOST_MEASURED, most_at_once(comm, place.sizes, settings))
        for candidate in promising[most:]:
            bench.drop(candidate)
        last, times = halve(
            promising[:most],
            partial(_seconds_a_sample, bench),
            bench.clock,
            max(_LEAST_SHARE * budget_s, budget_s - bench.clock()),
            near=_NEAR,
            drop=bench.drop,
        )
        never = [each for each in promising if each not in times]
        held = _bytes_of(never, request, place, bench)
    held = {**bench.held_bytes, **held}
    return [
        *(
            _measured(each, predicted[each], times[each], held[each], each in last)
            for each in times
        ),
        *(Row(each, predicted[each], held_bytes=held.get(each, 0)) for each in never),
    ]


def _bytes_of(
    candidates: Sequence[Candidate], request: Request, place: Place, bench: Bench
) -> dict[Candidate, int]:
    """Return the bytes that candidates hold, as far as there is time to find out.  Collective."""
    if request.kind != "batch" and not request.given.settings().batch_norm:
        return {each: memory.held_bytes(each, place) for each in candidates}
    end = max(request.budget_s, bench.clock() + _SHARE_OF_BYTES * request.budget_s)
    for candidate in candidates:
        if bench.clock() < end:
            bench.count_bytes(candidate)
    return {each: bench.held_bytes[each] for each in candidates if each in bench.held_bytes}


def _seconds_a_sample(bench: Bench, candidate: Candidate, seconds: float) -> list[float]:
    return [step_s / candidate.settings.batch for step_s in bench.measure(candidate, seconds)]


def _predict(
    comm: rr.Communicator,
    request: Request,
    place: Place,
    candidates: Sequence[Candidate],
    bench: Bench,
    xp: ModuleType,
) -> dict[Candidate, float]:
    """Return the predicted seconds of a step of each candidate, alike on all ranks.  Collective."""

    def measure(some: Sequence[Candidate]) -> list[float]:
        return [*map(median, bench.in_turns(some, _SHARE_OF_FITS * request.budget_s))]

    if request.kind == "batch":
        found = prices.of_batches(candidates, measure)
    else:
        layers_s = _SHARE_OF_LAYERS * request.budget_s
        priced = prices.Prices(comm, place, candidates, measure, xp, layers_s)
        found = {each: priced.predict(each) for each in candidates}
    # The ranks of different nodes may predict different times.
    return dict(zip(candidates, from_rank_0(comm, [*found.values()]), strict=True))


def _measured(
    candidate: Candidate,
    predicted_s: float,
    times: Sequence[float],
    held_bytes: int,
    is_last: bool,
) -> Row:
    """Return a row; `times` are seconds a sample."""
    step_s = median(times) * candidate.settings.batch
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
