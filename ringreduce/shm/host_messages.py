"""Messages to and from other hosts in a program: compiled code calls MPI, or leaves them to Python.

A program has the messages of its plan as `HostMessageRecord`.  START hands one to MPI, COMPLETE
polls until it is over.  MPI moves data only inside its calls, so a program that waits for a rank of
its own host tests the messages under way, too.

Without MPI, START only notes that a message is wanted.  The program pauses at each send, and while
a message is not over: `HostsExecutable` then starts and tests messages in Python.
"""

from __future__ import annotations

from ringreduce.compiler.memory import call_mpi, nanoseconds, store, yield_core
from ringreduce.compiler.records import Address, address_of, compilable, offset_of, size_of
from ringreduce.shm.layout import (
    DONE,
    FAILED,
    MISMATCH,
    NOT_STARTED,
    OVER,
    PENDING,
    UNDER_WAY,
    WANTED,
    Buffer,
    Header,
    HostMessageRecord,
    Mpi,
    Program,
    Team,
)
from ringreduce.shm.protocol import copy_header, equal
from ringreduce.trace.ring import EventRing, record_event

_MESSAGE_BYTES = size_of(HostMessageRecord)
_REQUEST, _FLAG = offset_of(HostMessageRecord, "request"), offset_of(Mpi, "flag")


@compilable
def message_of(program: Program, index: int) -> HostMessageRecord:
    return HostMessageRecord(program.messages + index * _MESSAGE_BYTES)


def messages_of(program: Program) -> list[HostMessageRecord]:
    return [message_of(program, index) for index in range(program.message_count)]


@compilable
def begin_messages(program: Program) -> None:
    for index in range(program.message_count):
        message_of(program, index).state = NOT_STARTED


@compilable
def place_of(message: HostMessageRecord) -> Address:
    return Buffer(message.place.buffer).address + message.place.offset


@compilable
def start(program: Program, team: Team, message: HostMessageRecord) -> int:
    mpi, place = team.mpi, place_of(message)
    if mpi.error:  # the communicator is broken
        return FAILED
    if mpi.isend == 0 and message.state != NOT_STARTED:  # Python has started it
        return DONE
    function = mpi.isend
    if message.receives:
        function = mpi.irecv
    elif message.signed:
        copy_header(Header(place), program.header)
    if mpi.isend == 0:
        message.state = WANTED
        return DONE if message.receives else PENDING
    if message.words:
        message.began_ns = nanoseconds(address_of(team.clock))
    mpi.error = call_mpi(
        function,
        place,
        message.nbytes,
        mpi.byte,
        message.peer,
        0,
        mpi.comm,
        address_of(message) + _REQUEST,
    )
    if mpi.error:
        return FAILED
    message.state = UNDER_WAY
    return DONE


@compilable
def test(team: Team, message: HostMessageRecord) -> int:
    """Let MPI make progress; return DONE if a message is over, PENDING or FAILED if it is not."""
    mpi = team.mpi
    if mpi.error:  # MPI has freed the request, and would say that it is over
        return FAILED
    if mpi.isend == 0:
        return DONE if message.state >= OVER else PENDING
    if message.state != UNDER_WAY:
        return DONE
    flag = address_of(mpi) + _FLAG
    store(flag, 0)
    request = address_of(message) + _REQUEST
    mpi.error = call_mpi(mpi.test, request, flag, mpi.status, 0, 0, 0, 0)
    if mpi.error:
        return FAILED
    if mpi.flag == 0:
        return PENDING
    message.state = OVER
    if message.words:
        ring, clock = EventRing(team.events), address_of(team.clock)
        record_event(ring, message.began_ns, message.data_bytes, message.words, clock)
    return DONE


@compilable
def complete(program: Program, team: Team, message: HostMessageRecord) -> int:
    """Poll for a while until a message is over; compare the header if it is a received one."""
    result = test(team, message)
    for _ in range(min(team.spins, team.mpi.polls)):
        if result != PENDING:
            break
        result = test(team, message)
    for _ in range(team.yields if team.mpi.isend else 0):
        if result != PENDING:
            break
        yield_core()
        result = test(team, message)
    if result != DONE or message.signed == 0 or message.receives == 0:
        return result
    return DONE if equal(Header(place_of(message)), program.header) else MISMATCH


@compilable
def progress(program: Program, team: Team) -> int:
    """Let MPI make progress with the messages under way, while this rank waits for another one.

    Returns PENDING or FAILED.
    """
    for index in range(program.message_count):
        if test(team, message_of(program, index)) == FAILED:
            return FAILED
    return PENDING
