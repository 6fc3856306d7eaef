"""What ranks of one host tell each other through memory, compiled: put it there, and see it come.

Every rank has a block that it alone writes: a flag, and two slots.  It puts a message into one
slot, behind the number of the exchange, then raises its flag to ``2 * number + slot`` (release);
who reads the flag (acquire) sees what was written before.  The slots take turns.  One is written
again two exchanges later, and between lies one in which this rank has seen every other's flag: so
each of them had done with it.  A rank can be ahead by one exchange, whose message is in the other
slot.

An exchange's number comes from that of its call, the last 8 of the first 24 bytes of the message;
a call may make several.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ringreduce.devices.blocks import (
    BLOCK,
    CAME,
    FLAG,
    INTO,
    LAST,
    MINE,
    NBYTES,
    OUT,
    PEERS,
    PER_PEER,
    SLOT_BYTES,
    SLOTS,
    SPINS,
    TURN,
    WORDS,
)

_CALL = 16
_MOST = 64
"""Exchanges in a call."""
_MESSAGE = 64
"""Where in a slot the message begins."""

_intrinsic: Callable[[Callable[..., Any]], Any] = intrinsic


@_intrinsic
def _acquire(_context: Any, address: Any) -> Any:
    def generate(_: Any, builder: Any, __: Any, arguments: Any) -> Any:
        place = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        return builder.load_atomic(place, "acquire", 8)

    return types.int64(types.int64), generate


@_intrinsic
def _release(_context: Any, address: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
        place = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        builder.store_atomic(arguments[1], place, "release", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@_intrinsic
def _copy(_context: Any, into: Any, source: Any, nbytes: Any) -> Any:
    def generate(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
        byte = ir.IntType(8).as_pointer()
        into, source = (builder.inttoptr(each, byte) for each in arguments[:2])
        cgutils.raw_memcpy(builder, into, source, arguments[2], 1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@_intrinsic
def _number_at(_context: Any, address: Any) -> Any:
    """The number of a call, whose most significant byte is the first."""

    def generate(_: Any, builder: Any, __: Any, arguments: Any) -> Any:
        place = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        word = builder.load(place)
        word.align = 1
        return builder.bswap(word)

    return types.int64(types.int64), generate


def put(words: Any) -> None:
    """Put this rank's message into the slot whose turn it is, and raise the flag."""
    mine, out = words[MINE], words[OUT]
    slot, last = _acquire(mine + TURN), _acquire(mine + LAST)
    number = (_number_at(out + _CALL) + 1) * _MOST
    if last >= number:
        number = last + 1
    _release(mine + TURN, 1 - slot)
    _release(mine + LAST, number)
    place = mine + SLOTS + slot * SLOT_BYTES
    _release(place, number)
    _copy(place + _MESSAGE, out, words[NBYTES])
    for peer in range(words[PEERS]):
        words[WORDS + PER_PEER * peer + CAME] = 0
    _release(mine + FLAG, 2 * number + slot)


def all_came(words: Any) -> bool:
    """Copy what has come since; whether all have."""
    number, nbytes = _acquire(words[MINE] + LAST), words[NBYTES]
    for _ in range(words[SPINS]):
        missing = 0
        for peer in range(words[PEERS]):
            at = WORDS + PER_PEER * peer
            if words[at + CAME]:
                continue
            missing += 1
            flag = _acquire(words[at + BLOCK] + FLAG)
            theirs, slot = flag >> 1, flag & 1
            if theirs < number:
                continue
            if theirs > number:
                slot = 1 - slot
            place = words[at + BLOCK] + SLOTS + slot * SLOT_BYTES
            if _acquire(place) == number:
                _copy(words[at + INTO], place + _MESSAGE, nbytes)
                words[at + CAME] = 1
                missing -= 1
        if missing == 0:
            return True
    return False
