"""Memory that the ranks of one host share without names: nothing of it outlives them.

Every rank makes a file that is in no folder, and maps it; the others open it through /proc and map
it too.  When the last of them ends, however it ends, the memory is gone.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import secrets
import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

_TOKEN_BYTES = 16
_PLACE = struct.Struct(f"<qqqq{_TOKEN_BYTES}s")
"""Process, file descriptor, length of the file, where in the process the token lies, and the token:
what the file begins with."""
_NOTHING, _SHARES, _PULLS = bytes((0,)), bytes((1,)), bytes((2,))


class SharedBlocks:
    """A block of every rank, zero at first, mapped by all."""

    def __init__(
        self, blocks: list[Any], rank: int, nbytes: int, processes: Sequence[int], pulls: bool
    ) -> None:
        self._blocks = blocks
        self.nbytes: int = blocks[rank].size
        self.arena = blocks[rank][nbytes:]
        self.addresses: Sequence[int] = [int(block.ctypes.data) for block in blocks]
        """By rank."""
        self.processes, self.pulls = processes, pulls

    def word(self, rank: int, offset: int) -> Any:
        return self._blocks[rank][offset : offset + 8].view(np.int64)


def share(
    nbytes: int, collect: Callable[[bytes], bytearray], rank: int, able: bool = True
) -> SharedBlocks | None:
    """Share a block of so many bytes, at least 16, with the other ranks.  Collective.

    `collect` gives what all ranks pass, in rank order.  None, on all ranks, where some cannot: for
    want of memory files, of the right to look into /proc, or of a host in common; or if a rank is
    not `able` to use it.  Behind its bytes a block has an arena, as long as the machine's memory
    where addresses allow; memory is only taken for what is written to.
    """
    token = secrets.token_bytes(_TOKEN_BYTES)
    here = np.frombuffer(token, np.uint8)
    mine: Any
    file, mine = _made(nbytes, token) if able else (None, None)
    try:
        length, mark = (0, -1) if file is None else (mine.size, file)
        place = _PLACE.pack(os.getpid(), mark, length, here.ctypes.data, token)
        places = list(_PLACE.iter_unpack(collect(place)))
        blocks = [_opened(*place) for place in places]
        said = _NOTHING
        if not any(block is None for block in (mine, *blocks)):
            said = _PULLS if all(_reads(place[0], *place[3:]) for place in places) else _SHARES
        everybody = bytes(collect(said))  # now all have read all tokens: they may be overwritten
    finally:
        if file is not None:
            os.close(file)
    if _NOTHING in everybody:
        return None
    blocks[rank] = mine
    mine[:_TOKEN_BYTES] = 0
    collect(_SHARES)  # all blocks are zero
    processes = [place[0] for place in places]
    return SharedBlocks(blocks, rank, nbytes, processes, pulls=set(everybody) == set(_PULLS))


def _made(nbytes: int, token: bytes) -> tuple[int | None, Any]:
    try:
        file = os.memfd_create("ringreduce")
    except (AttributeError, OSError):  # no such call, or it is forbidden
        return None, None
    block = None
    for length in (nbytes + _arena_bytes(), nbytes):
        with contextlib.suppress(OSError, ValueError):
            os.ftruncate(file, length)
            block = _mapped(file, length)
            break
    if block is None:
        os.close(file)
        return None, None
    block[:_TOKEN_BYTES] = np.frombuffer(token, np.uint8)
    return file, block


def _arena_bytes() -> int:
    """All of the machine's memory: what is lent is as much as is asked for."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return pages // mmap.PAGESIZE * mmap.PAGESIZE


def _opened(process: int, file: int, nbytes: int, _: int, token: bytes) -> Any:
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


def _reads(process: int, address: int, token: bytes) -> bool:
    """Whether this process may read that one's memory, as the kernel or a container decides."""
    try:
        function = ctypes.CDLL(None, use_errno=True).process_vm_readv
    except (OSError, AttributeError):
        return False
    function.restype = ctypes.c_ssize_t
    come = ctypes.create_string_buffer(_TOKEN_BYTES)
    here = (ctypes.c_size_t * 2)(ctypes.addressof(come), _TOKEN_BYTES)
    there = (ctypes.c_size_t * 2)(address, _TOKEN_BYTES)
    one, flags = ctypes.c_ulong(1), ctypes.c_ulong(0)
    done = function(ctypes.c_int(process), here, one, there, one, flags)
    return bool(done == _TOKEN_BYTES and come.raw == token)
