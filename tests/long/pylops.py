"""Solve a least-squares problem by pylops-mpi on MPI's communicator, and on a wrapped one.

    python -m tests.long.pylops 2 3

The arguments are numbers of ranks.  Exits with 1 if pylops-mpi is missing, if the solutions differ,
or if ringreduce made no call.
"""

from __future__ import annotations

import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

import ringreduce as rr
from tests.support.mpi import MpiJobs


def solved(comm: Any) -> tuple[np.ndarray, np.ndarray, float]:
    """Solve a problem on `comm`; return this rank's part of the solution, the costs, a norm."""
    import pylops
    import pylops_mpi

    n = 50  # unknowns of a rank
    matrix = np.random.default_rng(comm.rank).random((n, n)) + n * np.eye(n)
    operator = pylops_mpi.MPIBlockDiag(ops=[pylops.MatrixMult(matrix)], base_comm=comm)
    x, start = (pylops_mpi.DistributedArray(n * comm.size, base_comm=comm) for _ in range(2))
    x[:], start[:] = np.arange(n) + comm.rank, 0
    found, *_, costs = pylops_mpi.cgls(operator, operator @ x, x0=start, niter=60, tol=1e-12)
    assert np.allclose(found.local_array, x.local_array)
    return found.local_array, costs, float(found.norm())


def both() -> dict[str, int]:
    """Compare the solutions on this rank; return the calls on the wrapped communicator."""
    from mpi4py import MPI

    comm = rr.wrap(MPI.COMM_WORLD)
    for plain, wrapped in zip(solved(MPI.COMM_WORLD), solved(comm), strict=True):
        assert np.allclose(plain, wrapped, rtol=1e-10), (plain, wrapped)
    assert any(by == "ringreduce" for _, by in comm.routes), comm.routes
    return {f"{method} by {by}": count for (method, by), count in comm.routes.items()}


def main() -> None:
    if find_spec("pylops_mpi") is None:
        sys.exit("pylops-mpi is missing.  Do: pip install pylops-mpi==0.8.0")
    with tempfile.TemporaryDirectory() as name:
        jobs = MpiJobs(Path(name))
        for ranks in map(int, sys.argv[1:]):
            found = jobs.run_ok("call", ranks, "tests.long.pylops:both")
            print(f"{ranks} ranks: {found[0]}", flush=True)


if __name__ == "__main__":
    main()
