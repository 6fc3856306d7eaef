"""What `init` arranges for this process over MPI: how it ends, whatever happens.

Uncaught exceptions end the job, a killed launcher takes its ranks along, and a process whose
communicator broke neither hangs in MPI_Finalize nor leaves anything behind.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any

from ringreduce.calls.communicator import Communicator
from ringreduce.config import Environment
from ringreduce.errors import PeerLostError
from ringreduce.launch import job

_FAREWELL_S = 5.0
"""How long a rank whose communicator broke waits, before it ends, for the others to get as far."""
_CULPRITS_S = 1.0
"""How long a rank that failed because another did leaves that one to end the job."""
_AFTER_INIT_S = 1.0
"""The same where no communicator came to be, by which ranks could tell each other."""


def prepare(environment: Environment, world_size: int) -> None:
    """Arrange how this process ends.  Raises ValueError when the job's size is not what was asked.

    A mismatch means that mpiexec and mpi4py belong to different MPIs, or that this is not the
    communicator of the whole job.
    """
    if not isinstance(sys.excepthook, _CulpritsFirst):
        job.install()
        sys.excepthook = _CulpritsFirst(sys.excepthook)
    if environment.launched:
        job.die_with_parent()
    expected = environment.expected_size
    if expected is not None and expected != world_size:
        raise ValueError(
            f"init: the job was started with {expected} ranks, but MPI sees {world_size}; mpiexec "
            "and mpi4py belong to different MPIs: run 'ringreduce doctor'"
        )


class _CulpritsFirst:
    """An excepthook: a rank that lost another lets that one print its traceback and end the job."""

    def __init__(self, following: Any) -> None:
        self._following = following

    def __call__(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        if isinstance(error, PeerLostError):
            time.sleep(_CULPRITS_S)
        self._following(kind, error, trace)


def close_at_exit(comm: Communicator) -> None:
    """Close the communicator when the interpreter exits, if nobody has by then."""
    atexit.register(_close, comm, os.getpid())


def never_finalize() -> None:
    """Let the interpreter's exit not wait for lost ranks, when no communicator came to be."""
    atexit.register(_leave_without_finalizing, partial(time.sleep, _AFTER_INIT_S), os.getpid())


def _close(comm: Communicator, pid: int) -> None:
    if os.getpid() != pid:
        return
    try:
        comm.close()
    except BaseException:
        traceback.print_exc()
        comm.leave("its process ends")
        if not comm.broken:  # closed well, but a call that nobody had waited for has failed
            _leave_without_finalizing(lambda: None, pid)
    if comm.broken:
        _leave_without_finalizing(lambda: comm.farewell(_FAREWELL_S), pid)


def _leave_without_finalizing(last_words: Callable[[], None], pid: int) -> None:
    """End with status 1 after all other exit handlers: MPI_Finalize would wait for lost ranks.

    The first rank to end takes the others along, so all that is to be done is done before.
    """
    if os.getpid() != pid:
        return
    atexit.unregister(_close)
    atexit.unregister(_leave_without_finalizing)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    try:
        last_words()
    finally:
        os._exit(1)
