"""An action has a text, and is read from it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringreduce.errors import ScheduleError
from ringreduce.pipeline import Action
from ringreduce.pipeline.actions import KINDS, held_after

actions = st.builds(Action, st.integers(0, 99), st.sampled_from([*KINDS]), st.integers(0, 999))


def test_the_text_has_stage_kind_and_microbatch() -> None:
    assert str(Action(stage=2, kind="F", microbatch=5)) == "2F5"


@given(actions)
def test_every_action_is_read_from_its_text(action: Action) -> None:
    assert Action.from_text(str(action)) == action


@pytest.mark.parametrize(
    "text", ["", "2X5", "F5", "2F", "-1F0", "2F5 ", "2f5", "1.0F2", "2F5B", "²F5"]
)
def test_another_text_is_refused(text: str) -> None:
    with pytest.raises(ScheduleError, match="is no action; write the stage, F, B, I or W"):
        Action.from_text(text)


@pytest.mark.parametrize(
    ("texts", "held"),
    [
        ("0F0 0F1 0B0 0B1", [1, 2, 1, 0]),
        ("0F0 0I0 0F1 0W0 0I1 0W1", [1, 1, 2, 1, 1, 0]),
    ],
)
def test_an_activation_is_held_until_the_gradient_of_the_weights(
    texts: str, held: list[int]
) -> None:
    assert [*held_after(map(Action.from_text, texts.split()))] == held
