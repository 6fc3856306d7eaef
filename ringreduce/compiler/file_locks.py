"""Locks on files, for processes that would otherwise do the same work at the same time."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

_BETWEEN_TRIES_S = 0.01


@contextlib.contextmanager
def hold(path: Path, wait_s: float) -> Iterator[bool]:
    """Hold the lock of the file `path` until the block ends; yield whether this process holds it.

    Waits at most `wait_s` seconds for another process.  The system releases the locks of a
    process that ends.  Where files have no locks, yields True.
    """
    file = -1
    with contextlib.suppress(OSError):  # a folder in which no file can be made
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    if file == -1:
        yield True
        return
    try:
        yield _acquire(file, time.monotonic() + wait_s)
    finally:
        # Closing releases nothing while a child that was forked meanwhile has the file open too.
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_UN)
        os.close(file)


def _acquire(file: int, until_s: float) -> bool:
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= until_s:
                return False
            time.sleep(_BETWEEN_TRIES_S)
        except OSError:  # a file system without locks
            return True
        else:
            return True
