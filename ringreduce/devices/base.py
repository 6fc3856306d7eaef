"""What every device offers: memory that it allocates, copies, and adds.

A device knows where arrays live and how their elements are combined.  It knows nothing of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
        """The bytes of a contiguous array, without a copy."""

    def address(self, array: Any) -> int:
        """Where the array's first byte lies."""

    def unowned(self, array: Any) -> Any:
        """The same memory as another contiguous array, which does not keep it alive."""

    def overlap(self, a: Any, b: Any) -> bool:
        """Whether two arrays share any byte."""
