"""Read what the kernel says of processes in /proc.  Their names are bytes, and may be cut."""

from __future__ import annotations

import os
from pathlib import Path

_STATE, PARENT, FLAGS, _THREADS, _START = 0, 1, 6, 17, 19
"""Indices of fields of `stat_of`: see ``proc(5)``."""
_ENDED = (b"Z", b"X")
"""States of a process that is not reaped yet, and of one that is just being reaped."""


def stat_of(process: int) -> list[bytes]:
    """Return the fields of ``/proc/PID/stat`` behind the name: state, parent, and so on.

    The name stands in parentheses, and may have spaces, newlines and parentheses itself.  Raises
    OSError if there is no such process.
    """
    stat = Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].split()
    if not stat:  # it ended while it was read
        raise ProcessLookupError(f"process {process} has ended")
    return stat


def name_of(process: int) -> str:
    """Return the name of a process, cut after 15 bytes.  Raises OSError if there is none."""
    return Path(f"/proc/{process}/comm").read_text("utf-8", "replace").removesuffix("\n")


def command_of(process: int) -> str:
    """Return the command line of a process, with "?" for what cannot be shown; "" if it is gone."""
    try:
        words = os.fsdecode(Path(f"/proc/{process}/cmdline").read_bytes()).rstrip("\0").split("\0")
    except OSError:
        return ""
    return "".join(each if each.isprintable() else "?" for each in " ".join(words))


def start_of(process: int) -> int | None:
    """Return when a process started, in clock ticks since the host did; None if it has ended.

    A later process with the same number has another start.  A process that was killed stays a
    zombie until its parent reaps it.  The first thread of a process can be a zombie while others
    still run, so a zombie has ended when it has no other thread.
    """
    try:
        fields = stat_of(process)
    except OSError:
        return None
    if fields[_STATE] in _ENDED and int(fields[_THREADS]) <= 1:
        return None
    return int(fields[_START])
