"""Another number of ranks without a loss: the decisions, without processes."""

from __future__ import annotations

import pytest

from ringreduce.supervisor.membership import Decision, Lost, Next, Phase
from tests.recovery.test_membership import running


def changed(members) -> tuple:
    """What the change to the present generation was."""
    change = members.resize.change
    return change.before, change.after, change.lost, change.joined, change.cause, change.level


def test_the_next_generation_starts_beside_the_present_one():
    members = running(most=6)
    members.wish(6, "command")
    assert members.wants_ranks
    assert members.pursue({}) == Decision(Next.PREPARE, 6)
    assert members.pursue({}) is None
    assert members.phase is Phase.RUNNING
    assert members.prepared() == Decision(Next.PAUSE)
    assert members.paused(7.0, committed_at=6.5) == Decision(Next.LEAVE)
    assert members.fenced(7.1) == Decision(Next.TAKE_OVER, 6, 2)
    assert changed(members) == (4, 6, (), 2, "command", 3)
    assert (members.resize.redone, members.resize.detected_at) == (0, 6.5)
    assert not members.wants_ranks
    members.started()
    assert members.pursue({}) is None


def test_the_last_ranks_leave_if_there_are_too_many():
    members = running()
    members.wish(2, "discover")
    assert members.pursue({}) == Decision(Next.PREPARE, 2)
    members.prepared()
    assert members.paused(7.0, 6.5) == Decision(Next.LEAVE)
    assert members.fenced(7.1) == Decision(Next.TAKE_OVER, 2, 2)
    assert changed(members) == (4, 2, (2, 3), 0, "discover", 3)


def test_ranks_that_are_told_to_leave_do_and_others_stay():
    members = running()
    assert members.pursue({1: "notice"}) == Decision(Next.PREPARE, 3)
    members.prepared()
    assert members.paused(7.0, 6.5) == Decision(Next.LEAVE)
    assert members.fenced(7.1) == Decision(Next.TAKE_OVER, 3, 2)
    assert changed(members) == (4, 3, (1,), 0, "notice", 3)


def test_a_wish_and_a_notice_are_one_change():
    members = running()
    members.wish(4, "command")
    assert members.pursue({0: "notice"}) == Decision(Next.PREPARE, 4)
    members.prepared()
    members.paused(7.0, 6.5)
    assert members.fenced(7.1) == Decision(Next.TAKE_OVER, 4, 2)
    assert changed(members) == (4, 4, (0,), 1, "command", 3)


def test_another_wish_starts_another_generation():
    members = running(most=8)
    members.wish(6, "command")
    assert members.pursue({}) == Decision(Next.PREPARE, 6)
    members.wish(8, "command")
    assert members.pursue({}) == Decision(Next.PREPARE, 8)
    members.wish(4, "command")
    assert members.pursue({}) == Decision(Next.DROP)
    assert not members.wants_ranks


def test_newcomers_that_fail_end_the_wish():
    members = running(most=6)
    members.wish(6, "command")
    members.pursue({})
    members.unprepared()
    assert not members.wants_ranks
    assert members.pursue({}) is None


def test_what_has_started_takes_over_after_a_loss():
    members = running(most=6)
    members.wish(6, "command")
    members.pursue({})
    assert members.lost([Lost(1, 9)], 5.0, step=10) == Decision(Next.FENCE)
    assert members.fenced(5.1) == Decision(Next.TAKE_OVER, 6, 2)
    assert changed(members) == (4, 6, (1,), 3, "killed", 2)
    assert members.resize.redone == 1


def test_survivors_go_on_until_the_newcomers_are_ready():
    members = running(live=True, most=6)
    members.wish(6, "command")
    members.pursue({})
    assert members.lost([Lost(1, 9)], 5.0, step=10) == Decision(Next.SHRINK)
    assert members.prepared() is None
    members.shrunk(5.2)
    members.started()
    assert members.pursue({}) is None, "they start already"
    assert members.prepared() == Decision(Next.PAUSE)


def test_ranks_only_leave_where_the_mpi_goes_on():
    members = running(live=True)
    assert members.pursue({0: "notice"}) == Decision(Next.PAUSE)
    assert members.paused(7.0, 6.5) == Decision(Next.PART, leaving=(0,))
    assert members.wakes_at == 37.0
    members.all_take_part(7.1)
    assert members.wakes_at == pytest.approx(10.1)
    members.shrunk(5.2)
    assert changed(members) == (4, 3, (0,), 0, "notice", 3)
    members.started()
    assert members.pursue({}) is None
    members.stepped(11)
    assert members.lost([Lost(0, 9)], 8.0, step=11) == Decision(Next.SHRINK)


def test_a_loss_while_ranks_leave_is_part_of_the_change():
    members = running(live=True)
    members.pursue({0: "notice"})
    members.paused(7.0, 6.5)
    assert members.lost([Lost(2, 9)], 7.1, step=10) == Decision(Next.SHRINK)
    members.shrunk(5.2)
    assert changed(members) == (4, 2, (0, 2), 0, "notice", 3)
    assert members.resize.redone == 0


def test_ranks_that_leave_too_slowly_are_followed_by_a_new_job():
    members = running(live=True, grace_s=2)
    members.pursue({0: "notice"})
    members.paused(7.0, 6.5)
    assert members.tick(9.0) == Decision(Next.FENCE)
    assert members.fenced(9.1) == Decision(Next.START, 3, 2)


def test_too_few_ranks_are_left_by_those_that_leave():
    members = running(least=4, wait_s=60)
    assert members.pursue({1: "notice"}) == Decision(Next.PAUSE)
    assert members.paused(7.0, 6.5) == Decision(Next.LEAVE)
    assert members.fenced(7.1) is None
    assert members.phase is Phase.WAITING
    members.wish(4, "command")
    assert members.pursue({}) == Decision(Next.START, 4, 2)


def test_ranks_that_are_wanted_while_others_leave_start_when_these_are_gone():
    members = running(least=4, wait_s=60)
    members.pursue({1: "notice"})
    members.paused(7.0, 6.5)
    members.wish(4, "command")
    assert members.pursue({}) is None
    assert members.fenced(7.1) == Decision(Next.START, 4, 2)


def test_all_ranks_that_leave_end_the_job():
    members = running()
    members.pursue(dict.fromkeys(range(4), "notice"))
    members.paused(7.0, 6.5)
    stop = members.fenced(7.1)
    assert (stop.code, stop.saves) == (75, True)
    assert stop.text.startswith("all ranks were told to end; rank 0, rank 1")


def test_the_job_ends_after_its_step():
    stop = Decision(Next.STOP, code=143, text="signal 15 came", saves=True)
    members = running(grace_s=5)
    assert members.end_after_step(stop, 1.0) == Decision(Next.PAUSE)
    assert members.paused(1.1, 1.0) == Decision(Next.LEAVE)
    assert members.fenced(1.2) == stop
    assert members.wakes_at is None


def test_the_job_ends_at_once_if_it_is_told_again_or_the_step_takes_too_long():
    stop = Decision(Next.STOP, code=143, text="signal 15 came", saves=True)
    members = running(grace_s=5, live=True)
    assert members.end_after_step(stop, 1.0) == Decision(Next.PAUSE)
    assert members.pursue({1: "notice"}) is None
    assert members.end_after_step(stop, 1.5) == stop
    assert members.tick(3.4) is None, "the step has half of the grace"
    assert members.tick(3.5) == stop
    assert members.lost([Lost(1, 9)], 3.0, step=10) == Decision(Next.FENCE), (
        "no rank shrinks any more"
    )
    assert members.fenced(3.1) == stop


def test_a_job_that_does_not_train_ends_at_once():
    stop = Decision(Next.STOP, code=143, text="signal 15 came", saves=True)
    members = running()
    members.finished()
    assert members.end_after_step(stop, 1.0) == stop


def test_sizes_outside_the_limits_are_refused():
    members = running()
    with pytest.raises(ValueError, match=r"wanted ranks: 5; --elastic allows 2 to 4"):
        members.wish(5, "command")
    assert members.rules.clamped(9) == 4
    assert members.rules.clamped(0) == 2
