"""How Python gets into the machine: a function of CPython's own calling convention, compiled.

A compiled function that Numba wraps asks of each argument anew what it is, and takes 0.3 us for it;
arrays take more.  This one is called by CPython itself, as those of C extensions are, and takes the
arrays' addresses from where NumPy's C API has them (``PyArrayObject``, the same since NumPy 1.7).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np

from ringreduce.devices.blocks import ARRAY_BYTES, UNUSUAL, WORD
from ringreduce.devices.compilable import compilable
from ringreduce.devices.machine import run
from ringreduce.devices.native import (
    enter_interpreter,
    integer,
    leave_interpreter,
    load,
    number_of,
)

_TYPE, _DATA, _DIMENSIONS, _SHAPE, _DTYPE, _FLAGS = 8, 16, 24, 32, 56, 64
"""Where in an array its type, the address of its data, its dimensions (32 bits), the address of its
shape, its dtype and its flags (32 bits) stand."""
_CONTIGUOUS_AND_ALIGNED, _WRITABLE = 0x101, 0x400
_HALF = 0xFFFFFFFF
_FASTCALL = 0x80


@compilable
def _fits(x: Any, out: Any, nbytes: Any) -> bool:
    """Whether the result of `x` can go to `out` with no more to be asked."""
    whole, wanted = _CONTIGUOUS_AND_ALIGNED, _CONTIGUOUS_AND_ALIGNED | _WRITABLE
    if load(out + _TYPE) != load(x + _TYPE) or load(out + _FLAGS) & wanted != wanted:
        return False
    if out == x:
        return True
    if load(x + _FLAGS) & whole != whole or load(out + _DTYPE) != load(x + _DTYPE):
        return False
    dimensions = load(x + _DIMENSIONS) & _HALF
    if load(out + _DIMENSIONS) & _HALF != dimensions:
        return False
    for i in range(dimensions):
        if load(load(out + _SHAPE) + i * WORD) != load(load(x + _SHAPE) + i * WORD):
            return False
    apart: bool = abs(load(out + _DATA) - load(x + _DATA)) >= nbytes
    return apart


def enter(_: Any, arguments: Any, count: Any) -> Any:
    """``enter(program, number[, x, out])``: `machine.run`, or UNUSUAL.

    `x` is an array as the program is made for; `out` is whatever the caller has passed for it.
    """
    program, number = number_of(load(arguments)), number_of(load(arguments + WORD))
    source, target = 0, 0
    if count > 2:
        x, out = load(arguments + 2 * WORD), load(arguments + 3 * WORD)
        if not _fits(x, out, load(program + ARRAY_BYTES * WORD)):
            return integer(UNUSUAL)
        source, target = load(x + _DATA), load(out + _DATA)
    state = leave_interpreter()
    came = run(program, number, source, target)
    enter_interpreter(state)
    return integer(came)


class _Method(ctypes.Structure):
    """``PyMethodDef``"""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("function", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("doc", ctypes.c_char_p),
    )


def opened(address: int) -> Callable[..., int]:
    """`enter`, compiled to that address, as a Python function."""
    method = _Method(b"enter", address, _FASTCALL, None)
    kind = ctypes.PYFUNCTYPE(ctypes.py_object, *(ctypes.c_void_p,) * 3)
    make = kind(("PyCFunction_NewEx", ctypes.pythonapi))
    function: Callable[..., int] = make(ctypes.addressof(method), None, None)
    _kept.append(method)
    return function


_kept: list[_Method] = []
"""What functions point to, for as long as the process."""


def knows_arrays() -> bool:
    """Whether arrays of this NumPy, in this Python, are laid out as `enter` takes them to be."""
    array = np.zeros((3, 5), np.float32)[1:]

    def word(offset: int, address: int = id(array)) -> int:
        return ctypes.c_int64.from_address(address + offset).value

    shape = word(_SHAPE)
    there = (word(_TYPE), word(_DATA), word(_DIMENSIONS) & _HALF, word(_DTYPE))
    flags = word(_FLAGS) & _HALF
    return (
        there == (id(np.ndarray), array.ctypes.data, 2, id(array.dtype))
        and (word(0, shape), word(WORD, shape)) == array.shape
        and flags & (_CONTIGUOUS_AND_ALIGNED | _WRITABLE) == _CONTIGUOUS_AND_ALIGNED | _WRITABLE
        and flags == array.flags.num
    )
