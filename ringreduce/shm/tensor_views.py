"""NumPy arrays over the memory of torch's tensors, made by compiled code.

``Tensor.numpy()`` takes most of the time by which a short call on a tensor is slower than one on an
array, and torch refuses to resize the tensor's storage after it.  torch has a function of C that
describes a tensor's memory, in DLPack's exchange API, and NumPy has one that makes an array of it.
Tensors that these two cannot view correctly, and tensors of versions of torch without that API, are
viewed by Python.
"""

from __future__ import annotations

import ctypes
import importlib
import sys
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from ringreduce.compiler.interpreter import (
    attribute,
    call_object,
    describe,
    forget_exception,
    keep_object,
    let_go_of_object,
    new_array,
    set_base,
)
from ringreduce.compiler.memory import load, store
from ringreduce.compiler.pyobjects import PyArray, PyObject, tuple_item
from ringreduce.compiler.records import (
    Address,
    Int32,
    Record,
    Word,
    address_of,
    compilable,
    offset_of,
    record,
    size_of,
)
from ringreduce.shm import functions
from ringreduce.shm.layout import WORD

_API = "__dlpack_c_exchange_api__"
_API_NAME, _API_MAJOR = b"dlpack_exchange_api", 1
_DESCRIBE_AT = 5
"""Words of ``DLPackExchangeAPI`` before ``dltensor_from_py_object_no_sync``: two of the head."""
_NEW_ARRAY_AT, _SET_BASE_AT = 94, 282
"""Places of PyArray_NewFromDescr and PyArray_SetBaseObject in NumPy's table, since NumPy 1.7."""
_HOST, _PINNED = 1, 3
"""DLPack's device types of memory that the processor reads."""
_MOST_DIMENSIONS = 8
_CODES = {"i": 0, "u": 1, "f": 2, "V": 4, "b": 6}
"""DLPack's code of each of NumPy's kinds of dtypes.  The kind "V" is bfloat16.

Complex numbers are left out: the description of a conjugated tensor is that of its memory.
"""
_ONE_LANE = 1 << 16
_DTYPES = (
    *("f4", "f8", "f2", ml_dtypes.bfloat16, "?"),
    *("i8", "i4", "i2", "i1", "u1", "u2", "u4", "u8"),
)


@record
class TensorDescription(Record):
    """``dlpack.h``: DLTensor."""

    data: Address
    device: Int32
    device_number: Int32
    ndim: Int32
    # The dtype: its code, 8 bits; its bits, 8 bits; its lanes, 16 bits.
    kind: Int32
    # The address of the dimensions, `ndim` words.
    shape: Address
    # The address of the strides in elements, `ndim` words.
    strides: Address
    # Bytes between `data` and the first element.
    offset: Word


@record
class TensorViews(Record):
    # The type of tensors; 0: they are viewed by Python.
    type: Address
    # The function of C that describes a tensor.
    describe: Address
    # ``Tensor.is_neg``: whether the elements are those in memory, negated.
    is_neg: Address
    name_requires_grad: Address
    false: Address
    none: Address
    array_type: Address
    new_array: Address
    set_base: Address
    # The address of pairs of words: `TensorDescription.kind`, and the address of the dtype.
    dtypes: Address
    dtype_count: Word
    # Scratch: the address of a `TensorDescription`.
    described: Address
    # Scratch: the address of strides in bytes.
    strides: Address
    # Scratch: the argument of the Python function that is called.
    argument: Word


_ARGUMENT = offset_of(TensorViews, "argument")


@compilable
def _is_false(views: TensorViews, answer: Address) -> bool:
    """Whether `answer` is False; drops the reference to it."""
    if answer == 0:
        forget_exception()
        return False
    let_go_of_object(answer)
    return answer == views.false


@compilable
def _dtype_of(views: TensorViews, kind: int) -> Address:
    for i in range(views.dtype_count):
        if load(views.dtypes + 2 * i * WORD) == kind:
            return load(views.dtypes + (2 * i + 1) * WORD)
    return 0


@compilable
def view_tensor(views: TensorViews, tensor: Address) -> Address:
    """A new reference to an array over the memory of a tensor; 0: Python has to view it."""
    if not _is_false(views, attribute(tensor, views.name_requires_grad)):
        return 0
    views.argument = tensor
    if not _is_false(views, call_object(views.is_neg, address_of(views) + _ARGUMENT, 1, 0)):
        return 0
    if describe(views.describe, tensor, views.described) != 0:
        forget_exception()
        return 0
    found = TensorDescription(views.described)
    is_here = found.device == _HOST or found.device == _PINNED
    dtype = _dtype_of(views, found.kind)
    if not is_here or dtype == 0 or found.data == 0 or found.ndim > _MOST_DIMENSIONS:
        return 0
    itemsize = (found.kind >> 8 & 0xFF) >> 3
    for i in range(found.ndim):
        store(views.strides + i * WORD, load(found.strides + i * WORD) * itemsize)
    keep_object(dtype)
    data = found.data + found.offset
    array = new_array(
        views.new_array, views.array_type, dtype, found.ndim, found.shape, views.strides, data
    )
    if array == 0:
        forget_exception()
        return 0
    keep_object(tensor)
    if set_base(views.set_base, array, tensor) != 0:
        forget_exception()
        let_go_of_object(array)
        return 0
    return array


def tensor_view(me: Address, args: Address, _: int) -> Address:
    """``tensor_view(x)``, called by CPython: an array over the memory of a tensor, or None.

    `me` is a tuple that begins with the memory of a `TensorViews`.
    """
    views, value = TensorViews(PyArray(tuple_item(me, 0)).data), load(args)
    array = view_tensor(views, value) if PyObject(value).type == views.type else 0
    if array == 0:
        array = views.none
        keep_object(array)
    return array


def compiled_viewer() -> Callable[[Any], np.ndarray | None] | None:
    """Return a function that views tensors; None where there is none.

    The function returns None for all that Python has to view.
    """
    tensors = Tensors()
    tensors.look()
    if not tensors.views.type:
        return None
    return functions.python_function("tensor_view", (tensors.memory, tensors))


class Tensors:
    """The memory of a `TensorViews`, which is filled in once torch is there."""

    def __init__(self) -> None:
        head = size_of(TensorViews) + size_of(TensorDescription) + _MOST_DIMENSIONS * WORD
        self.memory = np.zeros(head // WORD + 2 * len(_DTYPES), np.int64)
        address = self.memory.ctypes.data
        self.views = views = TensorViews(address)
        views.described = address + size_of(TensorViews)
        views.strides = views.described + size_of(TensorDescription)
        views.dtypes = address + head
        self._kept: list[Any] = []
        """Keeps alive the objects with addresses in the views."""
        self._has_looked = False

    def look(self) -> None:
        """Let compiled code view tensors, once the program has imported torch."""
        tensor = None if self._has_looked else getattr(sys.modules.get("torch"), "Tensor", None)
        if tensor is None:
            return
        self._has_looked = True
        function = _describe_of(tensor)
        if function is not None:
            self._fill(tensor, function)

    def _fill(self, tensor: Any, function: int) -> None:
        dtypes = [np.dtype(each) for each in _DTYPES]
        named = {
            "is_neg": tensor.is_neg,
            "name_requires_grad": sys.intern("requires_grad"),
            "false": False,
            "none": None,
            "array_type": np.ndarray,
        }
        self._kept = [tensor, *named.values(), *dtypes]
        views = self.views
        for field, value in named.items():
            setattr(views, field, id(value))
        pairs = [(_kind(dtype), id(dtype)) for dtype in dtypes]
        self.memory[-2 * len(pairs) :] = np.ravel(pairs)
        views.dtype_count, views.describe = len(pairs), function
        table = _pointer_of(_array_api(), None)
        views.new_array = load(table + _NEW_ARRAY_AT * WORD)
        views.set_base = load(table + _SET_BASE_AT * WORD)
        views.type = id(tensor)


def _kind(dtype: np.dtype[Any]) -> int:
    return _CODES[dtype.kind] | dtype.itemsize * 8 << 8 | _ONE_LANE


def _describe_of(tensor: Any) -> int | None:
    """Return the address of the function that describes tensors; None if there is none."""
    capsule = getattr(tensor, _API, None)
    if type(capsule).__name__ != "PyCapsule":
        return None
    try:
        api = _pointer_of(capsule, _API_NAME)
    except ValueError:  # a capsule of another name
        return None
    major = load(api) & 0xFFFFFFFF
    if major != _API_MAJOR:
        return None
    return load(api + _DESCRIBE_AT * WORD) or None


def _array_api() -> Any:
    return importlib.import_module("numpy._core._multiarray_umath")._ARRAY_API


def _pointer_of(capsule: Any, name: bytes | None) -> int:
    kind = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)
    pointer: int = kind(("PyCapsule_GetPointer", ctypes.pythonapi))(capsule, name)
    return pointer
