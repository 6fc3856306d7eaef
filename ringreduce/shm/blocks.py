"""An array in blocks that all ranks of a node map, and that each of them adds to and reads.

`shm.block_access` has the locks, and explains what becomes of a rank that dies while it holds one.
"""

from __future__ import annotations

import errno
import mmap
import os
import secrets
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ringreduce.compiler import jit
from ringreduce.compiler.records import address_of, load_acquire, size_of
from ringreduce.control.diagnostics import ranks_text
from ringreduce.devices import compiled
from ringreduce.devices.cpu import CpuDevice
from ringreduce.devices.cpu import address_of as array_address
from ringreduce.errors import PeerTimeoutError, numbered
from ringreduce.shm import functions
from ringreduce.shm.block_access import (
    ADD,
    BLOCK_BYTES,
    CONTINUE,
    DONE,
    FOLDS,
    GIVE_UP,
    LOCK_BYTES,
    READ,
    TAKE_OVER,
    Access,
    Version,
    holder_of,
    next_block,
    size_of_block,
)
from ringreduce.shm.layout import WORD
from ringreduce.system.memory_files import (
    TOKEN_BYTES,
    Collect,
    RankFile,
    allocate,
    map_file_of,
    new_file,
)
from ringreduce.system.proc import start_of

_SPINS_AND_YIELDS, _CROWDED_SPINS_AND_YIELDS = (5000, 4), (100, 4)
"""(polls of a lock, further polls after a yield of the core each) until Python waits.

The first pair is for ranks with a core each: 5,000 polls take as long as an add to a block.
"""
_SHORTEST_SLEEP_S, _LONGEST_SLEEP_S = 5e-5, 1e-3
_CHECK_S = 0.02
"""Seconds that a rank waits for a lock before it looks whether the holder has ended.  To look takes
50 us."""


class _Process(NamedTuple):
    number: int
    start: int


class _FileLayout(NamedTuple):
    """Offsets in the file, in bytes: version, locks, result buffers, the array."""

    block_bytes: int
    block_count: int
    locks: int
    results: int
    array: int
    end: int


def _layout(nbytes: int, ranks: int) -> _FileLayout:
    block_bytes = min(BLOCK_BYTES, -(-max(nbytes, 1) // LOCK_BYTES) * LOCK_BYTES)
    block_count = -(-nbytes // block_bytes)
    locks = LOCK_BYTES  # the version has a cache line of its own
    results = _whole_pages(locks + block_count * LOCK_BYTES)
    array = results + _whole_pages(ranks * block_bytes)
    return _FileLayout(
        block_bytes, block_count, locks, results, array, array + _whole_pages(nbytes)
    )


def _whole_pages(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


# --- making them ----------------------------------------------------------------------------------


def share_blocks(
    nbytes: int,
    dtype: np.dtype[Any],
    owner: int,
    rank: int,
    collect: Collect,
    crowded: bool,
    timeout_s: float,
    job_ranks: Sequence[int] = (),
) -> Blocks:
    """Make an array of zeros in memory of rank `owner`, which all ranks map.  Collective.

    `crowded`: there are more ranks than cores.  A rank that has waited `timeout_s` seconds for a
    lock gives up.  `job_ranks`: the ranks' numbers in the job, for errors; by default the same.

    Raises ValueError if some rank cannot share memory, MemoryError if the owner cannot allocate it:
    on all ranks, with the same text.
    """
    able = collect(bytes((_is_able(dtype),)))
    if not all(able):
        raise ValueError(
            f"shared: {_ranks_without(able)} cannot share memory; it takes Linux, memory files and "
            "Numba: 'ringreduce doctor' says what is missing"
        )
    layout = _layout(nbytes, len(able))
    memory, processes = _map_together(layout.end, owner, rank, collect)
    polls = _CROWDED_SPINS_AND_YIELDS if crowded else _SPINS_AND_YIELDS
    return Blocks(memory, layout, nbytes, dtype, rank, processes, polls, timeout_s, job_ranks)


def _is_able(dtype: np.dtype[Any]) -> bool:
    """Whether this rank has memory files and the compiled functions; compiles them if needed."""
    if sys.platform != "linux" or functions.address("access_blocks") is None:
        return False
    try:
        compiled.fold("sum", dtype)
        os.close(new_file())
    except (jit.CompilationError, OSError, AttributeError):
        return False
    return True


def _ranks_without(flags: bytes) -> str:
    return ranks_text([rank for rank, flag in enumerate(flags) if not flag])


def _map_together(
    nbytes: int, owner: int, rank: int, collect: Collect
) -> tuple[Any, list[_Process]]:
    """Map a file of `nbytes` zeros of rank `owner`; return its bytes, and the ranks' processes."""
    token = secrets.token_bytes(TOKEN_BYTES)
    file = _new_file(nbytes, token) if rank == owner else -1
    try:
        length = nbytes if file >= 0 else 0
        place = RankFile(os.getpid(), file, length, start_of(os.getpid()) or 0, token)
        places = place.exchange(collect)
        error = max(-places[owner].file, 0)
        memory: Any = None if error else map_file_of(places[owner])
        in_sight = all(start_of(each.process) == each.fact for each in places)
        mapped = collect(bytes((memory is not None and in_sight,)))
    finally:
        if file >= 0:
            os.close(file)
    if error:
        reason = os.strerror(error)
        raise MemoryError(f"shared: rank {owner} cannot allocate {nbytes} bytes: {reason}")
    if not all(mapped):
        raise ValueError(
            f"shared: {_ranks_without(mapped)} cannot map the memory of rank {owner}; the ranks "
            "have to run on one host, as one user, and to see each other in /proc"
        )
    if rank == owner:
        memory[:TOKEN_BYTES] = 0  # every rank has read the token
    collect(b"\0")
    return memory, [_Process(each.process, each.fact) for each in places]


def _new_file(nbytes: int, token: bytes) -> int:
    """Make a file with pages for `nbytes`, zeros but for the token.

    Returns its descriptor, or the number of the error, below 0.
    """
    file = new_file()
    try:
        if nbytes > os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):
            raise OSError(errno.ENOMEM, "")
        allocate(file, nbytes)
        os.pwrite(file, token, 0)
    except OSError as failure:
        os.close(file)
        return -(failure.errno or errno.ENOMEM)
    return file


# --- using them -----------------------------------------------------------------------------------


def overlap_error(what: str) -> ValueError:
    return ValueError(f"{what} overlaps the shared array; pass an array of its own")


class Blocks:
    """One rank's end of an array in blocks.  Calls of several threads run one after another."""

    def __init__(
        self,
        memory: Any,
        layout: _FileLayout,
        nbytes: int,
        dtype: np.dtype[Any],
        rank: int,
        processes: Sequence[_Process],
        spins_and_yields: tuple[int, int],
        timeout_s: float,
        job_ranks: Sequence[int],
    ) -> None:
        self.array = memory[layout.array : layout.array + nbytes].view(dtype)
        """The array itself, flat.  It keeps the memory mapped."""
        self._job_ranks = job_ranks or range(len(processes))
        """By rank: its number in the job, for errors."""
        self._processes, self._timeout_s = processes, timeout_s
        self._process = processes[rank].number
        self._result = memory[layout.results + rank * layout.block_bytes :]
        self._fold = CpuDevice().fold("sum", dtype)
        serve = functions.python_function("access_blocks")
        assert serve is not None
        self._serve = serve
        self._words = np.zeros((size_of(Access) + compiled.FOLD_BYTES) // WORD, np.int64)
        self._address = int(self._words.ctypes.data)
        access = self._access = Access(self._address)
        begin = int(memory.ctypes.data)
        self._begin, self._nbytes = begin + layout.array, nbytes
        access.version, access.locks = begin, begin + layout.locks
        access.results, access.blocks = begin + layout.results, self._begin
        access.nbytes, access.block_bytes = nbytes, layout.block_bytes
        access.block_count = layout.block_count
        access.item_bytes = dtype.itemsize // (2 if dtype.kind == "c" else 1)
        access.rank, access.first = rank, rank * layout.block_count // len(processes)
        access.fold = compiled.fold("sum", dtype) or 0
        access.fold_scratch = address_of(access) + size_of(Access)
        access.spins, access.yields = spins_and_yields
        self._lock = threading.RLock()
        self._busy = False
        """Whether an operation is under way: a signal handler may call in the middle of one."""

    @property
    def version(self) -> int:
        return load_acquire(Version(self._access.version), "completed")

    def add(self, array: Any) -> None:
        """Add a contiguous array of the same dtype and size.  Raises ValueError if it overlaps."""
        self._run(ADD, array)

    def read(self, out: Any) -> None:
        """Copy the array into `out`: contiguous, of the same dtype and size; raise as `add`."""
        self._run(READ, out)

    def _run(self, request: int, array: Any) -> None:
        """Execute ADD or READ.  After an exception no lock is held, and no block is torn."""
        address = array_address(array)
        self._check(request, address)
        with self._lock:
            if self._busy:
                raise ValueError("a call from within a call, such as from a signal handler")
            try:
                self._busy = True
                result = self._serve(self._address, request, address)
                if result != DONE:
                    self._complete(result, array.reshape(-1))
            except BaseException:
                self._serve(self._address, GIVE_UP, 0)
                raise
            finally:
                self._busy = False

    def _check(self, request: int, address: int) -> None:
        if abs(address - self._begin) < self._nbytes:
            raise overlap_error("add: x" if request == ADD else "read: out")
        if os.getpid() != self._process:
            # Both processes would write to the result buffer of the rank.
            raise ValueError(
                "this process was forked from the one that made the shared array; "
                "add and read in that one, or start ranks with 'ringreduce run'"
            )

    def _complete(self, result: int, array: Any) -> None:
        access, done, idle, since, look = self._access, -1, 0, 0.0, 0.0
        while result != DONE:
            request = CONTINUE
            if result == FOLDS:
                self._fold_block(array)
            else:
                now = time.monotonic()
                if access.done != done:
                    done, idle, since, look = access.done, 0, now, now + _CHECK_S
                if now >= look:
                    look = now + _CHECK_S
                    request = self._look_at_holder(now - since)
                if request == CONTINUE:
                    idle += 1
                    time.sleep(min(_SHORTEST_SLEEP_S * idle, _LONGEST_SLEEP_S))
            result = self._serve(self._address, request, 0)

    def _look_at_holder(self, waited_s: float) -> int:
        """Return TAKE_OVER if the holder of the awaited lock has ended, else CONTINUE.

        Raises PeerTimeoutError if this rank has waited too long.
        """
        access = self._access
        holder = holder_of(access.found)
        if holder < 0:
            return CONTINUE
        process = self._processes[holder]
        if start_of(process.number) != process.start:
            return TAKE_OVER
        if waited_s > self._timeout_s:
            doing = "add" if access.operation == ADD else "read"
            error = PeerTimeoutError(
                f"{doing}: rank {holder} has held the lock of block {next_block(access)} of the "
                f"shared array for {waited_s:.1f} s; it has stopped, or has no core",
                (holder,),
            )
            raise numbered(error, self._job_ranks)
        return CONTINUE

    def _fold_block(self, array: Any) -> None:
        """Add the next block, whose lock this rank holds, into this rank's result buffer."""
        block, itemsize = next_block(self._access), array.itemsize
        begin = block * self._access.block_bytes // itemsize
        end = begin + size_of_block(self._access, block) // itemsize
        result = self._result[: (end - begin) * itemsize].view(array.dtype)
        self._fold(self.array[begin:end], array[begin:end], result)
