"""Messages match within their flow, and receives that are posted ahead resolve deadlocks."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringreduce.errors import ScheduleError
from ringreduce.schedules.check import check
from ringreduce.schedules.matching import Vocabulary, match, posts, progress
from ringreduce.schedules.schedule import Schedule, Step, from_text
from tests.support.schedules import any_schedule
from tests.support.strategies import steps_of, written

Ranks = list[list[Step]]
BY_PARITY = Vocabulary(flow=lambda chunks: chunks[0] % 2)
"""Even chunks are one flow, odd chunks another."""
EXCHANGE = "rank 0\n >1:0 \n <1:1 \nrank 1\n >0:1 \n <0:0"
"""Both ranks send before they receive."""


def entered(ranks: Ranks, ahead: int) -> list[tuple[int, int]]:
    return [tuple(place) for place in progress(ranks, posts(match(ranks)), ahead)]


# --- flows ----------------------------------------------------------------------------------------


def test_a_message_overtakes_those_of_another_flow() -> None:
    ranks = from_text("rank 0\n >1:0 >1:1 >1:2 \nrank 1\n <0:1 <0:0 <0:2")
    pairs = [message.chunks for message in match(ranks, BY_PARITY)]
    assert sorted(pairs) == [(0,), (1,), (2,)]


def test_within_a_flow_messages_match_first_in_first_out() -> None:
    ranks = from_text("rank 0\n >1:0 >1:1 >1:2 \nrank 1\n <0:2 <0:1 <0:0")
    with pytest.raises(ScheduleError, match=r"sends chunk 0 to rank 1, whose receive .* chunk 2"):
        match(ranks, BY_PARITY)


def test_a_collective_has_one_flow() -> None:
    with pytest.raises(ScheduleError, match=r"sends chunk 0 to rank 1, whose receive .* chunk 1"):
        match(from_text("rank 0\n >1:0 >1:1 \nrank 1\n <0:1 <0:0"))


# --- receives posted ahead ------------------------------------------------------------------------


def test_two_sends_wait_for_each_other_until_receives_are_posted_ahead() -> None:
    ranks = from_text(EXCHANGE)
    with pytest.raises(ScheduleError, match="deadlock"):
        entered(ranks, ahead=0)
    assert sorted(entered(ranks, ahead=1)) == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]


@pytest.mark.parametrize("sends", range(1, 8))
def test_receives_are_posted_exactly_as_far_ahead(sends: int) -> None:
    """Rank 0 gets as many steps ahead as rank 1 posts receives ahead, and so meets it half way."""
    text = "rank 0\n" + " >1:0 \n" * sends + " <1:1 \n"
    text += "rank 1\n >0:1 \n" + " <0:0 \n" * sends
    least = -(-sends // 2)
    with pytest.raises(ScheduleError, match="deadlock"):
        entered(from_text(text), ahead=least - 1)
    assert len(entered(from_text(text), ahead=least)) == 2 * (sends + 2)


def test_a_send_is_not_posted_ahead() -> None:
    ranks = from_text("rank 0\n <1:0 \n >1:1 \nrank 1\n <0:1 \n >0:0")
    with pytest.raises(ScheduleError, match="deadlock"):
        entered(ranks, ahead=9)


def test_a_receive_is_not_posted_before_its_rank_has_begun() -> None:
    first, *_ = entered(from_text("rank 0\n >1:0 \n - \nrank 1\n <0:0"), ahead=5)
    assert first == (0, 0)


@given(any_schedule(), st.integers(0, 4))
@settings(max_examples=60)
def test_every_rank_enters_its_steps_in_order(schedule: Schedule, ahead: int) -> None:
    ranks = steps_of(schedule)
    places = entered(ranks, ahead)
    for rank, steps in enumerate(ranks):
        assert [step for r, step in places if r == rank] == [*range(len(steps) + 1)]


@given(any_schedule(), st.data())
@settings(max_examples=60)
def test_posting_farther_ahead_never_deadlocks(schedule: Schedule, draws: st.DataObject) -> None:
    """Each step is divided into its sends and its receives, in any order."""
    ranks = [
        [
            part
            for step in steps
            for part in draws.draw(st.permutations([Step(step.sends), Step(recvs=step.recvs)]))
        ]
        for steps in steps_of(schedule)
    ]
    finishes = []
    for ahead in range(12):
        try:
            entered(ranks, ahead)
            finishes.append(True)
        except ScheduleError:
            finishes.append(False)
    assert finishes == sorted(finishes)


# --- the places of errors -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "places"),
    [
        ("rank 0\n >1:0 \nrank 1\n - \n <0:1", [(0, 0), (1, 1)]),
        ("rank 0\n - \n >1:0 \nrank 1\n -", [(0, 1)]),
        ("rank 0\n - \nrank 1\n - \n <0:0", [(1, 1)]),
        ("rank 0\n >1:0 \n <1:0 \nrank 1\n >0:0 \n <0:0", [(0, 0), (1, 0)]),
        ("rank 0\n - \n >0:0 \nrank 1\n -", [(0, 1)]),
        ("rank 0\n >1:0 \n >1:0 \nrank 1\n <0:0+ \n <0:0+", [(1, 1)]),
        ("rank 0\n - \nrank 1\n -", []),
    ],
    ids=["match", "send left", "receive left", "deadlock", "itself", "counted twice", "the end"],
)
def test_an_error_has_the_steps_that_it_names(text: str, places: list[tuple[int, int]]) -> None:
    with pytest.raises(ScheduleError) as error:
        check(written(text, chunks=2 if "1:1" in text or "0:1" in text else 1))
    assert [*error.value.places] == places
