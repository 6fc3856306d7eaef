"""Calls through shared memory between processes: sums, registered arrays, fallbacks, faults."""

from __future__ import annotations

import os

import pytest

from tests.calls.test_faults import run_to_its_end
from tests.support.mpi import MpiJobs
from tests.support.through_memory import KINDS, LACKING, TRANSPORTS, TURNS, WAYS

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.skipif(
        os.environ.get("NUMBA_DISABLE_JIT") == "1",
        reason="nothing is compiled, so nothing exchanged",
    ),
]


@pytest.fixture(
    scope="module", params=[3, *(pytest.param(ranks, marks=pytest.mark.long) for ranks in (2, 4))]
)
def ranks(request, tmp_path_factory):
    """The results of `facts` on each rank of a job."""
    jobs = MpiJobs(tmp_path_factory.mktemp("job"))
    yield jobs.run_ok("call", request.param, "tests.support.through_memory:facts")
    jobs.sweep()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_sums_over_mpi(ranks, transport):
    assert [each[transport][:2] for each in ranks] == [[0, transport != "mpi"]] * len(ranks)


@pytest.mark.parametrize("way", WAYS)
def test_registered_arrays_in_any_mixture(ranks, way):
    assert all(each[way] >= TURNS for each in ranks)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_past_the_caches(ranks, way, kind):
    """As where cores share no cache, which otherwise the clock decides."""
    by_way_of_the_buffer = (way, kind) == ("single-copy", "plain")
    assert [each[f"{way} {kind}"] for each in ranks] == [by_way_of_the_buffer] * len(ranks)


@pytest.mark.parametrize("lacking", LACKING)
def test_where_the_best_way_cannot_be_had_another_is_taken(ranks, lacking):
    reads = lacking == "writes of one"
    assert [each[lacking] for each in ranks] == [[0, True, reads, False]] * len(ranks)


def test_delays_change_nothing(mpi):
    done = mpi.run_ok("delayed_rounds", 3, "300", "303")
    assert [each["wrong"] for each in done] == [0] * 3


@pytest.mark.parametrize("how", ["stop", "kill"])
def test_a_rank_that_stops_or_dies_is_an_error_and_no_spin_for_ever(mpi, how):
    done = run_to_its_end(mpi, "shm_fault", 3, how)
    if how == "stop":
        # The third may be woken by its mpiexec; the first to end may take the other with it.
        told = [done.results[rank] for rank in (0, 2) if done.results[rank] is not None]
        assert told
        assert {each["error"] for each in told} == {"PeerTimeoutError"}
        assert all(each["text"].startswith("rank 1 stopped answering") for each in told)


@pytest.mark.parametrize("kind", ["registered", "ordinary"])
@pytest.mark.parametrize("where", ["in a write", "before a write"])
def test_a_rank_that_goes_on_late_writes_to_no_memory_that_was_given_back(mpi, where, kind):
    done = run_to_its_end(mpi, "late_writer", 2, where, kind, "continued", "1")
    assert done.results[0] == {"error": "PeerTimeoutError", "changed": 0}, done.output
