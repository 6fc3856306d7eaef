"""The interface of a device: memory for arrays, copies of arrays, arithmetic on arrays.

A device knows where arrays are and how their elements are combined.  It knows nothing of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

Array = Any
"""An array of the device: NumPy's for `CpuDevice`, CuPy's for `CudaDevice`."""
FoldFunction = Callable[[Array, Array, Array], Any]
"""``fold(left, right, into)``: combine elementwise, in this order; `into` may be either operand.

The result depends on the two operands alone, so every rank that folds them gets the same bits.
All three arrays are flat and contiguous.
"""
FoldManyFunction = Callable[[Sequence[Array], Array], None]
"""``fold_many(sources, into)``: combine 1 array or more, in this order; `into` may be a source."""


class Device(Protocol):
    """Allocates and reduces arrays.  Arrays copy by assignment: ``into[...] = source``."""

    name: str

    @property
    def stream(self) -> Stream | None:
        """The queue for all work on arrays that the processor cannot reach; None if it can."""

    def empty(self, shape: int | tuple[int, ...], dtype: DTypeLike) -> Array:
        """Return an uninitialised C-ordered array."""

    def scratch(self, nbytes: int) -> Array:
        """Return uninitialised bytes that are written and read again and again."""

    def flat(self, array: Array) -> Array:
        """Return the elements in C order, flat and contiguous: a view if possible, else a copy."""

    def fold(self, op: str, dtype: DTypeLike) -> FoldFunction:
        """Return the function that combines two arrays of `dtype` under `op`, without warnings.

        16-bit floats are combined in float32 and rounded once.
        """

    def fold_many(self, op: str, dtype: DTypeLike) -> FoldManyFunction:
        """Return the function that combines any number of arrays of `dtype` under `op`.

        16-bit floats are accumulated in float32 and rounded once.
        """

    def divide(self, array: Array, by: int) -> None:
        """Divide `array` by `by` in place, rounded once; 16-bit floats are divided in float32."""

    def convert(self, source: Array, into: Array) -> None:
        """Copy flat float32 or float64 into as many 16-bit floats, rounded once; or back.

        Every NaN becomes the format's positive quiet NaN.
        """

    def bytes_of(self, array: Array) -> memoryview:
        """Return the bytes of a contiguous array in host memory, without a copy."""

    def address(self, array: Array) -> int: ...

    def unowned(self, array: Array) -> Array:
        """Return another contiguous array of the same memory, which does not keep it alive."""

    def overlap(self, a: Array, b: Array) -> bool: ...


class Mark(Protocol):
    def set(self) -> None:
        """Place the mark behind all work that has been queued so far."""

    def reached(self) -> bool:
        """Return whether all work before the mark is done, True if never set; raise its error."""


class Stream(Protocol):
    """A device's queue: work is done later, in the order in which it was queued.

    The caller has a stream of its own, for work that is queued outside of `selected`.  No method
    but `pin` and `close` waits.
    """

    def selected(self) -> AbstractContextManager[None]:
        """Within this context, this thread's work on the device's arrays goes to this stream."""

    def follow(self) -> None:
        """Begin work that is queued here from now on after all work that the caller has queued."""

    def lead(self) -> None:
        """Begin work that the caller queues from now on after all work that was queued here."""

    def callers_empty(self) -> Callable[[int | tuple[int, ...], DTypeLike], Array]:
        """Return `empty` for arrays that the caller of this method uses and frees."""

    def pinned(self, nbytes: int) -> Array:
        """Return uninitialised bytes of host memory for copies; it is slow to allocate."""

    def pin(self, host: Array) -> None:
        """Pin whole pages of host memory, for fast copies, until `close` or the end of `host`."""

    def copy_out(self, source: Array, host: Array) -> None:
        """Queue a copy of an array into pinned bytes of its length."""

    def copy_in(self, host: Array, into: Array) -> None:
        """Queue a copy of pinned bytes into an array of their length."""

    def mark(self) -> Mark:
        """Return a mark that is not set yet."""

    def close(self) -> None:
        """Wait until all queued work is done, and unpin what `pin` has pinned."""


def flat_pair(device: Device, source: Any, target: Any) -> tuple[Any, Any]:
    """Return `source` and `target` as flat contiguous arrays: one array if they are the same.

    An array that is not contiguous is copied.
    """
    flat_target = device.flat(target)
    return (flat_target if source is target else device.flat(source)), flat_target


def shares_memory(device: Device, flat: Any, array: Any) -> bool:
    """Return whether `flat`, made of `array`, is no copy of it."""
    return flat.size == 0 or device.overlap(flat, array)
