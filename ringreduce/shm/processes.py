"""Find out whether another process of this host has ended."""

from __future__ import annotations

from pathlib import Path

_STATE, _THREADS, _START = 0, 17, 19
"""Indices in ``/proc/PID/stat`` behind the name of the program: see ``proc(5)``."""
_ENDED = ("Z", "X")
"""States of a process that is not reaped yet, and of one that is just being reaped."""


def start_of(process: int) -> int | None:
    """Return when a process started, in clock ticks since the host did; None if it has ended.

    A later process with the same number has another start.  A process that was killed stays a
    zombie until its parent reaps it.  The first thread of a process can be a zombie while others
    still run, so a zombie has ended when it has no other thread.
    """
    try:
        # The name of the program stands in parentheses and may have spaces.
        text = Path(f"/proc/{process}/stat").read_text(errors="replace").rpartition(")")[2]
    except OSError:
        return None
    fields = text.split()
    if fields[_STATE] in _ENDED and int(fields[_THREADS]) <= 1:
        return None
    return int(fields[_START])
