"""Cut the layers of a model into stages."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate, pairwise

from ringreduce.errors import counted, shown


def balance(costs: Sequence[float], stages: int) -> tuple[int, ...]:
    """Cut layers into stages so that the heaviest stage is as light as possible.

    The cut is exact: dynamic programming over all cuts, with sums that are not rounded.  Where
    several cuts are equally good, the last stages are as short as possible.

    Args:
        costs: cost of each layer, such as its time or its number of parameters; at least 0.
        stages: number of stages, each of at least one layer.

    Returns:
        The number of layers of each stage, in order.

    Raises:
        ValueError: there are fewer layers than stages, or a cost is negative or not finite.

    Example:
        >>> rr.pipeline.balance([1, 1, 1, 1, 4], stages=2)
        (4, 1)
    """
    if not isinstance(stages, int) or not 1 <= stages <= len(costs):
        raise ValueError(
            f"balance: stages is {shown(stages)}; pass an int from 1 to the "
            f"{counted(len(costs), 'layer')}"
        )
    if not all(0 <= cost < float("inf") for cost in costs):
        raise ValueError("balance: a cost is negative or not finite; pass the cost of each layer")
    sums = [Fraction(0), *accumulate(map(Fraction, costs))]
    """Number of layers -> the cost of the first of them."""
    starts = _starts(sums, stages)
    borders = [len(costs)]
    for start in reversed(starts):
        borders.append(start[borders[-1]])
    return tuple(end - begin for begin, end in pairwise(reversed(borders)))


def _starts(sums: Sequence[Fraction], stages: int) -> list[list[int]]:
    """Return, for each stage, its end -> its start in the best cut of all layers before its end.

    The best cut of the layers before `end` into k + 1 stages is the best cut of the layers before
    `start` into k stages, and one stage from `start` to `end`, for the best `start`.
    """
    ends = range(len(sums))
    heaviest = list(sums)
    """Number of layers -> the heaviest stage of their best cut into the stages so far."""
    starts = [[0 for _ in ends]]
    for stage in range(1, stages):
        found = [
            min(
                (
                    (max(heaviest[start], sums[end] - sums[start]), -start)
                    for start in range(stage, end)
                ),
                default=(sums[-1], 0),
            )
            for end in ends
        ]
        heaviest = [weight for weight, _ in found]
        starts.append([-start for _, start in found])
    return starts
