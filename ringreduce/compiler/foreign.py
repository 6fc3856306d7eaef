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
    """Write the DLTensor of an object to `into`; 0, or -1 if an exception was raised.

    `function` is ``dltensor_from_py_object_no_sync`` of DLPack's exchange API.  Uncompiled, the
    exception is caught here.
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
    """A new reference to a writable array over memory: ``PyArray_NewFromDescr``; 0 if it raised.

    `kind` is the type of arrays.  The array takes over a reference to `dtype`.
    """
    made: int = _NewArray(function)(kind, dtype, ndim, shape, strides, data, WRITABLE, None)
    return made


def set_base(function: Address, array: Address, base: Address) -> int:
    """Let an array take over a reference to the owner of its memory: ``PyArray_SetBaseObject``.

    0, or -1 if an exception was raised.
    """
    result: int = _SetBase(function)(array, base)
    return result
