"""Check the arguments of a call, before it sends anything."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from numbers import Number
from typing import Any

import numpy as np

from ringreduce.devices.float16 import is_short
from ringreduce.errors import did_you_mean

_BITWISE = ("and", "or", "xor")
_ON_FLOATS = ("sum", "mean", "min", "max", "prod")
_REDUCTIONS: dict[np.dtype, tuple[str, ...]] = {
    **dict.fromkeys(map(np.dtype, "?"), ("min", "max", *_BITWISE)),
    **dict.fromkeys(map(np.dtype, "bhilqBHILQ"), ("sum", "min", "max", "prod", *_BITWISE)),
    **dict.fromkeys(map(np.dtype, "efdg"), _ON_FLOATS),
    **dict.fromkeys(map(np.dtype, "FDG"), ("sum", "mean", "prod")),
}
"""The ops for bools, integers, floats and complex numbers.  bfloat16 has those of floats."""


def as_array(where: str, x: Any) -> np.ndarray:
    """View `x` as a NumPy array without a copy.  A number becomes a 0-d array.

    Raises TypeError unless `x` is an array or a number.
    """
    if isinstance(x, (list, tuple)):
        raise TypeError(f"{where}: got a {type(x).__name__}; pass an array, or numpy.asarray(...)")
    if isinstance(x, np.ma.MaskedArray):
        raise TypeError(f"{where}: got a masked array; fill it first, x.filled(...)")
    if not isinstance(x, np.ndarray):
        if not isinstance(x, Number) and not _exposes_memory(x):
            raise TypeError(f"{where}: got {type(x).__name__}; pass an array or a number")
        return np.asarray(x)
    return x


def _exposes_memory(x: Any) -> bool:
    names = ("__array_interface__", "__array__", "__dlpack__")
    if any(hasattr(x, name) for name in names):
        return True
    try:
        memoryview(x).release()
    except TypeError:
        return False
    return True


_WANTED = {
    "collective": "the name of a collective, then the array",
    "op": "the name of an op, such as 'sum'",
    "root": "a rank",
    "algorithm": "the name of an algorithm, or 'auto'",
    "wire": "'bfloat16', 'float16' or None",
}
"""Text of the wanted value, by the name of an argument that selects a call."""

_BEFORE_OUT = ("op", "root")
"""Arguments that take a positional array for the result: they follow the input directly."""


def check_selectors(where: str, **selectors: Any) -> None:
    """Check that no argument is an array or another object without a hash.

    A call is looked up by these arguments.  Raises TypeError, which names the argument.
    """
    for name, value in selectors.items():
        if hasattr(value, "__dlpack__"):
            wanted = "name the result with out=" if name in _BEFORE_OUT else f"pass {_WANTED[name]}"
            raise TypeError(f"{where}: {name} is an array; {wanted}")
        try:
            hash(value)
        except TypeError:
            kind = type(value).__name__
            raise TypeError(f"{where}: {name} is {kind}; pass {_WANTED[name]}") from None


def reduction(where: str, arrays: Iterable[Any], op: Any, algorithm: Any, wire: Any) -> Any:
    """Return `op`, `algorithm` and `wire` for a reduction of `arrays`, with `op` as its name.

    Raises TypeError for an array in their place, and for an mpi4py op without a counterpart.
    """
    if type(op) is str and type(algorithm) is str and wire is None:
        return op, algorithm, wire
    op = op_name(where, arrays, op)
    check_selectors(where, op=op, algorithm=algorithm, wire=wire)
    return op, algorithm, wire


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
    # An op of mpi4py exists only once mpi4py is imported: no import is needed here.
    if type(op).__module__ != "mpi4py.MPI" or type(op).__name__ != "Op":
        return op
    mpi = sys.modules["mpi4py.MPI"]
    found = next((name for name in _OPS_OF_MPI if getattr(mpi, name) == op), None)
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


def _reductions(dtype: np.dtype) -> tuple[str, ...]:
    """Return the ops that can reduce `dtype`; an empty tuple if it cannot even be sent."""
    return _REDUCTIONS.get(dtype, _ON_FLOATS if is_short(dtype) else ())


def check_movable(where: str, dtype: np.dtype) -> None:
    """Check that `dtype` can be sent: numbers or bools in this machine's byte order.

    Raises TypeError.
    """
    if not _reductions(dtype):
        raise TypeError(
            f"{where}: dtype {dtype} cannot be sent; "
            "pass numbers or bools in this machine's byte order"
        )


_OPS_ELSEWHERE = {"avg": "mean", "average": "mean", "add": "sum", "product": "prod"}
"""Ops of NCCL, Horovod and torch, with their names here."""


def check_reduction(where: str, dtype: np.dtype, op: str, ops: Any) -> None:
    """Check that `op` is one of `ops` and can reduce `dtype`.

    Raises ValueError for an unknown op, TypeError for a dtype that the op cannot reduce.
    """
    check_movable(where, dtype)
    if op not in ops:
        raise ValueError(
            f"{where}: unknown op {op!r}; choose one of {', '.join(map(repr, ops))}"
            f"{did_you_mean(op, ops, _OPS_ELSEWHERE)}"
        )
    if op not in _reductions(dtype):
        raise TypeError(f"{where}: op={op!r} on {dtype} {_refusal(op, dtype)}")


def _refusal(op: str, dtype: np.dtype) -> str:
    if op in _BITWISE:
        return "has no meaning; pass integers or bools"
    if dtype.kind == "c":
        return "has no meaning, complex numbers have no order; use op='sum', 'mean' or 'prod'"
    if dtype.kind == "b":
        return "gives no bool; use op='and', 'or' or 'xor', or pass numbers"
    return "would round; use op='sum', or pass floats"


def check_out(where: str, out: Any, shape: tuple[int, ...], dtype: np.dtype) -> None:
    """Check that `out` is a writeable array of this shape and dtype.

    Raises TypeError or ValueError.
    """
    if out.dtype != dtype:
        raise TypeError(f"{where}: out has dtype {out.dtype}, the result has {dtype}")
    if out.shape != shape:
        raise ValueError(f"{where}: out has shape {out.shape}, the result has {shape}")
    if isinstance(out, np.ndarray) and not out.flags.writeable:
        raise ValueError(f"{where}: out is read-only")


def same_memory(x: np.ndarray, out: np.ndarray) -> bool:
    """Whether `x` and `out` are the same elements in memory, in the same order."""
    return x is out or (
        x.shape == out.shape
        and x.strides == out.strides
        and x.__array_interface__["data"][0] == out.__array_interface__["data"][0]
    )


def check_overlap(where: str, x: np.ndarray, out: np.ndarray) -> None:
    """Check that `x` and `out` share no memory.  Raises ValueError."""
    if _share_memory(x, out):
        raise overlap_error(where)


def overlap_error(where: str) -> ValueError:
    """Return the error for an `out` that shares memory with the input."""
    return ValueError(
        f"{where}: out overlaps the input; pass the input itself as out (in place), "
        "or an array of its own"
    )


def _share_memory(x: np.ndarray, out: np.ndarray) -> bool:
    most_work: Any = 100_000  # NumPy takes any number; its stub names two
    try:
        return np.shares_memory(x, out, max_work=most_work)
    except np.exceptions.TooHardError:
        return True


def check_root(where: str, root: Any, size: int) -> None:
    """Check that `root` is a rank.  Raises TypeError or ValueError."""
    if not isinstance(root, (int, np.integer)) or isinstance(root, bool):
        raise TypeError(f"{where}: root is {root!r}; pass a rank")
    if not 0 <= root < size:
        raise ValueError(f"{where}: root is {root}; ranks are 0 to {size - 1}")


def check_timeout(where: str, timeout_s: Any) -> None:
    """Check that `timeout_s` is a number of seconds above 0.  Raises ValueError."""
    if not isinstance(timeout_s, (int, float)) or not timeout_s > 0:
        raise ValueError(f"{where}: timeout_s is {timeout_s!r}; pass seconds, above 0")


def array_text(array: np.ndarray, first: bool = True) -> str:
    """Describe dtype and shape: ``float32[3, 4]``, or ``float32[:, 4]`` if not `first`."""
    sizes = list(map(str, array.shape))
    if not first and sizes:
        sizes[0] = ":"
    return f"{array.dtype}[{', '.join(sizes)}]"


def as_out(where: str, out: Any) -> np.ndarray:
    """View `out` as a NumPy array without a copy.  Raises TypeError if it exposes no memory."""
    if isinstance(out, np.ndarray):
        return out
    if hasattr(out, "__dlpack__"):
        return np.from_dlpack(out)
    raise TypeError(f"{where}: out is {type(out).__name__}; pass a NumPy array")
