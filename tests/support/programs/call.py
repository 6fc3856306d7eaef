"""Calls a function on every rank, ``module:function argument ...``, and reports what it returns."""

import importlib
import sys
import traceback

from mpi4py import MPI

from tests.support.mpi import report

module, _, function = sys.argv[1].partition(":")
try:
    result = getattr(importlib.import_module(module), function)(*sys.argv[2:])
except BaseException:
    # The other ranks would wait for this one until the test gives up.
    traceback.print_exc()
    sys.stderr.flush()
    MPI.COMM_WORLD.Abort(1)
report(MPI.COMM_WORLD.rank, result)
