"""Tensors in memory that the other ranks of a group reach directly."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist

_BYTES = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64, 16: np.complex128}
"""By bytes of an element: a dtype of NumPy of this size."""


def empty(shape: Any, dtype: Any = None, *, group: Any = None) -> Any:
    """Return a tensor in registered memory; its elements are not set.

    Collectives of the group read and write such tensors in place, without a copy in between.  Other
    groups treat them as ordinary ones.  The memory is free again once the tensor is.

    Args:
        shape: the tensor's shape, an int or a tuple of ints.
        dtype: a dtype of torch; None: torch's default.
        group: a process group of this backend; None: all ranks.

    Returns:
        A C-contiguous tensor on the CPU.  Where ranks share no memory it is an ordinary one.

    Raises:
        TypeError: `group` is no group of this backend.
        RuntimeError: there is no process group yet.

    Example:
        >>> bucket = ringreduce.torch.empty((1 << 20,), torch.float32)  # doctest: +SKIP
        >>> torch.distributed.all_reduce(bucket)  # doctest: +SKIP
    """
    from ringreduce.torch.group import RingReduceGroup

    if not dist.is_initialized():
        raise RuntimeError("empty: there is no process group; call init_process_group first")
    group = dist.group.WORLD if group is None else group
    if not isinstance(group, RingReduceGroup):
        raise TypeError(f"empty: group is {group!r}; pass a group of the backend 'ringreduce'")
    dtype = torch.get_default_dtype() if dtype is None else dtype
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    memory: np.ndarray = group.comm.empty(shape, _BYTES[dtype.itemsize])
    return torch.from_numpy(memory).view(dtype)
