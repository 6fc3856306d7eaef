"""What the supervisor consists of, without a process."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from ringreduce.recovery.wire import Message
from ringreduce.supervisor import handover, suspicions, together
from ringreduce.supervisor.generation import Generation
from ringreduce.supervisor.handover import Handover
from ringreduce.supervisor.membership import Rules
from ringreduce.supervisor.ranks import Gone, Rank
from ringreduce.supervisor.supervisor import Supervisor, _code_of, _signal_of
from ringreduce.supervisor.suspicions import Suspicions
from ringreduce.supervisor.together import Together


@pytest.fixture
def clock(monkeypatch):
    """The clock of these modules; the test moves it."""
    clock = SimpleNamespace(now=100.0)
    for module in (handover, suspicions, together):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def some_ranks(count: int) -> list[Rank]:
    connection = SimpleNamespace(send=lambda *_, **__: None)
    return [Rank(connection, pid=10 + number, number=str(number)) for number in range(count)]


def test_a_rank_that_is_to_leave_has_the_grace_to_do_so(clock):
    handover, ranks = Handover(grace_s=30), some_ranks(2)
    handover.leaves(ranks[1], "notice")
    assert handover.overdue(ranks) == {}
    assert handover.leaving(ranks) == {1: "notice"}
    clock.now += 29
    assert handover.overdue(ranks) == {}
    clock.now += 1
    assert handover.overdue(ranks) == {ranks[1]: "notice"}
    assert handover.overdue(ranks) == {}


def test_a_rank_that_reports_another_one_is_alive_and_not_to_blame(clock):
    found, ranks = Suspicions(), some_ranks(3)
    found.add(ranks[0], [2], stopped=True)
    found.add(ranks[2], [1], stopped=True)
    assert found.blamed() == set()
    clock.now += 0.1
    assert found.blamed() == {1}


def test_ranks_that_wait_a_second_time_have_the_whole_timeout(clock):
    waiting, ranks = Together(timeout_s=30), some_ranks(2)
    waiting.ask(ranks[0], Message("finished"))
    assert waiting.until == 130
    waiting.answer([ranks[0]], "go on")
    assert waiting.until is None
    clock.now = 150
    waiting.ask(ranks[1], Message("finished"))
    assert waiting.until == 180


def test_a_generation_that_has_shrunk_is_complete_and_counts_from_0():
    generation = Generation.__new__(Generation)
    generation.number, generation.size, generation.ranks = 1, 3, some_ranks(3)
    left = [generation.ranks[0], generation.ranks[2]]
    generation.shrink(2, [generation.ranks[1]])
    assert (generation.ranks, [rank.number for rank in left]) == (left, ["0", "1"])
    assert (generation.size, generation.is_complete) == (2, True)


def test_the_status_of_a_process_gives_its_exit_code_or_its_signal():
    (rank,) = some_ranks(1)
    exited, killed = Gone(rank, 3 << 8), Gone(rank, 9)
    assert (_code_of(exited), _signal_of(exited)) == (3, 0)
    assert (_code_of(killed), _signal_of(killed)) == (0, 9)


@pytest.mark.parametrize(("replace", "spares"), [(False, [True, False]), (True, [True, True])])
def test_a_slow_rank_leaves_only_if_enough_ranks_stay(replace, spares):
    found, ranks = Handover(grace_s=30), some_ranks(3)
    rules = Rules(ranks=3, least=2, most=3, replace=replace)
    job = SimpleNamespace(_living=ranks, _handover=found, _rules=rules)
    assert Supervisor._can_spare_one.fget(job) is spares[0]
    found.leaves(ranks[0], "slow")
    assert Supervisor._can_spare_one.fget(job) is spares[1]
