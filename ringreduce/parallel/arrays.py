"""The arrays that callers pass, and the wide dtype in which their numbers are summed."""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterable, Mapping
from numbers import Number
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np

from ringreduce.errors import shown


def wide(dtype: Any) -> np.dtype[Any]:
    """Return the dtype to compute in: float64 or complex128; of longdouble, longdouble itself."""
    try:
        return np.promote_types(dtype, np.float64)
    except TypeError:  # an 8-bit float that NumPy cannot promote
        return np.dtype(np.float64)


def is_float(dtype: Any) -> bool:
    """Whether `dtype` is of floats or complex numbers, also of 16 and 8 bits."""
    return dtype.kind in "fc" or dtype.name.startswith(("bfloat", "float"))


def plain(where: str, name: object, value: Any) -> Any:
    """Return an array, a tensor or a number as an array; a TypeError calls it `name`."""
    said = type(value).__name__
    if isinstance(value, (Number, np.generic)):
        value = np.broadcast_to(np.asarray(value), ())
    elif hasattr(value, "detach"):
        try:
            value, bits = value.detach(), str(value.dtype) == "torch.bfloat16"
            value = value.view(sys.modules["torch"].int16) if bits else value
            value = value.numpy().view(ml_dtypes.bfloat16) if bits else value.numpy()
        except (TypeError, RuntimeError):
            raise TypeError(
                f"{where}: {name} is a {said} of {value.dtype} on {value.device}; pass an array"
            ) from None
    elif isinstance(value, np.ma.MaskedArray):
        raise TypeError(f"{where}: {name} is a masked array; fill it first, x.filled(...)")
    elif isinstance(value, (np.matrix, np.recarray, np.memmap)):
        value = np.asarray(value)  # methods of a subclass may do something else
    dtype = getattr(value, "dtype", None)
    if isinstance(dtype, np.dtype):
        if dtype.kind in "biu" or is_float(dtype):
            return value
        said = f"an array of {dtype.name}"
    raise TypeError(f"{where}: {name} is {said}; wanted an array of numbers")


def by_name(where: str, given: Any, *, changed: bool = False) -> dict[Any, Any]:
    """Return the arrays of a mapping, of several arrays, or of a lone one, by name or number.

    Raises TypeError unless all are arrays of numbers.  Arrays that are to be `changed` must have
    floats, and ValueError is raised for one that cannot be written.
    """
    if isinstance(given, Mapping):
        named = {name: (repr(name), value) for name, value in given.items()}
    elif hasattr(given, "dtype") or not isinstance(given, Iterable) or isinstance(given, str):
        named = {0: ("the argument", given)}
    else:
        named = {number: (f"array {number}", each) for number, each in enumerate(given)}
    found = {key: plain(where, name, value) for key, (name, value) in named.items()}
    for key, array in found.items():
        said = f"{where}: {named[key][0]} is"
        if changed and not is_float(array.dtype):
            raise TypeError(f"{said} {array.dtype}; wanted an array of floats")
        if changed and isinstance(array, np.ndarray) and not array.flags.writeable:
            raise ValueError(f"{said} read-only; pass an array that can be written")
    return found


def check_used(where: str, name: str, gradient: Any, like: Any) -> None:
    """Raise TypeError if a backward pass gave None for a parameter of the kind of `like`."""
    if gradient is None:
        raise TypeError(
            f"{where}: the gradient of {name!r} is None; pass zeros of "
            f"{like.dtype}{list(like.shape)} for a parameter that was not used"
        )


def scale(array: Any, factor: float, out: Any) -> None:
    """Write ``array * factor``, computed in the wide dtype, into `out`; no wide copy is kept."""
    if isinstance(array, np.ndarray):
        np.multiply(array, factor, out=out, dtype=wide(array.dtype), casting="unsafe")
    else:
        out[...] = array.astype(wide(array.dtype)) * factor


def check_comm(where: str, comm: Any) -> None:
    """Raise TypeError unless `comm` is a communicator, or stands in for one."""
    if not hasattr(comm, "rank"):
        raise TypeError(
            f"{where}: comm is {type(comm).__name__}; pass the communicator in this place"
        )


def whole(name: str, value: Any, least: int) -> int:
    """Return a whole number.  Raises TypeError or ValueError, which calls it `name`."""
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} is {shown(value)}; wanted a whole number") from None
    if number < least:
        raise ValueError(f"{name} is {value}; wanted at least {least}")
    return number


def module_of(array: Any) -> ModuleType:
    """Return the module of an array, NumPy or CuPy."""
    return sys.modules[type(array).__module__.partition(".")[0]]
