"""Lends parts of a stretch of memory as arrays: what peers reach directly is allocated from it."""

from __future__ import annotations

import contextlib
import mmap
import weakref
from bisect import insort
from collections import deque
from math import prod
from typing import Any

import numpy as np

_ALIGNMENT = 4096
"""Bytes: no two arrays share a page, so that a page is given back with its array."""
_WORTH_GIVING_BACK = 32 << 20
"""Bytes of a freed array from which its pages go back to the system; smaller ones are kept."""


class Arena:
    """Memory to be lent: `memory` is an array of its bytes."""

    def __init__(self, memory: np.ndarray) -> None:
        self._memory = memory
        self._free: list[tuple[int, int]] = [(0, memory.size)] if memory.size else []
        """(start, stop) of what is not lent, in order; no two of them touch."""
        self._returned: deque[tuple[int, int]] = deque()
        """What arrays have given back that are no more: at any time, in any thread."""

    @property
    def free_bytes(self) -> int:
        """How much is not lent."""
        self._take_back()
        return sum(stop - start for start, stop in self._free)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray | None:
        """An uninitialised array, freed with its last view; None if there is no room for it."""
        nbytes = prod(shape) * dtype.itemsize
        self._take_back()
        if nbytes == 0:
            return None
        start = self._lend(-(-nbytes // _ALIGNMENT) * _ALIGNMENT)
        if start is None:
            return None
        stop = start + -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        lent = _Lent(self._memory[start : start + nbytes])
        weakref.finalize(lent, self._returned.append, (start, stop)).atexit = False
        array: np.ndarray = np.asarray(lent).view(dtype).reshape(shape)
        return array

    def _lend(self, nbytes: int) -> int | None:
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
        """Let the system have the pages; if they are used again they are zero."""
        base: Any = self._memory
        while base is not None and not isinstance(base, mmap.mmap):
            base = base.obj if isinstance(base, memoryview) else base.base
        if base is not None:
            offset = self._memory.ctypes.data - np.frombuffer(base, np.uint8).ctypes.data
            base.madvise(mmap.MADV_REMOVE, offset + start, stop - start)


class _Lent:
    """Keeps the arena's memory for an array, which keeps this."""

    def __init__(self, memory: np.ndarray) -> None:
        self._memory = memory
        interface = memory.__array_interface__
        self.__array_interface__ = {
            key: interface[key] for key in ("data", "shape", "typestr", "version")
        }
