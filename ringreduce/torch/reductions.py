"""The ops of torch's reductions; and the all-reduce of sparse tensors.

For sparse tensors every rank gathers the entries of all, and adds them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import ringreduce as rr
from ringreduce.torch.tensors import array_of

_PREMUL_SUM = dist.ReduceOp.RedOpType.PREMUL_SUM.value
_NAMES = {
    dist.ReduceOp.SUM: "sum",
    dist.ReduceOp.AVG: "mean",
    dist.ReduceOp.PRODUCT: "prod",
    dist.ReduceOp.MIN: "min",
    dist.ReduceOp.MAX: "max",
    dist.ReduceOp.BAND: "and",
    dist.ReduceOp.BOR: "or",
    dist.ReduceOp.BXOR: "xor",
    dist.ReduceOp.RedOpType.PREMUL_SUM: "sum",
}
_OPS = {op.value: name for op, name in _NAMES.items()}
"""By number of a ReduceOp.  A look-up by number takes a third of the time of a look-up by op."""
_OF_BOOLS = {"sum": "or", "prod": "and"}
"""The ops for arrays of truth values, in place of arithmetic."""


def prepare(op: Any, x: np.ndarray) -> str:
    """Prepare `x` for a ReduceOp; return the name of ringreduce's op that then reduces it.

    PREMUL_SUM multiplies `x` in place by its factor.  Raises ValueError for an op that
    ringreduce does not have, and for PREMUL_SUM of integers and of truth values.
    """
    number = op.op.value
    name = _OPS.get(number)
    if name is None:
        known = ", ".join(dict.fromkeys(_OPS.values()))
        raise ValueError(f"unknown ReduceOp {op.op}; ringreduce has {known}")
    if number == _PREMUL_SUM:
        if x.dtype.kind in "iub":
            raise ValueError(f"PREMUL_SUM is for floats, and a tensor has {x.dtype}")
        _, factor = op.__getstate__()  # torch 2.9 has no attribute for it
        x *= x.dtype.type(factor if isinstance(factor, float) else factor.item())
    return _OF_BOOLS.get(name, name) if x.dtype.kind == "b" else name


def prepare_copy(op: Any, x: np.ndarray) -> tuple[np.ndarray, str]:
    """Do as `prepare`, on a copy of `x` if it would change; return that array, and the op."""
    if op.op.value == _PREMUL_SUM:
        x = x.copy()
    return x, prepare(op, x)


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
