"""Jobs on two hosts without MPI: results, errors and faults, in network namespaces."""

from __future__ import annotations

import signal
import time

import pytest
from hypothesis import given, settings

from tests.support.case_job import CaseJob
from tests.support.case_strategies import cases
from tests.support.mpi import DEADLINE_S
from tests.support.over_hosts import LONG_S
from tests.support.point_to_point import CHECKS, RANKS

pytestmark = pytest.mark.slow


def test_ranks_find_each_other_and_disagree_alike_although_host_names_are_loopback(hosts):
    found = hosts.run_ok("call", 3, "tests.support.over_hosts:facts")
    assert [each["name"] for each in found] == ["127.0.1.1"] * 3
    assert [each["nodes"] for each in found] == [[[0, 1], [2]]] * 3
    assert [each["again"] for each in found] == [3] * 3
    for each in found:
        assert each["says"][0].endswith("over tcp>")
        assert each["says"][1] == "tcp"
    (mismatch,) = {each["mismatch"] for each in found}
    assert "rank 2" in mismatch
    memory, tcp = "over shared memory", "over tcp"
    wanted = [[[1, memory], [2, tcp]], [[1, memory], [1, memory]], [[2, memory], [2, tcp]]]
    assert [each["parts"] for each in found] == wanted


def test_all_facts_of_messages(hosts):
    passed = hosts.run_ok("call", RANKS, "tests.support.point_to_point:over_mpi", "auto")
    assert passed == [list(CHECKS)] * RANKS


@pytest.mark.parametrize(
    ("fault", "error"),
    [("kill", "PeerLostError"), ("stop", "PeerTimeoutError"), ("disconnect", "PeerTimeoutError")],
)
def test_a_host_that_fails_is_named_by_the_others(hosts, fault, error):
    timeout_s = LONG_S if fault == "kill" else 1.0
    job = hosts.start("call", 3, "tests.support.over_hosts:interrupted", str(timeout_s))
    end = time.monotonic() + DEADLINE_S
    while len([*job.results.glob("began*")]) < 3:
        assert time.monotonic() < end
        time.sleep(0.02)
    if fault == "disconnect":
        hosts.connect(2, "down")
    else:
        hosts.signal(2, signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
    try:
        while len([*job.results.glob("[01].json")]) < 2:
            assert time.monotonic() < end
            time.sleep(0.02)
    finally:
        hosts.connect(2, "up")
        hosts.signal(2, signal.SIGKILL)
    found = hosts.finish(job).results
    assert [(each["error"], each["ranks"]) for each in found[:2]] == [(error, [2])] * 2


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
