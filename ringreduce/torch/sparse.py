"""The all-reduce of sparse tensors: every rank gathers the entries of all, and adds them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import ringreduce as rr
from ringreduce.torch.tensors import array_of

_CALLS = 3
"""Calls for each tensor: of the shape, the indices and the values."""


def sparse_calls(
    comm: rr.Communicator, tensor: Any, op: Any, *, timeout_s: float | None, async_op: bool
) -> list[Any]:
    """Begin to add a sparse tensor of each rank in place; return `_CALLS` results or Works.

    Ranks may have different numbers of entries.  Raises ValueError for another `op` than
    torch's SUM and AVG, TypeError for the mean of integers, MismatchError on all ranks for
    different numbers of dimensions.
    """
    if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
        raise ValueError(f"all_reduce: op is {op}; sparse tensors have SUM and AVG")
    if op == dist.ReduceOp.AVG and not (tensor.is_floating_point() or tensor.is_complex()):
        raise TypeError(f"all_reduce: AVG is for floats, and the tensor has {tensor.dtype}")
    mine = tensor.coalesce()
    indices = np.ascontiguousarray(array_of("all_reduce", mine.indices(), writes=False).T)
    values = array_of("all_reduce", mine.values(), writes=False, reduces=True)
    shape = np.array(tensor.shape)
    return [
        comm.all_reduce(
            np.concatenate([shape, -shape]), "max", timeout_s=timeout_s, async_op=async_op
        ),
        comm.all_gather(indices, timeout_s=timeout_s, async_op=async_op),
        comm.all_gather(values, timeout_s=timeout_s, async_op=async_op),
    ]


def add_entries(tensors: Sequence[Any], op: Any, size: int, *found: np.ndarray) -> None:
    """Write the sums or means of all `size` ranks to sparse tensors; `found` are their results.

    Raises MismatchError on all ranks if the shapes of a tensor differ.
    """
    for place, tensor in enumerate(tensors):
        _add(tensor, op, size, *found[place * _CALLS : (place + 1) * _CALLS])


def _add(
    tensor: Any, op: Any, size: int, largest: np.ndarray, indices: np.ndarray, values: np.ndarray
) -> None:
    if (largest[: tensor.ndim] + largest[tensor.ndim :]).any():
        raise rr.MismatchError(
            f"all_reduce: ranks passed sparse tensors of different shapes; this rank's is "
            f"{tuple(tensor.shape)}"
        )
    if op == dist.ReduceOp.AVG:
        values = values / values.dtype.type(size)
    entries = torch.from_numpy(np.ascontiguousarray(indices.T))
    gathered = _tensor_of(values, tensor.dtype)
    total = torch.sparse_coo_tensor(
        entries, gathered, tensor.shape, device="cpu", check_invariants=False
    )
    with torch.no_grad():
        tensor.copy_(total.coalesce())


def _tensor_of(values: np.ndarray, dtype: Any) -> Any:
    if dtype is torch.bfloat16:
        return torch.from_numpy(values.view(np.int16)).view(dtype)
    return torch.from_numpy(values)
