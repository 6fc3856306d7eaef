"""Buffers in pieces: arrays of a list, read and written where they lie as if they lay end to end.

Whoever takes bytes of such a buffer takes a piece, or what there is of it, where it lies.  Pieces
of few bytes are brought together first, or dealt out afterwards, in memory that stays near.
"""

from __future__ import annotations

from typing import Any

from ringreduce.compiler.memory import copy, load, store
from ringreduce.compiler.records import compilable
from ringreduce.shm.layout import (
    BEGIN,
    FEW_BYTES,
    IN_PIECES,
    PIECE,
    PLACES,
    SIZES,
    TOGETHER_BYTES,
    WORD,
)


@compilable
def _seek(pieces: Any, offset: Any) -> Any:
    """Go to the piece that has the byte at an offset; how much of it there is from there on."""
    piece, begin = load(pieces + PIECE * WORD), load(pieces + BEGIN * WORD)
    if offset < begin:
        piece, begin = 0, 0
    sizes = load(pieces + SIZES * WORD)
    size = load(sizes + piece * WORD)
    while offset >= begin + size:
        begin += size
        piece += 1
        size = load(sizes + piece * WORD)
    store(pieces + PIECE * WORD, piece)
    store(pieces + BEGIN * WORD, begin)
    return begin + size - offset


@compilable
def _place(pieces: Any, offset: Any) -> Any:
    """Where the byte at an offset lies, in the piece that `_seek` has gone to."""
    begin = load(pieces + PLACES * WORD) + load(pieces + PIECE * WORD) * WORD
    return load(begin) + offset - load(pieces + BEGIN * WORD)


@compilable
def at_once(register: Any, offset: Any, most: Any) -> Any:
    """How many bytes of a buffer to take at once, from an offset on: no more than `most`."""
    if load(register + WORD) != IN_PIECES:
        return most
    there = _seek(load(register), offset)
    if there < FEW_BYTES:
        return min(most, TOGETHER_BYTES)
    return min(most, there)


@compilable
def room(register: Any, offset: Any, nbytes: Any, memory: Any) -> Any:
    """Where so many bytes of a buffer lie, if they do so end to end, else `memory`.

    To be written to, before they are dealt out.
    """
    pieces = load(register)
    if load(register + WORD) != IN_PIECES:
        return pieces + offset
    return _place(pieces, offset) if _seek(pieces, offset) >= nbytes else memory


@compilable
def _move(register: Any, offset: Any, nbytes: Any, memory: Any, together: Any) -> None:
    """Copy a buffer's pieces to `memory`, where they lie end to end, or from there."""
    pieces = load(register)
    length, place = _seek(pieces, offset), _place(pieces, offset)
    places = load(pieces + PLACES * WORD) + load(pieces + PIECE * WORD) * WORD
    sizes = load(pieces + SIZES * WORD) + load(pieces + PIECE * WORD) * WORD
    while True:
        length = min(length, nbytes)
        if together:
            copy(memory, place, length)
        else:
            copy(place, memory, length)
        nbytes -= length
        if nbytes == 0:
            break
        memory, places, sizes = memory + length, places + WORD, sizes + WORD
        place, length = load(places), load(sizes)


@compilable
def brought(register: Any, offset: Any, nbytes: Any, memory: Any) -> Any:
    """Where to read so many bytes of a buffer: at `memory`, if they were in several pieces."""
    place = room(register, offset, nbytes, memory)
    if place == memory:
        _move(register, offset, nbytes, memory, True)
    return place


@compilable
def deal_out(register: Any, offset: Any, nbytes: Any, memory: Any, place: Any) -> None:
    """The bytes are written to where there was `room`: to the pieces, if that was `memory`."""
    if place == memory:
        _move(register, offset, nbytes, memory, False)
