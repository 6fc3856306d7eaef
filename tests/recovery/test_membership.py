"""Who belongs to a job after a loss: the decisions, without processes."""

from __future__ import annotations

import pytest

from ringreduce.supervisor.membership import Decision, Lost, Membership, Next, Phase, Rules


def running(live: bool = False, **rules) -> Membership:
    """A job of 4 ranks in its first generation, after 10 steps."""
    members = Membership(Rules(**{"ranks": 4, "least": 2, "most": 4, **rules}), live)
    assert members.begin() == Decision(Next.START, 4, 1)
    members.started()
    members.stepped(10)
    return members


def lose(members: Membership, *ranks: int, at: float = 0.0, step: int = 10):
    """Lose ranks; return what follows once all others are gone."""
    killed = [Lost(rank, 9) for rank in ranks]
    assert members.lost(killed, at, step=step) == Decision(Next.FENCE)
    return members.fenced(at)


def test_the_next_generation_has_the_ranks_that_are_left():
    members = running()
    assert lose(members, 1) == Decision(Next.START, 3, 2)
    change = members.resize.change
    assert (change.before, change.after, change.lost, change.joined) == (4, 3, (1,), 0)
    assert (change.cause, change.generation, members.resize.redone) == ("killed", 2, 1)


def test_lost_ranks_are_replaced_if_that_is_asked_for():
    members = running(replace=True)
    assert lose(members, 1, 2) == Decision(Next.START, 4, 2)
    assert members.resize.change.joined == 2


def test_a_second_loss_before_all_are_gone_belongs_to_the_first():
    members = running()
    assert members.lost([Lost(1, 9)], 0.0, step=10) == Decision(Next.FENCE)
    assert members.lost([Lost(1, 9), Lost(3, 9)], 0.0, step=10) is None
    assert members.fenced(0.0) == Decision(Next.START, 3, 2)
    assert members.resize.change.lost == (1,)


def test_too_few_ranks_wait_and_then_end_with_75():
    members = running(wait_s=60)
    assert lose(members, 0, 1, 2, at=5.0) is None
    assert (members.phase, members.wakes_at) == (Phase.WAITING, 65.0)
    assert members.tick(64.9) is None
    stop = members.tick(65.0)
    assert stop.kind is Next.STOP
    assert stop.code == 75
    assert "ranks left: 1; --elastic wants at least 2" in stop.text


def test_the_fewest_ranks_go_on_without_waiting():
    assert lose(running(), 1, 3) == Decision(Next.START, 2, 2)


def test_a_step_that_is_lost_twice_running_ends_the_job():
    members = running()
    assert lose(members, 1) == Decision(Next.START, 3, 2)
    members.started()
    stop = lose(members, 0, at=0.5)
    assert stop == Decision(
        Next.STOP,
        code=137,
        text="step 11 was lost twice running; in step 11 rank 0 was killed by signal 9 (SIGKILL)",
        saves=True,
    )


def test_a_loss_while_a_generation_starts_is_no_loss_of_its_step():
    members = running(replace=True, max_failures=9)
    assert lose(members, 1) == Decision(Next.START, 4, 2)
    for generation in range(3, 7):
        assert lose(members, 0) == Decision(Next.START, 4, generation)
    members.started()
    members.stepped(11)
    assert lose(members, 2, step=11) == Decision(Next.START, 4, 7)


def test_losses_of_an_hour_are_counted():
    members = running(replace=True, max_failures=2)
    for number, at in enumerate((0.0, 10.0, 3605.0)):
        assert lose(members, 1, at=at, step=10 + number).kind is Next.START
        members.started()
        members.stepped(11 + number)
    stop = lose(members, 1, at=3606.0, step=13)
    assert stop.code == 137
    assert stop.text.startswith("3 losses within an hour; --max-failures is 2; in step 14 rank 1")


def test_a_killed_mpiexec_costs_no_rank():
    members = running()
    assert members.lost([], 0.0, step=10) == Decision(Next.FENCE)
    assert members.fenced(0.0) == Decision(Next.START, 4, 2)


def killed(members: Membership, *ranks: int, at: float = 0.0, step: int = 10):
    return members.lost([Lost(rank, 9) for rank in ranks], at, step=step)


def test_ranks_that_can_go_on_shrink():
    members = running(live=True)
    assert killed(members, 1) == Decision(Next.SHRINK)
    members.all_take_part(0.1)
    members.shrunk(0.2)
    change = members.resize.change
    assert (change.before, change.after, change.lost, change.level) == (4, 3, (1,), 1)
    assert (members.phase, members.generation, members.resize.redone) == (Phase.STARTING, 2, 1)
    members.started()
    assert (members.phase, members.wakes_at) == (Phase.RUNNING, None)
    members.stepped(11)
    assert killed(members, 2, step=11) == Decision(Next.SHRINK)


def test_a_second_loss_while_ranks_shrink_starts_that_again():
    members = running(live=True)
    assert killed(members, 1) == Decision(Next.SHRINK)
    members.all_take_part(0.1)
    assert killed(members, 3, at=2.0) == Decision(Next.SHRINK)
    assert members.wakes_at == 5.0
    members.all_take_part(2.1)
    assert members.wakes_at == 5.0
    members.shrunk(0.2)
    assert members.resize.change.lost == (1, 3)
    assert members.size == 2


def test_a_loss_before_the_shrunk_generation_has_started_shrinks_it_again():
    members = running(live=True)
    assert killed(members, 1) == Decision(Next.SHRINK)
    members.shrunk(0.2)
    assert killed(members, 0) == Decision(Next.SHRINK)
    members.shrunk(0.2)
    assert (members.size, members.generation, members.resize.redone) == (2, 3, 0)


def test_a_shrink_that_hangs_is_followed_by_a_new_job():
    members = running(live=True)
    assert killed(members, 1) == Decision(Next.SHRINK)
    members.all_take_part(1.0)
    assert members.tick(3.9) is None
    assert members.tick(4.0) == Decision(Next.FENCE)
    assert members.fenced(4.1) == Decision(Next.START, 3, 2)
    assert members.resize.change.level == 2
    assert members.wakes_at is None


def test_ranks_that_hang_after_a_shrink_are_followed_by_a_new_job():
    members = running(live=True)
    assert killed(members, 1) == Decision(Next.SHRINK)
    members.all_take_part(1.0)
    members.shrunk(2.0)
    assert members.wakes_at == 12.0
    assert members.tick(11.9) is None
    assert members.tick(12.0) == Decision(Next.FENCE)
    assert members.fenced(12.1) == Decision(Next.START, 3, 3)


def test_a_loss_after_all_have_finished_is_followed_by_a_new_job():
    members = running(live=True)
    members.finished()
    assert killed(members, 1) == Decision(Next.FENCE)
    assert members.fenced(0.0) == Decision(Next.START, 3, 2)
    assert members.resize.redone == 0


@pytest.mark.parametrize("is_made", [False, True])
def test_ranks_that_crash_while_they_shrink_have_a_place_in_the_next_job(is_made):
    members = running(live=True)
    assert killed(members, 1) == Decision(Next.SHRINK)
    if is_made:
        members.shrunk(0.2)
    assert members.lost([Lost(0, 11)], 0.1, step=10) == Decision(Next.FENCE)
    assert members.fenced(0.2) == Decision(Next.START, 3, 3 if is_made else 2)


@pytest.mark.parametrize("rules", [{"least": 4}, {"replace": True}, {"max_failures": 0}])
def test_what_a_shrink_cannot_do_follows_from_a_new_job(rules):
    assert killed(running(live=True, **rules), 1) == Decision(Next.FENCE)


def test_too_few_ranks_after_a_second_loss_are_killed():
    members = running(live=True, least=3)
    assert killed(members, 1) == Decision(Next.SHRINK)
    assert killed(members, 2) == Decision(Next.FENCE)
    assert members.fenced(0.0) is None
    assert members.phase is Phase.WAITING


def test_a_killed_mpiexec_or_a_loss_at_the_start_is_followed_by_a_new_job():
    assert running(live=True).lost([], 0.0, step=10) == Decision(Next.FENCE)
    members = Membership(Rules(ranks=4, least=2, most=4), live=True)
    members.begin()
    assert killed(members, 1, step=0) == Decision(Next.FENCE)


def test_a_step_that_is_lost_twice_is_not_made_a_third_time():
    members = running(live=True)
    assert killed(members, 1) == Decision(Next.SHRINK)
    members.shrunk(0.2)
    members.started()
    assert killed(members, 0, at=0.2) == Decision(Next.FENCE)
    assert members.fenced(0.2).kind is Next.STOP


def test_two_losses_at_once_do_not_show_that_a_step_is_at_fault():
    members = running(live=True, least=1)
    assert killed(members, 1, at=0.0) == Decision(Next.SHRINK)
    members.shrunk(0.2)
    members.started()
    assert killed(members, 0, at=0.05) == Decision(Next.SHRINK)
    members.shrunk(0.2)
    members.started()
    assert killed(members, 0, at=0.08) == Decision(Next.FENCE)
    assert "step 11 was lost 3 times running" in members.fenced(0.1).text


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"least": 0}, "--elastic: MIN is 0; wanted at least 1 rank"),
        ({"least": 5, "most": 3}, "--elastic: MIN is 5, more than MAX, 3"),
        ({"ranks": 6, "most": 5}, "-n is 6; --elastic allows 2 to 5 ranks"),
        ({"max_failures": -1}, "--max-failures is -1; wanted at least 0"),
        ({"replace": True, "recovery": "live"}, "--recovery live cannot replace a rank"),
        ({"wait_s": -1.0}, "--wait-s is -1; wanted a finite number of at least 0 seconds"),
    ],
)
def test_rules_that_contradict_each_other_are_refused(wrong, text):
    with pytest.raises(ValueError, match=text):
        Rules(**{"ranks": 4, "least": 2, "most": 4, **wrong})


@pytest.mark.parametrize(
    ("asked", "what"),
    [
        ([("finished", 0), ("finished", 0)], Next.RETURN),
        ([("paused", 0), ("paused", 0)], Next.LEAVE),
        ([("paused", 0), ("finished", 0)], Next.RESUME),
        ([("unable", 0), ("shrunk", 2)], Next.FENCE),
    ],
)
def test_what_follows_when_all_ranks_have_asked(asked, what):
    members = running()
    members.pursue({1: "notice"})
    assert members.asked(asked, 7.0, 6.5).kind is what


@pytest.mark.parametrize(
    ("asked", "what"),
    [
        ([("finished", 0), ("suspect", 0), ("finished", 0)], Next.MEET),
        ([("finished", 0)] * 3, Next.MEET),
        ([("shrunk", 3), ("shrunk", 0), ("shrunk", 3)], Next.MEET),
        ([("shrunk", 4)] * 3, Next.MEET),
        ([("shrunk", 3)] * 3, Next.GO_ON),
        ([("shrunk", 3), ("unable", 0), ("shrunk", 3)], Next.FENCE),
    ],
)
def test_after_a_loss_ranks_shrink_until_all_have_the_same_communicator(asked, what):
    members = running(live=True)
    assert killed(members, 1) == Decision(Next.SHRINK)
    assert members.asked(asked, 0.1, 0.0).kind is what
