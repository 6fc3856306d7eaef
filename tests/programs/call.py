"""Calls a function on every rank, ``module:function argument ...``, and reports what it returns."""

import importlib
import sys

from mpi4py import MPI

from tests.mpi import report

module, _, function = sys.argv[1].partition(":")
result = getattr(importlib.import_module(module), function)(*sys.argv[2:])
report(MPI.COMM_WORLD.rank, result)
