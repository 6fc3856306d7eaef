"""Trials of ordinary and streaming stores: all ranks take the kind that is faster for all."""

from __future__ import annotations

import numpy as np
import pytest

from ringreduce.compiler.records import size_of
from ringreduce.shm import layout, stores
from ringreduce.shm.layout import TIME_KEPT, TIME_OTHER, WORD, Peer, Team

KIB = 1 << 10


class Ranks:
    """Ranks that execute programs of one round each, and time one COPY in each program."""

    def __init__(self, monkeypatch, ranks):
        self.now = 0
        self.memory = [np.zeros(layout.RING_OFFSET // WORD, np.int64) for _ in range(ranks)]
        bytes_of_team = size_of(Team) + size_of(Peer) * (ranks - 1)
        self.words = [np.zeros(bytes_of_team // WORD, np.int64) for _ in range(ranks)]
        self.teams = [Team(words.ctypes.data) for words in self.words]
        for rank, team in enumerate(self.teams):
            team.segment, team.peer_count = self.memory[rank].ctypes.data, ranks - 1
            team.trial.interval = stores.FIRST_INTERVAL
            for index, peer in enumerate(set(range(ranks)) - {rank}):
                first = self.words[rank].ctypes.data + size_of(Team)
                Peer(first + index * size_of(Peer)).segment = self.memory[peer].ctypes.data
        monkeypatch.setattr(stores, "nanoseconds", lambda clock: self.now + 1)

    def round(self, costs, nbytes=64 * KIB):
        """Run one round on every rank; `costs` has the ns of (ordinary, streaming) of each rank.

        Returns whether rank 0 streams.
        """
        self.now += 1
        for team, cost in zip(self.teams, costs, strict=True):
            if team.rounds >= team.trial.phase_end:
                stores.next_phase(team)
            begin = stores.begin_timing(team, nbytes) if stores.is_timed(team) else 0
            self.now += cost[team.trial.streams]
            if begin:
                stores.end_timing(team, begin, nbytes)
            team.rounds += 1
        assert len({team.trial.streams for team in self.teams}) == 1
        return bool(self.teams[0].trial.streams)

    def settle(self, costs, rounds=2000, **how):
        """Run many rounds; return the share of the last half of them that streamed."""
        streamed = [self.round(costs, **how) for _ in range(rounds)]
        return sum(streamed[rounds // 2 :]) / (rounds - rounds // 2)


@pytest.fixture
def ranks(monkeypatch):
    return lambda number: Ranks(monkeypatch, number)


ORDINARY, STREAMING = (100, 300), (300, 100)
"""Costs of a rank for which that kind of stores is the faster one."""


@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize(("costs", "streams"), [(ORDINARY, False), (STREAMING, True)])
def test_the_faster_kind_is_taken(ranks, number, costs, streams):
    share = ranks(number).settle([costs] * number)
    assert share > 0.9 if streams else share < 0.1


def test_the_kind_follows_the_machine(ranks):
    team = ranks(2)
    shares = [team.settle([costs] * 2) for costs in (ORDINARY, STREAMING, ORDINARY)]
    assert [round(share) for share in shares] == [0, 1, 0]


def test_the_time_of_all_ranks_counts(ranks):
    """A root writes faster by streaming stores, but its readers lose more than it gains."""
    root, reader = (200, 100), (100, 400)
    assert ranks(3).settle([root, reader, reader]) < 0.1


def test_a_small_difference_changes_nothing(ranks):
    assert ranks(2).settle([(110, 100)] * 2) < 0.1


def test_trials_become_rare(ranks):
    team = ranks(2)
    team.settle([ORDINARY] * 2)
    streamed = [team.round([ORDINARY] * 2) for _ in range(30_000)]
    assert 0 < sum(streamed) / len(streamed) < 0.015


@pytest.mark.parametrize(("nbytes", "timed"), [(64, False), (4 * KIB, True)])
def test_only_long_copies_are_timed(ranks, nbytes, timed):
    assert (stores.begin_timing(ranks(1).teams[0], nbytes) > 0) == timed


def test_two_phases_of_each_trial_are_timed(ranks):
    team, timed = ranks(2), []
    for _ in range(200):
        team.round([ORDINARY] * 2)
        own = team.teams[0]
        timed += [own.trial.phase] * stores.is_timed(own)
    assert set(timed) == {TIME_KEPT, TIME_OTHER}


def test_a_kind_that_has_become_slower_is_replaced_long_before_the_next_trial(ranks):
    team = ranks(2)
    team.settle([ORDINARY] * 2, rounds=20_000)
    assert team.teams[0].trial.interval == stores.LAST_INTERVAL
    assert team.settle([STREAMING] * 2, rounds=800) > 0.9


def test_there_is_no_trial_without_long_data(ranks):
    team = ranks(2)
    assert not any(team.round([ORDINARY] * 2, nbytes=64) for _ in range(20_000))
    assert team.settle([STREAMING] * 2, rounds=3000) > 0.9


@pytest.mark.parametrize("streams", [0, 1])
@pytest.mark.parametrize("nbytes", [64, 4 * KIB - 1, 4 * KIB, 40 * KIB + 5])
def test_long_data_are_streamed_and_short_data_are_not(monkeypatch, ranks, nbytes, streams):
    used = []
    monkeypatch.setattr(stores, "copy", lambda *_: used.append("copy"))
    monkeypatch.setattr(stores, "stream", lambda *_: used.append("stream"))
    team = ranks(1).teams[0]
    team.trial.streams = streams
    stores.write(team, 0, 0, nbytes)
    assert used == ["stream" if streams and nbytes >= 4 * KIB else "copy"]
