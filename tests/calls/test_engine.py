"""What a first call makes, and what calls that were made before make anew."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ringreduce as rr
from ringreduce.algorithms import ALGORITHMS, build
from ringreduce.messages import executor
from ringreduce.planning.plan import plan_parts, plan_whole
from ringreduce.planning.shm_instructions import instructions_of
from tests.support.cases import CONFIG

SHARED = rr.Config(shared_memory=True)

CALLS = {
    "all_reduce": lambda comm, x: comm.all_reduce(x),
    "reduce_scatter": lambda comm, x: comm.reduce_scatter(x),
    "reduce": lambda comm, x: comm.reduce(x),
    "broadcast": lambda comm, x: comm.broadcast(x),
    "all_gather": lambda comm, x: comm.all_gather(x, counts=[x.size] * comm.size),
    "gather": lambda comm, x: comm.gather(x, counts=[x.size] * comm.size),
    "all_to_all": lambda comm, x: comm.all_to_all(x),
    "barrier": lambda comm, x: comm.barrier(),
    "planned": lambda comm, x: comm.plan("all_reduce", x)(),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_first_call_makes_one_program_and_unrolls_nothing(name, monkeypatch):
    unrolled: list[object] = []
    monkeypatch.setattr(executor, "unrolled", lambda *given: unrolled.append(given))

    def program(comm):
        made = Counter()
        make = comm._engine.shared_memory.program

        def counted(*given):
            made["programs"] += 1
            return make(*given)

        comm._engine.shared_memory.program = counted
        x = np.full(6, comm.rank + 1.0, np.float32)
        CALLS[name](comm, x)
        first = made["programs"]
        if name != "planned":
            for _ in range(3):
                CALLS[name](comm, x)
            assert made["programs"] == first
        return first

    assert rr.spawn(program, 2, config=SHARED, timeout_s=20) == [1, 1]
    assert unrolled == []


def test_executables_of_calls_that_are_no_longer_kept_are_freed():
    def program(comm):
        for count in range(1, 40):
            assert comm.all_reduce(np.ones(count))[0] == comm.size
        comm._engine.free_discarded()
        return len(comm._engine._flows._flows)

    config = rr.Config(kept_plans=4)
    assert all(flows <= 4 for flows in rr.spawn(program, 2, config=config, timeout_s=20))


def test_a_call_that_was_freed_is_made_anew():
    def program(comm):
        x = np.ones(5)
        for _ in range(3):
            for count in range(1, 12):
                comm.all_reduce(np.ones(count))
            assert (comm.all_reduce(x) == comm.size).all()

    rr.spawn(program, 3, config=rr.Config(kept_plans=2, shared_memory=True), timeout_s=20)


def test_an_asynchronous_call_that_is_no_longer_kept_still_completes():
    def program(comm):
        works = [comm.all_reduce(np.full(n, 1.0), async_op=True) for n in range(1, 30)]
        assert all((work.wait() == comm.size).all() for work in works)

    rr.spawn(program, 2, config=rr.Config(kept_plans=1), timeout_s=20)


SHARING = [
    (collective, name)
    for collective in ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all")
    for name in ALGORITHMS[collective]
]


@given(
    case=st.sampled_from(SHARING),
    ranks=st.integers(2, 5),
    count=st.integers(0, 3000),
    slices=st.integers(2, 6),
    single_copy=st.booleans(),
)
@settings(max_examples=150)
def test_if_one_slice_goes_through_shared_memory_all_do(case, ranks, count, slices, single_copy):
    """The engine asks about the first slice alone."""
    collective, name = case
    try:
        schedule = build(collective, name, (tuple(range(ranks)),), 0)
    except rr.ScheduleError:
        return
    plans = []
    for rank in range(ranks):
        if collective in ("all_reduce", "broadcast"):
            plans.append(plan_whole(schedule, rank, count, 4, slices, CONFIG.segment_bytes))
        else:
            parts = ranks**2 if collective == "all_to_all" else ranks
            counts = [count + part % 2 for part in range(parts)]
            plans.append(plan_parts(schedule, rank, counts, 4, slices, CONFIG.segment_bytes))
    answers = []
    for index in range(plans[0].slices):
        every = [plan.slice(index) for plan in plans]
        ways = (True, False) if single_copy else (False,)
        found = [
            any(instructions_of(every, rank, 4, way, plans[0].in_place) for way in ways)
            for rank in range(ranks)
        ]
        assert len(set(found)) == 1
        answers.append(found[0])
    assert len(set(answers)) == 1
