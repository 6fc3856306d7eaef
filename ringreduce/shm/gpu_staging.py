"""Run an all-reduce of an array on a GPU through shared memory, piece by piece.

Each piece is copied to pinned host memory, reduced there by the ranks' processors, and copied back.
While one piece is reduced, the next ones are copied.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ringreduce.control import executable
from ringreduce.devices.base import Device, Stream, flat_pair, shares_memory
from ringreduce.shm.executable import ShmExecutable

PIECE_BYTES = 4 << 20
"""To reduce a piece of this length takes longer than to start its copies, a few 10 us."""
_BLOCKS = 3
"""Pieces that are in host memory at once: one is reduced while two are copied."""


def piece_counts(count: int, itemsize: int) -> dict[int, int]:
    """Cut `count` elements into pieces; return the number of pieces of each length."""
    most = PIECE_BYTES // itemsize
    longest = max(0, -(-count // most) - 1)
    last = count - longest * most
    if last == most or not longest:
        return {last: longest + 1}
    return {most: longest, last: 1}


def _whole_pages(reachable: Callable[..., Any]) -> Any:
    """Allocate the bytes of a block in pages that no other array has bytes in."""
    memory = reachable((PIECE_BYTES + mmap.PAGESIZE,), np.dtype(np.uint8))
    start = -memory.ctypes.data % mmap.PAGESIZE
    return memory[start : start + PIECE_BYTES]


class PinnedPieces:
    """The pinned host memory of a GPU's calls, which run one after another."""

    def __init__(self, reachable: Callable[..., Any], stream: Stream) -> None:
        """Allocate by ``reachable(shape, dtype)``: arrays that the other ranks reach."""
        self._stream = stream
        self.memory = [_whole_pages(reachable) for _ in range(_BLOCKS)]
        self.copied = [stream.mark() for _ in range(_BLOCKS)]
        """Each is reached when the latest copy to its block is complete."""
        for block in self.memory:
            stream.pin(block)

    def close(self) -> None:
        self._stream.close()


class GpuExecutable(executable.Executable):
    def __init__(
        self, pieces: Sequence[ShmExecutable], device: Device, dtype: Any, blocks: PinnedPieces
    ) -> None:
        """Run ``pieces[-1]`` in place on the last piece, and ``pieces[0]`` on all others."""
        assert device.stream is not None
        self._pieces, self._blocks = pieces, blocks
        self._device, self._stream, self._dtype = device, device.stream, dtype
        self.moved = False
        self._header = b""
        self._flat: tuple[Any, Any] | None = None
        """The flat input and output of the present run."""
        self._target: Any = None
        self._at = self._count = 0
        """The piece that is reduced, and the number of pieces."""
        self._begun = False
        """Whether the processors have begun to reduce the piece."""

    # --- running ---

    def run(self, header: bytes, source: Any, target: Any) -> None:
        raise AssertionError("a call on a GPU is made by start and test")

    def start(self, header: bytes, source: Any, target: Any) -> None:
        self._header, self._target = header, target
        self._flat = flat_pair(self._device, source, target)
        self._at, self._count = 0, max(1, -(-self._flat[0].nbytes // PIECE_BYTES))
        self._begun = False
        for piece in range(min(_BLOCKS, self._count)):
            self._copy_out(piece)

    def test(self) -> bool:
        self.moved = False
        while self._at < self._count:
            if not self._begun:
                if not self._blocks.copied[self._at % _BLOCKS].reached():
                    return False
                host = self._host(self._at)
                self._piece.start(self._header, host, host)
                self._begun = self.moved = True
            if not self._piece.test():
                self.moved |= self._piece.moved
                return False
            self._copy_in(self._at)
            if self._at + _BLOCKS < self._count:
                self._copy_out(self._at + _BLOCKS)
            self._at += 1
            self._begun = False
        self._finish()
        return True

    @property
    def _piece(self) -> ShmExecutable:
        return self._pieces[-1 if self._at == self._count - 1 else 0]

    def _finish(self) -> None:
        assert self._flat is not None
        target, flat = self._target, self._flat[1]
        if not shares_memory(self._device, flat, target):
            target[...] = flat.reshape(target.shape)
        self._flat = self._target = None

    # --- copies ---

    def _of(self, flat: Any, piece: int) -> Any:
        length = PIECE_BYTES // self._dtype.itemsize
        return flat[piece * length : (piece + 1) * length]

    def _host(self, piece: int) -> Any:
        assert self._flat is not None
        nbytes = self._of(self._flat[0], piece).nbytes
        return self._blocks.memory[piece % _BLOCKS][:nbytes].view(self._dtype)

    def _copy_out(self, piece: int) -> None:
        """Queue the copy of a piece to its block, behind the copy from that block before."""
        assert self._flat is not None
        source = self._of(self._flat[0], piece)
        if source.nbytes:
            host = self._blocks.memory[piece % _BLOCKS][: source.nbytes]
            self._stream.copy_out(source, host)
        self._blocks.copied[piece % _BLOCKS].set()

    def _copy_in(self, piece: int) -> None:
        assert self._flat is not None
        into = self._of(self._flat[1], piece)
        if into.nbytes:
            self._stream.copy_in(self._blocks.memory[piece % _BLOCKS][: into.nbytes], into)

    # --- the run under way ---

    def where(self) -> tuple[int, list[int]]:
        return self._piece.where() if self._begun else (0, [])

    def reset(self) -> None:
        for piece in self._pieces:
            piece.reset()
        self._flat = self._target = None
        self._begun = False
