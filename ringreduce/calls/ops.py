"""The ops of reductions: their names, the dtypes that each reduces, and the ops of mpi4py."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import numpy as np

from ringreduce.calls.elsewhere import OPS_ELSEWHERE
from ringreduce.devices.float16 import is_short
from ringreduce.errors import unknown

_BITWISE = ("and", "or", "xor")
_ON_FLOATS = ("sum", "mean", "min", "max", "prod")
_REDUCTIONS: dict[np.dtype, tuple[str, ...]] = {
    **dict.fromkeys(map(np.dtype, "?"), ("min", "max", *_BITWISE)),
    **dict.fromkeys(map(np.dtype, "bhilqBHILQ"), ("sum", "min", "max", "prod", *_BITWISE)),
    **dict.fromkeys(map(np.dtype, "efdg"), _ON_FLOATS),
    **dict.fromkeys(map(np.dtype, "FDG"), ("sum", "mean", "prod")),
}
"""The ops for bools, integers, floats and complex numbers.  bfloat16 has those of floats."""


def _reductions(dtype: np.dtype) -> tuple[str, ...]:
    """Return the ops that can reduce `dtype`."""
    return _REDUCTIONS.get(dtype, _ON_FLOATS if is_short(dtype) else ())


def _is_8_bit_float(dtype: np.dtype) -> bool:
    """Return whether `dtype` is an 8-bit float of `ml_dtypes`.  No op reduces them."""
    return dtype.itemsize == 1 and dtype.name.startswith("float8_")


def check_movable(where: str, dtype: np.dtype) -> None:
    """Check that `dtype` can be sent: numbers or bools in this machine's byte order.

    Raises TypeError.
    """
    if not _reductions(dtype) and not _is_8_bit_float(dtype):
        native = dtype if dtype.isnative else dtype.newbyteorder("=")  # texts have no other order
        if _reductions(native):
            raise TypeError(
                f"{where}: dtype {dtype} is not in the byte order of this machine; "
                f"convert it to {native}"
            )
        raise TypeError(f"{where}: dtype {dtype} cannot be sent; pass numbers or bools")


def check_addable(where: str, dtype: np.dtype) -> None:
    """Check that numbers of `dtype` can be added.  Raises TypeError."""
    check_movable(where, dtype)
    if "sum" not in _reductions(dtype):
        raise TypeError(f"{where}: dtype {dtype} cannot be added; pass numbers")


def check_reduction(where: str, dtype: np.dtype, op: str, ops: Any) -> None:
    """Check that `op` is one of `ops` and can reduce `dtype`.

    Raises ValueError for an unknown op, TypeError for a dtype that the op cannot reduce.
    """
    check_movable(where, dtype)
    if op not in ops:
        raise ValueError(f"{where}: {unknown('op', op, ops, OPS_ELSEWHERE)}")
    if op not in _reductions(dtype):
        raise TypeError(f"{where}: op={op!r} on {dtype} {_refusal(op, dtype)}")


def _refusal(op: str, dtype: np.dtype) -> str:
    if _is_8_bit_float(dtype):
        return "is not supported; pass floats of at least 16 bits"
    if op in _BITWISE:
        return "has no meaning; pass integers or bools"
    if dtype.kind == "c":
        return "has no meaning, complex numbers have no order; use op='sum', 'mean' or 'prod'"
    if dtype.kind == "b":
        return "gives no bool; use op='and', 'or' or 'xor', or pass numbers"
    return "would round; use op='sum', or pass floats"


# --- names of ops ---

_OPS_OF_MPI = {
    "SUM": "sum",
    "PROD": "prod",
    "MIN": "min",
    "MAX": "max",
    "BAND": "and",
    "BOR": "or",
    "BXOR": "xor",
    "LAND": "and",
    "LOR": "or",
    "LXOR": "xor",
}
"""The op that means the same as a predefined op of mpi4py."""


def op_name(where: str, arrays: Iterable[Any], op: Any) -> Any:
    """Return the name of a predefined op of mpi4py, and any other `op` as it is.

    A logical op, such as ``MPI.LAND``, has a name on bools alone: on integers ``"and"`` is bitwise.
    Raises TypeError for an mpi4py op that no name stands for on these `arrays`.
    """
    if not is_op_of_mpi(op):
        return op
    found = name_of_mpi_op(op)
    if found is None:
        names = ", ".join(f"MPI.{name}" for name in _OPS_OF_MPI)
        raise TypeError(f"{where}: op is an mpi4py op without a counterpart; pass one of {names}")
    name = _OPS_OF_MPI[found]
    if found.startswith("L"):
        for array in arrays:
            if array.dtype.kind in "iu":
                raise TypeError(
                    f"{where}: op=MPI.{found} on {array.dtype} is logical; "
                    f"pass bools, or op={name!r}, which is bitwise on integers"
                )
    return name


def op_meant_by(value: Any) -> str | None:
    """Return the op that a text, a function such as ``numpy.add`` or an op of mpi4py stands for."""
    if is_op_of_mpi(value):
        return _OPS_OF_MPI.get(name_of_mpi_op(value) or "")
    name = getattr(value, "__name__", getattr(value, "name", value))
    if not isinstance(name, str):
        return None
    name = name.lower()
    return name if name in (*_ON_FLOATS, *_BITWISE) else OPS_ELSEWHERE.get(name)


def is_op_of_mpi(value: Any) -> bool:
    """Whether `value` is an op of mpi4py."""
    return type(value).__module__ == "mpi4py.MPI" and type(value).__name__ == "Op"


def name_of_mpi_op(op: Any) -> str | None:
    """Return the key of `_OPS_OF_MPI` of an op of mpi4py; None for any other op."""
    mpi = sys.modules["mpi4py.MPI"]  # there is an op of mpi4py, so mpi4py is imported
    return next((name for name in _OPS_OF_MPI if getattr(mpi, name) == op), None)
