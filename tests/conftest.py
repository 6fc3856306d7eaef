"""Fixtures: MPI jobs as subprocesses of their own session, swept when they are done."""

from __future__ import annotations

import pytest

from tests.mpi import MpiJobs


@pytest.fixture
def mpi(tmp_path):
    """Starts SPMD programs under the mpiexec of this environment; sweeps what is left of them."""
    jobs = MpiJobs(tmp_path)
    yield jobs
    jobs.sweep()
