"""Between two actions a rank sends the result of one and receives the input of the other."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringreduce.pipeline import Payload, PipelineSchedule, lower, schedule
from ringreduce.schedules.schedule import Step
from tests.support.pipelines import of_input, of_result, schedules

payloads = st.builds(Payload, st.integers(0, 1), st.integers(0, 1 << 20), st.integers(0, 1 << 40))


@given(payloads)
def test_every_payload_is_read_from_its_chunk(payload: Payload) -> None:
    assert Payload.of(payload.chunk) == payload


@given(payloads, payloads)
def test_different_payloads_have_different_chunks(one: Payload, other: Payload) -> None:
    assert (one == other) == (one.chunk == other.chunk)


def test_a_negative_chunk_is_of_no_payload() -> None:
    with pytest.raises(ValueError, match="chunk is -1"):
        Payload.of(-1)


def words(step: Step) -> list[str]:
    """The messages of a step, such as: to 1, the output of 0F0."""
    ends = [("to", send) for send in step.sends] + [("from", recv) for recv in step.recvs]
    return [f"{way} {end.peer}, {Payload.of(*end.chunks)}" for way, end in ends]


def test_the_steps_of_a_middle_rank() -> None:
    steps = lower(schedule("1f1b", ranks=3, splits=2), rank=1)
    assert [words(step) for step in steps] == [
        ["from 0, the output of 0F0"],
        ["to 2, the output of 1F0", "from 0, the output of 0F1"],
        ["to 2, the output of 1F1", "from 2, the gradient of 1F0"],
        ["to 0, the gradient of 0F0", "from 2, the gradient of 1F1"],
        ["to 0, the gradient of 0F1"],
    ]


def test_the_gradient_of_the_input_is_sent_and_that_of_the_weights_is_not() -> None:
    steps = lower(schedule("zero_bubble", ranks=2, splits=1), rank=1)
    assert [words(step) for step in steps[1:]] == [[], ["to 0, the gradient of 0F0"], []]


def test_the_last_rank_sends_to_the_first_between_its_stages() -> None:
    steps = lower(schedule("interleaved", ranks=2, splits=2, virtual=2), rank=1)
    assert words(steps[1])[0] == "to 0, the output of 1F0"


def test_stages_of_one_rank_exchange_no_messages() -> None:
    assert set(lower(schedule("interleaved", ranks=1, splits=2, virtual=3), rank=0)) == {Step()}


def key(payload: Payload) -> tuple[str, int, int]:
    return "FB"[payload.flow], payload.receiver, payload.microbatch


@given(schedules())
@settings(max_examples=50)
def test_a_step_has_the_result_before_it_and_the_input_behind_it(shown: PipelineSchedule) -> None:
    for rank in range(shown.ranks * (shown.ranks > 1)):
        actions, steps = shown.acts(rank), lower(shown, rank)
        assert len(steps) == len(actions) + 1
        for before, step in zip([None, *actions], steps, strict=True):
            sent = [key(Payload.of(*send.chunks)) for send in step.sends]
            assert sent == [r for r in [before and of_result(before, shown)] if r]
        for step, after in zip(steps, [*actions, None], strict=True):
            received = [key(Payload.of(*recv.chunks)) for recv in step.recvs]
            assert received == [r for r in [after and of_input(after, shown)] if r]


@given(schedules())
@settings(max_examples=50)
def test_peers_are_the_ranks_of_the_stages(shown: PipelineSchedule) -> None:
    for rank in range(shown.ranks):
        for step in lower(shown, rank):
            for send in step.sends:
                assert shown.rank_of(Payload.of(*send.chunks).receiver) == send.peer
            for recv in step.recvs:
                assert shown.rank_of(Payload.of(*recv.chunks).sender) == recv.peer
