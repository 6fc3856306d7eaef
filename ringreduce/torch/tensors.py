"""Tensors of torch as NumPy arrays over the same memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import torch

_CERTAINLY = 1
"""What torch answers where two elements of a tensor certainly are in the same memory."""
_UNKNOWN_TO_NUMPY = (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
_AS_BYTES = {1: torch.uint8, 2: torch.int16}
"""By bytes of an element: the dtype as which NumPy sees it."""


def array_of(where: str, tensor: Any, *, writes: bool) -> np.ndarray:
    """Return the array over the memory of `tensor`; `where` is the collective that asks for it.

    `writes`: the collective writes the tensor.

    Raises ValueError if the tensor is not on the CPU, sparse, quantised, or not fit to be written.
    """
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided or tensor.is_quantized:
        raise ValueError(_refusal(where, tensor))
    if writes:
        _check_writable(where, tensor)
    plain = tensor.detach()
    if tensor.dtype in _UNKNOWN_TO_NUMPY:
        dtype = getattr(ml_dtypes, str(tensor.dtype).removeprefix("torch."))
        seen: np.ndarray = plain.view(_AS_BYTES[tensor.element_size()]).numpy()
        return seen.view(dtype)
    array: np.ndarray = plain.numpy()
    return array


def flat(where: str, tensor: Any, *, writes: bool) -> np.ndarray:
    """Return the array over the memory of a contiguous tensor, with one dimension.

    Raises ValueError as `array_of`, and if the tensor is not contiguous.
    """
    array = array_of(where, tensor, writes=writes)
    if not array.flags.c_contiguous:
        raise ValueError(f"{where}: a tensor is not contiguous; pass tensor.contiguous()")
    return array.reshape(-1)


def check_list(where: str, tensors: Sequence[Any], size: int, what: str) -> None:
    """Check that a list has one tensor of each rank.  Raises ValueError."""
    if len(tensors) != size:
        raise ValueError(f"{where}: {what} has {len(tensors)} tensors; pass one for each of {size}")


def _refusal(where: str, tensor: Any) -> str:
    """Return why a tensor cannot take part."""
    kind = tensor.device.type
    if kind == "meta":
        return f"{where}: a tensor on 'meta' has no data"
    if kind != "cpu":
        return (
            f"{where}: a tensor is on {tensor.device}, and ringreduce is for tensors on the CPU; "
            "make a group of its own for the others, such as new_group(backend='nccl')"
        )
    if tensor.is_quantized:
        return f"{where}: a tensor is quantised; pass tensor.int_repr() or tensor.dequantize()"
    return f"{where}: a tensor is sparse; pass tensor.to_dense()"


def _check_writable(where: str, tensor: Any) -> None:
    if torch._debug_has_internal_overlap(tensor) == _CERTAINLY:
        raise ValueError(
            f"{where}: elements of a tensor share memory, as after expand(); pass tensor.clone()"
        )
    if tensor.requires_grad and tensor.is_leaf and torch.is_grad_enabled():
        raise ValueError(
            f"{where}: a leaf tensor that requires a gradient would be written in place; "
            "pass tensor.detach(), or call it under torch.no_grad()"
        )
