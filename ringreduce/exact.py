"""A sum over ranks that has the same bits whichever rank has which addends."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ringreduce.calls.communicator import Communicator
from ringreduce.devices import fixed_point


def exact_sum(
    comm: Communicator, addends: Sequence[Sequence[np.ndarray] | np.ndarray]
) -> list[np.ndarray]:
    """Add arrays of all ranks, with the same bits for any number of ranks.  Collective.

    Each number becomes a whole multiple of a power of two, which suits the largest number of all
    addends.  Whole numbers are added in 64 bits, without an error, so their order does not matter.
    With V addends whose largest magnitude is M, the result differs from the exact sum by at most
    V² M / 2**61, besides the rounding to float64 and to the dtype at the end.

    A call makes two collectives.  The second one adds int64, twice the bytes of float32.

    Args:
        comm: the communicator of the ranks.
        addends: groups of arrays: one sum for each group.  A group is a list of arrays of the same
            shape, or one array ``(addends, *shape)``.  All are contiguous arrays of NumPy, of one
            dtype, float32 or float64.  The groups of a rank have the same number of addends;
            another rank may have another number, also none: an array ``(0, *shape)``.

    Returns:
        The sum of each group, the same on all ranks; full of NaN if a number is not finite.

    Raises:
        TypeError: an addend is no contiguous array of NumPy, of float32 or float64.
        ValueError: there is no group, or their shapes, dtypes or numbers of addends differ.
        MismatchError, PeerTimeoutError, PeerLostError: as for `Communicator.all_reduce`.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> parts = rng.normal(size=(6, 4)).astype(np.float32)
        >>> def program(comm):
        ...     mine = parts[comm.rank * 6 // comm.size : (comm.rank + 1) * 6 // comm.size]
        ...     (total,) = rr.exact_sum(comm, [mine])
        ...     return total.tobytes()
        >>> len({rr.spawn(program, ranks)[0] for ranks in (1, 2, 3, 4)})
        1
    """
    groups = [_Group(group) for group in addends]
    if not groups:
        raise ValueError("exact_sum: addends is empty; pass a group for each sum")
    if len({group.count for group in groups}) > 1:
        raise ValueError("exact_sum: the groups have different numbers of arrays")
    dtype = groups[0].dtype
    if any(group.dtype != dtype for group in groups):
        names = ", ".join(sorted({group.dtype.name for group in groups}))
        raise ValueError(f"exact_sum: groups of {names}; wanted one dtype")
    mine = np.array([*(group.magnitude() for group in groups), groups[0].count], np.int64)
    of_ranks = comm.all_gather(mine).reshape(comm.size, -1)
    count = max(1, int(of_ranks[:, -1].sum()))
    largest = of_ranks[:, :-1].max(axis=0).tolist()
    exponents = [fixed_point.exponent_for(most, count, dtype) for most in largest]
    sums = [group.sums(e) for group, e in zip(groups, exponents, strict=True)]
    comm.all_reduce(sums, out=sums)
    results = []
    for group, exponent, total in zip(groups, exponents, sums, strict=True):
        if exponent is None:
            results.append(np.full(group.shape, np.nan, dtype))
        else:
            results.append(np.empty(group.shape, dtype))
            fixed_point.to_floats(total, exponent, results[-1])
    return results


class _Group:
    """The addends of one sum on this rank.  Raises TypeError or ValueError if they are none."""

    def __init__(self, given: Sequence[np.ndarray] | np.ndarray) -> None:
        self._blocks = [given] if isinstance(given, np.ndarray) else list(given)
        """Arrays of one addend each; or one array of all."""
        for block in self._blocks:
            is_array = isinstance(block, np.ndarray) and block.flags.c_contiguous
            if not is_array or block.dtype not in fixed_point.DTYPES:
                what = str(block.dtype) if isinstance(block, np.ndarray) else type(block).__name__
                raise TypeError(
                    f"exact_sum: an addend is {what}; wanted a contiguous array of float32 or "
                    "float64"
                )
        if not self._blocks:
            raise ValueError("exact_sum: a group is empty; pass an array of shape (0, ...)")
        first = self._blocks[0]
        for block in self._blocks:
            if (block.shape, block.dtype) != (first.shape, first.dtype):
                raise ValueError(
                    f"exact_sum: a group has arrays {first.dtype}{list(first.shape)} and "
                    f"{block.dtype}{list(block.shape)}"
                )
        self.dtype: np.dtype[Any] = first.dtype
        if isinstance(given, np.ndarray):
            if not given.ndim:
                raise ValueError("exact_sum: a group is one number; wanted (addends, ...)")
            self.count, self.shape = given.shape[0], given.shape[1:]
        else:
            self.count, self.shape = len(self._blocks), first.shape

    def magnitude(self) -> int:
        """The largest number without its sign, as bits."""
        return max(map(fixed_point.magnitude, self._blocks))

    def sums(self, exponent: int | None) -> np.ndarray:
        """The sums of this rank's addends times 2 ** `exponent`, of whole numbers."""
        found = np.zeros(math.prod(self.shape), np.int64)
        if exponent is not None:
            for block in self._blocks:
                fixed_point.add(block, exponent, found)
        return found
