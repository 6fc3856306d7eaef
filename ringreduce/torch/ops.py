"""The ops of torch's reductions."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch.distributed as dist

_PREMUL_SUM = dist.ReduceOp.RedOpType.PREMUL_SUM
_OPS = {
    dist.ReduceOp.SUM: "sum",
    dist.ReduceOp.AVG: "mean",
    dist.ReduceOp.PRODUCT: "prod",
    dist.ReduceOp.MIN: "min",
    dist.ReduceOp.MAX: "max",
    dist.ReduceOp.BAND: "and",
    dist.ReduceOp.BOR: "or",
    dist.ReduceOp.BXOR: "xor",
    _PREMUL_SUM: "sum",
}
_OF_BOOLS = {"sum": "or", "prod": "and"}
"""The ops for arrays of truth values, in place of arithmetic."""


def name_of(op: Any, x: np.ndarray) -> str:
    """Return ringreduce's name of a ReduceOp for arrays like `x`.

    Raises ValueError for an op that ringreduce does not have.
    """
    name = _OPS.get(op.op)
    if name is None:
        known = ", ".join(dict.fromkeys(_OPS.values()))
        raise ValueError(f"unknown ReduceOp {op.op}; ringreduce has {known}")
    return _OF_BOOLS.get(name, name) if x.dtype == np.bool_ else name


def multiplies(op: Any) -> bool:
    """Whether an op multiplies each rank's elements before it adds them: PREMUL_SUM."""
    return bool(op.op == _PREMUL_SUM)


def multiply(op: Any, x: np.ndarray) -> None:
    """Multiply `x` in place by the factor of PREMUL_SUM; do nothing for other ops."""
    if multiplies(op):
        _, factor = op.__getstate__()  # torch 2.9 has no attribute for it
        x *= x.dtype.type(factor) if isinstance(factor, float) else factor.numpy()
