"""Tensors of torch as NumPy arrays over the same memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ringreduce.calls.views import has_memory, view_of

_TWO_OF_4_BITS = getattr(torch, "float4_e2m1fn_x2", None)
"""A dtype of torch with two floats in a byte; NumPy has none like it."""
_CERTAINLY = 1
"""Result of `torch._debug_has_internal_overlap`: two elements share memory."""


def array_of(where: str, tensor: Any, *, writes: bool, reduces: bool = False) -> np.ndarray:
    """Return the array over the memory of `tensor`; `where` is the collective that asks for it.

    The program may resize the storage later, as FullyShardedDataParallel does.  An array that
    is only read may be a copy: torch may have yet to conjugate or to negate elements.  Raises
    ValueError as `check`, or if the memory to write holds conjugated or negated elements;
    TypeError for a tensor of tensors, or if NumPy has no such dtype.
    """
    check(where, tensor, writes=writes, reduces=reduces)
    plain = tensor.detach()  # keeps the storage, even if the program sets `tensor.data`
    array = view_of(plain)
    if array is None and plain.dtype is _TWO_OF_4_BITS:
        array = view_of(plain.view(torch.uint8))
    if array is None and not writes and has_memory(type(tensor)):
        array = view_of(plain.resolve_conj().resolve_neg())
    if array is None:
        raise _no_view(where, tensor)
    return array


def _no_view(where: str, tensor: Any) -> Exception:
    if not has_memory(type(tensor)):
        kind = type(tensor).__name__
        return TypeError(
            f"{where}: a {kind} has no elements in memory; pass the tensors that it holds"
        )
    if not is_as_in_memory(tensor):
        return ValueError(
            f"{where}: torch has yet to conjugate or to negate the elements of a tensor; "
            "pass tensor.resolve_conj().resolve_neg()"
        )
    if tensor.numel() and not tensor.data_ptr():
        return ValueError(f"{where}: a tensor has no memory; pass tensor.clone()")
    return TypeError(f"{where}: NumPy has no dtype for {tensor.dtype}")


def is_as_in_memory(tensor: Any) -> bool:
    return has_memory(type(tensor)) and not tensor.is_conj() and not tensor.is_neg()


def check(where: str, tensor: Any, *, writes: bool, reduces: bool = False) -> None:
    """Raise ValueError if `tensor` is not on the CPU, sparse, quantised, or not fit to be written.

    `writes`: the collective `where` writes it.  `reduces`: it computes with the elements, which
    may not be 8-bit floats.
    """
    if not tensor.is_cpu or tensor.layout is not torch.strided or tensor.is_quantized:
        raise ValueError(_refusal(where, tensor))
    if writes and torch._debug_has_internal_overlap(tensor) == _CERTAINLY:
        raise ValueError(
            f"{where}: elements of a tensor share memory, as after expand(); pass tensor.clone()"
        )
    dtype = tensor.dtype
    if reduces and dtype.itemsize == 1 and dtype.is_floating_point:
        raise ValueError(f"{where}: {dtype} cannot be reduced; pass tensor.bfloat16()")


def check_list(where: str, tensors: Sequence[Any], size: int, what: str) -> None:
    """Check that a list has one tensor of each rank.  Raises ValueError."""
    if len(tensors) != size:
        raise ValueError(f"{where}: {what} has {len(tensors)} tensors; pass one for each of {size}")


def _refusal(where: str, tensor: Any) -> str:
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
