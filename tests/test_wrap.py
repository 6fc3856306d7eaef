"""Communicators of mpi4py whose reductions ringreduce makes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from tests.support.case_job import CaseJob
from tests.support.mpi import MpiJobs
from tests.support.wrapped import FACTS, programs

pytestmark = pytest.mark.mpi


@pytest.fixture(scope="module")
def case_job(tmp_path_factory):
    """A job of five ranks that make the programs sent to them."""
    jobs = MpiJobs(tmp_path_factory.mktemp("jobs"))
    job = CaseJob(jobs, ranks=5, program="serve_wrapped")
    yield job
    job.close()
    jobs.sweep()


@settings(max_examples=60)
@given(program=programs(range(1, 6)))
def test_any_program_has_the_outcome_that_it_has_on_mpi(case_job, program):
    case_job.run(program)


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.smoke), 3])
def test_facts(mpi, ranks):
    for outcomes in mpi.run_ok("call", ranks, "tests.support.wrapped:facts"):
        assert outcomes == {fact.__name__: "ok" for fact in FACTS}


def test_below_thread_multiple_asynchronous_calls_are_mpis(mpi):
    function, level = (
        "tests.support.wrapped:without_threads",
        {"MPI4PY_RC_THREAD_LEVEL": "serialized"},
    )
    assert mpi.run_ok("call", 2, function, **level) == [[["Iallreduce", "MPI"], 2.0]] * 2
