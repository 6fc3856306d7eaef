"""What a compiled function must know to be called by Python itself, with NumPy arrays."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Sequence
from itertools import chain
from math import prod
from typing import Any

import numpy as np

from ringreduce.shm.layout import PIECES_WORDS, PLACES, SIZES, WORD

TYPE, DATA, DIMENSIONS, SHAPE, DTYPE, FLAGS = 8, 16, 24, 32, 56, 64
"""Where in an array its type, the address of its data, its dimensions (32 bits), the address of its
shape, its dtype and its flags (32 bits) stand."""
CONTIGUOUS_AND_ALIGNED, WRITABLE = 0x101, 0x400
HALF = 0xFFFFFFFF
LENGTH, ITEMS_OF_LIST, ITEMS_OF_TUPLE = 16, 24, tuple.__basicsize__
"""Where in a list and a tuple its length stands, the address of its items, and its items."""
_FASTCALL, _WITH_NAMES = 0x80, 0x02

# --- a gate, in words: see `shm.fast_entry` -------------------------------------------------------

OPEN, BUSY, OWNER, NEXT, ACCOUNTED, TAKEN_OVER, LOST = range(7)
REMEMBER, BEGUN, USUAL_WAY, EMPTY, OUT, OP, DEFAULT_OP, NONE, ARRAY, ARGUMENTS = range(7, 17)
"""Whether calls may pass; whether one is under way, and of which thread; the number of the next;
whether all that have passed are accounted for; whether what finishes a call has got so far as to
answer for it, and whether nothing did.  Then Python objects: what remembers a signature, and a call
that waits; the method that does it as usual; ``numpy.empty``; ``"out"``, ``"op"``, ``"sum"``
and None; the type of arrays; and three words for the arguments of what is called."""
GATE_WORDS = 20
ENTRIES, MOST_DIMENSIONS = 512, 4
ENTRY_PROGRAM, ENTRY_DTYPE, ENTRY_DIMENSIONS, ENTRY_SHAPE, ENTRY_OP = 0, 1, 2, 3, 7
ENTRY_SIGNATURE, ENTRY_LIKE, ENTRY_SHAPE_TUPLE, ENTRY_FINISH, ENTRY_FLOW = range(8, 13)
"""Then for each of so many calls: its program, or 0; what its array is like; its op; its signature;
an array as the result is, and that one's shape; what finishes a call that waits, and its flow."""
ENTRY_WORDS = 13

# --- a table: what `door.find` knows of a list, in words -----------------------------------------

LIST_TYPE, TUPLE_TYPE, ARRAY_TYPE, ARRAY_DTYPE, MEMBERS, TURNS, AFTER, AREAS = range(8)
"""The types of lists, tuples and arrays, and the arrays' dtype; how many arrays, and in how many
turns they are reduced; a register; memory for `areas.overlap`, two areas for each array, twice."""
TABLE_WORDS, AREA_BYTES = 8, 2 * WORD
TURN_MEMBERS, TURN_BYTES, LAYOUT, PULLED, SOURCE, TARGET = range(6)
SOURCES, TARGETS = 6, 6 + PIECES_WORDS
"""Then for each turn: how many arrays it has, and their bytes; where their layouts stand; whether
peers read them where they lie, which has to be end to end then; where to read and where to leave
the result, as `machine.run` has it; and the arrays and the results as pieces."""
TURN_WORDS = 6 + 2 * PIECES_WORDS
"""Then for each array its layout: its dimensions, its bytes, its shape."""
SCATTERED, MOVED = 1, 2
"""Arrays of a turn that do not lie end to end, and that do not lie where they did."""


class Table:
    """What `door.find` has to know of lists of arrays of one dtype.

    `turns` are their shapes, of those that are reduced together; if these are so many bytes
    together, peers pull them.
    """

    def __init__(
        self,
        turns: Sequence[Sequence[tuple[int, ...]]],
        dtype: np.dtype[Any],
        pulled_from: int | None,
    ) -> None:
        shapes = [*chain.from_iterable(turns)]
        self._sizes = np.array([prod(shape) for shape in shapes], np.int64) * dtype.itemsize
        self._places = np.zeros((2, len(shapes)), np.int64)
        self._areas = np.empty((2, 2 * len(shapes), AREA_BYTES // WORD), np.int64)
        self._dtype = dtype
        layouts_at = TABLE_WORDS + TURN_WORDS * len(turns)
        words = np.zeros(layouts_at + sum(2 + len(shape) for shape in shapes), np.int64)
        self._words = words
        words[[LIST_TYPE, TUPLE_TYPE, ARRAY_TYPE]] = id(list), id(tuple), id(np.ndarray)
        words[[ARRAY_DTYPE, MEMBERS, TURNS]] = id(dtype), len(shapes), len(turns)
        words[AREAS] = self._areas.ctypes.data
        layouts = zip(shapes, self._sizes.tolist(), strict=True)
        words[layouts_at:] = [word for shape, n in layouts for word in (len(shape), n, *shape)]
        self.address: int = words.ctypes.data
        self.turns: list[int] = []
        """Their addresses."""
        first = 0
        for members in turns:
            begin = TABLE_WORDS + TURN_WORDS * len(self.turns)
            turn, last = words[begin : begin + TURN_WORDS], first + len(members)
            turn[[TURN_MEMBERS, TURN_BYTES]] = len(members), self._sizes[first:last].sum()
            turn[LAYOUT] = self.address + layouts_at * WORD
            turn[PULLED] = pulled_from is not None and turn[TURN_BYTES] >= pulled_from
            for pieces, places in zip((SOURCES, TARGETS), self._places, strict=True):
                turn[pieces + PLACES] = places[first:].ctypes.data
                turn[pieces + SIZES] = self._sizes[first:].ctypes.data
            layouts_at += sum(2 + len(shape) for shape in members)
            self.turns.append(turn.ctypes.data)
            first = last


class _Method(ctypes.Structure):
    """``PyMethodDef``"""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("function", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("doc", ctypes.c_char_p),
    )


_METHODS: dict[int, _Method] = {}
"""What functions point to, for as long as the process, by the addresses of their code."""


def callable_at(
    address: int, name: str, me: Any = None, names: bool = False, doc: str | None = None
) -> Callable[..., Any]:
    """The C function at an address, ``object(me, arguments, count[, names])``, as Python's."""
    flags = _FASTCALL | (_WITH_NAMES if names else 0)
    if address not in _METHODS:
        _METHODS[address] = _Method(name.encode(), address, flags, doc and doc.encode())
    kind = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.py_object, ctypes.c_void_p)
    make = kind(("PyCFunction_NewEx", ctypes.pythonapi))
    function: Callable[..., Any] = make(ctypes.addressof(_METHODS[address]), me, None)
    return function


def knows_arrays() -> bool:
    """Whether arrays and lists are laid out, in this NumPy and Python, as is said above."""
    array = np.zeros((3, 5), np.float32)[1:]

    def word(offset: int, address: int = id(array)) -> int:
        return ctypes.c_int64.from_address(address + offset).value

    shape = word(SHAPE)
    there = (word(TYPE), word(DATA), word(DIMENSIONS) & HALF, word(DTYPE))
    flags = word(FLAGS) & HALF
    locked = getattr(sys, "_is_gil_enabled", lambda: True)()
    return (
        locked
        and there == (id(np.ndarray), array.ctypes.data, 2, id(array.dtype))
        and (word(0, shape), word(WORD, shape)) == array.shape
        and flags & (CONTIGUOUS_AND_ALIGNED | WRITABLE) == CONTIGUOUS_AND_ALIGNED | WRITABLE
        and flags == array.flags.num
        and _knows_sequences(word)
    )


def _knows_sequences(word: Callable[[int, int], int]) -> bool:
    items = ["one", "two", "three"]
    wanted = [id(item) for item in items]
    pair = tuple(items)
    return (
        (word(TYPE, id(items)), word(TYPE, id(pair))) == (id(list), id(tuple))
        and (word(LENGTH, id(items)), word(LENGTH, id(pair))) == (3, 3)
        and [word(i * WORD, word(ITEMS_OF_LIST, id(items))) for i in range(3)] == wanted
        and [word(ITEMS_OF_TUPLE + i * WORD, id(pair)) for i in range(3)] == wanted
    )
