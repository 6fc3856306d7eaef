"""Iovecs: buffers of several pieces, which are read and written in place as one buffer.

The pieces are the arrays of a list.  Each access uses one piece, or the rest of one.  Small pieces
are gathered in scratch memory that stays in the cache, or scattered from there.
"""

from __future__ import annotations

from ringreduce.compiler.memory import copy, load
from ringreduce.compiler.records import Address, compilable
from ringreduce.shm.layout import GATHER_BYTES, IOVEC, SMALL_PIECE_BYTES, WORD, Buffer, Iovec


@compilable
def seek(iovec: Iovec, offset: int) -> int:
    """Find the piece with the byte at `offset`; return the bytes of the piece from there on."""
    piece, begin = iovec.piece, iovec.begin
    if offset < begin:
        piece, begin = 0, 0
    size = load(iovec.sizes + piece * WORD)
    while offset >= begin + size:
        begin += size
        piece += 1
        size = load(iovec.sizes + piece * WORD)
    iovec.piece, iovec.begin = piece, begin
    return begin + size - offset


@compilable
def address_in(iovec: Iovec, offset: int) -> Address:
    return load(iovec.addresses + iovec.piece * WORD) + offset - iovec.begin


@compilable
def contiguous(buffer: Buffer, offset: int, most: int) -> int:
    """Return how many bytes of a buffer to access at a time from `offset` on: `most` or fewer."""
    if buffer.process != IOVEC:
        return most
    left = seek(Iovec(buffer.address), offset)
    if left < SMALL_PIECE_BYTES:
        return min(most, GATHER_BYTES)
    return min(most, left)


@compilable
def writable_at(buffer: Buffer, offset: int, nbytes: int, memory: Address) -> Address:
    """Return the address to write bytes of a buffer to: their own if in one piece, else `memory`.

    The caller must `scatter` afterwards.
    """
    if buffer.process != IOVEC:
        return buffer.address + offset
    iovec = Iovec(buffer.address)
    return address_in(iovec, offset) if seek(iovec, offset) >= nbytes else memory


@compilable
def move(buffer: Buffer, offset: int, nbytes: int, memory: Address, gathers: bool) -> None:
    """Copy bytes of a buffer's pieces to contiguous `memory` if `gathers`, else from there."""
    iovec = Iovec(buffer.address)
    length, place = seek(iovec, offset), address_in(iovec, offset)
    addresses = iovec.addresses + iovec.piece * WORD
    sizes = iovec.sizes + iovec.piece * WORD
    while True:
        length = min(length, nbytes)
        if gathers:
            copy(memory, place, length)
        else:
            copy(place, memory, length)
        nbytes -= length
        if nbytes == 0:
            break
        memory, addresses, sizes = memory + length, addresses + WORD, sizes + WORD
        place, length = load(addresses), load(sizes)


@compilable
def gathered(buffer: Buffer, offset: int, nbytes: int, memory: Address) -> Address:
    """Return the address to read bytes of a buffer: their own if in one piece, else `memory`."""
    place = writable_at(buffer, offset, nbytes, memory)
    if place == memory:
        move(buffer, offset, nbytes, memory, True)
    return place


@compilable
def scatter(buffer: Buffer, offset: int, nbytes: int, memory: Address, place: Address) -> None:
    """Complete a write to `place` of `writable_at`: copy to the pieces if `place` is `memory`."""
    if place == memory:
        move(buffer, offset, nbytes, memory, False)
