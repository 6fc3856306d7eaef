"""A drawing shows all messages by rank and step, marks failed steps, and stays small."""

from __future__ import annotations

import doctest
import importlib
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringreduce.algorithms import build
from ringreduce.schedules.draw import draw
from ringreduce.schedules.schedule import Schedule, Step, from_text
from tests.support.each import each
from tests.support.strategies import EVERY_ALGORITHM, block_layout, steps


def ring(size: int) -> Schedule:
    return build("all_reduce", "ring", block_layout(size))


def lines(*args: object, **kwargs: object) -> list[str]:
    return draw(*args, **kwargs).splitlines()  # type: ignore[arg-type]


def test_a_ring_of_two() -> None:
    assert lines(ring(2)) == [
        "step  rank 0       rank 1",
        "   0   >1:1 <1:0+   >0:0 <0:1+",
        "   1   >1:0 <1:1    >0:1 <0:0",
        ">1:1 sends chunk 1 to rank 1; <1:0+ adds chunk 0 from rank 1; "
        "<1:1 overwrites chunk 1 with rank 1's",
    ]


def test_a_schedule_and_its_steps_draw_the_same() -> None:
    schedule = ring(4)
    assert draw(schedule) == draw([schedule.steps(rank) for rank in range(4)])


def test_the_example_in_the_docstring_is_true() -> None:
    assert doctest.testmod(importlib.import_module("ringreduce.schedules.draw")).failed == 0


def test_a_step_without_messages_is_a_dash_and_after_the_last_step_there_is_nothing() -> None:
    assert lines(from_text("rank 0\n -\n >1:0\nrank 1\n <0:0"))[1:3] == [
        "   0   -       <0:0",
        "   1   >1:0",
    ]


def test_ranges_of_chunks_are_shortened() -> None:
    assert lines(from_text("rank 0\n >1:1,2,4,5,6,7,9"))[1] == "   0   >1:1,2,4-7,9"


def test_a_long_message_is_cut() -> None:
    assert lines(from_text("rank 0\n >1:0,2,4,6,8"))[1] == "   0   >1:0,2,4,…"


def test_many_messages_are_counted() -> None:
    text = "rank 0\n " + " ".join(f"<{peer}:0+" for peer in range(1, 8))
    assert lines(from_text(text))[1] == "   0   <1:0+ <2:0+ <3:0+ <4:0+ …3 more"


def test_one_rank_has_no_steps() -> None:
    assert lines(ring(1)) == ["step  rank 0"]


# --- the legend -----------------------------------------------------------------------------------


def legend_of(schedule: Schedule) -> list[str]:
    """The lines below the grid."""
    return [line for line in lines(schedule) if not line.startswith(("step", " ", "…"))]


@each("size", [1, 2, 3])
@pytest.mark.parametrize(("collective", "algorithm"), EVERY_ALGORITHM)
def test_the_legend_explains_what_is_drawn(collective: str, algorithm: str, size: int) -> None:
    schedule = build(collective, algorithm, block_layout(size))
    grid = [line for line in lines(schedule) if line.startswith(" ")]
    words = {word for line in grid for word in line.split()}
    examples = [part.split()[0] for line in legend_of(schedule) for part in line.split("; ")]
    chunks = {chunk for word in words for chunk in word.strip("+").rpartition(":")[2].split(",")}
    assert {example for example in examples if example[0] in "<>="} <= words
    assert {example for example in examples if example[0] not in "<>="} <= chunks
    assert bool(examples) == (size > 1)


def test_the_numbers_of_the_legend_are_those_of_its_example() -> None:
    for line in legend_of(build("all_reduce", "halving_doubling", block_layout(4))):
        for part in line.split("; "):
            rank, _, chunks = part.split()[0].lstrip("<>").rstrip("+").partition(":")
            assert f"rank {rank}" in part
            assert f" {chunks} " in part


def test_a_message_that_is_cut_off_is_not_explained() -> None:
    drawing = lines(from_text("rank 0\n >1:0 >2:0 >3:0 >4:0 <1:0+"))
    assert drawing[1:] == [
        "   0   >1:0 >2:0 >3:0 >4:0 …1 more",
        ">1:0 sends chunk 0 to rank 1",
    ]


def test_an_empty_message_is_explained() -> None:
    assert legend_of(build("barrier", "direct", block_layout(2))) == [
        ">1: sends an empty message to rank 1; <1: receives an empty message from rank 1"
    ]


def test_a_copy_is_explained() -> None:
    assert legend_of(build("all_reduce", "allgather_reduce", block_layout(2))) == [
        ">1:0@0 sends chunk 0@0 to rank 1; <1:0@1 receives chunk 0@1 from rank 1",
        "0@0 is rank 0's copy of chunk 0, kept apart; =0 adds up all copies of chunk 0",
    ]


# --- failed steps ---------------------------------------------------------------------------------


def test_the_step_that_failed_is_marked_on_its_rank() -> None:
    assert lines(ring(3), failed={2: 1, 0: 0}) == [
        "step  rank 0       rank 1       rank 2",
        "   0  !>1:2 <2:1+   >2:0 <0:2+   >0:1 <1:0+",
        "   1   >1:1 <2:0+   >2:2 <0:1+  !>0:0 <1:2+",
        "   2   >1:0 <2:2    >2:1 <0:0    >0:2 <1:1",
        "   3   >1:2 <2:1    >2:0 <0:2    >0:1 <1:0",
        ">1:2 sends chunk 2 to rank 1; <2:1+ adds chunk 1 from rank 2; "
        "<2:2 overwrites chunk 2 with rank 2's",
        "! did not finish: rank 0 in step 0, rank 2 in step 1",
    ]


def test_nothing_failed_draws_no_mark() -> None:
    assert "!" not in draw(ring(3), failed={})


def test_a_rank_that_failed_after_its_last_step_is_still_marked() -> None:
    assert lines(ring(2), failed={1: 2})[3] == "   2               !"


@pytest.mark.parametrize("size", [2, 30])
def test_every_rank_may_have_failed(size: int) -> None:
    last = lines(ring(size), failed=dict.fromkeys(range(size), 0))[-1]
    assert last.count("in step 0") == min(size, 8)
    assert last.endswith("22 more ranks") == (size == 30)


# --- large schedules ------------------------------------------------------------------------------


def test_a_large_schedule_is_drawn_around_what_failed() -> None:
    drawing = lines(ring(100), failed={50: 120}, max_ranks=3, max_steps=2)
    assert drawing == [
        "step  rank 49         rank 50         rank 51",
        "…",
        " 119   >50:29 <48:28   >51:30 <49:29   >52:31 <50:30",
        " 120   >50:28 <48:27  !>51:29 <49:28   >52:30 <50:29",
        "…",
        "… 97 of 100 ranks are not drawn",
        "… 196 of 198 steps are not drawn",
        ">50:29 sends chunk 29 to rank 50; <48:28 overwrites chunk 28 with rank 48's",
        "! did not finish: rank 50 in step 120",
    ]


def test_a_large_schedule_is_drawn_from_its_start_where_nothing_failed() -> None:
    drawing = lines(ring(100), max_ranks=2, max_steps=1)
    assert drawing[:3] == [
        "step  rank 0          rank 1",
        "   0   >1:99 <99:98+   >2:0 <0:99+",
        "…",
    ]


def test_failures_far_apart_are_both_drawn() -> None:
    drawing = lines(ring(100), failed={3: 5, 90: 150}, max_ranks=4, max_steps=4)
    assert drawing[0].split()[1:] == ["rank", "2", "rank", "3", "rank", "89", "rank", "90"]
    assert [line[:4].strip() for line in drawing[1:8]] == ["…", "4", "5", "…", "149", "150", "…"]


def test_of_a_large_schedule_only_what_is_drawn_is_generated() -> None:
    schedule, asked = ring(5000), []

    def steps_of(rank: int) -> Iterator[Step]:
        for number, step in enumerate(schedule.steps(rank)):
            asked.append((rank, number))
            yield step

    draw(replace(schedule, steps=steps_of), failed={4000: 17})
    assert {rank for rank, _ in asked} == set(range(3996, 4004))
    assert max(number for _, number in asked) == 24


@pytest.mark.slow
@given(
    st.lists(st.lists(steps, max_size=12), max_size=9),
    st.dictionaries(st.integers(0, 8), st.integers(0, 12), max_size=9),
)
@settings(max_examples=30)
def test_any_drawing_has_a_bounded_size(ranks: list[list[Step]], failed: dict[int, int]) -> None:
    drawing = lines(ranks, failed=failed, max_ranks=4, max_steps=6)
    assert len(drawing) <= 1 + 6 + 7 + 2 + 1 + 1
    assert max(map(len, drawing)) <= 6 + 4 * 100
