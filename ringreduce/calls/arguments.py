"""Check the arguments of a call, before it sends anything."""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterable
from numbers import Number
from typing import Any

import numpy as np

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


def shown(value: Any) -> str:
    """Show a wrong argument: numbers, texts and None as they are, others by their name or type."""
    if value is None or isinstance(value, (Number, str, bytes)):
        return repr(value)
    if _is_op_of_mpi(value) and (name := _name_of_mpi_op(value)):
        return f"MPI.{name}"
    if callable(value) and hasattr(value, "__name__"):
        return f"the {'type' if isinstance(value, type) else 'function'} {value.__name__!r}"
    return type(value).__name__


def as_array(where: str, x: Any) -> np.ndarray:
    """View `x` as a NumPy array without a copy.  A number becomes a 0-d array.

    Raises TypeError unless `x` is an array or a number.
    """
    if isinstance(x, (list, tuple)):
        raise TypeError(f"{where}: got a {type(x).__name__}; pass an array, or numpy.asarray(...)")
    if isinstance(x, np.ma.MaskedArray):
        raise TypeError(f"{where}: got a masked array; fill it first, x.filled(...)")
    if isinstance(x, np.ndarray):
        return x
    if not isinstance(x, Number) and not _exposes_memory(x):
        lists_too = where == "all_reduce"
        wanted = "an array, a number, or a list of these" if lists_too else "an array or a number"
        method = next((f", such as x.{name}()" for name in _TO_NUMPY if hasattr(x, name)), "")
        raise TypeError(f"{where}: got {shown(x)}; pass {wanted}{method}")
    try:
        array = np.asarray(x)
    except Exception as error:  # of another library: its text says what it wants
        kind = type(x).__name__
        raise TypeError(f"{where}: NumPy cannot read the {kind}: {error}") from error
    if array.dtype == object and isinstance(x, int):
        raise TypeError(f"{where}: got an int of more than 64 bits; pass a float")
    return array


_TO_NUMPY = ("to_numpy", "numpy", "toarray")
"""Methods by which objects of other libraries give a NumPy array."""


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
    "collective": "the name of a collective, such as 'all_reduce'",
    "op": "the name of an op, such as 'sum'",
    "root": "a rank, a whole number",
    "algorithm": "the name of an algorithm, or 'auto'",
    "wire": "'bfloat16', 'float16' or None",
}
"""Text of the wanted value, by the name of an argument that selects a call."""

_BEFORE_OUT = ("op", "root")
"""Arguments that take a positional array for the result: they follow the input directly."""


def check_selectors(where: str, **selectors: Any) -> None:
    """Check the types of arguments by which a call is looked up.

    Raises TypeError, which names the argument.
    """
    for name, value in selectors.items():
        if hasattr(value, "__dlpack__"):
            wanted = "name the result with out=" if name in _BEFORE_OUT else f"pass {_WANTED[name]}"
            raise TypeError(f"{where}: {name} is an array; {wanted}")
        if name == "root":
            right = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
        else:
            right = isinstance(value, str) or (name == "wire" and value is None)
        if not right:
            wanted = _op_instead(where, name, value) or f"pass {_WANTED[name]}"
            raise TypeError(f"{where}: {name} is {shown(value)}; {wanted}")


def _op_instead(where: str, name: str, value: Any) -> str:
    """Return what to write if `value` stands for an op, and the argument `name` may be one; or "".

    In `reduce` the root stands before the op; in mpi4py the op stands before the root.
    """
    meant = _op_meant_by(value)
    if meant and name == "op":
        return f"pass op={meant!r}"
    return f"pass the op by name, op={meant!r}" if meant and where == "reduce" else ""


def _op_meant_by(value: Any) -> str | None:
    """Return the op that a text, a function such as ``numpy.add`` or an op of mpi4py stands for."""
    if _is_op_of_mpi(value):
        return _OPS_OF_MPI.get(_name_of_mpi_op(value) or "")
    name = getattr(value, "__name__", getattr(value, "name", value))
    if not isinstance(name, str):
        return None
    name = name.lower()
    return name if name in (*_ON_FLOATS, *_BITWISE) else OPS_ELSEWHERE.get(name)


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
    if not _is_op_of_mpi(op):
        return op
    found = _name_of_mpi_op(op)
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


def _is_op_of_mpi(value: Any) -> bool:
    return type(value).__module__ == "mpi4py.MPI" and type(value).__name__ == "Op"


def _name_of_mpi_op(op: Any) -> str | None:
    """Return the key of `_OPS_OF_MPI` of an op of mpi4py; None for any other op."""
    mpi = sys.modules["mpi4py.MPI"]  # there is an op of mpi4py, so mpi4py is imported
    return next((name for name in _OPS_OF_MPI if getattr(mpi, name) == op), None)


def _reductions(dtype: np.dtype) -> tuple[str, ...]:
    """Return the ops that can reduce `dtype`; an empty tuple if it cannot even be sent."""
    return _REDUCTIONS.get(dtype, _ON_FLOATS if is_short(dtype) else ())


def check_movable(where: str, dtype: np.dtype) -> None:
    """Check that `dtype` can be sent: numbers or bools in this machine's byte order.

    Raises TypeError.
    """
    if not _reductions(dtype):
        native = dtype.newbyteorder("=")
        if _reductions(native):
            raise TypeError(
                f"{where}: dtype {dtype} is not in the byte order of this machine; "
                f"convert it to {native}"
            )
        raise TypeError(f"{where}: dtype {dtype} cannot be sent; pass numbers or bools")


OPS_ELSEWHERE = {
    **dict.fromkeys(("add", "+", "plus", "total"), "sum"),
    **dict.fromkeys(("avg", "average"), "mean"),
    **dict.fromkeys(("product", "multiply", "mul", "*"), "prod"),
    **dict.fromkeys(("minimum", "amin", "fmin"), "min"),
    **dict.fromkeys(("maximum", "amax", "fmax"), "max"),
    **dict.fromkeys(("band", "land", "bitwise_and", "logical_and", "all"), "and"),
    **dict.fromkeys(("bor", "lor", "bitwise_or", "logical_or", "any"), "or"),
    **dict.fromkeys(("bxor", "lxor", "bitwise_xor", "logical_xor"), "xor"),
}
"""Ops of MPI, NCCL, Horovod and torch, and functions of NumPy, with the names of these ops here."""


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
        raise ValueError(f"{where}: out is read-only; pass an array that can be written")


def same_memory(x: np.ndarray, out: np.ndarray) -> bool:
    """Whether `x` and `out` are the same elements in memory, in the same order."""
    return x is out or (
        x.shape == out.shape
        and x.strides == out.strides
        and x.__array_interface__["data"][0] == out.__array_interface__["data"][0]
    )


def check_overlap(where: str, x: np.ndarray, out: np.ndarray, in_place: bool) -> None:
    """Check that `x` and `out` share no memory.  Raises ValueError, as `overlap_error`."""
    if _share_memory(x, out):
        raise overlap_error(where, in_place)


def overlap_error(where: str, in_place: bool) -> ValueError:
    """Return the error for an `out` that shares memory with the input.

    `in_place`: the collective accepts the input itself as `out`.
    """
    itself = "the input itself as out (in place), or " if in_place else ""
    return ValueError(f"{where}: out overlaps the input; pass {itself}an array of its own")


def _share_memory(x: np.ndarray, out: np.ndarray) -> bool:
    most_work: Any = 100_000  # NumPy takes any number; its stub names two
    try:
        return np.shares_memory(x, out, max_work=most_work)
    except np.exceptions.TooHardError:
        return True


def check_root(where: str, root: int, size: int) -> None:
    """Check that `root`, a whole number, is a rank.  Raises ValueError."""
    if not 0 <= root < size:
        raise ValueError(f"{where}: root is {root}; ranks are 0 to {size - 1}")


def check_timeout(where: str, timeout_s: Any) -> None:
    """Check that `timeout_s` is a number of seconds above 0.  Raises ValueError."""
    if not isinstance(timeout_s, (int, float)) or not timeout_s > 0:
        raise ValueError(f"{where}: timeout_s is {timeout_s!r}; pass seconds, above 0")


def as_counts(where: str, counts: Any) -> tuple[int, ...]:
    """Return `counts` as ints.  Raises TypeError unless it has whole numbers alone."""
    try:
        return tuple(map(operator.index, counts))
    except TypeError:
        raise TypeError(
            f"{where}: counts={counts!r}; pass a list of whole numbers, one for each rank"
        ) from None


def as_dtype(where: str, dtype: Any) -> np.dtype[Any]:
    """Return a dtype, also of ml_dtypes by its name.  Raises TypeError if there is none."""
    try:
        return named_dtype(dtype) if isinstance(dtype, str) else np.dtype(dtype)
    except (TypeError, AttributeError):
        raise TypeError(
            f"{where}: unknown dtype {shown(dtype)}; pass one such as 'float32'"
        ) from None


def named_dtype(name: str) -> np.dtype[Any]:
    """Return the dtype of a name; dtypes of ml_dtypes are included."""
    try:
        return np.dtype(name)
    except TypeError:
        import ml_dtypes

        dtype: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
        return dtype


def array_text(array: np.ndarray, first: bool = True) -> str:
    """Describe dtype and shape: ``float32[3, 4]``, or ``float32[:, 4]`` if not `first`."""
    sizes = list(map(str, array.shape))
    if not first and sizes:
        sizes[0] = ":"
    return f"{array.dtype}[{', '.join(sizes)}]"


def as_out(where: str, out: Any) -> np.ndarray:
    """View `out` as a NumPy array without a copy.  Raises TypeError if it exposes no memory."""
    if isinstance(out, np.ma.MaskedArray):
        raise TypeError(f"{where}: out is a masked array; pass out.data")
    if isinstance(out, np.ndarray):
        return out
    if not hasattr(out, "__dlpack__"):
        raise TypeError(f"{where}: out is {shown(out)}; pass a NumPy array")
    try:
        return np.from_dlpack(out)
    except Exception as error:  # of another library: its text says what it wants
        kind = type(out).__name__
        raise TypeError(f"{where}: NumPy cannot write to out, a {kind}: {error}") from error
