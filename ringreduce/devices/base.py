"""What every device offers: memory that it allocates, copies, and adds.

A device knows where arrays live and how their elements are combined.  It knows nothing of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

FoldFunction = Callable[[Any, Any, Any], Any]
"""``fold(left, right, into)``: elementwise, in this order; `into` may be either operand.

What it writes depends on the two operands alone, so every rank that folds them gets the same bits.
All three are flat and contiguous.
"""
FoldManyFunction = Callable[[Sequence[Any], Any], None]
"""``fold_many(sources, into)``: one array or more, in this order; `into` may be one of them."""


class Device(Protocol):
    """Allocates and reduces arrays, which copy by assignment: ``into[...] = source``."""

    name: str

    @property
    def stream(self) -> Stream | None:
        """What all work on arrays goes through that the processor cannot reach, or else None."""

    def empty(self, shape: int | tuple[int, ...], dtype: Any) -> Any:
        """An uninitialised C-ordered array."""

    def scratch(self, nbytes: int) -> Any:
        """Uninitialised bytes to be written and read again and again."""

    def flat(self, array: Any) -> Any:
        """The elements in C order as a one-dimensional contiguous array: a view, or else a copy."""

    def fold(self, op: str, dtype: Any) -> FoldFunction:
        """The function that combines two arrays of `dtype` under `op`.

        16-bit floats are combined in float32 and rounded
        once.  NaN, infinity and overflow come without warnings.
        """

    def fold_many(self, op: str, dtype: Any) -> FoldManyFunction:
        """The function that combines any number of arrays under `op`.

        16-bit floats are accumulated in float32 and rounded once.
        """

    def divide(self, array: Any, by: int) -> None:
        """``array /= by``, once rounded; 16-bit floats are divided in float32."""

    def convert(self, source: Any, into: Any) -> None:
        """Copy float32 or float64 into a 16-bit float of that size, once rounded; or back.

        Both are flat and contiguous.  Every NaN becomes the format's positive quiet one.
        """

    def bytes_of(self, array: Any) -> memoryview:
        """The bytes of a contiguous array in host memory, without a copy."""

    def address(self, array: Any) -> int:
        """Where the array's first byte lies."""

    def unowned(self, array: Any) -> Any:
        """The same memory as another contiguous array, which does not keep it alive."""

    def overlap(self, a: Any, b: Any) -> bool:
        """Whether two arrays share any byte."""


class Mark(Protocol):
    """A place in a stream."""

    def set(self) -> None:
        """Put it behind all that has been asked for."""

    def reached(self) -> bool:
        """Whether all before it is done, or it was never set.  Raises what went wrong there."""


class Stream(Protocol):
    """What is asked of it is done later, in the order in which it was asked.

    The caller has a stream of his own: what he asks of the device outside of `selected`.  No method
    waits, but for `close`.
    """

    def selected(self) -> AbstractContextManager[Any]:
        """Within it, this thread's work on the device's arrays goes through this stream."""

    def follow(self) -> None:
        """Let what is asked from now on begin when all is done that the caller has asked so far."""

    def lead(self) -> None:
        """Let what the caller asks from now on begin when all that was asked here is done."""

    def callers_empty(self) -> Callable[[int | tuple[int, ...], Any], Any]:
        """The device's `empty`, for arrays that the caller, who asks for it, will use and free."""

    def pinned(self, nbytes: int) -> Any:
        """Uninitialised bytes of host memory, to be copied from and to: slow to allocate."""

    def copy_out(self, source: Any, host: Any) -> None:
        """Copy an array into pinned bytes of its length, in its turn."""

    def copy_in(self, host: Any, into: Any) -> None:
        """Copy pinned bytes into an array of their length, in its turn."""

    def mark(self) -> Mark:
        """A mark that is not set yet."""

    def close(self) -> None:
        """Wait until all is done."""
