"""Successive halving: measure candidates in turns, keep the better half, and measure on."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import TypeVar

T = TypeVar("T")
Measure = Callable[[T, float], list[float]]
"""(candidate, seconds) -> the values measured in about `seconds`, at least one."""
_TURNS, _SLOT_S = 3, 0.25
"""The fewest turns of a round, and the most seconds of a candidate in a turn: a disturbance that
lasts for one turn does not decide."""
_FIRST_SHARE = 0.4
"""Share of the budget for the first round."""


def halve(
    candidates: Sequence[T],
    measure: Measure[T],
    clock: Callable[[], float],
    budget_s: float,
    *,
    near: float = 0.0,
    drop: Callable[[T], None] = lambda candidate: None,
) -> tuple[list[T], dict[T, list[float]]]:
    """Measure candidates for `budget_s` seconds of `clock`, the better ones for longer.

    The first round, in which all candidates are measured, has 2/5 of the time, and each round after
    it an equal share of the rest.  In a round the candidates are measured in turns, so that a drift
    of the machine meets all alike.  After the round the better half stays, by the median of all
    values, and also every candidate whose median is at most ``1 + near`` times the best.  When the
    time of a round is over, nothing more is measured in it: candidates at the end of a long list
    may never be.

    Candidates are hashable, the most promising first; smaller values are better.  `drop` is called
    with each candidate that is not measured any more, except the last ones.

    Returns the candidates of the last round, the best first; and candidate -> all its values, those
    of the last round first, then those of the round before, and so on.  Compare candidates of one
    round alone: between rounds the machine may drift.

    Source: Jamieson & Talwalkar, "Non-stochastic best arm identification and hyperparameter
    optimization", AISTATS 2016.

    >>> now = 0.0
    >>> def measure(candidate, seconds):
    ...     global now
    ...     now += candidate
    ...     return [candidate]
    >>> last, found = halve([0.1, 0.3, 0.2, 0.4], measure, lambda: now, budget_s=10)
    >>> last, {candidate: len(values) for candidate, values in found.items()}
    ([0.1, 0.2], {0.1: 19, 0.2: 19, 0.3: 4, 0.4: 4})
    """
    begin, alive = clock(), list(candidates)
    gone: list[T]
    values: dict[T, list[float]] = {}
    _round(alive, measure, clock, begin + _FIRST_SHARE * budget_s, values)
    rounds = math.ceil(math.log2(len(values)))
    for each in alive:
        if each not in values:
            drop(each)
    alive, gone = _in_order([*values], values), []
    for number in range(rounds):
        better = _better(alive, values, near)
        worse = [each for each in alive if each not in better]
        for each in worse:
            drop(each)
        alive, gone, now = better, worse + gone, clock()
        end = now + (begin + budget_s - now) / (rounds - number)
        _round(alive, measure, clock, end, values)
        alive = _in_order(alive, values)
    return alive, {each: values[each] for each in (*alive, *gone)}


def _in_order(candidates: Sequence[T], values: Mapping[T, list[float]]) -> list[T]:
    return sorted(candidates, key=lambda each: median(values[each]))


def _better(alive: Sequence[T], values: Mapping[T, list[float]], near: float) -> list[T]:
    """Return the better half of candidates in order, at least two, and those near the best."""
    enough = (1 + near) * median(values[alive[0]])
    half = max(2, -(-len(alive) // 2))
    return [each for at, each in enumerate(alive) if at < half or median(values[each]) <= enough]


def _round(
    alive: Sequence[T],
    measure: Measure[T],
    clock: Callable[[], float],
    end: float,
    values: dict[T, list[float]],
) -> None:
    """Measure the candidates in turns until `end`; the first of all is measured in any case."""
    turns = max(_TURNS, math.ceil((end - clock()) / (_SLOT_S * len(alive))))
    for turn in range(turns):
        first = turn * len(alive) // _TURNS % len(alive)
        for place, candidate in enumerate([*alive[first:], *alive[:first]]):
            seconds = (end - clock()) / ((turns - turn) * len(alive) - place)
            if seconds <= 0 and values:
                return
            values.setdefault(candidate, []).extend(measure(candidate, max(0.0, seconds)))
