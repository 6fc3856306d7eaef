"""Cut arrays into the pieces of ranks, and copy results to where torch wants them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def check_alike(where: str, arrays: Sequence[np.ndarray]) -> None:
    """Check that arrays have as many elements, of one dtype.  Raises ValueError."""
    if len({(array.size, array.dtype) for array in arrays}) > 1:
        kinds = ", ".join(dict.fromkeys(f"{array.dtype}[{array.size}]" for array in arrays))
        raise ValueError(f"{where}: the tensors differ: {kinds}; all need the same size and dtype")


def check_dtypes(where: str, arrays: Sequence[np.ndarray]) -> None:
    dtypes = dict.fromkeys(str(array.dtype) for array in arrays)
    if len(dtypes) > 1:
        raise ValueError(f"{where}: the tensors have {', '.join(dtypes)}; all need one dtype")


def pieces_of(
    array: np.ndarray, lengths: Sequence[int], size: int, what: str
) -> Sequence[np.ndarray]:
    """Cut the first axis into pieces of these lengths; without any, into equal ones."""
    if array.ndim == 0:
        raise ValueError(f"all_to_all: the {what} is 0-d; pass tensor.reshape(1)")
    first = array.shape[0]
    if not lengths:
        if first % size:
            raise ValueError(
                f"all_to_all: the {what}'s first dimension is {first}, no multiple of {size}"
            )
        lengths = [first // size] * size
    if len(lengths) != size or sum(lengths) != first:
        raise ValueError(
            f"all_to_all: {what}_split_sizes is {list(lengths)}; pass {size} lengths that add up "
            f"to {first}"
        )
    return np.split(array, np.cumsum(lengths)[:-1])


def room_for(out: np.ndarray) -> np.ndarray:
    """Return the memory of `out` with one dimension; new memory if `out` is strided."""
    return out.reshape(-1) if out.flags.c_contiguous else np.empty(out.size, out.dtype)


def deliver(outs: Sequence[np.ndarray], found: np.ndarray) -> None:
    """Copy the parts of `found` to `outs`, one after another."""
    begin = 0
    for out in outs:
        out[...] = found[begin : begin + out.size].reshape(out.shape)
        begin += out.size


def deliver_all(every: Sequence[Sequence[np.ndarray]], *found: np.ndarray) -> None:
    for outs, result in zip(every, found, strict=True):
        deliver(outs, result)


def deliver_each(outs: Sequence[np.ndarray | None], *parts: np.ndarray) -> None:
    """Copy each part to its array, unless it is there; None: the part is for another rank."""
    for out, part in zip(outs, parts, strict=True):
        if out is not None and not np.may_share_memory(out, part):
            out[...] = part.reshape(out.shape)
