"""Arrays in host memory: NumPy reduces them, and compiled kernels reduce 16-bit floats."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable, Sequence
from contextvars import Context
from ctypes import addressof, c_char
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ringreduce.devices import compiled
from ringreduce.devices.base import FoldFunction, FoldManyFunction
from ringreduce.devices.float16 import (
    accumulate_with_numpy,
    convert_with_numpy,
    divide_with_numpy,
    fold_with_numpy,
    is_short,
)

if TYPE_CHECKING:
    from numpy.typing import DTypeLike


def _minimum(left: np.ndarray, right: np.ndarray, into: np.ndarray) -> None:
    np.minimum(left, right, out=into)


def _maximum(left: np.ndarray, right: np.ndarray, into: np.ndarray) -> None:
    np.maximum(left, right, out=into)


def _divide(array: np.ndarray, by: int) -> None:
    if array.dtype.kind == "c":  # its parts: a division by a complex number would multiply them too
        array = array.view(array.real.dtype)
    np.divide(array, by, array)


OPS: dict[str, FoldFunction] = {
    "sum": np.add,
    "mean": np.add,
    "min": _minimum,
    "max": _maximum,
    "prod": np.multiply,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}
"""The functions by operation: integers wrap, and min and max propagate NaN."""

_BITS, _PAIRS = np.dtype(np.uint16), np.dtype(np.uint32)
_PAIRED = ("sum-bfloat16", "prod-bfloat16")
"""Kernels for which there is a faster one that combines two elements at a time."""
_byte_of: Callable[[Any], c_char] = c_char.from_buffer
_HUGE_PAGE = 2 << 20
"""Bytes."""
_ON_HUGE_PAGES_FROM = 256 << 10
"""Bytes of scratch from which it is on huge pages."""
_BLOCK = 1 << 16
"""Elements of each array that `fold_many` folds at a time."""
_FoldBlock = Callable[[Sequence[np.ndarray], np.ndarray, np.ndarray], None]
"""``fold_block(sources, into, total)``; `total` has the length of `into` and may be overwritten."""


def quietly(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make `function` run without NumPy's floating-point warnings, whatever the caller has set.

    An overflow, or inf - inf, follows from the values of all ranks, so no rank can prevent it, and
    an exception on one rank would break the call.  NumPy keeps its settings in a context variable.
    To enter a context costs next to nothing; ``np.errstate`` costs 1 us.  One thread at a time may
    be inside the context.
    """
    context = Context()
    context.run(np.seterr, all="ignore")
    return partial(context.run, function)


class _Memory:
    def __init__(self, array: np.ndarray) -> None:
        flat = array.reshape(-1).view(np.uint8).__array_interface__
        self.__array_interface__ = {
            key: flat[key] for key in ("data", "shape", "typestr", "version")
        }


def address_of(array: np.ndarray) -> int:
    try:
        return addressof(_byte_of(array))  # takes a fifth of the time of the other way
    except (TypeError, ValueError, BufferError):  # read-only, empty, bfloat16, not contiguous
        address: int = array.__array_interface__["data"][0]
        return address


class CpuDevice:
    """NumPy arrays.  One thread at a time may fold, divide and convert."""

    name = "cpu"
    stream = None

    def __init__(self) -> None:
        self._divide, self._convert = quietly(_divide), quietly(convert_with_numpy)
        self._divide_short = quietly(divide_with_numpy)

    # --- memory ---

    def empty(self, shape: int | tuple[int, ...], dtype: DTypeLike) -> np.ndarray:
        return np.empty(shape, dtype)

    def scratch(self, nbytes: int) -> np.ndarray:
        """Return uninitialised bytes: if many, on huge pages where the system has such pages.

        Small pages compete for some sets of the cache: on them the same all-reduce of 16
        MiB took 1.3 to 2.1 times as long, depending on the process.
        """
        if nbytes < _ON_HUGE_PAGES_FROM:
            return np.empty(nbytes, np.uint8)
        whole = -(-nbytes // _HUGE_PAGE) * _HUGE_PAGE
        pages = mmap.mmap(-1, whole + _HUGE_PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # the system has no huge pages
            pages.madvise(mmap.MADV_HUGEPAGE)
        memory = np.frombuffer(pages, np.uint8)
        start = -self.address(memory) % _HUGE_PAGE
        return memory[start : start + nbytes]

    def flat(self, array: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(array).reshape(-1)

    def bytes_of(self, array: np.ndarray) -> memoryview:
        if array.dtype.isbuiltin != 1:  # the buffer protocol has no name for bfloat16
            array = array.reshape(-1).view(np.uint8)
        return memoryview(array.data).cast("B") if array.size else memoryview(bytearray())

    def address(self, array: np.ndarray) -> int:
        return address_of(array)

    def unowned(self, array: np.ndarray) -> np.ndarray:
        return np.asarray(_Memory(array)).view(array.dtype)

    def overlap(self, a: np.ndarray, b: np.ndarray) -> bool:
        return np.shares_memory(a, b)

    # --- arithmetic ---

    def fold(self, op: str, dtype: DTypeLike) -> FoldFunction:
        dtype = np.dtype(dtype)
        if not is_short(dtype):
            return quietly(OPS[op]) if dtype.kind in "fc" else OPS[op]
        if op == "mean":
            op = "sum"
            compiled.kernel(f"divide-{dtype.name}")  # compile now, not during a call
        name = f"{op}-{dtype.name}"
        kernel = compiled.kernel(name)
        if kernel is None:
            return quietly(fold_with_numpy(op, dtype))
        paired = name in _PAIRED and compiled.kernel(f"{name}-pairs")
        return partial(_fold_pairs, paired, kernel) if paired else partial(_fold_bits, kernel)

    def fold_many(self, op: str, dtype: DTypeLike) -> FoldManyFunction:
        dtype = np.dtype(dtype)
        if is_short(dtype) and op not in ("min", "max"):
            return _in_blocks(self._fold_widened(op, dtype), np.dtype(np.float32))
        fold = self.fold(op, dtype)

        def fold_block(sources: Sequence[np.ndarray], into: np.ndarray, total: np.ndarray) -> None:
            first, *others = sources
            for source in others[:-1]:
                fold(first, source, total)
                first = total
            if others:
                fold(first, others[-1], into)
            else:
                into[...] = first

        return _in_blocks(fold_block, dtype)

    def _fold_widened(self, op: str, dtype: np.dtype) -> _FoldBlock:
        accumulate = self._accumulate(op, dtype)
        for name in (f"{dtype.name}-float32", f"float32-{dtype.name}"):
            compiled.kernel(name)  # compile now, not during a call

        def fold_block(sources: Sequence[np.ndarray], into: np.ndarray, total: np.ndarray) -> None:
            self.convert(sources[0], total)
            for source in sources[1:]:
                accumulate(source, total)
            self.convert(total, into)

        return fold_block

    def _accumulate(self, op: str, dtype: np.dtype) -> Callable[[np.ndarray, np.ndarray], None]:
        op = "sum" if op == "mean" else op
        kernel = compiled.kernel(f"accumulate-{op}-{dtype.name}")
        if kernel is None:
            return quietly(accumulate_with_numpy(op))
        return lambda source, total: kernel(source.view(_BITS), total)

    def divide(self, array: np.ndarray, by: int) -> None:
        if not is_short(array.dtype):
            self._divide(array, by)
            return
        kernel = compiled.kernel(f"divide-{array.dtype.name}")
        if kernel is None:
            self._divide_short(array, by)
        else:
            kernel(array.view(_BITS), np.float32(by))

    def convert(self, source: np.ndarray, into: np.ndarray) -> None:
        kernel = compiled.kernel(f"{source.dtype.name}-{into.dtype.name}")
        if kernel is None:
            self._convert(source, into)
        else:
            kernel(_bits(source), _bits(into))


def _bits(array: np.ndarray) -> np.ndarray:
    return array.view(_BITS) if array.itemsize == _BITS.itemsize else array


def _fold_bits(kernel: FoldFunction, left: np.ndarray, right: np.ndarray, into: np.ndarray) -> None:
    kernel(left.view(_BITS), right.view(_BITS), into.view(_BITS))


def _fold_pairs(
    kernel_of_pairs: FoldFunction,
    kernel: FoldFunction,
    left: np.ndarray,
    right: np.ndarray,
    into: np.ndarray,
) -> None:
    if into.size % 2:
        _fold_bits(kernel, left[-1:], right[-1:], into[-1:])
        left, right, into = left[:-1], right[:-1], into[:-1]
    kernel_of_pairs(left.view(_PAIRS), right.view(_PAIRS), into.view(_PAIRS))


def _in_blocks(fold_block: _FoldBlock, dtype: np.dtype) -> FoldManyFunction:
    """Make a function that folds blocks so short that the total, of `dtype`, stays in the cache."""
    memory = np.empty(_BLOCK, dtype)

    def fold_many(sources: Sequence[np.ndarray], into: np.ndarray) -> None:
        if into.size <= _BLOCK:
            fold_block(sources, into, memory[: into.size])
            return
        for start in range(0, into.size, _BLOCK):
            here = slice(start, start + _BLOCK)
            part = into[here]
            fold_block([source[here] for source in sources], part, memory[: part.size])

    return fold_many
