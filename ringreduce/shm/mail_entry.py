"""The compiled function behind `send`, `recv` and `probe`, for one message at a time.

CPython passes arguments to `message` by its vectorcall convention.  It makes the call if

- the arguments are those of an earlier call,
- the channel is quiet: nothing is under way with that peer,
- the entry is idle: no other operation is under way in Python, which alone compares their memory,
- calls are not refused.

Else it calls the general function, in Python, with the same arguments.

The fields `idle`, `quiet` and `busy` are read and written with the interpreter's lock held, so no
two threads use a channel at once.  `busy` keeps other threads out while that lock is released.
"""

from __future__ import annotations

from ringreduce.compiler.interpreter import (
    call_object,
    enter_interpreter,
    integer,
    keep_object,
    leave_interpreter,
    number_within,
)
from ringreduce.compiler.memory import load
from ringreduce.compiler.pyobjects import (
    CONTIGUOUS_AND_ALIGNED,
    WRITABLE,
    PyArray,
    PyObject,
    PyVarObject,
    same_kind,
    tuple_item,
)
from ringreduce.compiler.records import (
    Address,
    Record,
    Word,
    address_of,
    compilable,
    offset_of,
    record,
    size_of,
)
from ringreduce.shm.layout import WORD
from ringreduce.shm.mailbox import (
    PENDING,
    TAKEN,
    UNKNOWN,
    Counts,
    DtypeAndShapeRecord,
    MailboxPair,
    look,
    receive,
    send,
)

WAYS = 4
"""Kinds of arrays that are known for each peer."""


@record
class KnownKind(Record):
    """A kind of arrays that the general function has sent or received."""

    # An array of this dtype and shape; 0: none.
    like: Address
    kind: Address


@record
class MailEntry(Record):
    """The state of one function; `WAYS` known kinds for each rank follow."""

    # 1: the function sends; 0: it receives or probes.
    sends: Word
    probes: Word
    rank: Word
    ranks: Word
    # 1: no operation is under way in Python.  Only Python compares the memory of operations.
    idle: Word
    # The address of a word that is not 0 while calls are refused.
    refused: Address
    # The channels with all ranks, by rank.
    channels: Address
    general: Address
    # ``adopt(x, peer, tag)``: waits for the answer to the message that was offered last.
    adopt: Address
    array_type: Address
    int_type: Address
    none: Address
    name_peer: Address
    name_tag: Address
    # An int of C, for `number_within`.
    overflow: Word
    argument0: Address
    argument1: Address
    argument2: Address


_ENTRY_BYTES, _KNOWN_BYTES, _CHANNEL_BYTES = map(size_of, (MailEntry, KnownKind, MailboxPair))
ENTRY_WORDS = _ENTRY_BYTES // WORD
KNOWN_WORDS = _KNOWN_BYTES // WORD
_OVERFLOW, _ARGUMENTS = offset_of(MailEntry, "overflow"), offset_of(MailEntry, "argument0")
_NOT_NATURAL = -1


@compilable
def _natural(entry: MailEntry, value: Address) -> int:
    """The value of a Python int; _NOT_NATURAL if it is negative, too large or no exact int."""
    if PyObject(value).type != entry.int_type:
        return _NOT_NATURAL
    number = number_within(value, address_of(entry) + _OVERFLOW)
    return number if number >= 0 else _NOT_NATURAL


@compilable
def _kind_of(entry: MailEntry, peer: int, x: PyArray) -> Address:
    """The record of an array's kind; 0 if it is not known."""
    wanted = CONTIGUOUS_AND_ALIGNED if entry.sends else CONTIGUOUS_AND_ALIGNED | WRITABLE
    if x.flags & wanted != wanted:
        return 0
    first = address_of(entry) + _ENTRY_BYTES + peer * WAYS * _KNOWN_BYTES
    for i in range(WAYS):
        known = KnownKind(first + i * _KNOWN_BYTES)
        if known.like and same_kind(x, PyArray(known.like)):
            return known.kind
    return 0


@compilable
def _sender(entry: MailEntry, tag: int) -> int:
    """The lowest rank whose next message has `tag`; below 0 if the general function has to look."""
    if tag == _NOT_NATURAL or not entry.idle or load(entry.refused):
        return UNKNOWN
    first, state = MailboxPair(entry.channels), leave_interpreter()
    found = look(first, entry.ranks, tag, first.spins + first.yields)
    enter_interpreter(state)
    return found


@compilable
def _make(entry: MailEntry, x: Address, peer: Address, tag: Address) -> Address:
    """Make the call; return its result, 0 if it raised, or -1 if the general function has to."""
    if PyObject(x).type != entry.array_type:
        return -1
    to, number = _natural(entry, peer), 0
    if tag:
        number = _natural(entry, tag)
    if peer == entry.none and not entry.sends:
        to = _sender(entry, number)
    if to < 0 or number == _NOT_NATURAL or to >= entry.ranks or to == entry.rank:
        return -1
    channel = MailboxPair(entry.channels + to * _CHANNEL_BYTES)
    kind = _kind_of(entry, to, PyArray(x))
    if not entry.idle or load(entry.refused):
        return -1
    if not channel.quiet or channel.busy or not kind:
        return -1
    channel.busy = 1
    data, sends, state = PyArray(x).data, entry.sends, leave_interpreter()
    if sends:
        result = send(channel, DtypeAndShapeRecord(kind), number, data)
    else:
        result = receive(channel, DtypeAndShapeRecord(kind), number, data)
    enter_interpreter(state)
    channel.busy = 0
    if result == TAKEN:
        value = entry.none if sends else x
        keep_object(value)
        return value
    if not sends or result != PENDING:
        return -1
    channel.quiet, channel.unadopted = 0, channel.offered
    return _adopt(entry, channel, x, peer, tag)


@compilable
def _adopt(
    entry: MailEntry, channel: MailboxPair, x: Address, peer: Address, tag: Address
) -> Address:
    """Let Python wait for the answer to the latest offer.

    If a signal handler raises before Python knows the message, the peer must not use the data.
    """
    entry.argument0, entry.argument1, entry.argument2 = x, peer, tag
    count = 3 if tag else 2
    value = call_object(entry.adopt, address_of(entry) + _ARGUMENTS, count, 0)
    if value == 0 and channel.unadopted:
        Counts(channel.mine).broken = 1
    return value


def message(self: Address, args: Address, nargs: int, kwnames: Address) -> Address:
    """Send, receive or probe; `self` is a tuple that begins with the memory of the entry."""
    entry = MailEntry(PyArray(tuple_item(self, 0)).data)
    result = -1
    names = PyVarObject(kwnames).size if kwnames else 0
    if entry.probes:
        if nargs + names <= 1 and (names == 0 or tuple_item(kwnames, 0) == entry.name_tag):
            found = _sender(entry, _natural(entry, load(args)) if nargs + names else 0)
            result = integer(found) if found >= 0 else -1
    elif nargs >= 1 and 2 <= nargs + names <= 3:
        x, peer, tag, known = load(args), 0, 0, True
        if nargs > 1:
            peer = load(args + WORD)
        if nargs > 2:
            tag = load(args + 2 * WORD)
        for i in range(names):
            name, value = tuple_item(kwnames, i), load(args + (nargs + i) * WORD)
            if name == entry.name_peer and peer == 0:
                peer = value
            elif name == entry.name_tag and tag == 0:
                tag = value
            else:
                known = False
        if known and peer:
            result = _make(entry, x, peer, tag)
    if result == -1:
        result = call_object(entry.general, args, nargs, kwnames)
    return result
