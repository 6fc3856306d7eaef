"""MPI; or, where the ranks have none, the few parts of it that the benchmark needs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

import ringreduce as rr
from ringreduce import rendezvous
from ringreduce.system import place


class _NoMpi:
    """Stands in for `mpi4py.MPI`: each constant is its name."""

    def __getattr__(self, name: str) -> Any:
        return _World() if name == "COMM_WORLD" else name


class _World:
    """Stands in for MPI_COMM_WORLD, over a communicator of ringreduce of its own."""

    def __init__(self) -> None:
        self._comm = rr.init()
        self.rank, self.size = self._comm.rank, self._comm.size
        self.Barrier = self._comm.barrier

    def Allreduce(self, _: Any, array: np.ndarray, op: str = "SUM") -> None:  # noqa: N802 - MPI's name
        self._comm.all_reduce(array, op=op.lower(), out=array)

    def __getattr__(self, name: str) -> Any:
        return lambda *_: self  # the calls of contenders, which are left out, and those for hosts


def _found() -> Any:
    if rendezvous.default() is None:
        try:
            from mpi4py import MPI

            return MPI
        except (ImportError, RuntimeError):
            if place.mpi_rank() is not None:
                raise
    return _NoMpi()


if TYPE_CHECKING:
    from mpi4py import MPI as MPI
else:
    MPI = _found()
HAS_MPI = not isinstance(MPI, _NoMpi)
