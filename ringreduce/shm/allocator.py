"""Allocate arrays in a rank's segment, so that peers read and write them directly."""

from __future__ import annotations

import contextlib
import mmap
import threading
import weakref
from bisect import insort
from collections import deque
from math import prod
from typing import Any

import numpy as np

_ALIGNMENT = 4096
"""Bytes.  No two arrays share a page: the pages of a freed array can go to the system."""
_WORTH_GIVING_BACK = 32 << 20
"""Bytes: the pages of freed arrays of this size or more return to the system."""


class Arena:
    def __init__(self, memory: np.ndarray) -> None:
        self._memory = memory
        self._lock = threading.Lock()
        self._free: list[tuple[int, int]] = [(0, memory.size)] if memory.size else []
        """Free intervals (start, stop), in bytes, ascending; no two are adjacent."""
        self._returned: deque[tuple[int, int]] = deque()
        """Intervals of freed arrays, not yet in `_free`.  Finalizers append at any time, in any
        thread, so they may not touch `_free` itself."""

    @property
    def free_bytes(self) -> int:
        with self._lock:
            self._take_back()
        return sum(stop - start for start, stop in self._free)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray | None:
        """Allocate an uninitialised array, freed with its last view; None without space for it."""
        nbytes = prod(shape) * dtype.itemsize
        if nbytes == 0:
            return None
        with self._lock:
            self._take_back()
            start = self._allocate(-(-nbytes // _ALIGNMENT) * _ALIGNMENT)
        if start is None:
            return None
        stop = start + -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        owner = _Owner(self._memory[start : start + nbytes])
        weakref.finalize(owner, self._returned.append, (start, stop)).atexit = False
        array: np.ndarray = np.asarray(owner).view(dtype).reshape(shape)
        return array

    def _allocate(self, nbytes: int) -> int | None:
        for place, (start, stop) in enumerate(self._free):
            if stop - start >= nbytes:
                left = (start + nbytes, stop)
                self._free[place : place + 1] = [left] if left[0] < left[1] else []
                return start
        return None

    def _take_back(self) -> None:
        while self._returned:
            start, stop = self._returned.popleft()
            if stop - start >= _WORTH_GIVING_BACK:
                with contextlib.suppress(OSError):  # pages that are locked, or larger
                    self._give_back(start, stop)
            insort(self._free, (start, stop))
            place = self._free.index((start, stop))
            around = self._free[max(0, place - 1) : place + 2]
            joined = [around[0]]
            for each in around[1:]:
                if each[0] == joined[-1][1]:
                    joined[-1] = (joined[-1][0], each[1])
                else:
                    joined.append(each)
            self._free[max(0, place - 1) : place + 2] = joined

    def _give_back(self, start: int, stop: int) -> None:
        """Return the pages of an interval to the system; they are zero if used again."""
        base: Any = self._memory
        while base is not None and not isinstance(base, mmap.mmap):
            base = base.obj if isinstance(base, memoryview) else base.base
        if base is not None:
            offset = self._memory.ctypes.data - np.frombuffer(base, np.uint8).ctypes.data
            base.madvise(mmap.MADV_REMOVE, offset + start, stop - start)


class _Owner:
    """The base object of an allocated array and its views; refers to the arena's memory."""

    def __init__(self, memory: np.ndarray) -> None:
        self._memory = memory
        interface = memory.__array_interface__
        self.__array_interface__ = {
            key: interface[key] for key in ("data", "shape", "typestr", "version")
        }
