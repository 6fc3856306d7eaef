"""What a compiled function must know to be called by Python itself, with NumPy arrays."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np

from ringreduce.devices.blocks import WORD

TYPE, DATA, DIMENSIONS, SHAPE, DTYPE, FLAGS = 8, 16, 24, 32, 56, 64
"""Where in an array its type, the address of its data, its dimensions (32 bits), the address of its
shape, its dtype and its flags (32 bits) stand."""
CONTIGUOUS_AND_ALIGNED, WRITABLE = 0x101, 0x400
HALF = 0xFFFFFFFF
_FASTCALL = 0x80


class _Method(ctypes.Structure):
    """``PyMethodDef``"""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("function", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("doc", ctypes.c_char_p),
    )


_kept: list[_Method] = []
"""What functions point to, for as long as the process."""


def callable_at(address: int, name: str) -> Callable[..., int]:
    """The C function at an address, ``object(self, arguments, count)``, as a Python function."""
    method = _Method(name.encode(), address, _FASTCALL, None)
    kind = ctypes.PYFUNCTYPE(ctypes.py_object, *(ctypes.c_void_p,) * 3)
    make = kind(("PyCFunction_NewEx", ctypes.pythonapi))
    function: Callable[..., int] = make(ctypes.addressof(method), None, None)
    _kept.append(method)
    return function


def knows_arrays() -> bool:
    """Whether arrays of this NumPy, in this Python, are laid out as is said above."""
    array = np.zeros((3, 5), np.float32)[1:]

    def word(offset: int, address: int = id(array)) -> int:
        return ctypes.c_int64.from_address(address + offset).value

    shape = word(SHAPE)
    there = (word(TYPE), word(DATA), word(DIMENSIONS) & HALF, word(DTYPE))
    flags = word(FLAGS) & HALF
    return (
        there == (id(np.ndarray), array.ctypes.data, 2, id(array.dtype))
        and (word(0, shape), word(WORD, shape)) == array.shape
        and flags & (CONTIGUOUS_AND_ALIGNED | WRITABLE) == CONTIGUOUS_AND_ALIGNED | WRITABLE
        and flags == array.flags.num
    )
