"""How long ranks compute, and which are slow."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

import ringreduce as rr
from ringreduce.calls.refusals import refusals_here
from ringreduce.recovery.elastic import ComputeTimer
from ringreduce.supervisor.paces import Paces


def told(paces: Paces, step: int, times: list[float]) -> dict[int, tuple[float, float]]:
    slow = {}
    for rank, seconds in enumerate(times):
        slow |= paces.told(rank, step, seconds, len(times))
    return slow


def test_a_rank_is_slow_that_takes_twice_the_median_three_times_running():
    paces = Paces()
    assert told(paces, 51, [1.0, 2.1, 1.0]) == {}
    assert told(paces, 101, [1.0, 2.1, 1.0]) == {}
    assert told(paces, 151, [1.0, 1.9, 1.0]) == {}
    assert told(paces, 201, [1.0, 2.1, 1.0]) == {}
    assert told(paces, 251, [1.0, 2.1, 1.0]) == {}
    assert told(paces, 301, [1.0, 2.5, 1.1]) == {1: (2.5, 1.1)}
    assert told(paces, 351, [1.0, 2.5, 1.1]) == {}, "it is named once"


def test_one_of_two_ranks_can_be_slow():
    paces = Paces()
    found = [told(paces, step, [0.5, 0.1]) for step in (51, 101, 151)]
    assert found == [{}, {}, {0: (0.5, 0.1)}]


def test_a_step_that_not_all_have_told_of_is_passed_over():
    paces = Paces()
    assert paces.told(0, 51, 9.0, 2) == {}
    for step in (101, 151):
        assert told(paces, step, [1.0, 1.0]) == {}
    assert paces.told(1, 51, 9.0, 2) == {}
    assert told(paces, 201, [1.0, 1.0]) == {}


@pytest.mark.parametrize("is_async", [False, True])
def test_the_time_in_calls_is_no_computation(is_async):
    """Rank 1 computes longer, and rank 0 waits for it."""

    def program(comm):
        found = []
        pace = ComputeTimer(comm, lambda step, seconds: found.append((step, seconds)))
        pace.after(53)
        if comm.rank == 1:
            time.sleep(0.1)
        if is_async:
            comm.all_reduce(np.ones(3), async_op=True).wait()
        else:
            comm.all_reduce(np.ones(3))
        pace.after(54)
        pace.after(55)
        pace.close()
        comm.all_reduce(np.ones(3))
        return found

    (first,), (second,) = rr.spawn(program, 2)
    assert first[0] == second[0] == 54
    assert second[1] >= 0.1 > first[1]


def test_a_measurement_that_is_given_up_leaves_calls_as_they_were():
    def program(comm):
        pace = ComputeTimer(comm, lambda step, seconds: None)
        pace.after(106)
        pace.close()
        return comm.all_reduce(1).item(), type(comm._engine.queue.lock).__name__

    before = rr.spawn(lambda comm: type(comm._engine.queue.lock).__name__, 2)
    assert rr.spawn(program, 2) == [(2, name) for name in before]


def test_another_thread_may_end_a_measurement():
    """As where it ends an update of a state."""

    def program(comm):
        pace = ComputeTimer(comm, lambda step, seconds: None)
        pace.after(106)
        thread = threading.Thread(target=pace.close)
        thread.start()
        thread.join()
        return refusals_here()._depth[0]

    assert rr.spawn(program, 2) == [0, 0]
