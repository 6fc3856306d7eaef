"""Run an mpiexec of hydra, and leave out its banner: the launcher names the rank and how it ended.

MPICH's and Intel MPI's mpiexec print about ten lines to standard output when a rank fails.  No
option of theirs prevents it.
"""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import threading
from typing import Any

_BEGINNINGS = (
    b"\n" + b"=" * 83 + b"\n=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES\n",
    b"YOUR APPLICATION TERMINATED WITH THE EXIT STRING: ",
)
_BANNER = re.compile(
    re.escape(_BEGINNINGS[0]) + rb"(?:= .*\n)*={83}\n"
    rb"|" + re.escape(_BEGINNINGS[1]) + rb".*\nThis typically .*\nPlease see the FAQ .*\n"
)
_LONGEST = 4096
"""Bytes of the longest banner."""
_LINE_FEED_S = 0.02
"""Seconds that a last line feed waits for more: a banner may begin with it."""
_PATIENCE_S = 1.0
"""Seconds that the beginning of a banner waits for the rest."""
DRAIN_S = 1.0
"""Seconds to wait for the end of the output, which a process that a rank left may hold open."""


class MpiexecWithoutBanner(subprocess.Popen[bytes]):
    """A started mpiexec.  A thread writes what it prints to this process's standard output.

    Once `poll` has returned a code, all of the output is written.
    """

    def __init__(self, argv: list[str], **settings: Any) -> None:
        super().__init__(argv, stdout=subprocess.PIPE, **settings)
        self._relay = threading.Thread(target=self._pass_on, name="ringreduce output", daemon=True)
        self._relay.start()
        self._is_drained = False

    def poll(self) -> int | None:
        code = super().poll()
        if code is not None and not self._is_drained:
            self._relay.join(DRAIN_S)
            self._is_drained = True
        return code

    def _pass_on(self) -> None:
        # Signals are for the main thread.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        assert self.stdout is not None
        with self.stdout:  # mpiexec sees that nobody reads
            try:
                relay(self.stdout.fileno(), 1)
            except OSError:
                return


def relay(source: int, target: int) -> None:
    """Copy the output at a descriptor to another one, without banners, until it ends."""
    comes = select.poll()
    comes.register(source, select.POLLIN)
    held, ended = b"", False
    while not ended:
        more = b""
        patience_s = _LINE_FEED_S if held == b"\n" else _PATIENCE_S
        if comes.poll(patience_s * 1e3 if held else None):
            more = os.read(source, 1 << 16)
            ended = not more
        held = _BANNER.sub(b"", held + more)
        at = _may_begin(held) if more else len(held)
        _write(target, held[:at])
        held = held[at:]


def _may_begin(text: bytes) -> int:
    """Return where an unfinished banner begins in `text`; the length of `text` if none does."""
    begins = [text.find(each, max(0, len(text) - _LONGEST)) for each in _BEGINNINGS]
    begins += [
        len(text) - length
        for beginning in _BEGINNINGS
        for length in range(1, len(beginning))
        if text.endswith(beginning[:length])
    ]
    return min((at for at in begins if at >= 0), default=len(text))


def _write(target: int, text: bytes) -> None:
    while text:
        try:
            text = text[os.write(target, text) :]
        except BlockingIOError:  # a descriptor that another program has set so
            goes = select.poll()
            goes.register(target, select.POLLOUT)
            goes.poll()
