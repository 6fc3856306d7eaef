"""Memory files: memory that processes of one host map, and that no folder has.

The process that makes a file passes its process id and file descriptor to the others, which open
the file through /proc.  The kernel frees the memory when the last process that maps it has ended or
has unmapped it, even if it is killed.
"""

from __future__ import annotations

import errno
import mmap
import os
from typing import Any

import numpy as np

from ringreduce.system.proc import file_of

TOKEN_BYTES = 16
"""Bytes of a random token, by which a process recognises a file.  The file begins with it."""


def new_file() -> int:
    """Make an empty file; return its descriptor.  Raises AttributeError or OSError if it cannot."""
    return os.memfd_create("ringreduce")


def allocate(file: int, nbytes: int) -> None:
    """Give a file pages for `nbytes`.  Raises OSError if there are none.

    Without pages a write would end the process later.  Some containers have no fallocate: there
    pages come with the writes.
    """
    try:
        os.posix_fallocate(file, 0, nbytes)
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EPERM):
            raise
        os.ftruncate(file, nbytes)


def map_file(file: int, nbytes: int) -> Any:
    """Map a file, given its descriptor; return an array of its bytes, which keeps it mapped.

    Raises OSError or ValueError if that is impossible.
    """
    return np.frombuffer(mmap.mmap(file, nbytes), np.uint8)


def map_file_of(process: int, file: int, nbytes: int, token: bytes) -> Any:
    """Map the file with descriptor `file` of `process`; None if that is impossible.

    It is impossible too if the file does not begin with `token`: on another host the same process
    id and descriptor name another file.
    """
    try:
        there = os.open(file_of(process, file), os.O_RDWR)
    except OSError:
        return None
    try:
        memory = map_file(there, nbytes)
    except (OSError, ValueError):
        return None
    finally:
        os.close(there)
    return memory if memory[:TOKEN_BYTES].tobytes() == token else None
