"""The all-reduce of sparse tensors: every rank gathers the entries of all, and adds them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import ringreduce as rr
from ringreduce.torch.tensors import array_of


def all_reduce_sparse(comm: rr.Communicator, tensor: Any, op: Any, timeout_s: float | None) -> None:
    """Add a sparse tensor of each rank in place; `op` is torch's SUM or AVG.

    Ranks may have different numbers of entries.

    Raises ValueError for another op and for the mean of integers, MismatchError on all ranks if
    their shapes differ.
    """
    if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
        raise ValueError(f"all_reduce: op is {op}; sparse tensors have SUM and AVG")
    if op == dist.ReduceOp.AVG and not (tensor.is_floating_point() or tensor.is_complex()):
        raise ValueError(f"all_reduce: AVG is for floats, and the tensor has {tensor.dtype}")
    mine = tensor.coalesce()
    indices = np.ascontiguousarray(array_of("all_reduce", mine.indices(), writes=False).T)
    values = array_of("all_reduce", mine.values(), writes=False, reduces=True)
    shape = np.array(tensor.shape)
    largest = comm.all_reduce(np.concatenate([shape, -shape]), "max", timeout_s=timeout_s)
    if (largest[: shape.size] + largest[shape.size :]).any():
        raise rr.MismatchError(
            f"all_reduce: ranks passed sparse tensors of different shapes; this rank's is "
            f"{tuple(tensor.shape)}"
        )
    indices = comm.all_gather(indices, timeout_s=timeout_s)
    values = comm.all_gather(values, timeout_s=timeout_s)
    if op == dist.ReduceOp.AVG:
        values = values / values.dtype.type(comm.size)
    entries = torch.from_numpy(np.ascontiguousarray(indices.T))
    total = torch.sparse_coo_tensor(entries, _tensor_of(values, tensor.dtype), tensor.shape)
    with torch.no_grad():
        tensor.copy_(total.coalesce())


def _tensor_of(values: np.ndarray, dtype: Any) -> Any:
    if dtype is torch.bfloat16:
        return torch.from_numpy(values.view(np.int16)).view(dtype)
    return torch.from_numpy(values)
