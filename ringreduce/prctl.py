"""What a process asks of the kernel for itself, by Linux's prctl."""

from __future__ import annotations

import ctypes
import signal

_PR_SET_PDEATHSIG = 1
_PR_SET_PTRACER = 0x59616D61
_ANY_PROCESS = -1
"""``PR_SET_PTRACER_ANY``."""


def set_death_signal(how: signal.Signals) -> None:
    """Have the kernel send this process the signal `how` when the thread that started it ends."""
    _prctl(_PR_SET_PDEATHSIG, int(how))


def allow_reads() -> None:
    """Let every process of this user read the memory of this one, if the kernel lets them at all.

    Where Yama's ptrace_scope is 1, as on Ubuntu, a process may read only the memory of its
    children, and of processes that allow it.  Does nothing where the kernel has no Yama.
    """
    _prctl(_PR_SET_PTRACER, _ANY_PROCESS)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, ctypes.c_ulong(value), 0, 0, 0)
