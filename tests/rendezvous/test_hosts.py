"""Jobs on two hosts, by MPI and without it: results, errors and faults, in network namespaces."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

import ringreduce as rr
from tests.support import bits
from tests.support.case_job import CaseJob
from tests.support.case_strategies import cases
from tests.support.hosts import JobsOnHosts
from tests.support.over_hosts import LONG_S, SHORT
from tests.support.point_to_point import CHECKS, RANKS

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def mpi_hosts(hosts, tmp_path_factory):
    """Starts jobs on the same hosts by mpiexec."""
    jobs = hosts.by_mpi(tmp_path_factory.mktemp("hosts"))
    yield jobs
    jobs.sweep()


def check_facts(hosts: JobsOnHosts) -> list[dict]:
    """Check what does not depend on who connects the ranks; return the facts of each rank."""
    found = hosts.run_ok("call", 3, "tests.support.over_hosts:facts")
    assert [each["nodes"] for each in found] == [[[0, 1], [2]]] * 3
    assert [each["again"] for each in found] == [3] * 3
    (mismatch,) = {each["mismatch"] for each in found}
    assert "rank 2" in mismatch
    (wanted, *_) = rr.spawn(bits.of_hosts, 3, nodes=(2, 1))
    assert [each["bits"] for each in found] == [wanted] * 3
    return found


@pytest.mark.mpi
def test_ranks_that_mpi_connects_have_the_bits_of_threads_and_disagree_alike(mpi_hosts):
    for each in check_facts(mpi_hosts):
        assert each["says"][0].endswith("over MPI messages>")


def test_ranks_find_each_other_and_disagree_alike_although_host_names_are_loopback(hosts):
    found = check_facts(hosts)
    assert [each["name"] for each in found] == ["127.0.1.1"] * 3
    for each in found:
        assert each["says"][0].endswith("over tcp>")
        assert each["says"][1] == "tcp"
    memory, tcp = "over shared memory", "over tcp"
    wanted = [[[1, memory], [2, tcp]], [[1, memory], [1, memory]], [[2, memory], [2, tcp]]]
    assert [each["parts"] for each in found] == wanted


def test_all_facts_of_messages(hosts):
    passed = hosts.run_ok("call", RANKS, "tests.support.point_to_point:over_mpi", "auto")
    assert passed == [list(CHECKS)] * RANKS


@pytest.mark.mpi
@pytest.mark.parametrize("fault", ["stop", "disconnect"])
def test_under_mpi_a_host_that_fails_is_named_by_the_others(mpi_hosts, fault):
    found = mpi_hosts.let_fail(fault, 1.0, SHORT)
    assert [(each["error"], each["ranks"]) for each in found] == [("PeerTimeoutError", [2])] * 2


@pytest.mark.parametrize(
    ("fault", "error"),
    [("kill", "PeerLostError"), ("stop", "PeerTimeoutError"), ("disconnect", "PeerTimeoutError")],
)
def test_a_host_that_fails_is_named_by_the_others(hosts, fault, error):
    found = hosts.let_fail(fault, LONG_S if fault == "kill" else 1.0, SHORT)
    assert [(each["error"], each["ranks"]) for each in found] == [(error, [2])] * 2


@pytest.fixture(scope="module")
def case_job(hosts):
    """Made after the tests that kill all processes of a host."""
    job = CaseJob(hosts, ranks=3)
    yield job
    job.close()


@settings(max_examples=20)
@given(case=cases(range(2, 4)))
def test_any_case_gives_what_numpy_gives_and_ranks_meet_by_a_file(case_job, case):
    case_job.run(case)
