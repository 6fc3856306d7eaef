"""The signals to a launcher, and whether the terminal has sent them."""

from __future__ import annotations

import contextlib
import os
import signal

from ringreduce.system.prctl import signal_descriptor

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""Signals that end a job."""
PASSED_ON = (*ENDING, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that a launcher passes on."""
GRACE_S = 5.0
"""Seconds for mpiexec to end after a signal that should end it."""
_SI_KERNEL = 0x80
"""The code of a signal that the driver of the terminal has sent."""


class Signals:
    """Signals to this process: they wake it up, and are kept until they are taken.

    For the main thread, which blocks them: so the kernel says who has sent each.  A thread of a
    library, such as NumPy's, may get a signal all the same.
    """

    def __enter__(self) -> Signals:
        # An ignored signal stays ignored, so that `nohup` works.  Some parents leave SIGCHLD
        # ignored: the exit code of mpiexec would be lost.
        heeded = {number for number in PASSED_ON if signal.getsignal(number) != signal.SIG_IGN}
        self._heeded = heeded | {signal.SIGCHLD}
        self._came: list[int] = []
        """Signals that another thread got."""
        self._pipe = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._before = {
            number: signal.signal(number, lambda came, _: self._came.append(came))
            for number in self._heeded
        }
        self._waker_before = signal.set_wakeup_fd(self._pipe[1])
        self._mask_before = signal.pthread_sigmask(signal.SIG_BLOCK, self._heeded)
        self.woken = (self._pipe[0], signal_descriptor(self._heeded))
        """Descriptors of which one can be read when a signal has come."""
        return self

    def taken(self) -> list[tuple[int, bool]]:
        """Return the new signals; with each, whether the terminal sent it to the whole group."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._pipe[0], 4096)
        came = [(number, False) for number in self._came]
        self._came.clear()
        while (info := signal.sigtimedwait(self._heeded, 0)) is not None:
            came.append((info.si_signo, info.si_code == _SI_KERNEL))
        return came

    def __exit__(self, *_: object) -> None:
        self.taken()  # those that have come too late
        signal.set_wakeup_fd(self._waker_before)
        for number, before in self._before.items():
            signal.signal(number, before)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask_before)
        for descriptor in (*self._pipe, self.woken[1]):
            os.close(descriptor)


def heed_again() -> None:
    """Restore the default effects of signals: for a child, before its program."""
    for number in (*PASSED_ON, signal.SIGCHLD):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (*PASSED_ON, signal.SIGCHLD))
