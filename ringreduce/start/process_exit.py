"""End a process that has called `init`.

An uncaught exception ends the whole job.  The ranks of a killed launcher end with it.  A process
with a broken communicator does not hang in MPI_Finalize, and leaves no files or processes.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import sys
import time
import traceback
import weakref
from collections.abc import Callable
from functools import cache, partial
from types import TracebackType
from typing import Any

from ringreduce.calls.communicator import Communicator
from ringreduce.calls.ending import Ending
from ringreduce.config import Environment
from ringreduce.errors import MismatchError, PeerLostError
from ringreduce.start import job
from ringreduce.system.prctl import die_with_parent

_FAREWELL_S = 5.0
"""Seconds that a rank with a broken communicator waits for the other ranks to end."""
_OTHERS_FIRST_S = 1.0
"""Seconds that a rank waits for another rank to print the error and to end the job."""
_AFTER_INIT_S = 1.0
"""Seconds that a rank waits for the other ranks after a failed `init`, without a communicator."""
ENDING_S = 5.0
"""Seconds that the functions of `end_at_exit_by` may wait for other ranks in all."""
_LEAST_S = 1.0
"""The shortest limit of each of these functions."""
_RUNTIME_WORDS = 2048
"""Words of the interpreter's state that are searched for its list of C functions to call."""
_MOST_AT_EXIT = 32
"""Length of that list."""
_ENDS = "its process ends"
"""Text of the reason why this rank leaves, for the other ranks."""


def prepare(environment: Environment) -> None:
    """Arrange how this process ends."""
    if not job.leads_to(sys.excepthook, _OthersFirst):
        job.install()
        sys.excepthook = _OthersFirst(sys.excepthook)
    if environment.launched:
        die_with_parent()
    if "mpi4py.MPI" in sys.modules:
        keep_children_from_finalizing()


@cache
def keep_children_from_finalizing() -> None:
    """Have forked children end without MPI_Finalize, which ends the job or waits for ranks."""
    os.register_at_fork(after_in_child=_without_finalize())


@cache
def _without_finalize() -> Callable[[], None]:
    """Return a function that has this process end without MPI_Finalize, with its own exit code.

    mpi4py registers a C function that the interpreter calls at its very end, when no Python code
    runs and the exit code is chosen.  So the pointer to that function, in the interpreter's list,
    is replaced by one to a function that does nothing.
    """
    libc, file = ctypes.CDLL(None), os.fsencode(sys.modules["mpi4py.MPI"].__file__ or "")
    nothing = ctypes.cast(libc.getpid, ctypes.c_void_p).value or 0
    if ctypes.pythonapi.Py_AtExit(ctypes.c_void_p(nothing)):
        return lambda: None  # the list is full
    runtime = ctypes.c_size_t.in_dll(ctypes.pythonapi, "_PyRuntime")
    words = (ctypes.c_size_t * _RUNTIME_WORDS).from_address(ctypes.addressof(runtime))
    ours = next((index for index, word in enumerate(words) if word == nothing), 0)
    of_code = (ctypes.c_char_p * 4)()  # ``Dl_info``, which begins with the name of the file
    found = [
        index
        for index in range(max(ours - _MOST_AT_EXIT, 0), ours)
        if libc.dladdr(ctypes.c_void_p(words[index]), of_code) and of_code[0] == file
    ]

    def forget() -> None:
        for index in found:
            words[index] = nothing

    return forget


def check_size(environment: Environment, world_size: int) -> None:
    """Check that MPI has started the expected number of ranks.

    Raises ValueError if it has not: then mpiexec and mpi4py belong to different MPIs.
    """
    expected = environment.expected_size
    if expected is not None and expected != world_size:
        raise ValueError(
            f"init: the job was started with {expected} ranks, but MPI sees {world_size}; mpiexec "
            "and mpi4py belong to different MPIs: run 'ringreduce doctor'"
        )


class _OthersFirst:
    """An excepthook that lets another rank print its traceback and end the job first.

    A rank that lost another one waits for that rank.  Of the ranks that made the same call in a
    disagreement, all wait for the lowest: their tracebacks are identical.
    """

    def __init__(self, following: Any) -> None:
        self._following = following
        self._pid = os.getpid()
        self._has_waited = False

    def __call__(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        lost = isinstance(error, PeerLostError)
        waits = lost or (isinstance(error, MismatchError) and not error.speaks)
        if waits and not self._has_waited:
            self._has_waited = True
            time.sleep(_OTHERS_FIRST_S)
        job.ends_others = not any(ending.has_survived for ending in _open)
        self._following(kind, error, trace)
        if _without_mpi and os.getpid() == self._pid and not job.is_interactive():
            # In an MPI job this process would have ended by now.  The launcher ends the others.
            end = time.monotonic() + _OTHERS_FIRST_S
            for ending in list(_without_mpi):
                ending.leave(f"{kind.__name__}: {error}")
            for ending in list(_without_mpi):
                ending.flush(max(0.0, end - time.monotonic()))
            _open.clear()


_without_mpi: weakref.WeakSet[Ending] = weakref.WeakSet()
"""The ends of communicators of ranks that are in no MPI job."""


def close_without_mpi_at_exit(ending: Ending) -> None:
    """Do as `close_at_exit`; an uncaught exception of this process also reaches the other ranks."""
    _without_mpi.add(ending)
    close_at_exit(ending)


_open: list[Ending] = []
"""The ends of the communicators to close at the exit, in the order of `init`."""
_ends: dict[Ending, Callable[[float], bool]] = {}
"""Functions that end communicators at the exit in place of `Ending.close`."""


def has_begun() -> bool:
    """Return whether this process has called `init`."""
    return bool(_open)


def close_at_exit(ending: Ending) -> None:
    """Close a communicator when the interpreter exits, unless it is closed by then."""
    # The memory of closed ones is free from here on.  The exit asks for those that survived a loss.
    _open[:] = [each for each in _open if not each.closed or each.has_survived]
    _open.append(ending)
    _register(os.getpid())


def end_at_exit_by(comm: Communicator, end: Callable[[float], bool]) -> None:
    """Have ``end(seconds)`` end `comm` when the interpreter exits, unless it is broken.

    `end` raises no errors, and waits for other ranks for at most `seconds`.  It returns whether
    another rank is gone.
    """
    _ends[comm._ending] = end


def forget(comm: Communicator) -> None:
    """Do nothing about `comm` when the interpreter exits, although it may be broken.

    The program has ended its use of `comm`, and chooses the exit status.  A broken communicator of
    MPI is not forgotten: MPI_Finalize would hang.
    """
    _ends.pop(comm._ending, None)
    if is_forgettable(comm):
        _open[:] = [each for each in _open if each is not comm._ending]


def is_forgettable(comm: Communicator) -> bool:
    """Return whether `forget` works for `comm` if it is broken."""
    return comm._ending in _without_mpi


@cache
def _register(pid: int) -> None:
    atexit.register(_close_all, pid)


def never_finalize() -> None:
    """Skip MPI_Finalize when the interpreter exits: `init` failed, and ranks may be lost."""
    atexit.register(_leave_without_finalizing, partial(time.sleep, _AFTER_INIT_S), os.getpid())


def skip_finalize() -> None:
    """Skip MPI_Finalize when the interpreter exits without an error: ranks were lost."""
    atexit.register(_leave_without_finalizing, lambda: None, os.getpid(), 0)


def _close_all(pid: int) -> None:
    if os.getpid() == pid:
        deadline, others_gone = time.monotonic() + ENDING_S, False
        for ending in _open[::-1]:
            if ending in _ends and not ending.engine.broken:
                others_gone |= _ends[ending](max(deadline - time.monotonic(), _LEAST_S))
            if ending in _open:
                _close(ending, pid)
        # A launcher reports the rank that ends first.  A rank that has failed should be the first.
        if others_gone:
            time.sleep(_OTHERS_FIRST_S)


def _close(ending: Ending, pid: int) -> None:
    failed = False
    try:
        ending.close("the program")
    except (MismatchError, PeerLostError) as error:
        failed = True
        ending.leave(_ENDS)
        _print_once(error)
    except BaseException:
        failed = True
        with job.one_write():
            traceback.print_exc()
        ending.leave(_ENDS)
    if ending.engine.broken:
        _leave_without_finalizing(lambda: ending.farewell(_FAREWELL_S), pid)
    elif failed:  # the communicator is closed, but a Work failed and nobody has waited for it
        _leave_without_finalizing(lambda: None, pid)
    elif ending.has_survived and ending not in _without_mpi:
        _without_finalize()()


def _print_once(error: MismatchError | PeerLostError) -> None:
    """Print the error that ranks get at the end of the program, on one of these ranks.

    It has no traceback: no line of the program is to blame.  A rank that is in a call meanwhile
    has such a line.  If that rank does not catch the error, it prints it and ends the job.
    """
    time.sleep(_OTHERS_FIRST_S)
    # A rank that left because its own process ends prints why.
    speaks = error.speaks if isinstance(error, MismatchError) else _ENDS not in str(error)
    if speaks:
        with job.one_write():
            traceback.print_exception(error.with_traceback(None))
    else:
        time.sleep(_OTHERS_FIRST_S)  # the first rank to end takes the others along


def _leave_without_finalizing(last_words: Callable[[], None], pid: int, status: int = 1) -> None:
    """Run all other exit handlers, then `last_words`, then end with `status`.

    MPI_Finalize would wait for lost ranks.  The first rank to end without it takes the others
    along, so `last_words` gives them time.
    """
    if os.getpid() != pid:
        return
    atexit.unregister(_close_all)
    atexit.unregister(_leave_without_finalizing)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    try:
        last_words()
    finally:
        os._exit(status)
