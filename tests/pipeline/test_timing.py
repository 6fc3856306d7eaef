"""Predicted times equal sums by hand and a naive simulation."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringreduce.errors import ScheduleError
from ringreduce.pipeline import (
    Action,
    Costs,
    PipelineSchedule,
    Timeline,
    price,
    prove,
    schedule,
    timeline,
)
from ringreduce.schedules.cost import Link, Profile
from tests.support.pipelines import naive_begins, schedules, with_acts


def exactly(value: float) -> object:
    return pytest.approx(value, rel=1e-9)


@given(schedules(), st.floats(0.1, 10), st.floats(0.1, 10))
@settings(max_examples=60)
def test_the_price_of_equal_stages_and_free_messages_is_the_proven_time(
    shown: PipelineSchedule, forward: float, backward: float
) -> None:
    assert price(shown, Costs(forward, backward)) == exactly(prove(shown, forward, backward).time)


# --- unequal stages and microbatches --------------------------------------------------------------


@st.composite
def uneven(draw: st.DrawFn) -> tuple[PipelineSchedule, Costs]:
    """A schedule whose stages and microbatches have different times."""
    shown = draw(schedules(most_ranks=5, most_splits=8))
    costs = st.integers(1, 9).map(float)
    of_stages = st.lists(costs, min_size=shown.stages, max_size=shown.stages)
    lengths = draw(st.lists(costs, min_size=shown.splits, max_size=shown.splits))
    ahead = draw(st.integers(1, 3))
    return shown, Costs(draw(of_stages), draw(of_stages), lengths, posted_ahead=ahead)


def duration_of(costs: Costs) -> Callable[[Action], float]:
    def duration(action: Action) -> float:
        whole = (costs.forward if action.kind == "F" else costs.backward)[action.stage]
        share = 0.5 if action.kind in "IW" else 1.0
        return share * whole * costs.lengths[action.microbatch]

    return duration


@given(uneven())
@settings(max_examples=100)
def test_each_action_begins_as_in_a_naive_simulation(
    given_: tuple[PipelineSchedule, Costs],
) -> None:
    shown, costs = given_
    begins = naive_begins(shown, duration_of(costs), costs.posted_ahead, waits_for_sends=False)
    predicted = timeline(shown, costs).begins
    assert [list(map(exactly, times)) for times in begins] == [[*times] for times in predicted]


def test_the_slowest_stage_sets_the_pace() -> None:
    """The second rank computes without a gap: the first forward, and then 3 microbatches of 6."""
    slow_end = Costs(forward=[1, 2], backward=[2, 4])
    assert price(schedule("1f1b", ranks=2, splits=3), slow_end) == 1 + 3 * 6 + 2


def test_one_number_is_for_all_layers_of_a_rank() -> None:
    shown = schedule("interleaved", ranks=2, splits=2, virtual=2)
    assert timeline(shown, Costs(forward=1.0)) == timeline(shown, Costs(forward=[0.5] * 4))


def test_a_short_microbatch_takes_its_share() -> None:
    alone = schedule("gpipe", ranks=1, splits=3)
    assert price(alone, Costs(forward=1, backward=2, lengths=[1, 1, 0.5])) == 7.5


# --- messages -------------------------------------------------------------------------------------

ALPHA, BETA, NBYTES = 0.25, 0.001, 500.0
LINKS = Profile(in_node=Link(ALPHA, BETA), between_nodes=Link(10 * ALPHA, BETA))


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_a_microbatch_waits_for_each_message(ranks: int) -> None:
    """One microbatch crosses each border twice."""
    shown = schedule("sequential", ranks, splits=1)
    wanted = 3 * ranks + 2 * (ranks - 1) * (ALPHA + NBYTES * BETA)
    assert price(shown, Costs(nbytes=NBYTES, profile=LINKS)) == exactly(wanted)


def test_a_message_is_as_long_as_its_microbatch() -> None:
    shown = schedule("sequential", ranks=2, splits=2)
    costs = Costs(0.0, 0.0, lengths=[1, 3], nbytes=NBYTES, profile=LINKS)
    assert price(shown, costs) == exactly(4 * ALPHA + 2 * (1 + 3) * NBYTES * BETA)


def test_each_stage_has_an_output_of_its_own_length() -> None:
    shown = schedule("sequential", ranks=3, splits=1)
    costs = Costs(nbytes=[100.0, 300.0, 1e9], profile=LINKS)
    assert price(shown, costs) == exactly(9 + 4 * ALPHA + 2 * (100 + 300) * BETA)


def test_messages_between_nodes_cost_more() -> None:
    shown = schedule("sequential", ranks=3, splits=1)
    costs = Costs(nodes=[[0], [1, 2]], profile=LINKS)
    assert price(shown, costs) == exactly(9 + 2 * ALPHA + 2 * 10 * ALPHA)


def test_a_rank_works_while_its_messages_are_sent() -> None:
    """Rank 0 computes 4 forwards without a gap; the last rank receives one message a forward."""
    shown = schedule("gpipe", ranks=2, splits=4)
    costs = Costs(1.0, 1.0, nbytes=0.9 / BETA, profile=Profile(in_node=Link(0.0, BETA)))
    times = timeline(shown, costs)
    assert times.begins[0][:4] == (0, 1, 2, 3)
    assert times.begins[1][:4] == exactly((1.9, 2.9, 3.9, 4.9))


# --- a timeline -----------------------------------------------------------------------------------


def test_a_timeline_has_the_time_and_the_idle_share_of_each_rank() -> None:
    shown = schedule("gpipe", ranks=2, splits=1)
    times = Timeline(shown, begins=[[0.0, 5.0], [2.0, 3.0]], ends=[[2.0, 10.0], [3.0, 5.0]])
    assert times.time == 10.0
    assert times.idle == exactly((0.3, 0.7))


def test_actions_of_a_rank_do_not_overlap() -> None:
    times = timeline(schedule("zero_bubble", ranks=4, splits=6), Costs(forward=[3, 1, 2, 1]))
    for begins, ends in zip(times.begins, times.ends, strict=True):
        assert all(end <= begin for end, begin in zip(ends, begins[1:], strict=False))


def test_a_schedule_that_deadlocks_has_no_price() -> None:
    shown = schedule("interleaved", ranks=2, splits=4, virtual=2)
    assert price(shown, Costs(posted_ahead=0)) > 0  # its sends need not be complete
    swapped = [["0F0", "0B0", "0F1", "0B1"], ["1F0", "1F1", "1B0", "1B1"]]
    with pytest.raises(ScheduleError, match="cannot finish"):
        price(with_acts(schedule("1f1b", ranks=2, splits=2), swapped))


def test_a_schedule_with_a_missing_action_has_no_price() -> None:
    with pytest.raises(ScheduleError, match="rank 1 lacks 1B0"):
        price(with_acts(schedule("1f1b", ranks=2, splits=1), [["0F0", "0B0"], ["1F0"]]))


# --- costs that do not fit ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("costs", "reason"),
    [
        (Costs(forward=[1, 2, 3]), "forward has 3 numbers; there are 2 stages"),
        (Costs(backward=[1]), "backward has 1 number; there are 2 stages"),
        (Costs(nbytes=[1, 2, 3]), "nbytes has 3 numbers; there are 2 stages"),
        (Costs(lengths=[1]), "lengths has 1 number; there are 3 microbatches"),
        (Costs(forward=-1), "forward is -1; pass finite numbers of at least 0"),
        (Costs(lengths=[1, 1, float("nan")]), "lengths is .*; pass finite numbers"),
        (Costs(nodes=[[0]]), r"nodes \[\[0\]\] do not list ranks 0 to 1 once"),
    ],
)
def test_costs_that_do_not_fit_are_refused(costs: Costs, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        price(schedule("1f1b", ranks=2, splits=3), costs)
