"""Functions of C that NumPy and torch give by their addresses.

Compiled code calls the C functions themselves.  Python runs the bodies below.
"""

from __future__ import annotations

import ctypes

from ringreduce.compiler.pyobjects import WRITABLE
from ringreduce.compiler.records import Address

_Describe = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
_NewArray = ctypes.PYFUNCTYPE(
    ctypes.c_void_p,
    *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p),
    *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p),
)
_SetBase = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)


def describe(function: Address, value: Address, into: Address) -> int:
    """Write the DLTensor of an object to `into`; return 0, or -1 if that raised.

    `function` is ``dltensor_from_py_object_no_sync`` of DLPack's exchange API.
    """
    try:
        result: int = _Describe(function)(value, into)
    except Exception:  # of another library
        return -1
    return result


def new_array(
    function: Address,
    kind: Address,
    dtype: Address,
    ndim: int,
    shape: Address,
    strides: Address,
    data: Address,
) -> Address:
    """Return a new writable array, of type `kind`, over memory: ``PyArray_NewFromDescr``.

    Returns 0 if that raised.  The array takes over a reference to `dtype`.
    """
    made: int = _NewArray(function)(kind, dtype, ndim, shape, strides, data, WRITABLE, None)
    return made


def set_base(function: Address, array: Address, base: Address) -> int:
    """Give an array a reference to its memory's owner: ``PyArray_SetBaseObject``; -1: raised."""
    result: int = _SetBase(function)(array, base)
    return result
