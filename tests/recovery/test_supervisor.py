"""What the supervisor consists of, without a process."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from ringreduce.recovery.wire import WireMessage
from ringreduce.supervisor import generation
from ringreduce.supervisor.elastic import ElasticSupervisor, _code_of, _signal_of
from ringreduce.supervisor.generation import Generation
from ringreduce.supervisor.membership import Rules
from ringreduce.supervisor.ranks import Gone, Rank


@pytest.fixture
def clock(monkeypatch):
    """The clock of a generation; the test moves it."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(
        generation, "time", SimpleNamespace(monotonic=lambda: clock.now, time=lambda: 0.0)
    )
    return clock


def some_ranks(count: int) -> list[Rank]:
    connection = SimpleNamespace(send=lambda *_, **__: None)
    return [Rank(connection, pid=10 + number, number=str(number)) for number in range(count)]


@pytest.fixture
def started(monkeypatch):
    """A generation without processes; returns it and its ranks."""
    monkeypatch.setattr(generation, "start_mpiexec", lambda *_, **__: None)

    def start(size: int) -> tuple[Generation, list[Rank]]:
        found = Generation(1, size, ([], {}))
        for rank in some_ranks(size):
            found.connect(rank)
        return found, list(found.ranks)

    return start


def test_a_rank_that_is_to_leave_has_the_grace_to_do_so(clock, started):
    found, ranks = started(2)
    found.leaves(ranks[1], "notice", grace_s=30)
    assert found.take_overdue() == {}
    assert found.leaving == {1: "notice"}
    clock.now += 29
    assert found.take_overdue() == {}
    clock.now += 1
    assert found.take_overdue() == {ranks[1]: "notice"}
    assert found.take_overdue() == {}


def test_a_rank_that_reports_another_one_is_alive_and_not_to_blame(clock, started):
    found, ranks = started(3)
    found.suspect(ranks[0], [2], stopped=True)
    found.suspect(ranks[2], [1], stopped=True)
    assert found.blamed == []
    clock.now += 0.1
    assert found.blamed == [ranks[1]]


def test_ranks_that_wait_a_second_time_have_the_whole_timeout(clock, started):
    found, ranks = started(2)
    found.ask(ranks[0], WireMessage("finished"), timeout_s=30)
    assert found.asked_until == 130
    found.answer([ranks[0]], "go on")
    assert found.asked_until is None
    clock.now = 150
    found.ask(ranks[1], WireMessage("finished"), timeout_s=30)
    assert found.asked_until == 180


def test_a_generation_that_has_shrunk_is_complete_and_counts_from_0(clock, started):
    found, ranks = started(3)
    left = [ranks[0], ranks[2]]
    found.lost.append(ranks[1])
    found.shrink(2)
    assert (found.ranks, [rank.number for rank in left]) == (left, ["0", "1"])
    assert (found.size, found.is_complete) == (2, True)


def test_the_status_of_a_process_gives_its_exit_code_or_its_signal():
    (rank,) = some_ranks(1)
    exited, killed = Gone(rank, 3 << 8), Gone(rank, 9)
    assert (_code_of(exited), _signal_of(exited)) == (3, 0)
    assert (_code_of(killed), _signal_of(killed)) == (0, 9)


@pytest.mark.parametrize(("replace", "spares"), [(False, [True, False]), (True, [True, True])])
def test_a_slow_rank_leaves_only_if_enough_ranks_stay(clock, started, replace, spares):
    found, ranks = started(3)
    rules = Rules(ranks=3, least=2, most=3, replace=replace)
    job = SimpleNamespace(_present=found, _rules=rules)
    assert ElasticSupervisor._can_spare_one.fget(job) is spares[0]
    found.leaves(ranks[0], "slow", grace_s=30)
    assert ElasticSupervisor._can_spare_one.fget(job) is spares[1]
