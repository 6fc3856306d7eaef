"""Write and read a file of h5py's on all ranks, by MPI's communicator, and by a wrapped one.

    python -m tests.long.parallel_hdf5 2 3

The arguments are numbers of ranks.  Exits with 1 if h5py for MPI is missing, if a file holds other
elements, or if ringreduce made no call.
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


def written(comm: Any, path: str) -> np.ndarray:
    """Write a row on each rank; return the sum of the rows, which every rank reads."""
    import h5py

    row = np.arange(1000.0) * (comm.rank + 1)
    with h5py.File(path, "w", driver="mpio", comm=comm) as file:
        file.create_dataset("rows", (comm.size, row.size))[comm.rank] = row
    total = np.empty_like(row)
    comm.Allreduce(row, total)
    with h5py.File(path, "r", driver="mpio", comm=comm) as file:
        assert np.array_equal(file["rows"][:].sum(axis=0), total)
    return total


def both(folder: str) -> dict[str, int]:
    """Compare the sums on this rank; return the calls on the wrapped communicator."""
    from mpi4py import MPI

    comm = rr.wrap(MPI.COMM_WORLD)
    plain, wrapped = written(MPI.COMM_WORLD, f"{folder}/plain"), written(comm, f"{folder}/wrapped")
    assert np.array_equal(plain, wrapped)
    assert comm.routes == {("Allreduce", "ringreduce"): 1}
    return {f"{method} by {by}": count for (method, by), count in comm.routes.items()}


def main() -> None:
    if find_spec("h5py") is None:
        sys.exit("h5py is missing; the step mpi4py of .ci/nightly builds it for MPI")
    with tempfile.TemporaryDirectory() as name:
        jobs = MpiJobs(Path(name))
        for ranks in map(int, sys.argv[1:]):
            found = jobs.run_ok("call", ranks, "tests.long.parallel_hdf5:both", name)
            print(f"{ranks} ranks: {found[0]}", flush=True)


if __name__ == "__main__":
    main()
