"""The signals to a launcher with a supervisor."""

from __future__ import annotations

import contextlib
import os
import signal

from ringreduce.supervisor.launcher import PASSED_ON


class Signals:
    """Signals to this process wake it up, and are kept until they are taken."""

    def __enter__(self) -> Signals:
        self.woken, self._waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._came: list[int] = []
        # An ignored signal stays ignored, so that `nohup` works.
        heeded = [n for n in PASSED_ON if signal.getsignal(n) != signal.SIG_IGN]
        self._before = {
            number: signal.signal(number, lambda came, _: self._came.append(came))
            for number in (*heeded, signal.SIGCHLD)
        }
        self._waker_before = signal.set_wakeup_fd(self._waker)
        return self

    def taken(self) -> list[int]:
        """Return the signals that have come since the last call."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.woken, 4096)
        came, self._came = self._came, []
        return came

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._waker_before)
        for number, before in self._before.items():
            signal.signal(number, before)
        os.close(self.woken)
        os.close(self._waker)
