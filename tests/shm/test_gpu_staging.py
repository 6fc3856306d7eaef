"""All-reduces of arrays in device memory through shared memory, piece by piece."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings

import ringreduce as rr
from ringreduce.calls.executables import Executables
from ringreduce.shm import gpu_staging
from tests.support import late
from tests.support.case_strategies import cases
from tests.support.cases import CONFIG
from tests.support.late import LateArray, LateMark, LateStream
from tests.support.on_gpus import PROGRAMS, disagreeing, ramp, run_case, total

SHARED = replace(CONFIG, shared_memory=True)


@pytest.fixture(autouse=True)
def short_pieces():
    """The longest arrays of the programs have more pieces than there are blocks."""
    with mock.patch.object(gpu_staging, "PIECE_BYTES", 32 << 10):
        yield


def spawn(program, ranks, *args):
    return late.spawn(program, ranks, *args, config=SHARED)


@pytest.mark.parametrize(
    ("count", "itemsize", "lengths"),
    [
        (0, 8, {0: 1}),
        (1, 8, {1: 1}),
        (4096, 8, {4096: 1}),
        (4097, 8, {4096: 1, 1: 1}),
        (8192, 8, {4096: 2}),
        (8193, 8, {4096: 2, 1: 1}),
        (16384, 2, {16384: 1}),
        (20000, 2, {16384: 1, 3616: 1}),
    ],
)
def test_the_lengths_of_pieces(count, itemsize, lengths):
    assert gpu_staging.piece_counts(count, itemsize) == lengths


@pytest.mark.slow
@given(case=cases(range(1, 6)).filter(lambda case: case.collective == "all_reduce"))
@settings(max_examples=25)
def test_any_case_gives_what_numpy_gives(case):
    spawn(run_case, case.ranks, case)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_programs(program, ranks):
    spawn(program, ranks)


def test_an_all_reduce_sends_no_message():
    def program(comm, gpu):
        for count in (0, 1, 700, 60_001):
            result = comm.all_reduce(gpu.put(ramp(comm, count)))
            assert np.array_equal(gpu.values(result), total(comm, count))

    with mock.patch.object(Executables, "_by_messages", side_effect=AssertionError):
        spawn(program, 2)


def test_shards_are_those_of_the_ring_and_messages_are_counted():
    """A ring that is cut into pieces would sum some elements in another order."""

    def program(comm, gpu):
        x = gpu.put(ramp(comm, 60_001))
        values = np.random.default_rng(comm.rank).standard_normal(60_001)
        whole = gpu.values(comm.all_reduce(gpu.put(values), algorithm="ring"))
        assert np.array_equal(whole, comm.all_reduce(values, algorithm="ring"))
        assert comm.shards(x) == comm.shards(values)
        ring = comm.sent_bytes("all_reduce", x, algorithm="ring")
        assert comm.sent_bytes("all_reduce", x) > 0
        return ring

    assert sum(spawn(program, 3)) == 2 * 2 * 60_001 * 8


def test_an_array_on_a_gpu_and_one_in_host_memory_are_a_mismatch():
    def program(comm, gpu):
        x = ramp(comm, 700)
        with pytest.raises(rr.MismatchError, match="memory"):
            comm.all_reduce(gpu.put(x) if comm.rank else x)
        result = comm.all_reduce(gpu.put(x))
        assert isinstance(result, LateArray)
        assert np.array_equal(gpu.values(result), total(comm, 700))

    spawn(program, 3)


def test_ranks_that_disagree_go_on():
    spawn(disagreeing, 3)


@pytest.mark.slow
def test_a_device_that_does_nothing_any_more_is_not_waited_for_without_end():
    spawn(late.on_a_gpu_that_stops, 2)


# --- bugs that must be found ----------------------------------------------------------------------


def copies_without_order(self, source, host):
    """Plant: a copy ignores the work queued before it."""
    host[...] = source.view(np.ndarray).view(np.uint8)


def copies_in_the_callers_stream(self, host, into):
    """Plant: a copy to the device is queued in the wrong stream."""
    now = into.view(np.ndarray).view(np.uint8)
    self._gpu.ask(lambda: now.__setitem__(..., host), self._gpu.streams[0])


BUGS = {
    "a piece does not wait for its copy": (LateMark, "reached", lambda self: not self._gpu.poll()),
    "the call does not follow the caller": (LateStream, "follow", lambda self: None),
    "the caller does not wait for the call": (LateStream, "lead", lambda self: None),
    "a copy out is out of order": (LateStream, "copy_out", copies_without_order),
    "a copy in is in another stream": (LateStream, "copy_in", copies_in_the_callers_stream),
}


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_found(bug):
    late.must_be_found(*BUGS[bug], spawn)
