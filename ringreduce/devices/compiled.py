"""The compiled functions of devices: folds by address, and loops over 16-bit floats."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ringreduce.compiler import jit

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

FOLD_BYTES = 64
"""Bytes of memory that a fold uses: `devices.vectors.CHUNK`, known here without Numba."""


def fold(op: str, dtype: DTypeLike) -> int | None:
    """Return the address of the fold of `op` and `dtype`; None if there is no such fold.

    `devices.folds` describes the function.  Call it where `shm.functions.is_available`: there
    all ranks have the same folds.  Elsewhere it may raise `jit.CompilationError`.
    """
    op, dtype = "sum" if op == "mean" else op, np.dtype(dtype)
    return jit.address(f"fold-{op}-{dtype.name}", partial(_fold, op, dtype))


def _fold(op: str, dtype: np.dtype[Any]) -> Callable[..., None] | None:
    from ringreduce.devices import folds

    return folds.fold_of(op, dtype)


def kernel(name: str) -> Callable[..., None] | None:
    """Return a compiled loop of `float16_kernels`; None without Numba or needed instructions."""
    return jit.kernel(name, partial(_loop, name))


def _loop(name: str) -> jit.Loop:
    from ringreduce.devices import float16_kernels

    needs_float16 = "float16" in name.split("-")
    return jit.Loop(*float16_kernels.KERNELS[name], needs_float16)
