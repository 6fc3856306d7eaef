"""The collectives over MPI: any case gives NumPy's result; and facts that only MPI can show."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

import ringreduce as rr
from tests.support import bits
from tests.support.case_job import CaseJob
from tests.support.case_strategies import cases
from tests.support.cases import CONFIG
from tests.support.mpi import MpiJobs

pytestmark = pytest.mark.mpi

FEW = settings(max_examples=50)  # the long proof draws thousands


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    """Start MPI jobs; end the remaining processes after the module."""
    jobs = MpiJobs(tmp_path_factory.mktemp("jobs"))
    yield jobs
    jobs.sweep()


@pytest.fixture(scope="module")
def case_job(jobs):
    """A job of five ranks that run the cases sent to them."""
    job = CaseJob(jobs, ranks=5)
    yield job
    job.close()


@FEW
@given(case=cases(range(1, 6)))
def test_any_case_gives_what_numpy_gives(case_job, case):
    case_job.run(case)


@pytest.fixture(scope="module")
def digests(jobs):
    """Of an MPI job: rank -> algorithm -> call -> digests of the result."""
    return jobs.run_ok("call", 5, "tests.support.bits:over_mpi")


@pytest.mark.parametrize("algorithm", bits.LAYOUTS)
def test_ranks_runs_and_transports_have_the_same_bits(digests, algorithm):
    """Threads are one run, and processes another, of fewer dtypes."""
    nodes = bits.LAYOUTS[algorithm]
    threads = rr.spawn(bits.digests, sum(nodes), algorithm, nodes=nodes, config=CONFIG)
    runs = [threads, [rank[algorithm] for rank in digests[: sum(nodes)]]]
    for call in threads[0]:
        found = {digest for run in runs for rank in run for digest in rank.get(call, ())}
        assert len(found) == 1, call


def test_hosts_with_memory_of_their_own_have_the_bits_of_messages_and_of_threads(jobs):
    ranks = jobs.run_ok("call", 6, "tests.support.bits:between_hosts")
    for nodes in bits.HOSTS:
        size = sum(nodes)
        threads = rr.spawn(bits.of_hosts, size, nodes=nodes)
        runs = [
            [rank[f"{nodes}, {transport}"] for rank in ranks[:size]]
            for transport in bits.TRANSPORTS
        ]
        for algorithm in bits.BETWEEN_HOSTS:
            found = {tuple(rank[algorithm]) for run in (threads, *runs) for rank in run}
            assert len(found) == 1, (nodes, algorithm)


@pytest.mark.smoke
def test_what_only_mpi_can_show(jobs):
    # A failed check leaves a broken communicator, so the job does not end well: not `run_ok`.
    done = jobs.run("call", 4, "tests.support.mpi_checks:over_mpi")
    assert None not in done.results, done.output
    for outcomes in done.results:
        assert outcomes == dict.fromkeys(outcomes, "ok")


@pytest.mark.mpi
def test_where_mpi_has_no_more_communicators_all_ranks_are_told_and_close_frees_some(mpi):
    for errors, total, runs_out in mpi.run_ok(
        "call", 2, "tests.support.mpi_checks:without_free_communicators"
    ):
        assert total == 2
        assert len(errors) == (2 if runs_out else 0)
        for error in errors:
            assert "this MPI has no more communicators; 2 of ringreduce are open" in error
            assert "close() frees them" in error


def test_communicators_that_all_ranks_have_dropped_are_closed_and_no_others(mpi):
    assert mpi.run_ok("call", 3, "tests.support.dropped:over_mpi") == [2] * 3
