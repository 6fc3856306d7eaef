"""Sums over ranks that have the same bits for any number of ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise, starmap
from typing import Any

import numpy as np

from ringreduce.calls.communicator import Communicator
from ringreduce.devices import fixed_point


class ExactSum:
    """Adds arrays of all ranks, with the same bits for any number of ranks.

    Each number becomes a whole multiple of a power of two, which suits the largest number of all
    addends.  Whole numbers are added in 64 bits, without an error, so their order does not matter.
    With V addends whose largest magnitude is M, the result differs from the exact sum by at most
    V² M / 2**61 + V / 2**1024, besides the rounding to float64 and to the dtype at the end.

    The object keeps memory of 12 or 16 bytes for each number of a sum.

    Args:
        comm: the communicator of the ranks.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> parts = rng.normal(size=(6, 4)).astype(np.float32)
        >>> def program(comm):
        ...     mine = parts[comm.rank * 6 // comm.size : (comm.rank + 1) * 6 // comm.size]
        ...     (total,) = rr.ExactSum(comm).sum([mine])
        ...     return total.tobytes()
        >>> len({rr.spawn(program, ranks)[0] for ranks in (1, 2, 3, 4)})
        1
    """

    __module__ = "ringreduce"

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._sums = np.empty(0, np.int64)
        self._results = np.empty(0, np.float32)

    def sum(self, addends: Sequence[Sequence[np.ndarray] | np.ndarray]) -> list[np.ndarray]:
        """Add the addends of all ranks.  Collective.

        A call makes two collectives.  The second one adds int64, twice the bytes of float32.

        Args:
            addends: groups of arrays: one sum for each group.  A group is a list of arrays of the
                same shape, or one array ``(addends, *shape)``.  All are contiguous arrays of NumPy,
                of one dtype, float32 or float64.  The groups of a rank have the same number of
                addends; another rank may have another number, also none: an array ``(0, *shape)``.

        Returns:
            The sum of each group, the same on all ranks; full of NaN if a number is not finite.
            The next call overwrites them.

        Raises:
            TypeError: an addend is no contiguous array of NumPy, of float32 or float64.
            ValueError: there is no group, or their shapes, dtypes or numbers of addends differ.
            MismatchError, PeerTimeoutError, PeerLostError: as for `Communicator.all_reduce`.

        Example:
            >>> def program(comm):
            ...     exact = rr.ExactSum(comm)
            ...     return exact.sum([np.full((2, 3), 0.1), np.full((2, 1), comm.rank + 1.0)])
            >>> [total.tolist() for total in rr.spawn(program, 2)[0]]
            [[0.4, 0.4, 0.4], [6.0]]
        """
        groups = [_Group(group) for group in addends]
        dtype = _dtype_of(groups)
        mine = np.array([*(group.magnitude() for group in groups), groups[0].count], np.int64)
        of_ranks = self._comm.all_gather(mine).reshape(self._comm.size, -1)
        count = max(1, int(of_ranks[:, -1].sum()))
        largest = of_ranks[:, :-1].max(axis=0).tolist()
        exponents = [fixed_point.exponent_for(most, count, dtype) for most in largest]
        sums, results = self._memory(sum(group.size for group in groups), dtype)
        ends = list(accumulate((group.size for group in groups), initial=0))
        parts = list(starmap(slice, pairwise(ends)))
        sums.fill(0)
        for group, exponent, part in zip(groups, exponents, parts, strict=True):
            if exponent is not None:
                group.add(exponent, sums[part])
        self._comm.all_reduce(sums, out=sums)
        for exponent, part in zip(exponents, parts, strict=True):
            if exponent is None:
                results[part] = np.nan
            else:
                fixed_point.to_floats(sums[part], exponent, results[part])
        pairs = zip(groups, parts, strict=True)
        return [results[part].reshape(group.shape) for group, part in pairs]

    def _memory(self, size: int, dtype: np.dtype[Any]) -> tuple[np.ndarray, np.ndarray]:
        """Return arrays for the sums and the results; those of the last call if they fit."""
        if (self._sums.size, self._results.dtype) != (size, dtype):
            self._sums = self._comm.empty(size, np.int64)
            self._results = np.empty(size, dtype)
        return self._sums, self._results


def _dtype_of(groups: Sequence[_Group]) -> np.dtype[Any]:
    """Return the dtype of all groups.  Raises ValueError if counts or dtypes differ."""
    if not groups:
        raise ValueError("sum: addends is empty; pass a group for each sum")
    if len({group.count for group in groups}) > 1:
        raise ValueError("sum: the groups have different numbers of addends")
    dtypes = {group.dtype for group in groups}
    if len(dtypes) > 1:
        names = ", ".join(sorted(dtype.name for dtype in dtypes))
        raise ValueError(f"sum: groups of {names}; wanted one dtype")
    return dtypes.pop()


class _Group:
    """The addends of one sum on this rank.  Raises TypeError or ValueError for wrong addends."""

    def __init__(self, given: Sequence[np.ndarray] | np.ndarray) -> None:
        self._blocks = [given] if isinstance(given, np.ndarray) else list(given)
        """Arrays of one addend each; or one array of all."""
        for block in self._blocks:
            is_array = isinstance(block, np.ndarray) and block.flags.c_contiguous
            if not is_array or block.dtype not in fixed_point.DTYPES:
                what = str(block.dtype) if isinstance(block, np.ndarray) else type(block).__name__
                raise TypeError(
                    f"sum: an addend is {what}; wanted a contiguous array of float32 or float64"
                )
        if not self._blocks:
            raise ValueError("sum: a group is empty; pass an array of shape (0, ...)")
        first = self._blocks[0]
        for block in self._blocks:
            if (block.shape, block.dtype) != (first.shape, first.dtype):
                raise ValueError(
                    f"sum: a group has arrays {first.dtype}{list(first.shape)} and "
                    f"{block.dtype}{list(block.shape)}"
                )
        self.dtype: np.dtype[Any] = first.dtype
        if isinstance(given, np.ndarray):
            if not given.ndim:
                raise ValueError("sum: a group is one number; wanted (addends, ...)")
            self.count, self.shape = given.shape[0], given.shape[1:]
        else:
            self.count, self.shape = len(self._blocks), first.shape

    def magnitude(self) -> int:
        """Return the bits of the largest number without its sign."""
        return max(map(fixed_point.magnitude, self._blocks))

    @property
    def size(self) -> int:
        """Count of numbers in the sum."""
        return math.prod(self.shape)

    def add(self, exponent: int, sums: np.ndarray) -> None:
        """Add this rank's addends times 2 ** `exponent`, as whole numbers."""
        for block in self._blocks:
            fixed_point.add(block, exponent, sums)
