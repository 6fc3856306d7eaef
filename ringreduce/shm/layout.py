"""Records of the memory that ranks of one host share, and of the programs that use it.

Every rank has a segment, whose slots, report, mark, departure and ring it alone writes.  Rounds use
the two slots in turn.  A slot has the sequence number of the round it was last used for, then the
header of the call, and then the data of small rounds.  The data of larger rounds are staged in the
ring, behind those of the round before, or peers read them in place; then the slot has the location
of the data.

A `Team` has the state that all programs of a communicator share.  A `Program` is a plan;
its instructions follow it in memory.  The memory order is in `shm.protocol`.
"""

from __future__ import annotations

from ringreduce.compiler.records import Address, Record, Word, record

WORD = 8

# --- a segment ------------------------------------------------------------------------------------


@record
class Header(Record):
    """The first message of a call: the digest of its signature, and its number."""

    digest_low: Word
    digest_high: Word
    # Number of the call in its communicator, from 0.
    call_number: Word


@record
class Location(Record):
    """The location of a rank's array, as the rank publishes it."""

    # Address in the rank's process, or offset in bytes from the beginning of its segment.
    address: Address
    # 1: `address` is an offset in the segment; 0: it is an address.
    in_segment: Word


@record
class Slot(Record):
    """The data that a rank publishes in a round.  Only its owner writes a slot, `sequence` last."""

    # Sequence number of the round that the slot was last used for.
    sequence: Word
    header: Header
    # INPUT; with PUBLISHES_DATA the offset in the segment of the data of the round.
    input: Location
    output: Location


@record
class StoreReport(Record):
    """The measurements of one rank in a trial of stores: see `shm.stores`."""

    # Nanoseconds of timed COPYs and REDUCEs by the kind of stores that was in use before.
    kept_ns: Word
    kept_bytes: Word
    # Nanoseconds of timed COPYs and REDUCEs by the other kind of stores.
    other_ns: Word
    other_bytes: Word


@record
class WriteMark(Record):
    """Whether a rank is about to write, or writes, to arrays of its peers."""

    # 1: it may be writing; 0: it is not, and all that it has written is there.
    writes: Word


@record
class Departure(Record):
    """Whether a rank has left a call early, by an error, and so its communicator."""

    # 1: no peer may begin to write to the rank's arrays; 0: they may.
    has_left: Word


DATA_OFFSET = 32
"""Bytes from the beginning of a slot to its data, if it has data and publishes no locations."""
SLOT_BYTES = 4 << 10
MAX_STAGED_BYTES = (4 << 20) + (4 << 10)
"""The most bytes that a rank stages in a round: a slice, and the gaps between its parts."""
REPORT_OFFSET = 2 * SLOT_BYTES
MARK_OFFSET = REPORT_OFFSET + 64  # the report, the mark and the departure have a cache line each
DEPARTURE_OFFSET = MARK_OFFSET + 64
RING_OFFSET = DEPARTURE_OFFSET + 64
"""Bytes from the beginning of a segment to its report, mark, departure and ring."""
RING_BYTES = 3 * MAX_STAGED_BYTES
"""Three rounds of the most data fit, so a rank can always go back to the beginning of the ring."""
RING_TURN_BYTES = 512 << 10
"""Bytes after which the ring goes back to its beginning, if the latest data are not there.

Data that a peer has read are in the cache of the peer's core, and the writer has to fetch each line
from there.  By the time that a ring half as long as that cache has come round, most lines have
moved to the cache that the cores share.  A longer ring would leave the shared cache as well
(``bench_results/shared_writes.jsonl``).
"""
RING_TURN_ROUNDS = 32
"""Rounds of the current size after which the ring also goes back: small data stay in cache."""
SEGMENT_BYTES = RING_OFFSET + RING_BYTES
"""Bytes of all these.  The rank's mail and memory for registered arrays follow."""

# --- buffers --------------------------------------------------------------------------------------


@record
class Buffer(Record):
    # Address of the first byte; if `process` is IOVEC, the address of an `Iovec`.
    address: Address
    # 0: memory mapped by this process; IOVEC: an iovec; else the process that has the address.
    process: Word


IOVEC = -1
"""The `process` of a `Buffer` that is an iovec."""


@record
class Iovec(Record):
    """A buffer of several pieces, all in this process, and the piece that was used last."""

    addresses: Address
    # Array of the sizes of the pieces, in bytes.
    sizes: Address
    # Index of the piece that was used last, from 0.
    piece: Word
    # Offset of that piece in the buffer, in bytes.
    begin: Word


SMALL_PIECE_BYTES = 256
"""Smaller pieces are gathered and scattered: reduced or copied together with the next ones."""
GATHER_BYTES = 8 << 10
"""The most bytes that are gathered at a time."""


@record
class Interval(Record):
    """A range of memory, not empty: see `shm.intervals`."""

    begin: Address
    # Address behind the last byte.
    end: Address


# --- state of a communicator ----------------------------------------------------------------------


@record
class MemoryRange(Record):
    """``struct iovec`` of process_vm_readv and process_vm_writev."""

    address: Address
    nbytes: Word


@record
class Timespec(Record):
    """``struct timespec`` of clock_gettime."""

    seconds: Word
    nanoseconds: Word


KEEP, TIME_KEPT, AWAIT_KEPT, WARM_UP, TIME_OTHER, AWAIT = range(6)
"""Phases of a trial of stores: see `shm.stores`."""


@record
class StoreTrial(Record):
    """The kind of stores to memory that peers read, and the trial of both: see `shm.stores`."""

    # 1: streaming stores are used now; 0: ordinary stores are.
    streams: Word
    # KEEP, TIME_KEPT, AWAIT_KEPT, WARM_UP, TIME_OTHER or AWAIT.
    phase: Word
    # Sequence number of the round from which on the next phase begins.
    phase_end: Word
    # Sequence number of the round in which the latest trial ended.
    latest: Word
    # Rounds from `latest` to the next trial.
    interval: Word
    # The shortest time of the kind in use since `latest`, in ns a MiB; 0: not known yet.
    usual_ns: Word


@record
class Peer(Record):
    """The state of a peer, as far as this rank knows it."""

    segment: Address
    # Number of the peer's process; 0: this process maps the memory of the peer.
    process: Word
    # Sequence number of the latest round that the peer is known to have posted.
    seen: Word
    # Data, INPUT and OUTPUT of the peer in the current round.
    slot: Buffer
    input: Buffer
    output: Buffer
    # 1: OUTPUT is in the peer's segment, so this rank may write it; 0: it is not.
    output_is_shared: Word
    # Sequence number of the latest round whose header was compared with this rank's.
    compared: Word


@record
class Mpi(Record):
    """The functions of MPI that programs call, and what they pass: see `transports.mpi`."""

    # Addresses of MPI_Isend, MPI_Irecv and MPI_Test; 0: Python exchanges the messages.
    isend: Address
    irecv: Address
    test: Address
    # Handles of the communicator and of MPI_BYTE.
    comm: Word
    byte: Word
    # Address of scratch for a status.
    status: Address
    # Scratch of MPI_Test: not 0 if a message is complete.
    flag: Word
    # Tests of a message before the rank yields its core.
    polls: Word
    # The first error code that is not 0; from then on each message fails.
    error: Word


@record
class Team(Record):
    """State that all programs of a communicator share; a `Peer` for each other rank follows."""

    # Sequence number of the latest round that a program has begun or reserved.
    rounds: Word
    # Polls of a peer's slot before the rank yields its core.
    spins: Word
    # Polls after a yield of the core each, before the program returns PENDING.
    yields: Word
    peer_count: Word
    segment: Address
    segment_bytes: Word
    # Data of this rank in the current round.
    slot: Buffer
    # Memory for data of other processes: `read_bytes` for each peer.
    read_buffer: Address
    # Bytes that are read from a process, or reduced, at a time.
    read_bytes: Word
    # Scratch of the folds, `devices.compiled.FOLD_BYTES`.
    fold_scratch: Address
    # Array of the addresses of the sources of a fold, one for each rank.
    sources: Address
    # Scratch for pieces that are gathered: GATHER_BYTES for the result and for each rank.
    gather_buffer: Address
    # Memory of this process, for process_vm_readv and process_vm_writev.
    local: MemoryRange
    # Memory of another process, for these; follows `local`.
    remote: MemoryRange
    # Scratch of the clock.
    clock: Timespec
    # State of a random generator of delays before each instruction, for tests; 0: no delays.
    delay_seed: Word
    # Offset in the ring of the latest data, in bytes.
    ring_begin: Word
    # Offset in the ring behind the latest data, in bytes, a multiple of 64.
    ring_end: Word
    trial: StoreTrial
    # Reads of at most `read_bytes` by way of `read_buffer` before a direct read is timed again.
    indirect_reads: Word
    mpi: Mpi
    # The address of the `EventRing` of the trace; 0: this process records none.
    events: Address


# --- a program ------------------------------------------------------------------------------------


@record
class Program(Record):
    """A plan; its instructions follow."""

    team: Address
    # Address of the instruction to go on with; 0: the program has not begun, or is over.
    instruction: Address
    # Bytes that the waiting PUSH or REDUCE has completed; their complement, a negative number, if
    # the next piece is reduced already, and not yet written to all peers.
    done_bytes: Word
    # Sequence number of the round before the program's first.
    base: Word
    rounds: Word
    # PUBLISHES_NOTHING, PUBLISHES_ARRAYS or PUBLISHES_DATA.
    publishes: Word
    # Size in bytes of an element, or of one of the two parts of a complex element.
    item_bytes: Word
    # Address of the compiled fold; 0: the program reduces nothing.
    fold: Address
    # Divisor of the finished result, for "mean"; 0: the result is not divided.
    divisor: Word
    # Index of the peer that is waited for, or whose header is different.
    blamed: Word
    header: Header
    input: Buffer
    output: Buffer
    scratch: Buffer
    input_location: Location
    output_location: Location
    input_bytes: Word
    output_bytes: Word
    # 1: INPUT and OUTPUT may be the same memory; 0: they may not.
    in_place: Word
    # Address of `shm.executor.run`, compiled.
    run: Address
    # Memory for messages to and from other hosts that begin with the header.
    message: Buffer
    # Array of `message_count` records `HostMessageRecord`.
    messages: Address
    message_count: Word
    # Complete runs since their messages were last counted.
    runs: Word


PUBLISHES_NOTHING, PUBLISHES_ARRAYS, PUBLISHES_DATA = range(3)
"""Data that ranks publish in a round besides the header: none; the locations of INPUT and OUTPUT;
the locations of the round's data and of OUTPUT."""

DONE, PENDING, MISMATCH, FAILED = range(4)
"""Results of a run: the program is over; it waits or pauses; a peer is in another call; MPI reports
an error."""

# --- instructions ---------------------------------------------------------------------------------

FREE_SLOT, POST, WAIT, COPY, PUSH, REDUCE, PAUSE, END, START, COMPLETE = range(10)
"""Opcodes."""


@record
class OperandRecord(Record):
    # Address of a `Buffer`.
    buffer: Address
    # Offset of the first byte in the buffer.
    offset: Word


@record
class InstructionRecord(Record):
    """The fields that FREE_SLOT, POST and WAIT have in common; every instruction has an opcode."""

    opcode: Word
    # Number of the round in the program, from 1.
    round: Word


@record
class FreeSlotRecord(Record):
    opcode: Word
    round: Word
    # Bytes to reserve; 0: none.
    nbytes: Word
    # Address of a word that is not 0 if nothing need be reserved; 0: there is none.
    shared_flag: Address


@record
class PostRecord(Record):
    opcode: Word
    round: Word
    # Address of a word that is not 0 if `exposed` is the data of the round; 0: there is none.
    shared_flag: Address
    # Memory that peers read in place of the slot.
    exposed: OperandRecord


@record
class WaitRecord(Record):
    opcode: Word
    round: Word
    # Index of the peer.
    peer: Word
    # 1: compare the header, and resolve the peer's buffers; 0: only wait.
    reads: Word


@record
class CopyRecord(Record):
    opcode: Word
    target: OperandRecord
    source: OperandRecord
    nbytes: Word
    # 1: peers read the target, and it is long enough to choose how to write; STREAMED: write by
    # streaming stores; 0: another copy.
    staged: Word
    # Address of a word that is not 0 if there is nothing to copy; 0: there is none.
    shared_flag: Address


@record
class PushRecord(Record):
    """Copy bytes from INPUT to OUTPUT of a peer.  A `DirectWrite` follows the `Destinations`."""

    opcode: Word
    source: OperandRecord
    nbytes: Word
    # Address of the `Destinations`.
    destinations: Address


@record
class Destinations(Record):
    """The destinations of a PUSH, or of the result of a REDUCE besides its target."""

    # Number of peers whose OUTPUT is written directly, if it is shared, or by the kernel.
    direct_count: Word
    # Array of `direct_count` records `DirectWrite`.
    direct: Address
    # Number of ranks that read the result; the slot is written if fewer were written directly.
    readers: Word
    # Offset of the result in this rank's data of the next round, in bytes.
    slot_offset: Word
    # 1: OUTPUT of a peer is written if it is not shared, too, by the kernel; 0: it is not.
    writes_private: Word


@record
class DirectWrite(Record):
    # Address of the `Peer`.
    peer: Address
    # Offset of the first byte in OUTPUT.
    offset: Word


@record
class ReduceRecord(Record):
    opcode: Word
    target: OperandRecord
    nbytes: Word
    # Number of sources, 2 or more.
    source_count: Word
    # Array of `source_count` records `OperandRecord`.
    sources: Address
    # Address of the `Destinations`.
    destinations: Address
    # 1: divide the result by the divisor of the program; 0: do not.
    divides: Word


@record
class MessageRecord(Record):
    """START or COMPLETE a message."""

    opcode: Word
    # Address of the `HostMessageRecord`.
    message: Address


@record
class HostMessageRecord(Record):
    """A message to or from another host: see `planning.instructions.HostMessage`."""

    # Where it begins: with its header, if it has one.
    place: OperandRecord
    # Bytes that are sent, or the most that are received.
    nbytes: Word
    peer: Word
    receives: Word
    # 1: it begins with the header of the call; 0: it does not.
    signed: Word
    # MPI's request.
    request: Word
    # NOT_STARTED, WANTED, UNDER_WAY, OVER or WITHDRAWN.
    state: Word
    # The address of its words in a trace; 0: it is not traced.
    words: Address
    # Bytes of its data, for the trace.
    data_bytes: Word
    # When it was started, in ns, if it is traced.
    began_ns: Word


NOT_STARTED, WANTED, UNDER_WAY, OVER, WITHDRAWN = range(5)
"""States of a message in a run: Python starts one that is WANTED; WITHDRAWN is a receive that got
no message."""

STREAMED = 2
"""Value of `CopyRecord.staged` for a long copy from a rank's own input to its own output."""
INSTRUCTION_BYTES = 64
STAGED_FROM_BYTES = 4 << 10
"""Fewer bytes are always written by ordinary stores: to time them costs more than it saves."""
