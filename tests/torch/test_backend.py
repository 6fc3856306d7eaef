"""The backend of torch: jobs whose ranks run the same checks."""

from __future__ import annotations

from functools import cache

import pytest

from tests.support.mpi import MpiJobs
from tests.torch.checks import CHECKS

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def outcomes_on(tmp_path_factory):
    """Number of ranks -> the outcome of every check on each rank of a job, which runs once.

    Two ranks run with all debugging of torch, which changes nothing; three run random programs too.
    """
    jobs = MpiJobs(tmp_path_factory.mktemp("torch"), without_mpi=True)

    @cache
    def of(ranks):
        more = {2: [], 3: ["ringreduce", "25"]}[ranks]
        debugging = {2: "DETAIL", 3: "OFF"}[ranks]
        checks = "tests.torch.checks:over_torch"
        return jobs.run("call", ranks, checks, *more, TORCH_DISTRIBUTED_DEBUG=debugging)

    yield of
    jobs.sweep()


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", [check.__name__ for check in CHECKS])
def test_a_check_holds(outcomes_on, name, ranks):
    done = outcomes_on(ranks)
    assert None not in done.results, done.output
    assert [found.get(name, "not made") for found in done.results] == ["ok"] * ranks


def test_random_programs_give_what_torch_gives(outcomes_on):
    assert [found.get("random programs") for found in outcomes_on(3).results] == ["ok"] * 3


def test_mpi_connects_ranks_of_several_hosts(tmp_path):
    jobs = MpiJobs(tmp_path)
    found = jobs.run_ok("call", 2, "tests.torch.checks:over_mpi")
    jobs.sweep()
    wrong = {name: came for each in found for name, came in each.items() if came != "ok"}
    assert wrong == {}


def test_tcp_connects_ranks_of_several_hosts_without_mpi(hosts):
    found = hosts.run_ok("call", 3, "tests.torch.checks:over_tcp")
    wrong = {name: came for each in found for name, came in each.items() if came != "ok"}
    assert wrong == {}
    assert "ddp_trains_as_one_process_does" in found[0]
