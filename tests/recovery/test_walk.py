"""Every interleaving of ranks, a supervisor and one fault: nothing is lost or mixed."""

from __future__ import annotations

import pytest

from ringreduce.supervisor.membership import Decision, Membership, Next
from tests.support.recovery_walk import FAULTS, Walk, WalkError


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.long)])
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("live", [False, True])
def test_no_interleaving_loses_or_mixes_steps(live, fault, ranks):
    walk = Walk(live, fault=fault, ranks=ranks)
    walk.run()
    assert walk.states > 1_000


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wish", "fault"),
    [(1, "crash"), *(pytest.param(3, fault, marks=pytest.mark.long) for fault in FAULTS)],
)
@pytest.mark.parametrize("live", [False, True])
def test_no_interleaving_of_two_ranks_and_a_wish_loses_or_mixes_steps(live, wish, fault):
    """A rank leaves, or one joins; nobody would miss a single rank that is stopped."""
    walk = Walk(live, fault=fault, ranks=2, wish=wish)
    walk.run()
    assert walk.states > 10_000


@pytest.mark.long
def test_ranks_that_finish_although_others_were_lost_are_found(monkeypatch):
    truly = Membership.asked

    def hasty(members, asked, now, committed_at):
        kinds = {kind for kind, _ in asked}
        if kinds == {"finished"}:
            members.finished()
            return Decision(Next.RETURN)
        if "finished" in kinds:
            return Decision(Next.RESUME)
        return truly(members, asked, now, committed_at)

    monkeypatch.setattr(Membership, "asked", hasty)
    with pytest.raises(WalkError, match="nothing can happen"):
        Walk(live=True, ranks=3).run()


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("mistake", "live", "ranks", "text"),
    [
        ("no fence", False, 2, "a rank begins with a mixture"),
        ("commit before write", False, 2, "the next generation begins with a mixture"),
        ("lease ignored", False, 2, "a rank commits without a lease"),
        ("old manifest", False, 2, "an old generation writes a checkpoint"),
        ("no second look", False, 2, "nothing can happen"),
        ("no agreement", True, 3, "a step has other samples"),
    ],
)
def test_a_mistake_in_the_protocol_is_found(mistake, live, ranks, text):
    wish = 1 if mistake == "no second look" else 0
    with pytest.raises(WalkError, match=text):
        Walk(live, mistake, ranks=ranks, wish=wish).run()
