"""Who belongs to a job after a loss: the decisions, without processes."""

from __future__ import annotations

import pytest

from ringreduce.recovery.membership import Fence, Lost, Membership, Phase, Rules, Start, Stop


def running(**rules) -> Membership:
    """A job of 4 ranks in its first generation, after 10 steps."""
    members = Membership(Rules(**{"ranks": 4, "least": 2, "most": 4, **rules}))
    assert members.begin() == Start(1, 4)
    members.started()
    members.stepped(10)
    return members


def lose(members: Membership, *ranks: int, at: float = 0.0, step: int = 10):
    """Lose ranks; return what follows once all others are gone."""
    killed = [Lost(rank, 9) for rank in ranks]
    assert members.lost(killed, at, step=step) == Fence()
    return members.fenced(at)


def test_the_next_generation_has_the_ranks_that_are_left():
    members = running()
    assert lose(members, 1) == Start(2, 3)
    change = members.resize.change
    assert (change.before, change.after, change.lost, change.joined) == (4, 3, (1,), 0)
    assert (change.cause, change.generation, members.resize.redone) == ("killed", 2, 1)


def test_lost_ranks_are_replaced_if_that_is_asked_for():
    members = running(replace=True)
    assert lose(members, 1, 2) == Start(2, 4)
    assert members.resize.change.joined == 2


def test_a_second_loss_before_all_are_gone_belongs_to_the_first():
    members = running()
    assert members.lost([Lost(1, 9)], 0.0, step=10) == Fence()
    assert members.lost([Lost(1, 9), Lost(3, 9)], 0.0, step=10) is None
    assert members.fenced(0.0) == Start(2, 3)
    assert members.resize.change.lost == (1,)


def test_too_few_ranks_wait_and_then_end_with_75():
    members = running(wait_s=60)
    assert lose(members, 0, 1, 2, at=5.0) is None
    assert (members.phase, members.wakes_at) == (Phase.WAITING, 65.0)
    assert members.tick(64.9) is None
    stop = members.tick(65.0)
    assert isinstance(stop, Stop)
    assert stop.code == 75
    assert "1 rank(s) left, --elastic wants at least 2" in stop.text


def test_a_step_that_is_lost_twice_running_ends_the_job():
    members = running()
    assert lose(members, 1) == Start(2, 3)
    members.started()
    stop = lose(members, 0)
    assert stop == Stop(
        137,
        "step 11 was lost twice running; in step 11 rank 0 was killed by signal 9 (SIGKILL)",
        saves=True,
    )


def test_a_loss_while_a_generation_starts_is_no_loss_of_its_step():
    members = running(replace=True, max_failures=9)
    assert lose(members, 1) == Start(2, 4)
    for generation in range(3, 7):
        assert lose(members, 0) == Start(generation, 4)
    members.started()
    members.stepped(11)
    assert lose(members, 2, step=11) == Start(7, 4)


def test_losses_of_an_hour_are_counted():
    members = running(replace=True, max_failures=2)
    for number, at in enumerate((0.0, 10.0, 3605.0)):
        assert isinstance(lose(members, 1, at=at, step=10 + number), Start)
        members.started()
        members.stepped(11 + number)
    stop = lose(members, 1, at=3606.0, step=13)
    assert stop.code == 137
    assert stop.text.startswith("3 losses within an hour; --max-failures is 2; in step 14 rank 1")


def test_a_killed_mpiexec_costs_no_rank():
    members = running()
    assert members.lost([], 0.0, step=10) == Fence()
    assert members.fenced(0.0) == Start(2, 4)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"least": 0}, "--elastic: MIN is 0; wanted at least 1 rank"),
        ({"least": 5, "most": 3}, "--elastic: MIN is 5, more than MAX, 3"),
        ({"ranks": 6, "most": 5}, "-n is 6; --elastic allows 2 to 5 ranks"),
        ({"max_failures": -1}, "--max-failures is -1; wanted at least 0"),
        ({"wait_s": -1.0}, "--wait-s is -1; wanted at least 0 seconds"),
    ],
)
def test_rules_that_contradict_each_other_are_refused(wrong, text):
    with pytest.raises(ValueError, match=text):
        Rules(**{"ranks": 4, "least": 2, "most": 4, **wrong})
