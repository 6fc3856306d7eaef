"""Successive halving: measure candidates in turns, keep the better half, and measure on."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import median
from typing import TypeVar

T = TypeVar("T")
Measure = Callable[[T, float], list[float]]
"""(candidate, seconds) -> the measured values of about so many seconds, at least one."""
_TURNS = 3
"""The turns of a round: a disturbance that lasts for one of them does not decide."""


def halve(
    candidates: Sequence[T],
    measure: Measure[T],
    clock: Callable[[], float],
    budget_s: float,
    *,
    near: float = 0.0,
    drop: Callable[[T], None] = lambda candidate: None,
) -> dict[T, list[float]]:
    """Measure candidates for `budget_s` seconds of `clock`, the better ones for longer.

    Every round has an equal share of the time that is left.  In a round the candidates are
    measured in turns, so that a drift of the machine meets all alike.  After the round the better
    half stays, by the median of all values, and also every candidate whose median is at most
    ``1 + near`` times the best.  When the time of a round is over, nothing more is measured in it:
    candidates at the end of a long list may never be.

    Args:
        candidates: the most promising first; hashable.
        measure: measures a candidate; a smaller value is better.
        clock: returns seconds.
        budget_s: the seconds of all rounds.
        near: the share by which a candidate may be worse than the best and yet stay.
        drop: called with each candidate that is not measured any more, except the last ones.

    Returns:
        Candidate -> all its measured values, for the candidates that were measured.

    Source: Jamieson & Talwalkar, "Non-stochastic best arm identification and hyperparameter
    optimization", AISTATS 2016.

    >>> now = 0.0
    >>> def measure(candidate, seconds):
    ...     global now
    ...     now += candidate
    ...     return [candidate]
    >>> found = halve([0.1, 0.3, 0.2, 0.4], measure, lambda: now, budget_s=10)
    >>> {candidate: len(values) for candidate, values in found.items()}
    {0.1: 6, 0.3: 3, 0.2: 6, 0.4: 3}
    """
    begin, alive = clock(), list(candidates)
    values: dict[T, list[float]] = {}
    rounds = max(1, math.ceil(math.log2(max(1, len(alive)))))
    for number in range(rounds):
        now = clock()
        end = now + (begin + budget_s - now) / (rounds - number)
        _round(alive, measure, clock, end, values)
        best = min(map(median, values.values()))
        measured = [each for each in alive if each in values]
        measured.sort(key=lambda each: median(values[each]))
        half = -(-len(alive) // 2)
        kept = [
            each
            for place, each in enumerate(measured)
            if place < half or median(values[each]) <= (1 + near) * best
        ]
        if number < rounds - 1:
            for each in alive:
                if each not in kept:
                    drop(each)
            alive = kept
    return values


def _round(
    alive: Sequence[T],
    measure: Measure[T],
    clock: Callable[[], float],
    end: float,
    values: dict[T, list[float]],
) -> None:
    """Measure the candidates in turns until `end`; the first of all is measured in any case."""
    left = _TURNS * len(alive)
    for turn in range(_TURNS):
        first = turn * len(alive) // _TURNS
        for candidate in [*alive[first:], *alive[:first]]:
            seconds = (end - clock()) / left
            if seconds <= 0 and values:
                return
            values.setdefault(candidate, []).extend(measure(candidate, max(0.0, seconds)))
            left -= 1
