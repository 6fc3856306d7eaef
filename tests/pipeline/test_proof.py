"""The proof holds for every schedule, and rejects every broken one for the right reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ringreduce.errors import ScheduleError
from ringreduce.pipeline import Action, PipelineSchedule, lower, prove, schedule
from ringreduce.pipeline.generators import SCHEDULES
from ringreduce.pipeline.lowering import vocabulary
from ringreduce.schedules.matching import match, posts, progress
from tests.support.pipelines import (
    Edit,
    edited,
    fitting,
    naive_begins,
    schedules,
    swap,
    with_acts,
)

# --- every schedule is right ----------------------------------------------------------------------


@pytest.mark.parametrize("ranks", range(1, 6))
@pytest.mark.parametrize("name", SCHEDULES)
def test_it_is_right_for_few_ranks(name: str, ranks: int) -> None:
    for splits in range(1, 11):
        for shown in fitting(name, ranks, splits):
            prove(shown)


@pytest.mark.few(15)
@pytest.mark.slow
@pytest.mark.parametrize("ranks", range(6, 17))
@pytest.mark.parametrize("name", SCHEDULES)
def test_it_is_right_for_up_to_16_ranks(name: str, ranks: int) -> None:
    """With one microbatch, about as many as ranks, and many."""
    for splits in sorted({1, ranks - 1, ranks, ranks + 1, min(2 * ranks, 31), 32}):
        for shown in fitting(name, ranks, splits):
            prove(shown)


@pytest.mark.long
@pytest.mark.parametrize("ranks", range(1, 17))
@pytest.mark.parametrize("name", SCHEDULES)
def test_it_is_right_for_up_to_16_ranks_and_32_microbatches(name: str, ranks: int) -> None:
    for splits in range(1, 33):
        for shown in fitting(name, ranks, splits):
            prove(shown)


times = st.floats(0.01, 100)


@given(schedules(), times, times)
@settings(max_examples=100)
def test_its_claims_hold_for_all_times(
    shown: PipelineSchedule, forward: float, backward: float
) -> None:
    prove(shown, forward, backward)


# --- the figures of a proof -----------------------------------------------------------------------


def test_1f1b_holds_as_many_activations_as_there_are_ranks_behind() -> None:
    assert prove(schedule("1f1b", ranks=4, splits=8)).held == (4, 3, 2, 1)


@pytest.mark.parametrize(
    ("name", "virtual", "time"),
    [
        ("gpipe", 1, (8 + 3) * 3),
        ("1f1b", 1, (8 + 3) * 3),
        ("interleaved", 2, (8 + 3 / 2) * 3),
        ("interleaved", 4, (8 + 3 / 4) * 3),
        ("zero_bubble", 1, 8 * 3 + 3),
        ("sequential", 1, 8 * 4 * 3),
    ],
)
def test_the_time_of_four_ranks_and_eight_microbatches(
    name: str, virtual: int, time: float
) -> None:
    proof = prove(schedule(name, 4, 8, virtual))
    assert proof.time == pytest.approx(time)
    assert proof.idle == pytest.approx(1 - 8 * 3 / time)


def test_zero_bubble_idles_a_third_as_long_as_1f1b() -> None:
    """The paper's figure for its variant with the memory of 1F1B: P - 1 in place of 3(P - 1)."""
    for ranks in range(2, 9):
        zero_bubble, other = (
            prove(schedule(name, ranks, splits=2 * ranks)) for name in ("zero_bubble", "1f1b")
        )
        work = 3 * 2 * ranks
        assert (zero_bubble.time - work) * 3 == other.time - work
        assert max(zero_bubble.held) == max(other.held)


def actions_of(shown: PipelineSchedule, forward: float, backward: float) -> Callable[..., float]:
    """Return the function from an action to its time."""
    parts = {"F": forward, "B": backward, "I": backward / 2, "W": backward / 2}
    return lambda action: parts[action.kind] / shown.virtual


@given(schedules(), times, times)
@settings(max_examples=60)
def test_the_time_is_that_of_a_naive_simulation(
    shown: PipelineSchedule, forward: float, backward: float
) -> None:
    proof, duration = prove(shown, forward, backward), actions_of(shown, forward, backward)
    begins = naive_begins(shown, duration, proof.posted_ahead, waits_for_sends=True)
    assert begins is not None
    ends = [
        begin + duration(action)
        for rank, times in enumerate(begins)
        for begin, action in zip(times, shown.acts(rank), strict=True)
    ]
    assert max(ends) == pytest.approx(proof.time)


@given(schedules())
@settings(max_examples=60)
def test_one_step_less_ahead_deadlocks_or_takes_longer(shown: PipelineSchedule) -> None:
    proof, duration = prove(shown), actions_of(shown, 1.0, 2.0)
    if proof.posted_ahead == 0:
        return
    begins = naive_begins(shown, duration, proof.posted_ahead - 1, waits_for_sends=True)
    if begins is not None:
        last = [t[-1] + duration(shown.acts(rank)[-1]) for rank, t in enumerate(begins)]
        assert max(last) > proof.time


# --- deadlock -------------------------------------------------------------------------------------


def deadlocks(shown: PipelineSchedule, ahead: int) -> bool:
    steps = [lower(shown, rank) for rank in range(shown.ranks)]
    words = vocabulary([shown.acts(rank) for rank in range(shown.ranks)])
    try:
        for _ in progress(steps, posts(match(steps, words)), ahead, words):
            pass
    except ScheduleError:
        return True
    return False


@pytest.mark.parametrize("virtual", [1, 2, 3, 4])
@pytest.mark.parametrize("ranks", range(1, 9))
def test_interleaved_deadlocks_without_receives_posted_ahead(ranks: int, virtual: int) -> None:
    for turns in range(1, 5):
        shown = schedule("interleaved", ranks, turns * ranks, virtual)
        assert deadlocks(shown, ahead=0) == (ranks > 1 and virtual > 1 and turns > 1)
        assert not deadlocks(shown, ahead=1)


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name != "interleaved"])
def test_no_other_schedule_deadlocks(name: str) -> None:
    for ranks in range(1, 7):
        for splits in range(1, 13):
            assert not deadlocks(schedule(name, ranks, splits), ahead=0)


def test_the_cycle_of_a_deadlock_is_named_and_marked() -> None:
    shown = schedule("interleaved", ranks=2, splits=4, virtual=2)
    message = message_of(replace(shown, claim=replace(shown.claim, posted_ahead=0)))
    assert message.splitlines() == [
        "pipeline interleaved of 2 ranks with 2 stages each and 4 microbatches: receives have to "
        "be posted 1 step ahead; claimed is 0 steps: deadlock: rank 0 after 2B0 waits for rank 1 "
        "to receive the gradient of 1F0, which it does before 1B0; rank 1 after 3B1 waits for "
        "rank 0 to receive the gradient of 2F1, which it does before 2B1",
        "rank 0   0F0   0F1   2F0   2F1   0F2  !2B0   0F3   2B1   2F2   0B0   2F3   0B1",
        "rank 1   1F0   1F1   3F0   3B0   3F1  !3B1   1F2   1B0   1F3   1B1   3F2   3B2",
        "… 4 of 16 actions are not drawn",
        "! 2B0 on rank 0, 3B1 on rank 1",
    ]


# --- broken schedules are rejected ----------------------------------------------------------------


def message_of(broken: PipelineSchedule) -> str:
    """Return the error of a broken schedule."""
    with pytest.raises(ScheduleError) as error:
        prove(broken)
    return str(error.value)


def own(*lanes: str) -> PipelineSchedule:
    """A schedule without claims, of these actions."""
    acts = [lane.split() for lane in lanes]
    splits = 1 + max(Action.from_text(text).microbatch for lane in acts for text in lane)
    stages = 1 + max(Action.from_text(text).stage for lane in acts for text in lane)
    empty = PipelineSchedule("own", len(acts), splits, stages // len(acts), lambda *_: ())
    return with_acts(empty, acts)


@pytest.mark.parametrize(
    ("lanes", "reason"),
    [
        (("0F0 0B0", "1B0 1F0"), "rank 1 has 1B0 before 1F0"),
        (("0F0 0I0 0W0", "1F0 1W0 1I0"), "rank 1 has 1W0 before 1I0"),
        (("0F0 0B0 0F0", "1F0 1B0"), "rank 0 has 0F0 twice"),
        (("0F0 0B0 0B0", "1F0 1B0"), "rank 0 has 0B0 twice"),
        (("0F0 0F1 0B0 0B1", "1F0 1F1 1B1"), "rank 1 lacks 1B0"),
        (("0F0 0F1 0B0 0B1", "1F0 1B0 1B1"), "rank 1 lacks 1F1"),
        (("0F0 0I0 0W0", "1F0 1I0"), "rank 1 lacks 1W0"),
        (("0F0 0W0", "1F0 1B0"), "rank 0 lacks 0I0"),
        (("0F0 0B0 0W0", "1F0 1B0"), "rank 0 has 0B0 and 0W0; a backward is B, or I and W"),
        (("0F0 1F0", "0B0 1B0"), "rank 0 has 1F0, but stage 1 is on rank 1"),
        (("0F0 0B0", "1F0 1B0 1F9"), "rank 0 lacks 0F1"),
        (
            ("0F0 0F1 0B1 0B0", "1F0 1F1 1B1 1B0"),
            "rank 0 has 0B0 after 0B1, but the gradients of microbatches are added in ascending",
        ),
        (
            ("0F0 0F1 0B0 0B1", "1F0 1F1 1I0 1I1 1W1 1W0"),
            "rank 1 has 1W0 after 1W1, but the gradients of microbatches are added in ascending",
        ),
        (
            ("0F0 0F1 0B0 0B1", "1F1 1F0 1B0 1B1"),
            "rank 0 after 0F0 sends the output of 0F0 to rank 1, whose receive before 1F1 wants "
            "the output of 0F1",
        ),
        (
            ("0F0 0F1 0B0 0B1", "1F0 1F1 1I1 1I0 1W0 1W1"),
            "rank 1 after 1I1 sends the gradient of 0F1 to rank 0, whose receive before 0B0 wants "
            "the gradient of 0F0",
        ),
        (
            ("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"),
            "deadlock: rank 0 before 0B0 waits for rank 1 to send the gradient of 0F0, which it "
            "does after 1B0; rank 1 before 1F1 waits for rank 0 to send the output of 0F1, which "
            "it does after 0F1",
        ),
        (("1F0 0F0 1B0 0B0",), "rank 0 has 1F0 before the output of 0F0"),
        (("0F0 1F0 0B0 1B0",), "rank 0 has 0B0 before the gradient of 0F0"),
    ],
)
def test_a_broken_schedule_is_rejected(lanes: tuple[str, ...], reason: str) -> None:
    assert reason in message_of(own(*lanes))


@pytest.mark.parametrize(
    ("action", "reason"),
    [
        ("9F0", "rank 0 has 9F0; there are stages 0 to 1"),
        ("0F9", "rank 0 has 0F9; there are microbatches 0 to 1"),
        (Action(0, "X", 0), "rank 0 has 0X0; an action is F, B, I or W"),  # type: ignore[arg-type]
    ],
)
def test_what_is_not_there_is_rejected(action: str | Action, reason: str) -> None:
    right = schedule("1f1b", ranks=2, splits=2)
    assert reason in message_of(with_acts(right, [[action, *right.acts(0)], right.acts(1)]))


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (swap("1B0", "1F3"), "rank 1 holds 4 activations; claimed are 3"),
        (swap("1B1", "1F4"), "rank 1 holds 4 activations; claimed are 3"),
        (swap("1F2", "1B0"), "receives have to be posted 1 step ahead; claimed is 0 steps"),
        (swap("1F0", "1F1"), "whose receive before 1F1 wants the output of 0F1"),
        (lambda acts: acts.remove("1B5"), "rank 1 lacks 1B5"),
        (lambda acts: acts.append("1F5"), "rank 1 has 1F5 twice"),
    ],
)
def test_a_changed_action_of_1f1b_is_rejected(edit: Edit, reason: str) -> None:
    right = schedule("1f1b", ranks=4, splits=8)
    assert reason in message_of(edited(right, 1, edit))


@pytest.mark.parametrize(
    ("claim", "reason"),
    [
        ({"held": (4, 3, 1, 1)}, "rank 2 holds 2 activations; claimed are 1"),
        ({"held": (5, 3, 2, 1)}, "rank 0 holds 4 activations; claimed are 5"),
        ({"posted_ahead": 1}, "receives have to be posted 0 steps ahead; claimed is 1 step"),
        ({"time": lambda forward, backward: 32.0}, "the ranks take 33; claimed are 32"),
    ],
    ids=["held less", "held more", "ahead", "time"],
)
def test_a_wrong_claim_is_rejected(claim: dict[str, object], reason: str) -> None:
    right = schedule("1f1b", ranks=4, splits=8)
    assert reason in message_of(replace(right, claim=replace(right.claim, **claim)))


def test_a_schedule_that_waits_longer_than_claimed_is_rejected() -> None:
    zero_bubble = schedule("zero_bubble", ranks=4, splits=8)
    late = replace(zero_bubble, claim=replace(zero_bubble.claim, posted_ahead=0))
    assert message_of(late).endswith("have to be posted 1 step ahead; claimed is 0 steps")


def test_an_error_names_the_schedule_and_marks_its_actions() -> None:
    with pytest.raises(ScheduleError) as error:
        prove(own("0F0 0F1 0B0 0B1", "1F1 1F0 1B0 1B1"))
    text = str(error.value)
    assert text.startswith("pipeline own of 2 ranks and 2 microbatches: rank 0 after 0F0 sends")
    assert text.splitlines()[1:] == [
        "rank 0  !0F0   0F1   0B0   0B1",
        "rank 1  !1F1   1F0   1B0   1B1",
        "! 0F0 on rank 0, 1F1 on rank 1",
    ]
    assert error.value.places == ((0, 0), (1, 0))


@pytest.mark.parametrize("time", [0, -1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("what", ["forward", "backward"])
def test_times_are_above_0(what: str, time: float) -> None:
    with pytest.raises(ValueError, match=f"{what} is .*; pass a time above 0"):
        prove(schedule("1f1b", ranks=2, splits=2), **{what: time})


# --- and any change of a schedule is noticed ------------------------------------------------------


@given(schedules(most_ranks=4, most_splits=6), st.data())
@settings(max_examples=150)
def test_two_swapped_actions_are_rejected_or_right(
    right: PipelineSchedule, draws: st.DataObject
) -> None:
    """A swap that is not rejected ends in a naive simulation, and adds in ascending order."""
    rank = draws.draw(st.integers(0, right.ranks - 1))
    actions = [*right.acts(rank)]
    assume(len(actions) > 1)
    index = draws.draw(st.integers(0, len(actions) - 2))
    actions[index], actions[index + 1] = actions[index + 1], actions[index]
    acts = [actions if each == rank else right.acts(each) for each in range(right.ranks)]
    changed = with_acts(right, acts)
    try:
        prove(changed)
    except ScheduleError:
        return
    assert naive_begins(changed, lambda action: 1.0, ahead=99, waits_for_sends=True) is not None
    for stage in range(rank, right.stages, right.ranks):
        added = [a.microbatch for a in actions if a.stage == stage and a.kind in "BW"]
        assert added == [*range(right.splits)]


@given(schedules(most_ranks=4, most_splits=6), st.data())
@settings(max_examples=60)
def test_an_action_left_out_or_doubled_is_rejected(
    right: PipelineSchedule, draws: st.DataObject
) -> None:
    rank = draws.draw(st.integers(0, right.ranks - 1))
    times = draws.draw(st.sampled_from([0, 2]))
    index = draws.draw(st.integers(0, len(right.acts(rank)) - 1))

    def edit(acts: list[str]) -> None:
        acts[index : index + 1] = [acts[index]] * times

    assert "lacks" in message_of(edited(right, rank, edit)) or times == 2
