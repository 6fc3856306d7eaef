"""Fixtures: MPI jobs as subprocesses of their own session, swept when they are done."""

from __future__ import annotations

import pytest

from tests.support import (
    gpus,
    unclocked,  # noqa: F401
)
from tests.support.mpi import MpiJobs


def pytest_collection_modifyitems(config, items):
    """Deselect the tests that need a GPU if the machine has none."""
    if not gpus.has_gpu():
        needs_one = [item for item in items if item.get_closest_marker("gpu")]
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]
        config.hook.pytest_deselected(items=needs_one)


@pytest.fixture
def mpi(tmp_path):
    """Starts SPMD programs under the mpiexec of this environment; sweeps what is left of them."""
    jobs = MpiJobs(tmp_path)
    yield jobs
    jobs.sweep()
