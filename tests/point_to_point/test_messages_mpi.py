"""Messages between ranks that are processes: by mailboxes, and by messages of the MPI."""

from __future__ import annotations

import pytest

from tests.support.point_to_point import CHECKS, RANKS

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("transport", [pytest.param("shm", marks=pytest.mark.smoke), "mpi"])
def test_all_facts_of_messages(mpi, transport):
    passed = mpi.run_ok("call", RANKS, "tests.support.point_to_point:over_mpi", transport)
    assert passed == [list(CHECKS)] * RANKS
