"""The text form reads back what it wrote, and schedules combine side by side."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringreduce.algorithms import build
from ringreduce.config import Config
from ringreduce.errors import ScheduleError
from ringreduce.planning.select import resolve
from ringreduce.schedules.schedule import (
    Claim,
    Recv,
    Send,
    Step,
    from_text,
    in_parallel,
    joined,
    step_from_text,
    step_to_text,
    to_text,
)
from tests.support.strategies import steps

# --- text form ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "step"),
    [
        (">1:3", Step(sends=(Send(1, (3,)),))),
        ("<3:2", Step(recvs=(Recv(3, (2,)),))),
        ("<3:2+", Step(recvs=(Recv(3, (2,), reduce=True),))),
        (">1:2,3 <3:0", Step((Send(1, (2, 3)),), (Recv(3, (0,)),))),
        (">1: <0:", Step((Send(1, ()),), (Recv(0, ()),))),
        ("-", Step()),
    ],
)
def test_a_step_and_its_text(text: str, step: Step) -> None:
    assert step_to_text(step) == text
    assert step_from_text(text) == step


@given(steps)
def test_a_step_reads_back_from_its_text(step: Step) -> None:
    assert step_from_text(step_to_text(step)) == step


@given(st.lists(st.lists(steps, max_size=4), max_size=4))
def test_all_ranks_read_back_from_their_text(ranks: list[list[Step]]) -> None:
    assert from_text(to_text(ranks)) == ranks


def test_the_text_of_a_ring_of_two() -> None:
    ring = build("all_reduce", "ring", nodes=[[0, 1]])
    assert to_text([ring.steps(0), ring.steps(1)]) == (
        "rank 0\n  >1:1 <1:0+\n  >1:0 <1:1\nrank 1\n  >0:0 <0:1+\n  >0:1 <0:0\n"
    )


@pytest.mark.parametrize("word", ["1:3", ">1", ">x:3", ">1:y", ">1:3+", ">1:3,,4", "<1:3-", ">"])
def test_a_word_that_is_no_message_is_quoted(word: str) -> None:
    with pytest.raises(ScheduleError) as error:
        step_from_text(f"<0:1 {word}")
    assert f"{word!r} is no message" in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rank 0\n  >1:0\n  >1;0\n", "line 3: schedule text: '>1;0' is no message"),
        ("rank 1\n  -\n", "line 1: wanted 'rank 0'"),
        ("rank 0\n\nrank 2\n", "line 3: wanted 'rank 1'"),
        ("  >1:0\n", "line 1: a step before the first rank"),
    ],
)
def test_text_that_does_not_parse_names_its_line(text: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        from_text(text)


# --- composition ----------------------------------------------------------------------------------


def parallel(*texts: str) -> list[str]:
    """Return the steps of parallel schedules as texts; each is given as steps joined by ``/``."""
    schedules = [[step_from_text(step) for step in text.split("/")] for text in texts]
    return [step_to_text(step) for step in in_parallel(*schedules)]


def test_messages_to_one_peer_travel_as_one() -> None:
    assert parallel(">1:0 <2:1+", ">1:3 <2:4+") == [">1:0,3 <2:1,4+"]


def test_messages_to_different_peers_stay_apart() -> None:
    assert parallel(">1:0", ">2:3") == [">1:0 >2:3"]


def test_reducing_and_overwriting_receives_stay_apart() -> None:
    assert parallel("<1:0+", "<1:3") == ["<1:0+ <1:3"]


def test_a_shorter_schedule_ends_early() -> None:
    assert parallel(">1:0", ">1:3/>1:4") == [">1:0,3", ">1:4"]


def test_one_schedule_alone_stays_as_it_is() -> None:
    assert parallel(">1:0 <2:1+/-/<2:0") == [">1:0 <2:1+", "-", "<2:0"]


def test_no_schedules_are_no_steps() -> None:
    assert list(in_parallel()) == []


def test_parts_travel_together_in_order() -> None:
    assert joined([(3,), (), (1, 2)]) == (3, 1, 2)


def test_claims_of_phases_add_up() -> None:
    assert Claim(1, 2, 3) + Claim(10, 20, 30) == Claim(11, 22, 33)


# --- the table of algorithms ----------------------------------------------------------------------


def test_an_unknown_algorithm_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"all_reduce: unknown algorithm 'rong'; .*'ring'"):
        resolve("all_reduce", "rong", ((0,),), 8, Config())
