"""Ranks post receives ahead, work between steps, and may go on while their sends are under way."""

from __future__ import annotations

import pytest

from ringreduce.errors import ScheduleError
from ringreduce.schedules.cost import Link, Links, Profile
from ringreduce.schedules.matching import RankStep, match
from ringreduce.schedules.schedule import from_text
from ringreduce.schedules.simulation import Workload, simulate

EXCHANGE = "rank 0\n >1:0 \n <1:1 \nrank 1\n >0:1 \n <0:0"
"""Both ranks send before they receive."""


def workload(text: str, work_s: list[list[float]], message_s: float = 0.0, **how) -> Workload:
    ranks = from_text(text)
    links = Links([range(len(ranks))], Profile(in_node=Link(0.0, 1.0)))
    return Workload([links.wire(m, message_s) for m in match(ranks)], work_s, **how)


def test_ranks_work_after_each_step() -> None:
    text = "rank 0\n >1:0 \n - \nrank 1\n <0:0 \n -"
    assert simulate(workload(text, [[1.0, 2.0], [4.0, 8.0]], message_s=16.0)) == 16 + 4 + 8


def test_a_step_without_messages_has_its_work() -> None:
    text = "rank 0\n - \n >1:0 \nrank 1\n <0:0"
    assert simulate(workload(text, [[3.0, 0.0], [5.0]])) == 3 + 5


def test_who_waits_for_sends_deadlocks_without_receives_ahead() -> None:
    with pytest.raises(ScheduleError, match="cannot finish"):
        simulate(workload(EXCHANGE, [[1.0, 1.0], [1.0, 1.0]]))


@pytest.mark.parametrize(
    ("how", "time"),
    # With receives ahead the messages are first; without, they follow the work of the first step.
    [({"ahead": 1}, 10 + 1 + 1), ({"waits_for_sends": False}, 1 + 10 + 1)],
    ids=["ahead", "sends later"],
)
def test_both_ways_out_of_a_deadlock(how: dict[str, object], time: float) -> None:
    made = workload(EXCHANGE, [[1.0, 1.0], [1.0, 1.0]], message_s=10.0, **how)
    assert simulate(made) == time


def test_a_message_that_is_complete_ahead_costs_no_time_later() -> None:
    text = "rank 0\n >1:0 \nrank 1\n - \n <0:0"
    assert simulate(workload(text, [[0.0], [9.0, 1.0]], message_s=5.0, ahead=1)) == 9 + 1
    assert simulate(workload(text, [[0.0], [9.0, 1.0]], message_s=5.0)) == 9 + 5 + 1


def test_the_watcher_sees_when_the_work_after_each_step_begins() -> None:
    seen: dict[RankStep, float] = {}
    text = "rank 0\n - \n >1:0 \nrank 1\n <0:0"
    made = workload(text, [[3.0, 0.0], [5.0]], message_s=2.0)
    simulate(made, watch=seen.__setitem__)
    assert seen == {RankStep(0, 0): 0.0, RankStep(0, 1): 5.0, RankStep(1, 0): 5.0}
