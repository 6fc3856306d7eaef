"""Segments: memory that each rank of a host owns and all ranks of the host map.

Every rank makes a memory file (`system.memory_files`) and maps it, and the other ranks map it too.
Where memory files are forbidden, the transport allocates the segments: threads use memory of their
process, MPI uses a shared window.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import secrets
import time
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import numpy as np

from ringreduce.compiler import jit
from ringreduce.config import COMPILING, DEFAULT_TIMEOUT_S
from ringreduce.shm.functions import compiles, is_available
from ringreduce.shm.layout import RING_OFFSET, SEGMENT_BYTES, WORD
from ringreduce.shm.mailbox import mail_bytes
from ringreduce.system.memory_files import (
    TOKEN_BYTES,
    Collect,
    RankFile,
    map_file,
    map_file_of,
    new_file,
)
from ringreduce.system.prctl import allow_reads
from ringreduce.system.topology import Nodes
from ringreduce.transports.base import Transport

_COMPILES = 2
"""Passed by a rank that may be about to compile, in place of whether it has compiled functions."""
_DIGEST_BYTES = 8
_NOTHING, _SHARES, _READS, _WRITES = (bytes((access,)) for access in range(4))
"""A rank's access to its peers' files and memory: the rank cannot map all files; it maps all files;
it also reads all memory; it also writes all memory."""
_TRIALS, _TRIAL_BYTES = 3, 128 << 10
"""Number of blocks that a rank copies, and then reads by the kernel, to compare; bytes of each."""
_MOST_TIMES, _MOST_NS = 2.5, 32_000
"""Limits for a quick kernel: time of a read divided by that of a copy; nanoseconds of a read.

On an Intel Xeon the kernel takes 1.8 times as long as a copy.  On an AMD EPYC it takes 3.7 times as
long where cores share a cache, and 50,000 ns where they share none.
"""


class Segments:
    """A segment of every rank of this host, which all of them map.

    Its slots and mail are zero at first.
    """

    mates: Sequence[int]
    """The ranks of this host."""
    nbytes: int
    arena: Any
    """This rank's segment behind its slots, ring and mail, as bytes."""
    addresses: Sequence[int]
    """By rank; 0: a rank of another host."""
    processes: Sequence[int]
    """The process id by which to read a rank's private memory, by rank; 0: this process."""
    single_copy: bool
    """Whether every rank can read the private memory of all other ranks."""
    writes: bool
    """Whether every rank can also write the private memory of all other ranks."""
    quick: bool
    """Whether the kernel reads and writes about as fast as a rank copies from shared memory."""
    crowded = False
    """Whether a host of the communicator has more ranks than cores."""

    def __init__(
        self,
        segments: dict[int, Any],
        rank: int,
        nbytes: int,
        processes: Sequence[int],
        single_copy: bool,
        writes: bool,
        quick: bool,
    ) -> None:
        self._segments, self.mates = segments, sorted(segments)
        self.nbytes = segments[rank].size
        self.arena = segments[rank][nbytes:]
        self.addresses = [0] * len(processes)
        for mate, segment in segments.items():
            self.addresses[mate] = int(segment.ctypes.data)
        self.processes, self.single_copy = processes, single_copy
        self.writes, self.quick = writes, quick


def share_segments(transport: Transport, nodes: Nodes | None = None) -> Segments | None:
    """Map a segment of every rank in all ranks of its node.  Collective, before the first call.

    `nodes`: those of the communicator, if they are others than the transport's.  Returns None, on
    all ranks, if a node is on several hosts, if nodes are several and programs cannot send
    messages between them, if some rank lacks the compiled functions, or if the ranks of a node
    cannot share memory.
    """
    COMPILING[:] = [jit.COMPILING]
    nodes = transport.nodes() if nodes is None else nodes
    hosts = [set(host) for host in transport.nodes()]
    able = all(any(host.issuperset(node) for host in hosts) for node in nodes)
    able &= len(nodes) == 1 or transport.native() is not None
    can = able and (_COMPILES if compiles() else is_available())
    digest = blake2b(repr(nodes).encode(), digest_size=_DIGEST_BYTES).digest()
    rows = transport.collect(bytes((can,)) + digest)
    every = {rows[i : i + _DIGEST_BYTES] for i in range(1, len(rows), 1 + _DIGEST_BYTES)}
    all_can = rows[:: 1 + _DIGEST_BYTES]
    if len(every) > 1:  # the ranks compare their nodes later, and say so
        return None
    if _COMPILES in all_can:
        all_can = transport.collect(bytes((able and is_available(),)), DEFAULT_TIMEOUT_S)
    if 0 in all_can:
        return None
    nbytes = SEGMENT_BYTES + mail_bytes(transport.size)
    nbytes = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE  # arrays of the arena begin pages
    segments = None
    if not transport.one_process:
        mates = next(node for node in nodes if transport.rank in node)
        segments = map_files(nbytes, transport.collect, transport.rank, mates)
    if segments is None and len(nodes) == 1:
        buffers = transport.allocate_shared(nbytes)
        segments = None if buffers is None else _in_buffers(buffers, transport)
    if segments is not None:
        crowded = bytes((transport.yielding.crowded,))
        segments.crowded = 1 in (crowded if len(nodes) == 1 else transport.collect(crowded))
    return segments


def _in_buffers(buffers: Sequence[Any], transport: Transport) -> Segments | None:
    segments: list[Any] = [np.frombuffer(buffer, np.uint8) for buffer in buffers]
    mine = segments[transport.rank]
    mine[:RING_OFFSET] = mine[SEGMENT_BYTES:] = 0
    aligned = all(segment.ctypes.data % WORD == 0 for segment in segments)
    if 0 in transport.collect(bytes((aligned,))):  # from here on all slots are zero
        return None
    processes, ranks = [0] * transport.size, range(transport.size)
    mapped = dict(zip(ranks, segments, strict=True))
    return Segments(mapped, transport.rank, mine.size, processes, *[transport.one_process] * 3)


def map_files(
    nbytes: int, collect: Collect, rank: int, mates: Sequence[int] | None = None
) -> Segments | None:
    """Map a segment of every rank from a memory file of that rank.  Collective.

    `mates`: the ranks of this rank's host, if they are not all.  A segment has `nbytes` bytes, at
    least 16, and an arena as long as the machine's memory, if the address space allows that: the
    system allocates only pages that are written.  Returns None, on all ranks, if some rank cannot
    make a memory file, may not open that of a mate, or is on another host than its mates.
    """
    token = secrets.token_bytes(TOKEN_BYTES)
    here = np.zeros(2 * TOKEN_BYTES + _TRIALS * _TRIAL_BYTES, np.uint8)
    here[:TOKEN_BYTES] = np.frombuffer(token, np.uint8)
    mine: Any
    file, mine = _made(nbytes, token)
    try:
        length, mark = (0, -1) if file is None else (mine.size, file)
        # Each rank recognises the memory of another one by the token at this address.
        place = RankFile(os.getpid(), mark, length, here.ctypes.data, token)
        places = place.exchange(collect)
        here_are = sorted(range(len(places)) if mates is None else mates)
        of_mates = [places[mate] for mate in here_are]
        segments = {mate: map_file_of(places[mate]) for mate in here_are}
        maps_all = not any(segment is None for segment in (mine, *segments.values()))

        def access() -> bytes:
            reads = maps_all and all(map(_reads, of_mates))
            if reads and all(map(_writes, of_mates)):
                return _WRITES
            return _READS if reads else _SHARES if maps_all else _NOTHING

        all_can = collect(access())  # from here on all ranks have read all tokens
        if _SHARES in all_can and _NOTHING not in all_can:
            allow_reads()
            collect(_SHARES)  # from here on all ranks allow it
            all_can = collect(access())
    finally:
        if file is not None:
            os.close(file)
    if _NOTHING in all_can:
        return None
    segments[rank] = mine
    mine[:TOKEN_BYTES] = 0
    single_copy, writes = min(all_can) >= _READS[0], min(all_can) == _WRITES[0]
    written = here[TOKEN_BYTES : 2 * TOKEN_BYTES].tobytes() == token
    writes &= 0 not in collect(bytes((written,)))  # from here on all segments are zero
    quick = False
    if writes and nbytes >= RING_OFFSET + _TRIALS * _TRIAL_BYTES:
        here[2 * TOKEN_BYTES :] = mine[RING_OFFSET:][: _TRIALS * _TRIAL_BYTES] = 1
        collect(_SHARES)
        peer = here_are[(here_are.index(rank) + 1) % len(here_are)]
        process, address = places[peer].process, places[peer].fact + 2 * TOKEN_BYTES
        mapped = segments[peer][RING_OFFSET:]
        quick = 0 not in collect(bytes((_is_quick(process, address, mapped),)))
    processes = [place.process for place in places]
    return Segments(segments, rank, nbytes, processes, single_copy, writes, quick)


def _made(nbytes: int, token: bytes) -> tuple[int | None, Any]:
    try:
        file = new_file()
    except (AttributeError, OSError):  # no such call, or it is forbidden
        return None, None
    segment = None
    for length in (nbytes + _arena_bytes(), nbytes):
        with contextlib.suppress(OSError, ValueError):
            os.ftruncate(file, length)
            segment = map_file(file, length)
            break
    if segment is None:
        os.close(file)
        return None, None
    segment[:TOKEN_BYTES] = np.frombuffer(token, np.uint8)
    return file, segment


def _arena_bytes() -> int:
    """Return the bytes of the machine's memory: no arrays can take more."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return pages // mmap.PAGESIZE * mmap.PAGESIZE


def _reads(place: RankFile) -> bool:
    """Return whether the kernel and the container let this process read the token of a rank."""
    read = np.empty(TOKEN_BYTES, np.uint8)
    reads = _moves("process_vm_readv", place.process, place.fact, read)
    return reads and read.tobytes() == place.token


def _writes(place: RankFile) -> bool:
    """Write the token of a rank behind the one in its memory; return whether that is allowed."""
    source = np.frombuffer(place.token, np.uint8)
    return _moves("process_vm_writev", place.process, place.fact + TOKEN_BYTES, source)


def _moves(function: str, process: int, address: int, array: Any) -> bool:
    """Read another process's memory to an array, or write it from there; False if that fails."""
    try:
        move = getattr(ctypes.CDLL(None, use_errno=True), function)
    except (OSError, AttributeError):
        return False
    move.restype = ctypes.c_ssize_t
    here = (ctypes.c_size_t * 2)(array.ctypes.data, array.size)
    there = (ctypes.c_size_t * 2)(address, array.size)
    one, flags = ctypes.c_ulong(1), ctypes.c_ulong(0)
    return bool(move(ctypes.c_int(process), here, one, there, one, flags) == array.size)


def _is_quick(process: int, address: int, mapped: Any) -> bool:
    """Return whether the kernel reads a peer's memory about as fast as a copy from shared memory.

    Compares the fastest read of blocks at `address` of `process` with the fastest copy of
    `mapped`, both just written by the peer.
    """
    into, copied, read = np.zeros(_TRIAL_BYTES, np.uint8), _MOST_NS, 2 * _MOST_NS
    mapped[: _TRIALS * _TRIAL_BYTES : mmap.PAGESIZE].max()  # map its pages
    for begin in range(0, _TRIALS * _TRIAL_BYTES, _TRIAL_BYTES):
        before = time.perf_counter_ns()
        into[:] = mapped[begin : begin + _TRIAL_BYTES]
        between = time.perf_counter_ns()
        if _moves("process_vm_readv", process, address + begin, into):
            read = min(read, time.perf_counter_ns() - between)
        copied = min(copied, between - before)
    return read <= min(_MOST_NS, _MOST_TIMES * copied)
