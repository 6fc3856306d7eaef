"""Calls on arrays in device memory: in order with the caller's work, and no copy too early."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings

import ringreduce as rr
from ringreduce.messages import device_staging
from tests.support import late
from tests.support.case_strategies import cases
from tests.support.cases import nodes_of
from tests.support.late import Gpu, LateArray, LateMark, LateStream, spawn
from tests.support.on_gpus import COUNTS, PROGRAMS, disagreeing, ramp, run_case, total


@pytest.mark.slow
@given(case=cases(range(1, 6)))
@settings(max_examples=40)
def test_any_case_gives_what_numpy_gives(case):
    spawn(run_case, case.ranks, case, nodes=nodes_of(case.layout, case.ranks))


# --- programs -------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_programs(program, ranks):
    spawn(program, ranks)


def test_some_ranks_on_gpus_and_some_in_host_memory():
    def program(comm, gpu):
        for count in COUNTS:
            x = ramp(comm, count)
            result = comm.all_reduce(gpu.put(x) if comm.rank % 2 else x)
            assert isinstance(result, LateArray) == bool(comm.rank % 2)
            result = gpu.values(result) if comm.rank % 2 else result
            assert np.array_equal(result, total(comm, count))

    spawn(program, 4)


def test_a_call_returns_before_the_device_is_done():
    def program(comm, gpu):
        returned_early = 0
        for _ in range(20):
            comm.all_reduce(gpu.put(ramp(comm, 700)))
            returned_early += bool(gpu.streams[0].operations)
        return returned_early

    assert all(spawn(program, 2))


def test_ranks_that_disagree_go_on():
    spawn(disagreeing, 3)


@pytest.mark.slow
def test_a_device_that_does_nothing_any_more_is_not_waited_for_without_end():
    spawn(late.on_a_gpu_that_stops, 2)


# --- what is refused ------------------------------------------------------------------------------


def test_out_lives_where_the_array_does():
    def program(comm, gpu):
        x, host = gpu.put(np.ones(4)), np.ones(4)
        with pytest.raises(TypeError, match="out is in host memory, the array is on GPU 0"):
            comm.all_reduce(x, out=host)
        with pytest.raises(TypeError, match="out is on GPU 0, the array is in host memory"):
            comm.all_reduce(host, out=x)
        with pytest.raises(TypeError, match="member 0 is on GPU 0, member 1 is in host memory"):
            comm.all_reduce([x, host])
        with pytest.raises(ValueError, match="out overlaps the input"):
            comm.all_reduce(x[1:], out=x[:-1])
        with pytest.raises(TypeError, match="out has dtype float32"):
            comm.all_reduce(x, out=gpu.put(np.ones(4, np.float32)))
        assert np.array_equal(gpu.values(comm.all_reduce(x, out=x)), np.ones(4))

    spawn(program, 1)


def test_what_lives_on_a_gpu_needs_cupy():
    with (
        mock.patch.dict("sys.modules", {"cupy": None}),
        pytest.raises(ImportError, match=r"broadcast: .*pip install 'ringreduce\[gpu\]'"),
    ):
        rr.spawn(lambda comm: comm.broadcast(Gpu(0).put(np.ones(2))), 1)


# --- bugs that must be found ----------------------------------------------------------------------


def starts_at_once(self):
    """Plant: a send is started before its copy is complete."""
    for send in self._sends[self._started :]:
        if send.header is not None:
            send.header[0][:] = send.header[1]
        send.request.Start()
        self._started += 1
    return True


def posts_at_once(self):
    """Plant: a receive is posted into a block before the block's data are copied to the device."""
    for recv in self._recvs[self._started :]:
        recv.request.Start()
        self._started += 1
    return True


def copies_without_order(self, source, host):
    """Plant: a copy ignores the work queued before it."""
    host[...] = source.view(np.ndarray).view(np.uint8)


BUGS = {
    "a send does not wait for its copy": (device_staging.Outbox, "started", starts_at_once),
    "a block is used again too soon": (device_staging.Inbox, "started", posts_at_once),
    "the call does not follow the caller": (LateStream, "follow", lambda self: None),
    "the caller does not wait for the call": (LateStream, "lead", lambda self: None),
    "a copy is out of order": (LateStream, "copy_out", copies_without_order),
    "a mark is always reached": (LateMark, "reached", lambda self: not self._gpu.poll()),
}


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_found(bug):
    late.must_be_found(*BUGS[bug], spawn)
