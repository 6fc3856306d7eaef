"""What `init` arranges for this process over MPI: how it ends, whatever happens.

Uncaught exceptions end the job, a killed launcher takes its ranks along, and a process whose
communicator broke neither hangs in MPI_Finalize nor leaves anything behind.
"""

from __future__ import annotations

import atexit
import os
import sys
import traceback

from ringreduce import abort
from ringreduce.communicator import Communicator
from ringreduce.config import Environment

_FAREWELL_S = 5.0
"""How long a rank whose communicator broke waits, before it ends, for the others to get as far."""


def prepare(environment: Environment, world_size: int) -> None:
    """Arrange how this process ends.  Raises ValueError when the job's size is not what was asked.

    A mismatch means that mpiexec and mpi4py belong to different MPIs, or that this is not the
    communicator of the whole job.
    """
    abort.install()
    if environment.launched:
        abort.die_with_parent()
    expected = environment.expected_size
    if expected is not None and expected != world_size:
        raise ValueError(
            f"init: the job was started with {expected} ranks, but MPI sees {world_size}; mpiexec "
            "and mpi4py belong to different MPIs: run 'ringreduce doctor'"
        )


def close_at_exit(comm: Communicator) -> None:
    """Close the communicator when the interpreter exits, if nobody has by then."""
    atexit.register(_close, comm)


def _close(comm: Communicator) -> None:
    try:
        comm.close()
    except Exception:
        traceback.print_exc()
    if comm.broken:
        comm.farewell(_FAREWELL_S)
        _leave_without_finalizing()


def _leave_without_finalizing() -> None:
    """End with status 1 after all other exit handlers: MPI_Finalize would wait for lost ranks."""
    atexit.unregister(_close)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(1)
