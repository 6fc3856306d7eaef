"""In any order in which workers act, the bound holds, numbers count once, and nobody is stuck."""

from __future__ import annotations

import inspect

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringreduce.parallel import store_rule
from ringreduce.parallel.store_rule import Apply, Push, Rule, Worker
from tests.support.store_walk import PUSHES, World

MODES = [(0, 0), (0, 1), (1, 0), (2, 0), (None, 0)]
"""Staleness and backup workers."""
CASES = [
    {"losses": 1},
    {"deaths": 1},
    {"counts": (4,)},
    {"counts": (3, 1), "losses": 1},
    {"counts": (2, 1), "breaks": 1, "deaths": 1},
]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize(("staleness", "backup_workers"), MODES)
def test_every_order_of_two_workers_keeps_the_rule(staleness, backup_workers, case):
    most = max(w.ahead for w in World(Rule, 2, staleness, backup_workers, **case).states())
    pushes = case.get("counts", (PUSHES,))[0]
    assert most == (pushes if staleness is None else staleness) or staleness == 0


@settings(max_examples=20)
@given(st.data(), st.sampled_from([*MODES, (0, 2)]), st.lists(st.integers(0, 9), max_size=2))
def test_three_workers_end_in_any_order(data, mode, counts):
    losses, deaths = data.draw(st.integers(0, 2), "losses"), data.draw(st.integers(0, 2), "deaths")
    world = World(Rule, 3, *mode, tuple(counts), losses, bool(counts), deaths)
    while actions := world.actions():
        world.do(*data.draw(st.sampled_from(actions)))
    assert {worker.at for worker in world.workers} == {"gone"}


def test_a_push_seen_twice_and_a_push_after_a_loss_are_ignored():
    rule = Rule({0: Worker(), 1: Worker()}, None)
    rule.push(0, 1)
    rule.push(0, 1)
    rule.leave(1)
    rule.push(1, 1)
    assert rule.decisions() == [Apply(0, [Push(0, 1, None)])]


@pytest.mark.parametrize(
    ("old", "new", "text", "world"),
    [
        # The bound is off by one.
        ("ahead <= self._bound", "ahead < self._bound", "waits too long", (1,)),
        ("ahead <= self._bound", "ahead <= self._bound + 1", "too far ahead", (1,)),
        # The minimum has workers that have left, or that wait for a number.
        ("self.break_off(worker)\n        self.workers.pop(worker, None)", "pass", "too", (1,)),
        ("if state.takes_part]", "]", "nobody can go on", (1, 0, (3,))),
        # Workers wait for the fastest.
        ("least = min(", "least = max(", "too far ahead", (1,)),
        ("state.pushes - least", "max(s.pushes for s in self._busy()) - state.pushes", "too", (1,)),
        # A late gradient stays, or counts in the next step.
        ("if state.step < self.step:", "if False:", "late push stays", (0, 1)),
        ("if self.staleness != 0:", "if state.step < self.step:", "other pushes", (0, 1)),
        # A number is dealt twice, or to a worker that is a step ahead.
        ("self.break_off(worker)  # a", "pass  #", "a number is not dealt", (0, 1, (3,))),
        ("heappop(self._pool)", "self._pool[0]", "dealt twice", (None, 0, (3,))),
        (" - held", "", "dealt twice", (1, 0, (3,), 0, 0, 1)),
        (" and number not in self.applied", "", "dealt twice", (0, 1, (3,), 0, 0, 1)),
        (" and not is_held", "", "dealt twice", (0, 1, (3,), 0, 0, 1)),
        ("and state.step <= self.step))", "))", "lacks an own push", (0, 0, (3,))),
        # Clocks go on after a meeting.
        (" * (not over)", "", "too long", (1, 0, (3, 3))),
    ],
)
def test_a_mistake_in_the_rule_is_found(old, new, text, world):
    source = inspect.getsource(Rule)
    assert source.count(old) == 1
    names = dict(vars(store_rule))
    exec("from __future__ import annotations\n" + source.replace(old, new), names)
    with pytest.raises(AssertionError, match=text):
        list(World(names["Rule"], 2, *world).states())
