"""The programs of `tests.support.works` over MPI at the thread level that is given."""

import sys
import traceback

import mpi4py

mpi4py.rc.thread_level = sys.argv[1]

from mpi4py import MPI  # noqa: E402 - the level is chosen before MPI starts

from tests.support.mpi import report  # noqa: E402
from tests.support.works import over_mpi  # noqa: E402

try:
    over_mpi(sys.argv[1])
except BaseException:
    traceback.print_exc()
    sys.stderr.flush()
    MPI.COMM_WORLD.Abort(1)
report(MPI.COMM_WORLD.rank, "done")
