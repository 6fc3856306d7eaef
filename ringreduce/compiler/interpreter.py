"""Functions of C by their addresses: CPython's C API, and those that NumPy and torch give.

Compiled code calls the C functions themselves.  Python runs the bodies below.
"""

from __future__ import annotations

import ctypes
import threading
from typing import Any

from ringreduce.compiler.pyobjects import WRITABLE
from ringreduce.compiler.records import Address


def number_of(integer: Address) -> int:
    """The value of the Python int at an address: ``PyLong_AsLongLong``."""
    value: int = _object_at(integer)
    return value


def integer(value: int) -> Address:
    """The address of a new reference to a Python int: ``PyLong_FromLongLong``."""
    return _new_reference(value)


def number_within(integer: Address, overflow: Address) -> int:
    """Return a Python int, -1 above 64 bits, by ``PyLong_AsLongLongAndOverflow``."""
    value: int = _object_at(integer)
    return value if -(1 << 63) <= value < 1 << 63 else -1


def tuple_of(sequence: Address) -> Address:
    """A new reference to a tuple of a list's or tuple's items: ``PySequence_Tuple``."""
    return _new_reference(tuple(_object_at(sequence)))


def new_list(size: int) -> Address:
    """A new reference to a list whose items are yet to be set: ``PyList_New``; 0 if it raised."""
    return _new_reference([None] * size)


def set_item(items: Address, index: int, value: Address) -> None:
    """Set an item of a new list, which takes over a reference to `value`: ``PyList_SetItem``."""
    _object_at(items)[index] = _object_at(value)
    let_go_of_object(value)


def leave_interpreter() -> Address:
    """Release the interpreter's lock, if compiled (``PyEval_SaveThread``); return its state."""
    return 0


def enter_interpreter(state: Address) -> None:
    """Acquire the interpreter's lock again: ``PyEval_RestoreThread``."""


def call_object(function: Address, arguments: Address, count: int, names: Address) -> Address:
    """Call a Python function by ``PyObject_Vectorcall``; return a new reference, 0 if it raised.

    Uncompiled, the exception is raised here.
    """
    given = [_object_at(each) for each in _words(arguments, count)]
    keywords = _object_at(names) if names else ()
    values = (_object_at(each) for each in _words(arguments + 8 * count, len(keywords)))
    return _new_reference(_object_at(function)(*given, **dict(zip(keywords, values, strict=True))))


def attribute(value: Address, name: Address) -> Address:
    """Return a new reference to an attribute by ``PyObject_GetAttr``; 0 if compiled and raised."""
    return _new_reference(getattr(_object_at(value), _object_at(name)))


def forget_exception() -> None:
    """Forget an exception of compiled code (``PyErr_Clear``); in Python exceptions propagate."""


def keep_object(address: Address) -> None:
    """Add a reference to an object: ``Py_IncRef``."""
    ctypes.pythonapi.Py_IncRef(ctypes.c_void_p(address))


def let_go_of_object(address: Address) -> None:
    """Drop a reference to an object: ``Py_DecRef``."""
    ctypes.pythonapi.Py_DecRef(ctypes.c_void_p(address))


def this_thread() -> int:
    """The identity of the calling thread: ``PyThread_get_thread_ident``."""
    return threading.get_ident()


def _words(address: Address, count: int) -> list[int]:
    return list((ctypes.c_int64 * count).from_address(address)) if count else []


def _object_at(address: Address) -> Any:
    return ctypes.cast(address, ctypes.py_object).value


def _new_reference(value: Any) -> Address:
    keep_object(id(value))
    return id(value)


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
    """Let an array take over a reference to the owner of its memory: ``PyArray_SetBaseObject``.

    Returns 0, or -1 if that raised.
    """
    result: int = _SetBase(function)(array, base)
    return result
