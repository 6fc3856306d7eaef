"""The formula for many ranks: what the simulation says of the same schedules, and what it reads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringreduce.algorithms import build
from ringreduce.schedules.cost import Link, Profile, price
from ringreduce.schedules.formula import at_least, estimate
from ringreduce.schedules.schedule import Claim, Schedule, Step
from tests.support.each import each
from tests.support.strategies import block_layout, layouts

MIB = 1 << 20
NETWORK = Profile()
IN_MEMORY = Profile().of_memory(crowded=False)
CALLS = [(64 << 10, 1), (MIB, 2), (16 * MIB, 8)]
"""Bytes and slices, of which two are in flight, as of a call between nodes."""
FLAT = ["ring", "halving_doubling", "doubling"]
ALL_REDUCES = [
    *FLAT,
    "hierarchical",
    "hierarchical(two_shot, doubling)",
    "hierarchical(two_shot, halving_doubling)",
]
EQUAL = [
    *[[1] * 17, [1] * 24, [2] * 12, [4] * 6, [6] * 4, [3] * 8, [12] * 2, [8] * 4, [4] * 8],
    *[[1] * 48, [6] * 8, [16] * 3, [24] * 2, [20] * 3, [8] * 8],
]
UNEQUAL = [[3, 1, 2] * 3, [8, 8, 4], [2, 2, 2, 1] * 3, [1, 16], [5, 7, 9, 11], [20, 10, 30]]


def of_simulation(
    collective: str, algorithm: str, sizes: list[int], nbytes: int, slices: int
) -> float:
    """Return what the formula finds, in multiples of what the simulation finds."""
    nodes = block_layout(*sizes)
    schedule, how = build(collective, algorithm, nodes), {"slices": slices, "in_flight": 2}
    found, simulated = (
        model(schedule, nodes, nbytes, NETWORK, **how) for model in (estimate, price)
    )
    return found / simulated


def calls(algorithm: str, sizes: list[int]) -> list[tuple[int, int]]:
    """Of many ranks, a ring takes too long to simulate in several slices."""
    return CALLS[:1] if algorithm in ("ring", "hierarchical") and sum(sizes) > 32 else CALLS


@pytest.mark.parametrize("algorithm", ALL_REDUCES)
@each("sizes", EQUAL)
def test_equal_nodes(algorithm: str, sizes: list[int]) -> None:
    for nbytes, slices in calls(algorithm, sizes):
        assert 0.9 < of_simulation("all_reduce", algorithm, sizes, nbytes, slices) < 1.25


@pytest.mark.parametrize("algorithm", ALL_REDUCES)
@each("sizes", UNEQUAL)
def test_unequal_nodes(algorithm: str, sizes: list[int]) -> None:
    for nbytes, slices in calls(algorithm, sizes):
        assert 0.85 < of_simulation("all_reduce", algorithm, sizes, nbytes, slices) < 1.5


@pytest.mark.parametrize(
    ("collective", "algorithm"),
    [
        *[("all_reduce", algorithm) for algorithm in ALL_REDUCES],
        *[(name, "ring") for name in ("reduce_scatter", "all_gather")],
        *[(name, "halving_doubling") for name in ("reduce_scatter", "all_gather")],
        ("all_to_all", "direct"),
    ],
)
@each("sizes", [[8] * 4, [4] * 8, [1] * 32, [16] * 2, [1] * 64, [32] * 2])
def test_one_slice_on_powers_of_two_takes_the_time_of_the_simulation(
    collective: str, algorithm: str, sizes: list[int]
) -> None:
    for nbytes in (8, MIB):
        found = of_simulation(collective, algorithm, sizes, nbytes, slices=1)
        assert found == pytest.approx(1, rel=1e-9)


@pytest.mark.parametrize("profile", [NETWORK, IN_MEMORY], ids=["by messages", "in memory"])
@each("ranks", [17, 24, 32, 48, 64])
def test_one_node_takes_the_time_of_the_simulation(profile: Profile, ranks: int) -> None:
    nodes = block_layout(ranks)
    for algorithm in [*FLAT, "one_shot", "two_shot"]:
        schedule = build("all_reduce", algorithm, nodes)
        for nbytes in (8, MIB):
            simulated = price(schedule, nodes, nbytes, profile)
            assert estimate(schedule, nodes, nbytes, profile) == pytest.approx(simulated, rel=1e-9)


# --- what it reads --------------------------------------------------------------------------------


def changed(schedule: Schedule, change: Callable[[list[Step]], list[Step]]) -> Schedule:
    """The schedule with the steps of all ranks changed, and claims that are those of its steps."""
    ranks = [change(list(schedule.steps(rank))) for rank in range(schedule.size)]
    return replace(
        schedule,
        steps=lambda rank: iter(ranks[rank]),
        claim=lambda rank: Claim.of(ranks[rank]),
    )


def without(number: int) -> Callable[[list[Step]], list[Step]]:
    return lambda steps: steps[:number] + steps[number + 1 :]


def twice(number: int) -> Callable[[list[Step]], list[Step]]:
    def double(steps: list[Step]) -> list[Step]:
        step = steps[number]
        steps[number] = replace(step, sends=step.sends * 2, recvs=step.recvs * 2)
        return steps

    return double


@pytest.mark.parametrize("algorithm", ALL_REDUCES)
@each(("sizes", "slices"), [([6] * 4, 1), ([3, 1, 2] * 3, 1), ([1] * 17, 8), ([18] * 2, 1)])
def test_a_step_less_or_a_message_twice_changes_the_price(
    algorithm: str, sizes: list[int], slices: int
) -> None:
    nodes = block_layout(*sizes)
    schedule = build("all_reduce", algorithm, nodes)
    found = estimate(schedule, nodes, MIB, NETWORK, slices=slices)
    for number in range(min(schedule.claim(rank).steps for rank in range(schedule.size))):
        for change, sign in ((without(number), -1), (twice(number), 1)):
            other = estimate(changed(schedule, change), nodes, MIB, NETWORK, slices=slices)
            assert (other - found) * sign > 1e-7


@pytest.mark.parametrize("algorithm", ALL_REDUCES)
def test_a_thousand_ranks_are_priced_from_the_steps_of_few(algorithm: str) -> None:
    made, nodes = Counter[int](), block_layout(*[8] * 125)
    schedule = build("all_reduce", algorithm, nodes)

    def steps(rank: int) -> Iterator[Step]:
        for step in schedule.steps(rank):
            made[rank] += 1
            yield step

    assert estimate(replace(schedule, steps=steps), nodes, MIB, NETWORK) > 0
    assert made.total() < 20_000


@given(
    nodes=layouts(max_nodes=12, max_ranks=40),
    algorithm=st.sampled_from(ALL_REDUCES),
    nbytes=st.integers(0, 4 * MIB),
    slices=st.integers(1, 8),
    in_flight=st.integers(1, 4),
)
@settings(max_examples=150)
def test_the_bounds_are_below_the_price(
    nodes: list[list[int]], algorithm: str, nbytes: int, slices: int, in_flight: int
) -> None:
    call = build("all_reduce", algorithm, nodes), nodes, nbytes, NETWORK
    how = {"slices": slices, "in_flight": in_flight}
    found = estimate(*call, **how) * (1 + 1e-9)
    assert at_least(*call, **how) <= found
    assert at_least(*call, **how, of_steps=True) <= found


def test_a_node_of_many_ranks_is_priced_by_ranks_that_stand_for_others() -> None:
    """Each rank of two nodes exchanges all data with one of the other: 2,000 messages at a port."""
    nodes, link = block_layout(2000, 2000), Link(1e-6, 1e-10)
    profile = Profile(in_node=Link(0, 0), between_nodes=link, gamma_s_per_byte=0)
    schedule = build("all_reduce", "hierarchical(two_shot, one_shot)", nodes)
    assert estimate(schedule, nodes, MIB, profile) == pytest.approx(1e-6 + MIB * 1e-10)


def test_one_rank_pays_nothing() -> None:
    ring = build("all_reduce", "ring", [[0]])
    assert estimate(ring, [[0]], MIB, NETWORK, slices=8) == 0.0
    assert at_least(ring, [[0]], MIB, NETWORK) == 0.0
