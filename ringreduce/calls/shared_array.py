"""Shared arrays: one memory that all ranks of a node map, and that they add to at the same time."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from ringreduce.calls.arguments import array_text, as_host_array, as_host_out, check_out
from ringreduce.calls.refusals import refuse_copy
from ringreduce.shm.blocks import Blocks, overlap_error

S = TypeVar("S", bound=np.generic)


class SharedArray(Generic[S]):
    """An array in one memory that all ranks of a node map.  `Communicator.shared` makes it.

    Every rank may `add` and `read` at any time, without the other ranks.  A rank that is killed
    does not stop them: the others take over its locks.  The communicator may be closed or broken.
    The memory is freed when every rank has dropped its last reference to the array, or has ended.

    Attributes:
        array: the memory itself, as a NumPy array.  Reading and writing its elements takes no lock:
            an add of another rank at the same time may be seen in part, or overwritten.
        owner: the rank in whose memory the array is.

    Example:
        >>> def program(comm):
        ...     total = comm.shared(3, np.float64)
        ...     for _ in range(100):
        ...         total.add(np.array([1.0, 2.0, 3.0]))
        ...     comm.barrier()
        ...     return total.array, total.version
        >>> rr.spawn(program, 4)[0]
        (array([ 400.,  800., 1200.]), 400)
    """

    __module__ = "ringreduce"

    array: NDArray[S]
    owner: int

    __reduce__ = refuse_copy

    def __init__(self, blocks: Blocks, shape: tuple[int, ...], owner: int) -> None:
        self._blocks, self.owner = blocks, owner
        self.array = blocks.array.reshape(shape)
        self._shape, self._dtype = shape, blocks.array.dtype

    def __repr__(self) -> str:
        what = f"{array_text(self.array)} of rank {self.owner}, version {self.version}"
        return f"<ringreduce.SharedArray: {what}>"

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        """Return `array`, as ``numpy.asarray`` asks for it: the memory itself, not a copy."""
        return np.array(self.array, dtype, copy=copy)

    @property
    def version(self) -> int:
        """The number of adds of all ranks that are complete."""
        return self._blocks.version

    def add(self, x: Any) -> None:
        """Add `x` to the array, exactly once, whoever else adds at the same time.  Not collective.

        The array is cut into blocks of 8 KiB, each with a lock.  If this rank is killed in an add,
        or an exception such as KeyboardInterrupt ends the add, each block has all of `x` or nothing
        of it, and `version` does not count the add.  An exception that comes after the last block
        ends a complete add, which `version` counts.  16-bit floats are added in float32 and rounded
        once in each add.

        Args:
            x: array in host memory, of the same shape and dtype, with any strides; it does not
                overlap the shared array.  A number is a 0-d array.

        Raises:
            TypeError: `x` is no array, or has another dtype.
            ValueError: `x` has another shape, or overlaps the shared array.
            PeerTimeoutError: a rank that was stopped has held a lock for the communicator's
                timeout.  The shared array stays usable.

        Example:
            >>> def program(comm):
            ...     total = comm.shared((), np.int64)
            ...     total.add(comm.rank + 1)
            ...     comm.barrier()
            ...     return total.read().item()
            >>> rr.spawn(program, 3)
            [6, 6, 6]
        """
        array = x if type(x) is np.ndarray else as_host_array("add", x)
        if array.dtype != self._dtype:
            raise TypeError(f"add: x has dtype {array.dtype}, the shared array has {self._dtype}")
        if array.shape != self._shape:
            raise ValueError(f"add: x has shape {array.shape}, the shared array has {self._shape}")
        if not array.flags.c_contiguous:
            self._check_apart("add: x", array)
            array = array.copy()
        self._blocks.add(array)

    def read(self, out: Any = None) -> NDArray[S]:
        """Copy the array block by block, each as it is between two adds.  Not collective.

        An add to several blocks at the same time may be in some of the blocks and not yet in
        others.

        Args:
            out: array for the copy, of the same shape and dtype, with any strides; it does not
                overlap the shared array.  None: a new array.

        Returns:
            `out`, or the new array.

        Raises:
            TypeError, ValueError: wrong `out`.
            PeerTimeoutError: as for `add`.

        Example:
            >>> def program(comm):
            ...     total, copy = comm.shared(2, np.float32), np.empty(2, np.float32)
            ...     total.add(np.ones(2, np.float32))
            ...     comm.barrier()
            ...     return total.read(out=copy)
            >>> rr.spawn(program, 2)[1]
            array([2., 2.], dtype=float32)
        """
        if out is None:
            out = np.empty(self._shape, self._dtype)
        view = as_host_out("read", out)
        check_out("read", view, self._shape, self._dtype)
        target = view
        if not view.flags.c_contiguous:
            self._check_apart("read: out", view)
            target = np.empty(self._shape, self._dtype)
        self._blocks.read(target)
        if target is not view:
            view[...] = target
        result: NDArray[S] = out
        return result

    def _check_apart(self, what: str, array: NDArray[Any]) -> None:
        """Raise ValueError if a strided array overlaps the shared array; `Blocks` sees a copy."""
        if np.may_share_memory(array, self.array):
            raise overlap_error(what)
