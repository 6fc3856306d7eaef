"""Records: one class declares a layout of memory for Python, mypy and compiled code.

    @record
    class Slot(Record):
        sequence: Word
        header: Header

`Slot(address)` is the record at that address, in Python and in compiled code.  To read or assign a
field reads or writes that memory.  `compilable` marks the functions that compiled code may call.
Both need no compiler: `ringreduce.compiler.intrinsics` registers them just before it compiles.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_args, get_type_hints

import numpy as np

Word = Annotated[int, ctypes.c_int64]
Int32 = Annotated[int, ctypes.c_int32]
Address = Word

Function = TypeVar("Function", bound=Callable[..., Any])
RecordType = TypeVar("RecordType", bound="type[Record]")

MARKED: list[Callable[..., Any]] = []
"""Functions that `compilable` has marked and no compiler knows yet."""
DECLARED: list[type[Record]] = []


def compilable(function: Function) -> Function:
    """Let compiled code call a function; Python calls it as before."""
    MARKED.append(function)
    return function


if TYPE_CHECKING:
    # `ctypes.Structure` has `__getattr__`, behind which mypy does not see a misspelt field.
    class Record:
        def __init__(self, address: int) -> None: ...

else:

    class Record(ctypes.Structure):
        """A C struct.  Its fields are its annotations, in order, aligned as C aligns them.

        Only a class's own annotations count: a record inherits from `Record` alone.
        """

        def __new__(cls, address: int) -> Record:
            return cls.from_address(address)

        def __init__(self, address: int) -> None:
            pass


def record(cls: RecordType) -> RecordType:
    """Make the fields of a record out of the annotations of its class."""
    structure: Any = cls
    assert structure.__bases__ == (Record,), f"{cls.__name__} inherits from another record"
    structure._fields_ = [
        (name, hint if isinstance(hint, type) else get_args(hint)[1])
        for name, hint in get_type_hints(cls, include_extras=True).items()
        if name in cls.__annotations__
    ]
    assert np.dtype(structure).isalignedstruct
    DECLARED.append(cls)
    return cls


def size_of(cls: type[Record]) -> int:
    structure: Any = cls
    return ctypes.sizeof(structure)


def offset_of(cls: type[Record], field: str) -> int:
    offset: int = getattr(cls, field).offset
    return offset


def address_of(record: Record) -> Address:
    structure: Any = record
    return ctypes.addressof(structure)


def array_address(array: np.ndarray) -> Address:
    address: int = array.__array_interface__["data"][0]
    return address


def load_acquire(record: Record, field: str) -> int:
    """Read a field; the code that follows sees all that its writer wrote before `store_release`."""
    value: int = getattr(record, field)
    return value


def store_release(record: Record, field: str, value: int) -> None:
    """Write a field, after all that this thread read and wrote before."""
    setattr(record, field, value)


def compare_and_swap(record: Record, field: str, expected: int, value: int) -> bool:
    """Replace `expected` by `value` in a field at once; return False if another value is there.

    After a swap the code that follows sees all that the writer of `expected` wrote before.  Only
    compiled code is atomic: uncompiled, no other thread may access the field meanwhile.
    """
    if getattr(record, field) != expected:
        return False
    setattr(record, field, value)
    return True


def fetch_and_add(record: Record, field: str, value: int) -> int:
    """Add `value` to a field at once, and return the field's old value.

    A thread that sees the new value sees all that this thread wrote before.  Atomic as
    `compare_and_swap`.
    """
    before: int = getattr(record, field)
    setattr(record, field, before + value)
    return before
