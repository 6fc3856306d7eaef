"""Calls a function on every rank, ``module:function argument ...``, and reports what it returns."""

import importlib
import sys
import traceback

from ringreduce.start.job import end_job
from tests.support.mpi import place, report

module, _, function = sys.argv[1].partition(":")
try:
    result = getattr(importlib.import_module(module), function)(*sys.argv[2:])
except BaseException:
    # The other ranks would wait for this one until the test gives up.
    traceback.print_exc()
    end_job(1)
    sys.exit(1)
report(place()[0], result)
