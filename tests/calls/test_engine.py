"""The programs and messages that first calls make, and that later calls make again."""

from __future__ import annotations

import contextlib
import gc
import time
import weakref
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
        make = comm._engine.executables._shared_memory.program

        def counted(*given):
            made["programs"] += 1
            return make(*given)

        comm._engine.executables._shared_memory.program = counted
        x = np.full(6, comm.rank + 1.0, np.float32)
        CALLS[name](comm, x)
        first = made["programs"]
        if name != "planned":
            for _ in range(3):
                CALLS[name](comm, x)
            assert made["programs"] == first
        return first

    assert rr.spawn(program, 2, config=SHARED, timeout_s=120) == [1, 1]
    assert unrolled == []


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
)
@settings(max_examples=150)
def test_if_one_slice_can_be_copied_through_shared_memory_all_can(case, ranks, count, slices):
    """A plan is one program, whose slices all go the same way; this is the way of last resort."""
    collective, name = case
    try:
        schedule = build(collective, name, (tuple(range(ranks)),), 0)
    except rr.ScheduleError:
        return
    if collective in ("all_reduce", "broadcast"):
        plan = plan_whole(schedule, 0, count, 4, slices)
    else:
        parts = ranks**2 if collective == "all_to_all" else ranks
        plan = plan_parts(schedule, 0, [count + part % 2 for part in range(parts)], 4, slices)
    plans = [plan.of(rank) for rank in range(ranks)]
    answers = {
        instructions_of([plan.slice(index) for plan in plans], rank, 4, False, plans[0].in_place)
        is None
        for index in range(plans[0].slices)
        for rank in range(ranks)
    }
    assert len(answers) == 1


@pytest.mark.slow
def test_calls_that_only_take_turns_free_what_is_discarded():
    """Asynchronous calls and lists never pass through the way of a synchronous call."""

    def program(comm):
        for _ in range(3):
            for n in range(1, 12):
                comm.all_reduce(np.ones(n), async_op=True).wait()
                comm.all_reduce([np.ones(n), np.ones(1)])
        return len(comm._engine._discarded), len(comm._engine.executables._flows._flows)

    for discarded, flows in rr.spawn(program, 2, config=rr.Config(kept_plans=4), timeout_s=20):
        assert discarded <= 4
        assert flows <= 12


@pytest.mark.slow
@pytest.mark.parametrize("config", [rr.Config(), SHARED], ids=["messages", "shared memory"])
def test_the_arrays_of_a_planned_call_go_with_it_after_close(config):
    def program(comm):
        x = np.ones(64)
        op = comm.plan("all_reduce", x, out=np.empty(64))
        op()
        comm.close()
        array = weakref.ref(x)
        gc.collect()
        gc.disable()
        try:
            del op, x
            return array() is None
        finally:
            gc.enable()

    assert rr.spawn(program, 1, config=config, timeout_s=120) == [True]


@pytest.mark.slow
def test_arrays_are_held_when_a_signal_handler_raises_before_a_waiting_call_has_begun():
    """Rank 1 is late, so rank 0 waits; the handler raises where the engine numbers the call."""

    def program(comm):
        x = np.ones(8)
        for _ in range(3):
            comm.all_reduce(x)
        if comm.rank == 1:
            time.sleep(0.5)
            with contextlib.suppress(rr.PeerLostError):
                comm.all_reduce(x)  # may complete: rank 0 has posted its data
            with pytest.raises(rr.PeerLostError):
                comm.all_reduce(x)
            return True

        def begin(*given):
            raise KeyboardInterrupt

        comm._engine.agreement.begin = begin
        with pytest.raises(KeyboardInterrupt):
            comm.all_reduce(x)
        (executable,) = comm._engine.running
        return any(each is x for each in executable.held)

    assert rr.spawn(program, 2, config=SHARED, timeout_s=120) == [True, True]


def test_a_call_is_counted_before_another_may_begin(monkeypatch):
    """A signal handler may run as soon as the list of running executables is empty."""

    class Watched(list):
        def clear(self):
            seen.append(engine.agreement.completed)
            super().clear()

    seen = []
    engine = None

    def program(comm):
        nonlocal engine
        engine = comm._engine
        comm.barrier()
        engine.running = Watched(engine.running)
        before = engine.agreement.completed
        comm.all_reduce(np.ones(3))
        return before

    (before,) = rr.spawn(program, 1, timeout_s=120)
    assert seen[0] == before + 1
