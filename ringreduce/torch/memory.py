"""Tensors in memory that the other ranks of a group reach directly: new ones, and moved ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ringreduce.torch.shared import can_move

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
        A C-contiguous tensor on the CPU.  Where ranks share no memory it is an ordinary one.  Not
        collective: ranks may make different tensors.

    Raises:
        TypeError: `group` is no group of this backend.
        RuntimeError: there is no process group yet.

    Example:
        >>> bucket = ringreduce.torch.empty((1 << 20,), torch.float32)  # doctest: +SKIP
        >>> torch.distributed.all_reduce(bucket)  # doctest: +SKIP
    """
    group = group_of("empty", group)
    dtype = torch.get_default_dtype() if dtype is None else dtype
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    memory: np.ndarray = group.comm.empty(shape, _BYTES[dtype.itemsize])
    return torch.from_numpy(memory).view(dtype)


def share_(tensor: Any, *, group: Any = None) -> Any:
    """Move the storage of a tensor to registered memory, in place.

    All tensors with this storage, such as views, stay what they are, with another address.
    All-reduces of the group read and write it in place from now on if it is contiguous and has at
    least 64 KiB; other calls treat it as an ordinary tensor.  Its memory is free again once the
    storage is.  A process that is forked later, such as a worker of a DataLoader, shares the
    memory: this process sees what that process writes.  A process that gets the tensor through a
    queue gets a copy.  Not collective: ranks may move different tensors.

    The backend does this by itself with buckets of DistributedDataParallel of at least 64 KiB, the
    second time that they are reduced.  ``RINGREDUCE_TORCH_SHARE=0`` turns that off.  torch refuses
    to resize a moved tensor.

    Args:
        tensor: a dense tensor on the CPU.
        group: a process group of this backend; None: all ranks.

    Returns:
        `tensor`.  The tensor stays where it is if the ranks share no memory, if there is no room in
        it, or if 256 storages of the group that have moved there are in use.

    Raises:
        TypeError: `group` is no group of this backend.
        RuntimeError: there is no process group yet, or asynchronous calls are under way, which may
            use the tensor.
        ValueError: the tensor is no dense tensor on the CPU; or its memory is another library's, or
            an array of NumPy views it, as after ``from_numpy`` and ``numpy``; or torch shares it
            with other processes already.

    Example:
        >>> weights = ringreduce.torch.share_(torch.zeros(1 << 20))  # doctest: +SKIP
        >>> torch.distributed.all_reduce(weights)  # doctest: +SKIP
    """
    group = group_of("share_", group)
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        raise ValueError("share_: the tensor is not dense, or not on the CPU")
    storage = tensor.untyped_storage()
    if group.storages is not None and group.storages.has(storage):
        return tensor  # it is there already
    if not can_move(storage):
        raise ValueError(
            "share_: the tensor's memory cannot move, as another library, an array of NumPy or "
            "another process uses it; pass tensor.clone()"
        )
    if any(each.comm._ending.is_busy for each in _groups()):
        raise RuntimeError("share_: asynchronous calls are under way; wait for them first")
    if group.storages is not None:
        group.storages.move(storage)
    return tensor


def _groups() -> list[Any]:
    from ringreduce.torch.group import RingReduceGroup

    return [group for group in c10d._world.pg_map if isinstance(group, RingReduceGroup)]


def group_of(where: str, group: Any) -> Any:
    """Return a group of this backend: `group`, or the group of all ranks if it is None."""
    from ringreduce.torch.group import RingReduceGroup

    if not dist.is_initialized():
        raise RuntimeError(f"{where}: there is no process group; call init_process_group first")
    group = dist.group.WORLD if group is None else group
    if not isinstance(group, RingReduceGroup):
        raise TypeError(f"{where}: group is {group!r}; pass a group of the backend 'ringreduce'")
    return group
