"""What every device offers: memory that it allocates, copies, and adds.

A device knows where arrays live and how their elements are combined.  It knows nothing of ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

FoldFunction = Callable[[Any, Any, Any], Any]
"""``fold(left, right, into)``: elementwise, in this order; `into` may be either operand."""


class Device(Protocol):
    """Allocates and reduces arrays, which copy by assignment: ``into[...] = source``."""

    name: str

    def empty(self, shape: int | tuple[int, ...], dtype: Any) -> Any:
        """An uninitialised C-ordered array."""

    def scratch(self, nbytes: int) -> Any:
        """Uninitialised bytes to be written and read again and again."""

    def flat(self, array: Any) -> Any:
        """The elements in C order as a one-dimensional contiguous array: a view, or else a copy."""

    def fold(self, op: str) -> FoldFunction:
        """The function that combines two arrays under `op`."""

    def divide(self, array: Any, by: int) -> None:
        """``array /= by``, once rounded."""

    def bytes_of(self, array: Any) -> memoryview:
        """The bytes of a contiguous array, without a copy."""

    def address(self, array: Any) -> int:
        """Where the array's first byte lies."""

    def unowned(self, array: Any) -> Any:
        """The same memory as another contiguous array, which does not keep it alive."""

    def overlap(self, a: Any, b: Any) -> bool:
        """Whether two arrays share any byte."""
