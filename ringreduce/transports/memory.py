"""Memory that the ranks of one host share without names: nothing of it outlives them.

Every rank makes a file that is in no folder, and maps it; the others open it through /proc and map
it too.  When the last of them ends, however it ends, the memory is gone.
"""

from __future__ import annotations

import mmap
import os
import secrets
import struct
from collections.abc import Callable
from typing import Any

import numpy as np

_TOKEN_BYTES = 16
_PLACE = struct.Struct(f"<qq{_TOKEN_BYTES}s")
"""Process, file descriptor, and what the file begins with."""
_YES, _NO = b"\1", b"\0"


class SharedBlocks:
    """A block of every rank, zero at first, mapped by all."""

    def __init__(self, blocks: list[Any]) -> None:
        self._blocks = blocks
        self.addresses: tuple[int, ...] = tuple(block.ctypes.data for block in blocks)
        """By rank."""


def share(
    nbytes: int, collect: Callable[[bytes], bytearray], able: bool = True
) -> SharedBlocks | None:
    """Share a block of so many bytes, at least 16, with the other ranks.  Collective.

    `collect` gives what all ranks pass, in rank order.  None, on all ranks, where some cannot: for
    want of memory files, of the right to look into /proc, or of a host in common; or if a rank is
    not `able` to use it.
    """
    token = secrets.token_bytes(_TOKEN_BYTES)
    mine: Any
    file, mine = _made(nbytes, token) if able else (None, None)
    try:
        places = collect(_PLACE.pack(os.getpid(), -1 if file is None else file, token))
        blocks = [_opened(nbytes, *place) for place in _PLACE.iter_unpack(places)]
        everybody = collect(_NO if any(block is None for block in (mine, *blocks)) else _YES)
    finally:
        if file is not None:
            os.close(file)
    if _NO in everybody:
        return None
    collect(_YES)  # all have read all tokens: blocks may be written to
    mine[:_TOKEN_BYTES] = 0
    collect(_YES)  # all blocks are zero
    return SharedBlocks(blocks)


def _made(nbytes: int, token: bytes) -> tuple[int | None, Any]:
    try:
        file = os.memfd_create("ringreduce")
    except (AttributeError, OSError):  # no such call, or it is forbidden
        return None, None
    try:
        os.ftruncate(file, nbytes)
        block = _mapped(file, nbytes)
    except OSError:
        os.close(file)
        return None, None
    block[:_TOKEN_BYTES] = np.frombuffer(token, np.uint8)
    return file, block


def _opened(nbytes: int, process: int, file: int, token: bytes) -> Any:
    """Another rank's block, or this rank's own again; None if it is not to be had."""
    try:
        there = os.open(f"/proc/{process}/fd/{file}", os.O_RDWR)
    except OSError:
        return None
    try:
        block = _mapped(there, nbytes)
    except (OSError, ValueError):  # another process's file that has that number
        return None
    finally:
        os.close(there)
    return block if block[:_TOKEN_BYTES].tobytes() == token else None


def _mapped(file: int, nbytes: int) -> Any:
    return np.frombuffer(mmap.mmap(file, nbytes), np.uint8)
