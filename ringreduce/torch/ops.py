"""The ops of torch's reductions."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch.distributed as dist

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
