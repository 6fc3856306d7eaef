"""Parallel training on ranks that are processes: one job checks what holds for all transports."""

from __future__ import annotations

import pytest

import ringreduce as rr
from tests.train import (
    test_join,
    test_pipeline_parallel,
    test_sharded_parallel,
    test_tensor_parallel,
)

CHECKS = (
    test_join.over_mpi,
    test_pipeline_parallel.over_mpi,
    test_sharded_parallel.over_mpi,
    test_tensor_parallel.over_mpi,
)


def over_mpi() -> str:
    """Make all checks by messages of MPI, and in shared memory."""
    for transport in ("mpi", "shm"):
        with rr.init(transport=transport) as comm:
            for check in CHECKS:
                check(comm)
    return "passed"


@pytest.mark.mpi
def test_checks_of_parallel_training_hold_over_mpi(mpi):
    assert mpi.run_ok("call", 4, "tests.train.test_over_mpi:over_mpi") == ["passed"] * 4
