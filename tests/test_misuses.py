"""Every misuse of docs/messages.md gets the answer that stands there, word for word."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support import misuses
from tests.support.each import each
from tests.support.misuses import BY_ALL_RANKS, BY_ONE_RANK, HERE, JOBS, OVER_MPI, Misuse
from tests.support.mpi import MpiJobs

MISUSES = misuses.misuses()
TRANSPORTS = ("mpi", "shm")


def of(*sections: str) -> list[Misuse]:
    return [misuse for misuse in MISUSES if misuse.section in sections]


@each("misuse", of(*HERE))
def test_a_misuse_gets_its_answer(misuse):
    assert HERE[misuse.section](misuse.wrote) == misuse.answer


@pytest.mark.parametrize(
    "config", ["messages", pytest.param("shared memory", marks=pytest.mark.slow)]
)
@each("misuse", of(*BY_ONE_RANK, *BY_ALL_RANKS))
def test_a_misuse_gets_its_answer_among_threads(misuse, config):
    assert misuses.among_threads(config)[misuse.wrote] == misuse.answer


@pytest.fixture(scope="module")
def over_mpi(tmp_path_factory) -> Iterator[dict[str, dict[str, str]]]:
    """Transport -> the line -> the answer."""
    jobs = MpiJobs(tmp_path_factory.mktemp("jobs"))
    yield {transport: misuses.over_mpi_jobs(jobs, transport) for transport in TRANSPORTS}
    jobs.sweep()


@pytest.mark.mpi
@pytest.mark.parametrize("transport", TRANSPORTS)
@each("misuse", of(*BY_ONE_RANK, *BY_ALL_RANKS, OVER_MPI))
def test_a_misuse_gets_its_answer_over_mpi(misuse, transport, over_mpi):
    assert over_mpi[transport][misuse.wrote] == misuse.answer


@pytest.mark.few(2)
@pytest.mark.mpi
@pytest.mark.parametrize("misuse", of(JOBS), ids=str)
def test_a_rank_that_ends_early_is_named(misuse):
    assert misuses.of_job(misuse.wrote) == misuse.answer


def test_the_page_has_many_misuses_each_once():
    assert len({(misuse.section, misuse.wrote) for misuse in MISUSES}) == len(MISUSES) > 300


def test_every_mistake_in_files_is_on_the_page():
    made = {*misuses.DATA, *misuses.CHECKPOINTS, *misuses.MPIS, *misuses.HOSTS}
    sections = "Data", "Checkpoints", "The MPI of an environment"
    assert made == {m.wrote for m in of(*sections, "Ranks of several hosts without MPI")}
