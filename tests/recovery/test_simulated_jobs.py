"""Jobs that lose ranks at any moment, simulated: no sample is lost, and none counts twice."""

from __future__ import annotations

import os
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringreduce.recovery.slots import Slots
from ringreduce.recovery.state import State
from ringreduce.supervisor.held import HeldFiles
from tests.support.simulated_job import EVENTS, STEPS, Job, RevokedError


@pytest.fixture(autouse=True, scope="module")
def _ends_itself():
    """A rank whose lease is revoked ends its process; here it raises."""

    def end(code):
        raise RevokedError

    before, os._exit = os._exit, end
    yield
    os._exit = before


def run(seed: int) -> Job:
    job = Job(seed)
    try:
        step = job.run()
        assert step == STEPS or job.stop is not None, f"seed {seed}"
    finally:
        job.held.close()
    return job


@given(seed=st.integers(0, 2**63))
def test_every_generation_begins_with_a_whole_step(seed):
    run(seed)


@pytest.mark.slow
def test_the_seeds_draw_faults_of_all_kinds():
    jobs = [run(seed) for seed in range(300)]
    seen = Counter(what for job in jobs for what in job.events)
    for what in EVENTS:
        assert seen[what] > 10, what
    assert sum(job.events["generations"] > 3 for job in jobs) > 30
    assert sum(job.stop is None for job in jobs) > 150
    assert any("lost twice running" in job.stop.text for job in jobs if job.stop is not None)
    assert any("ranks left" in job.stop.text for job in jobs if job.stop is not None)


def found_by(seeds: range) -> bool:
    """Whether a simulated job shows a mistake."""
    try:
        for seed in seeds:
            run(seed)
    except AssertionError:
        return True
    return False


def test_a_commit_before_all_is_written_is_found(monkeypatch):
    writable = Slots.writable

    def early(self, name):
        array = writable(self, name)
        if name == "counts":
            array.flags.writeable = True
            array[...] = self.committed(name)
            self.commit([name])
        return array

    monkeypatch.setattr(Slots, "writable", early)
    assert found_by(range(300))


def test_a_generation_that_begins_with_any_file_is_found(monkeypatch):
    """Not with the most advanced one: ranks may stand at different steps."""

    def first(self):
        for call in list(self._written.keys() | self._sources.keys()):
            files = self._of(call)
            self._sources[call] = min(files, key=lambda slots: slots.step)
        self._written.clear()

    monkeypatch.setattr(HeldFiles, "next_generation", first)
    assert found_by(range(300))


def test_a_lease_that_is_not_revoked_is_found(monkeypatch):
    monkeypatch.setattr(HeldFiles, "revoke", lambda self: None)
    assert found_by(range(300))


def test_a_lease_that_is_ignored_is_found(monkeypatch):
    monkeypatch.setattr(Slots, "generation", property(lambda self: 1))
    monkeypatch.setattr(State, "join", join_as_generation_1)
    assert found_by(range(300))


def join_as_generation_1(state, generation, after, _):
    state._after = after


def test_a_rank_does_not_renew_a_lease_that_is_revoked():
    held, state = HeldFiles(), State({"x": np.zeros(2)})
    state.begin_generation(1)
    held.take(1, os.dup(state.file), 1)
    held.begin_generation(2, ())
    held.revoke()
    state.join(2, lambda state, pauses: None, print)
    with pytest.raises(RevokedError), state.update():
        state["x"] += 1
    assert held.step == 0
    held.close()
