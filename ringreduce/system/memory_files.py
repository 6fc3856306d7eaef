"""Memory files: memory that processes of one host map, and that is in no folder.

Ranks `exchange` their files: each passes its process id and file descriptor to the others, which
open the file through /proc.  Where a Unix socket joins two processes, the descriptor itself is sent
(`recovery.wire`, `transports.streams`): it also reaches another container, and outlives its sender.

The kernel frees the memory when the last process that maps it has ended or has unmapped it, even if
it is killed.
"""

from __future__ import annotations

import errno
import mmap
import os
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ringreduce.system.proc import file_of

TOKEN_BYTES = 16
"""Bytes of a random token, by which a process recognises a file.  The file begins with it."""
Collect = Callable[[bytes], bytes]
"""Returns the bytes that the ranks pass, in rank order; all pass the same length.  Collective."""
_PLACE = struct.Struct(f"<qqqq{TOKEN_BYTES}s")
"""The fields of a `RankFile`."""


class RankFile(NamedTuple):
    """Where the memory file of a rank is."""

    process: int
    """Process id of the rank."""
    file: int
    """Descriptor of the file in that process; below 0 if the rank has no file."""
    nbytes: int
    fact: int
    """A number for the other ranks."""
    token: bytes
    """The first bytes of the file."""

    def exchange(self, collect: Collect) -> list[RankFile]:
        """Return the files of all ranks, given this rank's.  Collective."""
        places = collect(_PLACE.pack(*self))
        return [RankFile(*fields) for fields in _PLACE.iter_unpack(places)]


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


def map_file_of(rank: RankFile) -> Any:
    """Map the file of a rank; None if that is impossible.

    None also if the file does not begin with the token: on another host the same process id and
    descriptor name another file.
    """
    try:
        there = os.open(file_of(rank.process, rank.file), os.O_RDWR)
    except OSError:
        return None
    try:
        memory = map_file(there, rank.nbytes)
    except (OSError, ValueError):
        return None
    finally:
        os.close(there)
    return memory if memory[:TOKEN_BYTES].tobytes() == rank.token else None
