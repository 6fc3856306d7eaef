"""How a rank ends: with its whole job when it fails, and with its parent when that is killed.

A rank that raises leaves the others waiting for it for ever; so an uncaught exception ends the job.
A killed mpiexec may leave its ranks behind; so each rank asks the kernel to go with its parent.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import fcntl
import os
import signal
import stat
import sys
import termios
import time
from types import TracebackType
from typing import Any

from ringreduce.errors import PeerLostError

ABORT_DEADLINE_S = 1.0
"""How long MPI_Abort may take before the process ends itself."""

_CONNECTING_S = 0.5
_DRAIN_S = 0.3
_PR_SET_PDEATHSIG = 1


def die_with_parent(how: signal.Signals = signal.SIGKILL, parent: int | None = None) -> None:
    """Ask the kernel to send this process the signal `how` when its parent dies.

    Only for a process whose parent is a launcher: under a shell, `nohup` or a notebook server it
    would end work that is meant to go on.  The setting survives exec and is not inherited by
    children.  Linux counts the death of the parent's *thread* that started this process.

    `parent` is the process id that is still expected (default: the present one); if it is gone by
    the time the kernel knows, this process sends itself `how`.
    """
    expected = os.getppid() if parent is None else parent
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(int(how)), 0, 0, 0)
    if os.getppid() != expected:
        os.kill(os.getpid(), how)


def install() -> None:
    """Let an uncaught exception of the main thread end the whole job within 2 s.

    Its traceback is printed first, by the hook that was there before.  Other threads keep their
    own hook.  A second call does nothing.
    """
    if not isinstance(sys.excepthook, _AbortHook):
        sys.excepthook = _AbortHook(sys.excepthook)


_AFTER_YOU_S = 0.5
"""How long a rank that was let down by another waits, so that the other's traceback is printed."""


class _AbortHook:
    """An excepthook: prints as the one before it did, then ends the job."""

    def __init__(self, previous: Any) -> None:
        self._previous = previous
        self._pid = os.getpid()

    def __call__(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        self._previous(kind, error, trace)
        forked = os.getpid() != self._pid
        interactive = hasattr(sys, "ps1") or sys.flags.interactive
        if not forked and not interactive:
            if isinstance(error, PeerLostError):
                time.sleep(_AFTER_YOU_S)
            end_job(exit_code_of(error))


def exit_code_of(error: BaseException) -> int:
    """The exit code of a process that `error` ends, as the interpreter would choose it."""
    if isinstance(error, SystemExit):
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        return 1
    return 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1


def end_job(code: int) -> None:
    """End all ranks of this process's MPI job with exit code `code` (1 to 255), output flushed.

    Returns if there is nothing to end: the job has one rank, or has finalised MPI, or is no MPI
    job.  It is then the caller's to exit.
    """
    _flush()
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or not mpi.Is_initialized():
        _abort_before_init(code)
    elif not mpi.Is_finalized() and mpi.COMM_WORLD.Get_size() > 1:
        # mpi4py holds the GIL inside Abort, so only a thread in C can watch over it.
        with open(os.devnull, "w") as silence:
            faulthandler.dump_traceback_later(ABORT_DEADLINE_S, exit=True, file=silence)
            mpi.COMM_WORLD.Abort(code)
            # MPICH's may return before the process manager has ended this rank; going on would let
            # the exit handlers run, which close communicators as if all were well.
            faulthandler.cancel_dump_traceback_later()
            time.sleep(ABORT_DEADLINE_S)
            os._exit(code)


def _flush() -> None:
    """Send on what was printed, and wait until the process manager has read it.

    MPICH's ends the ranks on an abort without reading what is left in their pipes.
    """
    deadline = time.monotonic() + _DRAIN_S
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
            while _unread_bytes(stream.fileno()) and time.monotonic() < deadline:
                time.sleep(0.001)


def _unread_bytes(descriptor: int) -> int:
    """What lies in a pipe, seen from its writing end; 0 for anything else."""
    if not stat.S_ISFIFO(os.fstat(descriptor).st_mode):
        return 0
    count = ctypes.c_int()
    fcntl.ioctl(descriptor, termios.FIONREAD, count)
    return count.value


def _abort_before_init(code: int) -> None:
    """Let the job end although this rank cannot call MPI_Abort.

    MPICH lets the other ranks wait in MPI_Init for ever, unless its process manager is told, in the
    words of the PMI-1 protocol.  Open MPI ends the job when this rank exits, but its mpiexec may
    crash or hang if the other ranks are just connecting to it; so they are given time to.
    """
    if "OMPI_COMM_WORLD_SIZE" in os.environ:
        time.sleep(_CONNECTING_S)
    with contextlib.suppress(KeyError, ValueError, OSError):
        channel = int(os.environ["PMI_FD"])
        if stat.S_ISSOCK(os.fstat(channel).st_mode):
            os.write(channel, f"cmd=abort exitcode={code}\n".encode())
