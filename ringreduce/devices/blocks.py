"""How the memory is laid out through which ranks of one host tell each other something.

Every rank has a block that it alone writes: two slots, which take turns.  A slot begins with the
number of the exchange that it was last used for; behind that stand the header of the call, and then
either the data or, where they are read from where they lie, the places of the two arrays.

What the compiled machine works on are words of 8 bytes: those that all programs of a communicator
have in common, and those of one program, its rows at the end.
"""

from __future__ import annotations

WORD = 8

# --- a block --------------------------------------------------------------------------------------

NUMBER, HEADER, DATA = 0, 8, 32
"""Where in a slot the number, the header of 24 bytes, and the data begin."""
INPUT_AT, OUTPUT_AT = 32, 48
"""Where, if the data are not there, it says where the arrays lie: an address each, and whether that
is counted from the beginning of the sender's block (1) or is one of its process (0).  If data are
there only as far as they are not lent, then at the first of these where in the block they begin."""
SLOT_BYTES = (1 << 20) + (4 << 10)
"""Room for a slice and for what lies between its parts."""
BLOCK_BYTES = 2 * SLOT_BYTES

# --- words of a communicator ----------------------------------------------------------------------

COUNT, SPINS, YIELDS, PEERS = range(4)
MY_BLOCK, MY_SLOT = 4, 5
PULLED, PULL_BYTES, ACC, SOURCES = range(7, 11)
VECTOR, MY_BYTES, DELAYS = 11, 15, 16
"""Exchanges ever begun; how often to look, and then to yield, before giving up for now; how many
peers; this rank's block; a register: the data of the slot in use; memory for what is read from
other processes, and how much of it a peer has; memory for folds; that for a list of addresses; four
words for the kernel; how long this rank's block is; a seed for delays before each row, for tests,
or 0."""
COMMON_WORDS = 17
BLOCK, PROCESS, SEEN = range(3)
PEER_SLOT, PEER_INPUT, PEER_OUTPUT = 3, 5, 7
COMPARED = 9
"""Then for each peer: its block; its process, 0 if its memory is mapped; the latest number seen;
and three registers: the data of its slot, its input, its output; the latest number whose header was
compared.  A register is two words: an address, and the process that it is of, 0 for this one."""
PEER_WORDS = 10

# --- words of a program ---------------------------------------------------------------------------

COMMON, ROW, DONE_BYTES, BASE, EXCHANGES, TELLS, ITEM_BYTES, FOLD, DIVISOR, MET = range(10)
"""The address of the common words; that of the row it is at, and how far it got with that; the
number before its first exchange, and how many it makes; what ranks tell besides the header:
nothing, where their ARRAYS are, or where what is LENT and the output are; of an element; the
function that folds and by what it divides; the peer that is waited for or whose header is another.
"""
NOTHING, ARRAYS, LENT = range(3)
OWN_HEADER = 10
"""Three words."""
INPUT, OUTPUT, SCRATCH, INPUT_PLACE, OUTPUT_PLACE = 13, 15, 17, 19, 21
"""Registers, and what is told of the first two."""
START = 23
PROGRAM_WORDS = 24
"""The rows follow."""

# --- rows -----------------------------------------------------------------------------------------

MAKE_ROOM, PUT, AWAIT, COPY, REDUCE, END = range(6)
"""What a row says, and then, in words of its own:

- MAKE_ROOM k: wait until the slot of exchange k may be written; compare headers of k - 1.
- PUT k, lends, register, offset: what this rank has to say in exchange k is there; or, if the word
  at the address `lends` is not 0, where it lies.
- AWAIT k, place, listens: wait until the peer at that place of the common words has put exchange k;
  compare its header, if that is not only to know how far it is.
- COPY into, offset, source, offset, bytes, whether past the caches, unless: by the addresses of
  registers; nothing, if there is a word at the address `unless` and it is not 0.
- REDUCE into, offset, bytes, sources, address of a list of (register, offset), bytes at a time,
  whether to divide.  Behind the sources the list says who wants the result: how many, how many have
  to for the slot to do without, where in the slot, nothing; and for each (register, offset).
- END
"""
ROW_WORDS = 8

# --- what a run comes to --------------------------------------------------------------------------

FINISHED, WAITS, FOREIGN = range(3)
