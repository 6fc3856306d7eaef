"""Objects of CPython and NumPy as records, and compiled functions as objects of Python.

Compiled code that CPython calls reads the fields of its arguments where the headers of CPython and
NumPy declare them.  `knows_arrays` compares these declarations with real objects at start.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from ringreduce.compiler.memory import load
from ringreduce.compiler.records import Address, Int32, Record, Word, compilable, record

CONTIGUOUS_AND_ALIGNED, WRITABLE = 0x101, 0x400
"""``ndarraytypes.h``: NPY_ARRAY_C_CONTIGUOUS | NPY_ARRAY_ALIGNED, NPY_ARRAY_WRITEABLE."""
_TUPLE_HEAD_BYTES = tuple.__basicsize__
_METH_FASTCALL, _METH_KEYWORDS = 0x80, 0x02
_WORD_BYTES = 8


@record
class PyObject(Record):
    """``object.h``: the head of every object."""

    refcount: Word
    type: Address


@record
class PyVarObject(Record):
    """``object.h``: the head of tuples and lists."""

    refcount: Word
    type: Address
    size: Word


@record
class PyList(Record):
    """``cpython/listobject.h``: PyListObject."""

    refcount: Word
    type: Address
    size: Word
    # The address of the items' addresses.
    items: Address


@record
class PyArray(Record):
    """``ndarraytypes.h``: PyArrayObject_fields, unchanged since NumPy 1.7."""

    refcount: Word
    type: Address
    data: Address
    ndim: Int32
    # The address of the dimensions, `ndim` words.
    shape: Address
    # The address of the strides in bytes, `ndim` words.
    strides: Address
    # The object that owns the data; 0: the array itself.
    base: Address
    descr: Address
    # NPY_ARRAY flags, as in ``array.flags.num``.
    flags: Int32


@compilable
def tuple_items(items: Address) -> Address:
    return items + _TUPLE_HEAD_BYTES


@compilable
def tuple_item(items: Address, index: int) -> Address:
    return load(tuple_items(items) + index * _WORD_BYTES)


@compilable
def same_kind(a: PyArray, b: PyArray) -> bool:
    if a.type != b.type or a.descr != b.descr or a.ndim != b.ndim:
        return False
    for i in range(a.ndim):
        if load(a.shape + i * _WORD_BYTES) != load(b.shape + i * _WORD_BYTES):
            return False
    return True


class _Method(ctypes.Structure):
    """``methodobject.h``: PyMethodDef."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("function", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("doc", ctypes.c_char_p),
    )


_METHODS: dict[tuple[int, str], _Method] = {}
"""The method definitions that functions point to, by the address of the code and the name.

They are kept for as long as the process lives.
"""


def make_function(
    address: int, name: str, self: Any = None, keywords: bool = False, doc: str | None = None
) -> Callable[..., Any]:
    """Make a Python function of the C function at `address`.

    CPython calls ``object(self, arguments, count)``, with `keywords` ``object(self, arguments,
    count, names)``, by its vectorcall convention.
    """
    flags = _METH_FASTCALL | (_METH_KEYWORDS if keywords else 0)
    method = _METHODS.get((address, name))
    if method is None:
        method = _Method(name.encode(), address, flags, doc and doc.encode())
        _METHODS[address, name] = method
    kind = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.py_object, ctypes.c_void_p)
    make = kind(("PyCFunction_NewEx", ctypes.pythonapi))
    function: Callable[..., Any] = make(ctypes.addressof(method), self, None)
    return function


def knows_arrays() -> bool:
    """Whether this Python and this NumPy lay their objects out as the records here declare them.

    Builds of Python without the interpreter's lock are refused: compiled code relies on the lock.
    """
    locked = getattr(sys, "_is_gil_enabled", lambda: True)()
    return locked and _knows_arrays() and _knows_sequences()


def _knows_arrays() -> bool:
    array = np.zeros((3, 5), np.float32)[1:]
    fields = PyArray(id(array))
    writable = CONTIGUOUS_AND_ALIGNED | WRITABLE
    return (
        (fields.type, fields.data, fields.ndim) == (id(np.ndarray), array.ctypes.data, array.ndim)
        and fields.descr == id(array.dtype)
        and (load(fields.shape), load(fields.shape + _WORD_BYTES)) == array.shape
        and fields.flags == array.flags.num
        and fields.flags & writable == writable
    )


def _knows_sequences() -> bool:
    items = ["one", "two", "three"]
    pair = tuple(items)
    wanted = [id(item) for item in items]
    listed = PyList(id(items))
    heads = [(head.type, head.size) for head in (listed, PyVarObject(id(pair)))]
    return (
        heads == [(id(list), 3), (id(tuple), 3)]
        and PyObject(id(pair)).type == id(tuple)
        and [load(listed.items + i * _WORD_BYTES) for i in range(3)] == wanted
        and [tuple_item(id(pair), i) for i in range(3)] == wanted
    )
