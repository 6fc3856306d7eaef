"""The heaviest stage of a cut is as light as that of the best of all cuts."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringreduce.pipeline import balance

costs = st.one_of(st.integers(0, 9), st.floats(0, 1e9))


@st.composite
def layers_and_stages(draw: st.DrawFn) -> tuple[list[float], int]:
    layers = draw(st.lists(costs, min_size=1, max_size=9))
    return layers, draw(st.integers(1, len(layers)))


def heaviest(layers: Sequence[float], borders: Sequence[int]) -> Fraction:
    return max(sum(map(Fraction, layers[a:b]), Fraction(0)) for a, b in pairwise(borders))


@given(layers_and_stages())
def test_no_cut_is_better(given_: tuple[list[float], int]) -> None:
    layers, stages = given_
    sizes = balance(layers, stages)
    assert (len(sizes), sum(sizes)) == (stages, len(layers))
    assert min(sizes) >= 1
    borders = [sum(sizes[:k]) for k in range(stages + 1)]
    inner = combinations(range(1, len(layers)), stages - 1)
    best = min(heaviest(layers, (0, *cut, len(layers))) for cut in inner)
    assert heaviest(layers, borders) == best


def test_sums_are_not_rounded() -> None:
    # Beside 1e16 floats lose 0.5 and 0.25, and then all three cuts between the two are alike.
    assert balance([1e16, 0.5, 0.25, 1e16, 0], stages=2) == (2, 3)


@pytest.mark.parametrize(
    ("layers", "stages", "sizes"),
    [
        ([1, 1, 1, 1, 1], 3, (2, 2, 1)),
        ([1, 1, 1, 1, 4], 2, (4, 1)),
        ([5], 1, (1,)),
        ([0, 0, 0], 2, (2, 1)),
        ([1, 2, 3], 3, (1, 1, 1)),
    ],
)
def test_of_several_best_cuts_the_last_stages_are_short(
    layers: list[float], stages: int, sizes: tuple[int, ...]
) -> None:
    assert balance(layers, stages) == sizes


@pytest.mark.parametrize("stages", [0, 4, -1, 1.5, "2"])
def test_stages_are_from_1_to_the_number_of_layers(stages: object) -> None:
    with pytest.raises(ValueError, match="pass an int from 1 to the 3 layers"):
        balance([1, 1, 1], stages)  # type: ignore[arg-type]


@pytest.mark.parametrize("cost", [-1, float("nan"), float("inf")])
def test_costs_are_finite_and_not_negative(cost: float) -> None:
    with pytest.raises(ValueError, match="a cost is negative or not finite"):
        balance([1, cost], 2)
