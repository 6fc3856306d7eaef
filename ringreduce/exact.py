"""A sum over ranks that has the same bits whichever rank has which addends."""

from __future__ import annotations

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
        addends: the arrays that this rank adds, in groups: one sum for each group.  All arrays of
            a group, on all ranks, have the same shape; all are contiguous arrays of NumPy, of one
            dtype, float32 or float64.  Each rank passes the same number of groups, and the same
            number of arrays in each group; that number may differ between ranks, and be 0 if the
            groups of another rank tell the shapes: then pass an array with shape ``(0, *shape)``.

    Returns:
        The sum of each group, the same on all ranks; full of NaN if a number is not finite.

    Raises:
        TypeError: an addend is no contiguous array of NumPy, of float32 or float64.
        ValueError: there is no group, or the shapes or dtypes of a group differ.
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
    groups = [_checked(group) for group in addends]
    if not groups:
        raise ValueError("exact_sum: addends is empty; pass a group for each sum")
    if len({len(group.arrays) for group in groups}) > 1:
        raise ValueError("exact_sum: the groups have different numbers of arrays")
    dtype = groups[0].dtype
    if any(group.dtype != dtype for group in groups):
        names = ", ".join(sorted({group.dtype.name for group in groups}))
        raise ValueError(f"exact_sum: groups of {names}; wanted one dtype")
    largest = [fixed_point.magnitude(group.arrays, dtype) for group in groups]
    mine = np.array([*largest, len(groups[0].arrays)], np.int64)
    all_ranks = comm.all_gather(mine).reshape(comm.size, -1)
    count = max(1, int(all_ranks[:, -1].sum()))
    exponents = [
        fixed_point.exponent_for(int(most), count, dtype) for most in all_ranks[:, :-1].max(axis=0)
    ]
    sums = []
    for group, exponent in zip(groups, exponents, strict=True):
        total = np.zeros(int(np.prod(group.shape, dtype=np.int64)), np.int64)
        if exponent is not None:
            fixed_point.add(group.arrays, exponent, total)
        sums.append(total)
    comm.all_reduce(sums, out=sums)
    results = []
    for group, exponent, total in zip(groups, exponents, sums, strict=True):
        result = np.full(group.shape, np.nan, dtype)
        if exponent is not None:
            fixed_point.to_floats(total, exponent, result)
        results.append(result)
    return results


class _Group:
    """The addends of one sum on this rank."""

    def __init__(self, arrays: Sequence[np.ndarray], shape: tuple[int, ...], dtype: Any) -> None:
        self.arrays, self.shape, self.dtype = arrays, shape, dtype


def _checked(group: Any) -> _Group:
    """Return the arrays of a group.  Raises TypeError or ValueError."""
    arrays = list(group)
    first = arrays[0] if arrays else group
    for array in arrays or [group]:
        is_array = isinstance(array, np.ndarray) and array.flags.c_contiguous
        if not is_array or array.dtype.name not in fixed_point.DTYPES:
            what = f"{array.dtype}" if isinstance(array, np.ndarray) else type(array).__name__
            raise TypeError(
                f"exact_sum: an addend is {what}; wanted a contiguous array of float32 or float64"
            )
        if (array.shape, array.dtype) != (first.shape, first.dtype):
            raise ValueError(
                f"exact_sum: a group has arrays {first.dtype}{list(first.shape)} and "
                f"{array.dtype}{list(array.shape)}"
            )
    shape = first.shape if arrays else first.shape[1:]
    return _Group(arrays, shape, first.dtype)
