"""How a rank ends: a rank that fails ends the whole job, and a killed parent ends its ranks.

The other ranks would wait for ever for a rank that has raised, so an uncaught exception ends the
job.  A killed mpiexec may leave its ranks behind, so each rank asks the kernel for a signal when
its parent dies.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import fcntl
import io
import os
import signal
import stat
import sys
import termios
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Any

from ringreduce.errors import PeerLostError
from ringreduce.trace.recorder import finish

ABORT_DEADLINE_S = 1.0
"""Seconds that MPI_Abort may take before the process ends itself."""

_CONNECTING_S = 0.5
"""Seconds for Open MPI's other ranks to connect to mpiexec before this rank exits."""
ends_others = True
"""Whether `end_job` calls MPI_Abort: after a loss Open MPI's mpiexec may hang then."""
_DRAIN_S = 1.0
"""Seconds to wait until the process manager has read the output of this rank."""


def install() -> None:
    """Install an excepthook: an uncaught exception of the main thread ends the job within 2 s.

    The previous hook prints the traceback first.  Other threads keep their own hook.  A second call
    does nothing, also if the hook is a function around this one by then, such as torch's.
    """
    if not leads_to(sys.excepthook, _AbortHook):
        sys.excepthook = _AbortHook(sys.excepthook)


def leads_to(hook: Any, kind: type) -> bool:
    """Return whether an excepthook is of the class `kind`, or a function around such a hook."""
    seen: set[int] = set()
    left = [hook]
    while left:
        each = left.pop()
        if isinstance(each, kind):
            return True
        if id(each) not in seen:
            seen.add(id(each))
            with contextlib.suppress(ValueError):  # a variable that is not set yet
                left += [cell.cell_contents for cell in getattr(each, "__closure__", None) or ()]
    return False


_AFTER_YOU_S = 0.5
"""Seconds that a rank waits after the loss of another, which prints its traceback meanwhile."""


class _AbortHook:
    """An excepthook that calls the previous one, which prints, and then ends the job."""

    def __init__(self, previous: Any) -> None:
        self._previous = previous
        self._pid = os.getpid()
        self._only_prints = False

    def __call__(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        if self._only_prints:
            self._previous(kind, error, trace)
            return
        if isinstance(sys.stderr, io.StringIO) and _ends_at_once():
            # A hook around this one, such as torch's, prints later what this one prints.  This
            # process may have ended by then.  Therefore that hook runs once more, and prints now.
            self._only_prints = True
            with contextlib.redirect_stderr(sys.__stderr__):
                try:
                    sys.excepthook(kind, error, trace)
                except Exception:
                    self._previous(kind, error, trace)
            self._only_prints = False
        else:
            # Python's own hook would write each line of the traceback in parts.
            with one_write() if self._previous is sys.__excepthook__ else contextlib.nullcontext():
                self._previous(kind, error, trace)
        forked = os.getpid() != self._pid
        if not forked and not is_interactive():
            if isinstance(error, PeerLostError):
                time.sleep(_AFTER_YOU_S)
            end_job(exit_code_of(error))


@contextlib.contextmanager
def one_write() -> Iterator[None]:
    """Collect the output to stderr, and write it in one piece, unless stderr is a terminal.

    Python writes each line of a traceback in parts; those of several ranks would mix.
    """
    if os.isatty(2):
        yield
        return
    text = io.StringIO()
    with contextlib.redirect_stderr(text):
        yield
    # Python's hook ignores a stderr that fails, too.  The job has to end all the same.
    with contextlib.suppress(Exception):
        sys.stderr.write(text.getvalue())


def is_interactive() -> bool:
    """Return whether a person types the program: an exception does not end it then."""
    return hasattr(sys, "ps1") or bool(sys.flags.interactive)


def exit_code_of(error: BaseException) -> int:
    if isinstance(error, SystemExit):
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        return 1
    return 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1


def end_job(code: int) -> None:
    """Flush the output, then end all ranks of this process's MPI job with exit code 1 to 255.

    Returns if there is nothing to end: the job has one rank, or this rank has finalised MPI, or is
    of no MPI job, or has survived the loss of a rank.  The caller then has to exit.
    """
    finish()
    _flush()
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or not mpi.Is_initialized():
        _abort_before_init(code)
    elif ends_others and not mpi.Is_finalized() and mpi.COMM_WORLD.Get_size() > 1:
        # mpi4py holds the GIL inside Abort, so only a thread written in C can end the process.
        with open(os.devnull, "w") as silence:
            faulthandler.dump_traceback_later(ABORT_DEADLINE_S, exit=True, file=silence)
            mpi.COMM_WORLD.Abort(code)
            # MPICH's Abort may return before the process manager has ended this rank.  The exit
            # handlers must not run meanwhile: they close communicators as if all were well.
            faulthandler.cancel_dump_traceback_later()
            time.sleep(ABORT_DEADLINE_S)
            os._exit(code)


def _ends_at_once() -> bool:
    """Return whether `end_job` may end this process before it returns."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or not mpi.Is_initialized():
        return "PMI_FD" in os.environ
    return not mpi.Is_finalized() and bool(mpi.COMM_WORLD.Get_size() > 1)


def _flush() -> None:
    """Flush stdout and stderr, and wait until the process manager has read them.

    On an abort MPICH's process manager ends the ranks without reading the rest of their pipes.
    """
    deadline = time.monotonic() + _DRAIN_S
    streams: list[Any] = [sys.stdout, sys.stderr, sys.__stderr__]
    for stream in streams:  # a hook may have replaced stderr
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
            while _unread_bytes(stream.fileno()) and time.monotonic() < deadline:
                time.sleep(0.001)


def _unread_bytes(descriptor: int) -> int:
    """Count the unread bytes of a pipe, given its writing end.  0 for anything else."""
    if not stat.S_ISFIFO(os.fstat(descriptor).st_mode):
        return 0
    count = ctypes.c_int()
    fcntl.ioctl(descriptor, termios.FIONREAD, count)
    return count.value


def _abort_before_init(code: int) -> None:
    """End the job although this rank cannot call MPI_Abort, because MPI is not initialised.

    MPICH's other ranks would wait in MPI_Init for ever, so its process manager gets the abort
    message of the PMI-1 protocol.  Open MPI ends the job when this rank exits.  Its mpiexec may
    crash or hang if the other ranks are connecting to it at that moment, so this rank waits first.
    """
    if "OMPI_COMM_WORLD_SIZE" in os.environ:
        time.sleep(_CONNECTING_S)
    with contextlib.suppress(KeyError, ValueError, OSError):
        channel = int(os.environ["PMI_FD"])
        if stat.S_ISSOCK(os.fstat(channel).st_mode):
            os.write(channel, f"cmd=abort exitcode={code}\n".encode())
