"""Calls of the kernel for which Python has no function: a process makes them for itself."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Iterable

_PR_SET_PDEATHSIG = 1
_PR_SET_PTRACER = 0x59616D61
_ANY_PROCESS = -1
"""``PR_SET_PTRACER_ANY``."""
_SIGSET_BYTES = 128
"""Size of C's ``sigset_t``; the first 8 bytes have the signals."""


def die_with_parent(how: signal.Signals = signal.SIGKILL, parent: int | None = None) -> None:
    """Ask the kernel to send this process the signal `how` when its parent dies.

    Only for a process whose parent is a launcher: under a shell, `nohup` or a notebook server it
    would end work that should go on.  The setting survives exec.  Children do not inherit it.
    Linux counts the death of the *thread* of the parent that started this process.

    `parent` is the expected process id of the parent (default: the present one).  If this parent
    has died before the kernel knew of the request, this process sends itself `how`.
    """
    expected = os.getppid() if parent is None else parent
    _prctl(_PR_SET_PDEATHSIG, int(how))
    if os.getppid() != expected:
        os.kill(os.getpid(), how)


def allow_reads() -> None:
    """Let every process of this user read the memory of this one, if the kernel lets them at all.

    Where Yama's ptrace_scope is 1, as on Ubuntu, a process may read only the memory of its
    children, and of processes that allow it.  Does nothing where the kernel has no Yama.
    """
    _prctl(_PR_SET_PTRACER, _ANY_PROCESS)


def signal_descriptor(numbers: Iterable[int]) -> int:
    """Return a descriptor that can be read while one of these signals is pending.

    The caller blocks these signals.  Raises OSError if the kernel makes no descriptor.
    """
    mask = sum(1 << number - 1 for number in numbers).to_bytes(8, sys.byteorder)
    library = ctypes.CDLL(None, use_errno=True)
    found = int(library.signalfd(-1, mask.ljust(_SIGSET_BYTES, b"\0"), os.O_CLOEXEC))
    if found < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return found


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, ctypes.c_ulong(value), 0, 0, 0)
