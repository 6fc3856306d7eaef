"""How the memory is laid out through which ranks of one host tell each other something.

Every rank has a block that it alone writes: two slots, which take turns, and a ring.  A slot begins
with the number of the exchange that it was last used for; behind that stands the header of the
call, and then the data, if they are few.  More are put into the ring, one exchange's behind the
other's, or read where they lie; then the slot says where.

What the compiled machine works on are words of 8 bytes: those that all programs of a communicator
have in common, and those of one program, its rows at the end.
"""

from __future__ import annotations

from ringreduce.compiler.records import Address, Record, Word, record

WORD = 8

# --- a block --------------------------------------------------------------------------------------

NUMBER, HEADER, DATA = 0, 8, 32
"""Where in a slot the number, the header of 24 bytes, and the data begin."""
INPUT_AT, OUTPUT_AT = 32, 48
"""Where, if the data are not there, it says where the arrays lie: an address each, and whether that
is counted from the beginning of the sender's block (1) or is one of its process (0).  If data are
staged or lent, then at the first of these where in the block they begin."""
SLOT_BYTES = 4 << 10
MOST_STAGED = (4 << 20) + (4 << 10)
"""A slice, and what lies between its parts."""
RING, RING_TURN, RING_BYTES = 2 * SLOT_BYTES, 512 << 10, 3 * MOST_STAGED
"""Where the ring begins; where at the latest it goes back to the beginning, if what was put there
last does not lie there; and how long it is, so that in the end it always can go back.

What a peer has read stands in that core's own cache, and to write there each line has to be asked
for.  By the time a ring half as long as that cache has come round, most of it has left for the
cache that the cores share; a longer one would leave that, too
(``bench_results/shared_writes.jsonl``).
"""
TIMES_ROUND = 32
"""How often what is put there fits before it goes back: few data stay near."""
BLOCK_BYTES = RING + RING_BYTES

# --- words of a communicator ----------------------------------------------------------------------

COUNT, SPINS, YIELDS, PEERS = range(4)
MY_BLOCK, MY_SLOT = 4, 5
PULLED, PULL_BYTES, ACC, SOURCES = range(7, 11)
VECTOR, MY_BYTES, DELAYS, RING_AT, RING_LAST = 11, 15, 16, 17, 18
FAR_STAGED, FAR_GIVEN, FAR_PULLED, TOGETHER = 19, 20, 21, 22
"""Exchanges ever begun; how often to look, and then to yield, before giving up for now; how many
peers; this rank's block; a register: the data of the slot in use; memory for what is read from
other processes, and how much of it a peer has; memory for folds; that for a list of addresses; four
words for the kernel; how long this rank's block is; a seed for delays before each row, for tests,
or 0; where in the ring what was taken last ends, and where it begins; how much to write past the
caches before trying again through them, or how much was since (`machine._write`): of what is
staged, and of what is written to where peers want it; how often to, of what is pulled; memory where
few bytes of several pieces lie end to end, one for each array of a fold, the result's first."""
COMMON_WORDS = 23
BLOCK, PROCESS, SEEN = range(3)
PEER_SLOT, PEER_INPUT, PEER_OUTPUT = 3, 5, 7
WRITABLE, COMPARED = 9, 10
"""Then for each peer: its block; its process, 0 if its memory is mapped; the latest number seen;
and three registers: the data of its slot, its input, its output; whether that is shared memory; the
latest number whose header was compared.  A register is two words: an address, and the process that
it is of, 0 for this one, IN_PIECES if what stands at that address is where the pieces lie."""
PEER_WORDS = 11

# --- words of a buffer in pieces: see `shm.iovec` --------------------------------------------

IN_PIECES = -1
PLACES, SIZES, PIECE, BEGIN = range(4)
"""Where their addresses stand, and where the bytes of each; a piece, and where in the buffer it
begins."""
PIECES_WORDS = 4
FEW_BYTES, TOGETHER_BYTES = 256, 8 << 10
"""What is less of a piece is brought together with others, up to so many bytes."""

# --- words of a program ---------------------------------------------------------------------------

COMMON, ROW, DONE_BYTES, BASE, EXCHANGES, TELLS, ITEM_BYTES, FOLD, DIVISOR, MET = range(10)
"""The address of the common words; that of the row it is at, and how far it got with that; the
number before its first exchange, and how many it makes; what ranks tell besides the header:
nothing, where their ARRAYS are, or where the DATA and the output are; of an element; the function
that folds and by what it divides; the peer that is waited for or whose header is another.
"""
TELLS_NOTHING, TELLS_ARRAYS, TELLS_DATA = range(3)
OWN_HEADER = 10
"""Three words."""
INPUT, OUTPUT, SCRATCH, INPUT_PLACE, OUTPUT_PLACE = 13, 15, 17, 19, 21
"""Registers, and what is told of the first two."""
START, INPUT_BYTES, OUTPUT_BYTES, IN_PLACE, RUN = range(23, 28)
"""Where the rows begin; how long the input is, and the output; whether they may be the same; the
address of `machine.run`."""
PROGRAM_WORDS = 28
"""The rows follow."""

# --- rows -----------------------------------------------------------------------------------------

MAKE_ROOM, PUT, AWAIT, COPY, REDUCE, END = range(6)
"""What a row says, and then, in words of its own:

- MAKE_ROOM k, bytes, unless: wait until the slot of exchange k may be written; compare headers of
  k - 1; take so much of the ring, unless there is a word at that address and it is not 0.
- PUT k, lends, register, offset: what this rank has to say in exchange k is there; or, if the word
  at the address `lends` is not 0, where it lies.
- AWAIT k, place, listens: wait until the peer at that place of the common words has put exchange k;
  compare its header, if that is not only to know how far it is.
- COPY into, offset, source, offset, bytes, whether that is staged, unless: by the addresses of
  registers; nothing, if there is a word at the address `unless` and it is not 0.
- REDUCE into, offset, bytes, sources, address of a list of (register, offset), bytes at a time,
  whether to divide.  Behind the sources the list says who wants the result: how many, how many have
  to for the slot to do without, where in the slot, nothing; and for each (register, offset).
- END
"""
ROW_WORDS = 8
STAGED_FROM = 4 << 10
"""Fewer bytes are copied through the caches in any case."""

# --- what a run comes to --------------------------------------------------------------------------

FINISHED, WAITS, FOREIGN, UNUSUAL = range(4)
"""It is over; it waits for a peer; a peer is in another call; the arrays are not as expected, and
nothing was done."""

# --- a segment, by fields -------------------------------------------------------------------------


@record
class Header(Record):
    """The first message of a call: the digest of its signature, and its number."""

    # First 8 bytes of the digest.
    digest_low: Word
    # Last 8 bytes of the digest.
    digest_high: Word
    # Number of the call in its communicator, from 0.
    call_number: Word


@record
class Location(Record):
    """Where a rank's array is, as the rank publishes it."""

    # Address in the rank's process, or offset in bytes from the beginning of its segment.
    address: Address
    # 1: `address` is an offset in the segment; 0: it is an address.
    in_segment: Word


@record
class Slot(Record):
    """What a rank publishes in one round.  Its owner alone writes it, `sequence` last."""

    # Number of the round that the slot was last used for.
    sequence: Word
    # Header of the call that the round belongs to.
    header: Header
    # Where peers read: INPUT, or, where data are staged or exposed, their offset in the segment.
    input: Location
    # Where peers write directly: OUTPUT.
    output: Location


# --- what a communicator's programs share, by fields ----------------------------------------------


@record
class Buffer(Record):
    """Memory that an instruction reads or writes."""

    # Address of the first byte; if `process` is IN_PIECES, that of an `Iovec`.
    address: Address
    # 0: this process; IN_PIECES: this process, in pieces; else the process to read from.
    process: Word


@record
class Iovec(Record):
    """A buffer in pieces, and the piece that was used last: see `shm.iovec`."""

    # Array of the addresses of the pieces.
    addresses: Address
    # Array of the sizes of the pieces, in bytes.
    sizes: Address
    # Index of the piece that was used last.
    piece: Word
    # Offset of that piece in the buffer, in bytes.
    begin: Word


@record
class Interval(Record):
    """Memory from `begin` up to `end`; it is not empty."""

    # Address of the first byte.
    begin: Address
    # Address behind the last byte.
    end: Address


# --- a program, by fields -------------------------------------------------------------------------


@record
class Program(Record):
    """One slice of a plan; its instructions follow."""

    # Address of the `Team`.
    team: Address
    # Address of the instruction that waits; 0: the program has not begun, or is over.
    instruction: Address
    # Bytes that a waiting REDUCE has done.
    done_bytes: Word
    # Sequence number of the round before the program's first.
    base: Word
    # Rounds that the program takes, 1 or more.
    rounds: Word
    # What ranks publish besides the header: PUBLISHES_NOTHING, PUBLISHES_ARRAYS, PUBLISHES_DATA.
    publishes: Word
    # Bytes of an element; of one part of a complex element.
    item_bytes: Word
    # Address of the compiled fold; 0: nothing is reduced.
    fold: Address
    # Divisor of the result of "mean"; 0: another operation.
    divisor: Word
    # Index of the peer that is waited for, or whose header is different.
    blamed: Word
    # Header of the call under way.
    header: Header
    # This rank's INPUT.
    input: Buffer
    # This rank's OUTPUT.
    output: Buffer
    # This rank's SCRATCH.
    scratch: Buffer
    # INPUT as this rank publishes it.
    input_location: Location
    # OUTPUT as this rank publishes it.
    output_location: Location
    # Offset of the first instruction, in words.
    first_instruction: Word
    # Size of INPUT in bytes.
    input_bytes: Word
    # Size of OUTPUT in bytes.
    output_bytes: Word
    # 1: INPUT and OUTPUT may be the same memory; 0: they may not.
    in_place: Word
    # Address of `shm.executor.run`, compiled.
    run: Address


DONE, PENDING, MISMATCH, NOT_ELIGIBLE = range(4)
"""Results of a run: the program is over; it waits for a peer; a peer is in another call; the arrays
are not as the program expects, and nothing was done."""
PUBLISHES_NOTHING, PUBLISHES_ARRAYS, PUBLISHES_DATA = range(3)
"""What ranks publish besides the header: nothing; where INPUT and OUTPUT are; where the data of
the round and OUTPUT are."""
