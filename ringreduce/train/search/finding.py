"""The search itself: price all candidates, and measure the best of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from statistics import median
from types import ModuleType

import ringreduce as rr
from ringreduce.parallel.consensus import from_rank_0, together
from ringreduce.train import inputs
from ringreduce.train.search import prices
from ringreduce.train.search.candidates import KINDS, Candidate, Site, check, fitting
from ringreduce.train.search.halving import halve
from ringreduce.train.search.measuring import Bench, Watch, most_at_once
from ringreduce.train.search.options import SearchOptions
from ringreduce.train.search.report import CandidateRow

_MOST_MEASURED = 32
"""The most candidates that are measured: those of the best predictions."""
_NEAR = 0.05
"""Candidates whose time for a sample is at most this share above the best are measured on, and the
one of them that holds least is chosen."""
_SHARE_OF_LAYERS, _SHARE_OF_FITS = 0.1, 0.1
"""Shares of the budget: for the times of layers, and for the steps to which prices are fitted."""
_MOVES, _SHARE_OF_A_MOVE = 2, 0.15
"""How often the neighbours of the best are measured, and the share of the rounds' time for it."""
_FINALISTS = 3
"""The most candidates of the last round that are measured again beside the neighbours."""


def find(
    comm: rr.Communicator, request: SearchOptions, watch: Watch = lambda candidate, seconds: None
) -> list[CandidateRow]:
    """Return what is predicted and measured of every candidate, the best first.  Collective.

    `watch` is that of `Bench`.  Raises ValueError, on all ranks, if no candidate fits.
    """
    settings, budget_s = request.given.settings(), request.budget_s
    split = together(comm, lambda: inputs.load(settings))
    inputs.check_same(comm, split)
    xp = together(comm, lambda: inputs.module(request.given.outputs().device, comm))
    place = Site(comm.nodes, split.widths(settings.hidden), len(split.train_labels))
    candidates = [*fitting(request.kind, request.given, place)]
    with closing(Bench(comm, split, xp, watch)) as bench:
        predict = _predictions(comm, request, place, candidates, bench, xp)
        predicted = predict(candidates)
        most = min(_MOST_MEASURED, most_at_once(comm, place.sizes, settings))
        promising = _promising(predicted)
        for candidate in promising[most:]:
            bench.drop(candidate)
        rounds = _Rounds(bench, max(0.0, budget_s - bench.clock()))
        neighbours = _neighbours(request, place, candidates)
        moves = _MOVES if any(map(neighbours, promising[:most])) else 0
        rounds.measure(promising[:most], 1 - moves * _SHARE_OF_A_MOVE)
        for _ in range(moves):
            best, *others = rounds.last[:_FINALISTS]
            around = [each for each in neighbours(best) if each not in others]
            if not around or bench.clock() >= budget_s:
                break
            predicted |= predict([each for each in around if each not in predicted])
            nearest = _promising({each: predicted[each] for each in around})
            rounds.measure([best, *others, *nearest][:most], _SHARE_OF_A_MOVE)
            if rounds.last[0] is best:
                break
        last, times = rounds.last, rounds.times
        never = [each for each in _promising(predicted) if each not in times]
        held = _bytes_of(never, request, place, bench)
    held = {**bench.held_bytes, **held}
    rows = []
    for each in (*times, *never):
        of_sample = times.get(each, [])
        step_s = median(of_sample or [math.nan]) * each.settings.batch
        count, nbytes = len(of_sample), held.get(each, 0)
        rows.append(CandidateRow(each, predicted[each], count, step_s, nbytes, each in last))
    return rows


def _bytes_of(
    candidates: Sequence[Candidate], request: SearchOptions, place: Site, bench: Bench
) -> dict[Candidate, int]:
    """Return the bytes that candidates hold, as far as there is time to find out.  Collective."""
    if request.kind != "batch" and not request.given.settings().batch_norm:
        return {each: prices.held_bytes(each, place) for each in candidates}
    for candidate in candidates:
        if bench.clock() < request.budget_s:
            bench.count_bytes(candidate)
    return {each: bench.held_bytes[each] for each in candidates if each in bench.held_bytes}


def _promising(predicted: Mapping[Candidate, float]) -> list[Candidate]:
    """Return the candidates in the order of their predicted time for a sample."""
    return sorted(predicted, key=lambda each: predicted[each] / each.settings.batch)


def _neighbours(
    request: SearchOptions, place: Site, candidates: Sequence[Candidate]
) -> Callable[[Candidate], list[Candidate]]:
    """Return a function that lists the candidates next to one, each always as the same object."""
    known = {each.name: each for each in candidates}

    def neighbours(candidate: Candidate) -> list[Candidate]:
        found = []
        for each in KINDS[request.kind].neighbours(candidate, request.given, place):
            with suppress(ValueError):  # it cannot run
                check(each, place)
                found.append(known.setdefault(each.name, each))
        return found

    return neighbours


class _Rounds:
    """Halves candidates, and keeps what was measured.  Collective.

    Attributes:
        last: the candidates of the last round, the best first.
        times: candidate -> seconds a sample of its steps.  The last ones of the last call come
            first, then the candidates of earlier calls, and then the others of the last call.
    """

    def __init__(self, bench: Bench, seconds: float) -> None:
        self._bench, self._seconds, self._end = bench, seconds, bench.clock() + seconds
        self.last: list[Candidate] = []
        self.times: dict[Candidate, list[float]] = {}

    def measure(self, candidates: Sequence[Candidate], share: float) -> None:
        """Halve the candidates in this share of the seconds, as far as they are not over."""
        bench = self._bench
        for each in self.last:
            if each not in candidates:
                bench.drop(each)
        self.last, found = halve(
            candidates,
            self._seconds_a_sample,
            bench.clock,
            min(share * self._seconds, self._end - bench.clock()),
            near=_NEAR,
            drop=bench.drop,
        )
        before = {each: times for each, times in self.times.items() if each not in found}
        self.times = {**{each: found[each] for each in self.last}, **before, **found}

    def _seconds_a_sample(self, candidate: Candidate, seconds: float) -> list[float]:
        batch = candidate.settings.batch
        return [step_s / batch for step_s in self._bench.measure(candidate, seconds)]


def _predictions(
    comm: rr.Communicator,
    request: SearchOptions,
    place: Site,
    candidates: Sequence[Candidate],
    bench: Bench,
    xp: ModuleType,
) -> Callable[[Sequence[Candidate]], dict[Candidate, float]]:
    """Return a function that predicts the seconds of steps alike on all ranks.  Collective."""

    def measure(some: Sequence[Candidate]) -> list[float]:
        return [*map(median, bench.in_turns(some, _SHARE_OF_FITS * request.budget_s))]

    if request.kind == "batch":
        price = prices.of_batches(candidates, measure).__getitem__
    else:
        layers_s = _SHARE_OF_LAYERS * request.budget_s
        price = prices.Prices(comm, place, candidates, measure, xp, layers_s).predict

    def predict(some: Sequence[Candidate]) -> dict[Candidate, float]:
        # The ranks of different nodes may predict different times.
        return dict(zip(some, from_rank_0(comm, [*map(price, some)]), strict=True))

    return predict


def choose(rows: Sequence[CandidateRow]) -> CandidateRow:
    """Return the row that holds least, of those that were measured to the end and are nearly as
    fast as the first row.  Of equal ones it is the smallest batch, and then the fastest."""
    least = rows[0].samples_per_s / (1 + _NEAR)
    enough = [row for row in rows if row.is_last and row.samples_per_s >= least]
    return min(enough, key=lambda row: (row.held_bytes, row.candidate.settings.batch))
