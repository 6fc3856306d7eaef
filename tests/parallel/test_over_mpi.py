"""Parallel training on ranks that are processes: one job checks what threads show in more cases."""

from __future__ import annotations

import pytest

import ringreduce as rr
from tests.parallel import (
    test_join,
    test_parameter_store,
    test_pipeline_parallel,
    test_sharded_parallel,
)
from tests.train import test_tensor_parallel as tensor_parallel

CHECKED = (
    test_join,
    test_parameter_store,
    test_pipeline_parallel,
    test_sharded_parallel,
    tensor_parallel,
)


def over_mpi() -> str:
    """Make the checks of all modules by messages of MPI, and in shared memory."""
    for transport in ("mpi", "shm"):
        with rr.init(transport=transport) as comm:
            for module in CHECKED:
                module.over_mpi(comm)
    return "passed"


@pytest.mark.mpi
def test_parallel_training_is_the_same_over_mpi(mpi):
    assert mpi.run_ok("call", 4, "tests.parallel.test_over_mpi:over_mpi") == ["passed"] * 4
