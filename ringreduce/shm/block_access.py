"""Blocks of an array that ranks of one node share: how ranks lock, change and read them.

The array is cut into blocks of `BLOCK_BYTES`, and each block has a lock.  Each rank has a *result
buffer* of one block, which it alone writes.  All of this is in one memory, which all ranks map.

To add to a block a rank

1. swaps the lock from FREE to `held(rank)`;
2. adds the block and its own array into its result buffer;
3. stores `committing(rank, rank)` to the lock;
4. copies the result buffer into the block;
5. stores FREE to the lock.

To read a block a rank holds the lock while it copies the block.  A rank holds one lock at a time,
so ranks never wait for each other in a circle.

**A rank that dies.**  A rank that waits for a lock finds the holder in the lock's word.  If the
process of the holder has ended (`ringreduce.system.proc`), the waiting rank takes the lock over
(`take_over`).  The word says what there is to do:

- `held(h)`: rank h was before step 3, or was reading.  The block is unchanged: it has nothing of
  the add.  The waiting rank swaps the word to its own, and frees the lock.
- `committing(h, s)`: the result buffer of rank s is complete, and some of it may be in the block.
  The waiting rank t swaps the word to `committing(t, s)`, copies the result buffer of s into the
  block, and frees the lock.  The block then has all of the add.  If t dies too, the word still
  names the result buffer of s, and the next rank copies it once more.

So each block has all or nothing of an add that was interrupted.  The version is increased in one
instruction after the last block, so it counts no such add.

**Why this is right.**

1. *The machine code keeps the order of the steps.*  A swap has acquire order, so no access of step
   2 comes before it.  The word of step 3 is stored with release order, after the result.  A fence
   keeps the stores of step 4 behind it: a release store alone lets later stores pass.  FREE is
   stored with release order, after the copy.
2. *A dead rank has executed the steps up to some instruction, and none after it.*  The processor
   interrupts a thread between two instructions.  The kernel reports the end of a process when no
   thread of it can execute instructions any more.  By then all its stores are visible to others.
3. *A live rank sees a whole block.*  Its swap reads the word that the holder before it stored with
   release order, after the copy.
4. *A word is taken over once.*  A dead rank never stores a word again.  So if the swap finds the
   word of a dead rank, no other rank has taken it over since.  Of two ranks that swap one wins.
5. *A result buffer that a word names is complete and does not change.*  The word names it from step
   3 on.  Until step 5 its owner does not write to it, and if the owner is dead, nobody ever does.
"""

from __future__ import annotations

from ringreduce.compiler.interpreter import (
    enter_interpreter,
    integer,
    leave_interpreter,
    number_of,
)
from ringreduce.compiler.memory import call_fold, copy, fence, load, yield_core
from ringreduce.compiler.records import (
    Address,
    Record,
    Word,
    address_of,
    compare_and_swap,
    compilable,
    fetch_and_add,
    load_acquire,
    offset_of,
    record,
    store_release,
)
from ringreduce.shm.layout import WORD

BLOCK_BYTES = 8 << 10
"""Bytes of a block; the last one may be shorter.

The block, the result and the rank's part of its own array fit in the first cache of a core, so the
copy of step 4 costs little beside the add.  Shorter blocks save no time, and have more locks.
"""
LOCK_BYTES = 64
"""Bytes from one lock to the next: each has a cache line of its own."""
_RANK_BITS = 16
_RANK_MASK = (1 << _RANK_BITS) - 1


@record
class Version(Record):
    # Adds that are complete.
    completed: Word


@record
class BlockLock(Record):
    # FREE, `held(rank)` or `committing(rank, source)`.
    word: Word


@record
class Access(Record):
    """One rank's access to an array in blocks, and its operation under way."""

    version: Address
    # Address of the first `BlockLock`; the others follow, LOCK_BYTES apart.
    locks: Address
    # Address of the result buffer of rank 0; the others follow, `block_bytes` apart.
    results: Address
    blocks: Address
    nbytes: Word
    block_bytes: Word
    block_count: Word
    # Size in bytes of an element, or of one of the two parts of a complex element.
    item_bytes: Word
    rank: Word
    # Index of the block that this rank begins with.
    first: Word
    # Address of the compiled fold that adds; 0: Python adds, while this rank holds the lock.
    fold: Address
    # Scratch of the fold, `devices.compiled.FOLD_BYTES`.
    fold_scratch: Address
    # Polls of a lock before the rank yields its core.
    spins: Word
    # Polls after a yield of the core each, before the operation returns WAITS.
    yields: Word
    operation: Word
    # Address of the rank's own array: the array to add, or the array to read into.
    array: Address
    done: Word
    # 1: this rank holds the lock of the next block; 0: it holds none.
    holds: Word
    # The word that this rank has found in the lock of the next block.
    found: Word
    # The block and the rank's own array, as sources of the fold.
    left: Address
    right: Address


_LEFT = offset_of(Access, "left")

ADD, READ, CONTINUE, TAKE_OVER, GIVE_UP = range(5)
"""Requests: begin to add or to read; continue; continue after the holder of the lock has ended;
give the operation up."""
DONE, WAITS, FOLDS = range(3)
"""Results: the operation is over; another rank holds the lock; Python has to add the block."""


# --- the word of a lock ---------------------------------------------------------------------------

FREE = 0


@compilable
def held(rank: int) -> int:
    """Return the word of a lock that `rank` holds, whose block is unchanged."""
    return rank + 1


@compilable
def committing(rank: int, source: int) -> int:
    """Return the word of a lock that `rank` holds to copy the result of `source` to the block."""
    return ((source + 1) << _RANK_BITS) | (rank + 1)


@compilable
def holder_of(word: int) -> int:
    """Return the rank that holds a lock; -1 if none does."""
    return (word & _RANK_MASK) - 1


@compilable
def source_of(word: int) -> int:
    """Return the rank whose result is copied to the block; -1 if the block is unchanged."""
    return (word >> _RANK_BITS) - 1


# --- one block ------------------------------------------------------------------------------------


@compilable
def next_block(access: Access) -> int:
    """Return the index of the next block; ranks begin at different blocks, and seldom meet."""
    return (access.first + access.done) % access.block_count


@compilable
def lock_of(access: Access, block: int) -> BlockLock:
    return BlockLock(access.locks + block * LOCK_BYTES)


@compilable
def size_of_block(access: Access, block: int) -> int:
    return min(access.block_bytes, access.nbytes - block * access.block_bytes)


@compilable
def acquire(access: Access, lock: BlockLock) -> bool:
    """Poll for a while until this rank holds a lock; return False if it does not."""
    for poll in range(access.spins + access.yields):
        if poll >= access.spins:
            yield_core()
        word = load_acquire(lock, "word")
        if word == FREE and compare_and_swap(lock, "word", FREE, held(access.rank)):
            return True
        access.found = word
    return False


@compilable
def fold(access: Access, block: int) -> None:
    """Add a block and this rank's own array into this rank's result buffer."""
    offset = block * access.block_bytes
    access.left, access.right = access.blocks + offset, access.array + offset
    into = access.results + access.rank * access.block_bytes
    sources = address_of(access) + _LEFT
    count = size_of_block(access, block) // access.item_bytes
    call_fold(access.fold, into, sources, 2, count, 0, access.fold_scratch)


@compilable
def copy_result(access: Access, source: int, block: int) -> None:
    """Copy the result buffer of rank `source` into a block."""
    into = access.blocks + block * access.block_bytes
    copy(into, access.results + source * access.block_bytes, size_of_block(access, block))


@compilable
def commit(access: Access, lock: BlockLock, block: int) -> None:
    """Replace a block, whose lock this rank holds, by this rank's result."""
    store_release(lock, "word", committing(access.rank, access.rank))
    fence()
    copy_result(access, access.rank, block)


@compilable
def read(access: Access, block: int) -> None:
    """Copy a block, whose lock this rank holds, into this rank's own array."""
    offset = block * access.block_bytes
    copy(access.array + offset, access.blocks + offset, size_of_block(access, block))


@compilable
def take_over(access: Access) -> None:
    """Free the lock that this rank waits for, and whose holder has ended."""
    block = next_block(access)
    lock, found = lock_of(access, block), access.found
    source = source_of(found)
    mine = held(access.rank)
    if source >= 0:
        mine = committing(access.rank, source)
    if compare_and_swap(lock, "word", found, mine):
        if source >= 0:
            copy_result(access, source, block)
        store_release(lock, "word", FREE)


# --- all blocks -----------------------------------------------------------------------------------


@compilable
def advance(access: Access) -> int:
    """Add or read block after block; return DONE, WAITS or FOLDS."""
    adds = access.operation == ADD
    while access.done < access.block_count:
        block = next_block(access)
        lock = lock_of(access, block)
        if not access.holds:
            if not acquire(access, lock):
                return WAITS
            access.holds = 1
            if adds and not access.fold:
                return FOLDS
            if adds:
                fold(access, block)
        if adds:
            commit(access, lock, block)
        else:
            read(access, block)
        access.holds = 0
        store_release(lock, "word", FREE)
        access.done += 1
    if adds:
        fetch_and_add(Version(access.version), "completed", 1)
    return DONE


@compilable
def give_up(access: Access) -> None:
    """Free the lock that this rank holds, if it holds one; the block is unchanged."""
    if access.holds:
        access.holds = 0
        store_release(lock_of(access, next_block(access)), "word", FREE)


@compilable
def serve(access: Access, request: int, array: Address) -> int:
    if request == TAKE_OVER:
        take_over(access)
    elif request != CONTINUE:
        give_up(access)  # an operation that Python could not give up after an exception
        if request == GIVE_UP:
            return DONE
        access.operation, access.array = request, array
        access.done = 0
    return advance(access)


def access_blocks(_: Address, args: Address, __: int) -> Address:
    """``access_blocks(access, request, array)``, called by CPython: execute a request."""
    access = Access(number_of(load(args)))
    request, array = number_of(load(args + WORD)), number_of(load(args + 2 * WORD))
    state = leave_interpreter()
    result = serve(access, request, array)
    enter_interpreter(state)
    return integer(result)
