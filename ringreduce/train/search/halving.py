"""Successive halving: measure candidates in turns, keep the better half, and measure on."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import TypeVar

T = TypeVar("T")
Measure = Callable[[T, float], list[float]]
"""(candidate, seconds) -> the measured values of about so many seconds, at least one."""
_TURNS, _SLOT_S = 3, 0.25
"""The fewest turns of a round, and the most seconds of a candidate in a turn: a disturbance that
lasts for one turn does not decide."""
_FIRST_SHARE = 0.4
"""Share of the time of all rounds for the first round."""
_CHECKS, _CHECK_SHARE = 2, 0.1
"""The most checks after the rounds, and the share of the budget for all of them."""


def halve(
    candidates: Sequence[T],
    measure: Measure[T],
    clock: Callable[[], float],
    budget_s: float,
    *,
    near: float = 0.0,
    drop: Callable[[T], None] = lambda candidate: None,
) -> dict[T, list[float]]:
    """Measure candidates for about `budget_s` seconds of `clock`, the better ones for longer.

    The rounds have 9/10 of the time.  The first round, in which all candidates are measured, has
    2/5 of that, and each round after it an equal share of the rest.  In a round the candidates are
    measured in turns, so that a drift of the machine meets all alike.  After the round the better
    half stays, by the median of all values, and also every candidate whose median is at most
    ``1 + near`` times the best.  When the time of a round is over, nothing more is measured in it:
    candidates at the end of a long list may never be.

    After the rounds, a candidate that was dropped may have a lower median than the best of the last
    round: the machine may have been faster before.  Such candidates and those of the last round are
    then measured again in turns, each at least once, and these values replace their old ones.  If
    this does not settle it, all candidates are measured so.

    Args:
        candidates: the most promising first; hashable.
        measure: measures a candidate; a smaller value is better.
        clock: returns seconds.
        budget_s: the seconds of all measurements.
        near: the share by which a candidate may be worse than the best and yet stay.
        drop: called with each candidate that a round is the last for.

    Returns:
        Candidate -> its values.  The candidate with the lowest median is the first, and so on.

    Source: Jamieson & Talwalkar, "Non-stochastic best arm identification and hyperparameter
    optimization", AISTATS 2016.  The check is not in it.

    >>> now = 0.0
    >>> def measure(candidate, seconds):
    ...     global now
    ...     now += candidate
    ...     return [candidate]
    >>> found = halve([0.1, 0.3, 0.2, 0.4], measure, lambda: now, budget_s=10)
    >>> {candidate: len(values) for candidate, values in found.items()}
    {0.1: 18, 0.2: 18, 0.3: 4, 0.4: 3}
    """
    begin, alive = clock(), list(candidates)
    rounds_s = (1 - _CHECK_SHARE) * budget_s
    values: dict[T, list[float]] = {}
    _round(alive, measure, clock, begin + _FIRST_SHARE * rounds_s, values)
    rounds = math.ceil(math.log2(len(values)))
    for each in alive:
        if each not in values:
            drop(each)
    alive = _in_order([*values], values)
    for number in range(rounds):
        better = _better(alive, values, near)
        for each in alive:
            if each not in better:
                drop(each)
        alive, now = better, clock()
        end = now + (begin + rounds_s - now) / (rounds - number)
        _round(alive, measure, clock, end, values)
        alive = _in_order(alive, values)
    _check(alive, measure, clock, begin + budget_s, values)
    return {each: values[each] for each in _in_order([*values], values)}


def _check(
    alive: Sequence[T],
    measure: Measure[T],
    clock: Callable[[], float],
    end: float,
    values: dict[T, list[float]],
) -> None:
    """Measure the candidates `alive` again beside dropped ones that look better, if any do."""
    for number in range(_CHECKS):
        best = min(median(values[each]) for each in alive)
        rivals = [each for each in values if each not in alive and median(values[each]) < best]
        if not rivals:
            return
        # After the last check all values are of one time, so nothing is left to settle.
        alive = [*values] if number == _CHECKS - 1 else [*alive, *rivals]
        again: dict[T, list[float]] = {}
        now = clock()
        _round(alive, measure, clock, now + (end - now) / (_CHECKS - number), again, len(alive))
        values |= again


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
    least: int = 1,
) -> None:
    """Measure the candidates in turns until `end`, and at least until `least` have values."""
    turns = max(_TURNS, math.ceil((end - clock()) / (_SLOT_S * len(alive))))
    for turn in range(turns):
        first = turn * len(alive) // _TURNS % len(alive)
        for place, candidate in enumerate([*alive[first:], *alive[:first]]):
            seconds = (end - clock()) / ((turns - turn) * len(alive) - place)
            if seconds <= 0 and len(values) >= least:
                return
            values.setdefault(candidate, []).extend(measure(candidate, max(0.0, seconds)))
