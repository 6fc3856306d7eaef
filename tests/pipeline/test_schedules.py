"""Schedules are found by name, have the actions of their sources, and refuse what does not fit."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Iterator

import pytest

from ringreduce import pipeline
from ringreduce.pipeline import Action, PipelineSchedule, schedule
from ringreduce.pipeline.generators import SCHEDULES
from tests.support.pipelines import forget_own


def texts(shown: PipelineSchedule, rank: int) -> str:
    return " ".join(map(str, shown.acts(rank)))


# --- what the generators yield --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "splits", "virtual", "wanted"),
    [
        ("gpipe", 2, 1, ["0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1", "2F0 2F1 2B0 2B1"]),
        (
            "1f1b",
            4,
            1,
            [
                "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
                "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
                "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
            ],
        ),
        ("1f1b", 1, 1, ["0F0 0B0", "1F0 1B0", "2F0 2B0"]),
        (
            "interleaved",
            3,
            2,
            [
                "0F0 0F1 0F2 3F0 3F1 3F2 3B0 3B1 3B2 0B0 0B1 0B2",
                "1F0 1F1 1F2 4F0 4F1 4F2 4B0 4B1 4B2 1B0 1B1 1B2",
                "2F0 2F1 2F2 5F0 5B0 5F1 5B1 5F2 5B2 2B0 2B1 2B2",
            ],
        ),
        (
            "zero_bubble",
            4,
            1,
            [
                "0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3",
                "1F0 1F1 1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3",
                "2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3",
            ],
        ),
        ("sequential", 2, 1, [f"{r}F0 {r}B0 {r}F1 {r}B1" for r in range(3)]),
    ],
)
def test_three_ranks_act_as_in_the_source(
    name: str, splits: int, virtual: int, wanted: list[str]
) -> None:
    shown = schedule(name, ranks=3, splits=splits, virtual=virtual)
    assert [texts(shown, rank) for rank in range(3)] == wanted


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_generator_has_at_most_15_lines_and_names_its_source(name: str) -> None:
    function, _ = SCHEDULES[name]
    (tree,) = ast.parse(inspect.getsource(function)).body
    assert isinstance(tree, ast.FunctionDef)
    docstring, *body = tree.body
    lines = body[-1].end_lineno - docstring.end_lineno  # type: ignore[operator]
    assert 1 + lines <= 15
    assert re.search(r"Source: .*, \w+ (19|20)\d\d", " ".join(function.__doc__.split()))


def test_stage_k_is_on_rank_k_mod_p() -> None:
    shown = schedule("interleaved", ranks=3, splits=3, virtual=4)
    assert [shown.rank_of(stage) for stage in range(shown.stages)] == [0, 1, 2] * 4


# --- names ----------------------------------------------------------------------------------------


def test_the_library_has_these_schedules() -> None:
    assert [*SCHEDULES] == ["gpipe", "1f1b", "interleaved", "zero_bubble", "sequential"]


def test_an_unknown_name_gets_the_closest() -> None:
    with pytest.raises(ValueError, match="did you mean 'zero_bubble'"):
        schedule("zero_bubbles", ranks=2, splits=2)


@pytest.mark.parametrize("what", ["ranks", "splits", "virtual"])
@pytest.mark.parametrize("number", [0, -1, 1.0, "2", None, True])
def test_numbers_are_ints_of_at_least_1(what: str, number: object) -> None:
    given = {"ranks": 2, "splits": 2, "virtual": 1, what: number}
    with pytest.raises(ValueError, match=f"{what} is .*; pass an int of at least 1"):
        schedule("1f1b", **given)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name != "interleaved"])
def test_several_stages_a_rank_are_for_interleaved_alone(name: str) -> None:
    with pytest.raises(ValueError, match="several stages a rank are for 'interleaved'"):
        schedule(name, ranks=2, splits=2, virtual=2)


@pytest.mark.parametrize(
    ("ranks", "splits", "nearest"), [(4, 6, "4 or 8"), (4, 3, "4"), (3, 10, "9 or 12")]
)
def test_interleaved_refuses_splits_that_the_ranks_do_not_divide(
    ranks: int, splits: int, nearest: str
) -> None:
    with pytest.raises(ValueError, match=rf"no multiple of the {ranks} ranks; choose {nearest}$"):
        schedule("interleaved", ranks, splits, virtual=2)


# --- schedules of users ---------------------------------------------------------------------------


@pytest.fixture
def register() -> Iterator[Callable[..., None]]:
    """Registers for one test alone."""
    yield pipeline.register
    forget_own()


def one_at_a_time(ranks: int, rank: int, splits: int, virtual: int):
    for microbatch in range(splits):
        yield f"{rank}F{microbatch}"
        yield Action(rank, "B", microbatch)


def test_own_actions_may_be_texts(register) -> None:
    register("mine", one_at_a_time)
    assert texts(schedule("mine", ranks=2, splits=2), 1) == "1F0 1B0 1F1 1B1"


def test_own_schedules_are_asked_for_all_their_numbers(register) -> None:
    asked = []
    register("mine", lambda *numbers: asked.append(numbers) or ())
    schedule("mine", ranks=3, splits=5, virtual=2).acts(1)
    assert asked == [(3, 1, 5, 2)]


def test_a_later_registration_replaces_the_earlier(register) -> None:
    register("mine", lambda *_: ["0F0"])
    register("mine", lambda *_: ["0B0"])
    assert texts(schedule("mine", ranks=1, splits=1), 0) == "0B0"


@pytest.mark.parametrize("rank", [-1, 2])
def test_the_actions_of_no_rank_are_refused(rank: int) -> None:
    with pytest.raises(ValueError, match="there are ranks 0 to 1"):
        schedule("1f1b", ranks=2, splits=2).acts(rank)


@pytest.mark.parametrize("stage", [-1, 4])
def test_the_rank_of_no_stage_is_refused(stage: int) -> None:
    with pytest.raises(ValueError, match="there are stages 0 to 3"):
        schedule("interleaved", ranks=2, splits=2, virtual=2).rank_of(stage)


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ((2, 3), "gpipe of 2 ranks and 3 microbatches"),
        ((1, 1), "gpipe of 1 rank and 1 microbatch"),
    ],
)
def test_a_schedule_writes_its_numbers(numbers: tuple[int, int], text: str) -> None:
    assert str(schedule("gpipe", *numbers)) == text
