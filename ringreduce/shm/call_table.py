"""The table of calls that compiled code makes without Python, and its hash.

A communicator has one table for all its collectives.  `ringreduce.shm.fast_path` fills the table,
`ringreduce.shm.entry` finds calls in it.  Both compute the hash of a call by `hash_of`.
"""

from __future__ import annotations

from ringreduce.compiler.memory import load
from ringreduce.compiler.pyobjects import PyArray, same_kind
from ringreduce.compiler.records import Address, Record, Word, compilable, record, size_of
from ringreduce.shm.layout import WORD

_SLOT_BITS = 9
SLOTS = 1 << _SLOT_BITS
"""The most calls of a table."""
WAYS = 8
"""A call is in one of this many neighbouring slots, which begin at the slot of its hash."""
EMPTY = -1
"""The hash of a slot without a call."""
_HASH_BITS = 32
_MASK = (1 << _HASH_BITS) - 1
"""Hashes are cut to 32 bits at each step, so that Python and compiled code compute the same."""
_SPREAD = 0x61C88647
"""2**32 minus 2**32 divided by the golden ratio: Fibonacci hashing, which uses the upper bits.

The number is less than 2**31, so its product with a hash fits into a word.
"""

ALL_REDUCE, SCATTER, SCATTER_TO_OUT = range(3)
"""Numbers of the collectives that compiled code distinguishes.

SCATTER_TO_OUT is a scatter on a rank that passes no array: `out` stands for it in the key.
"""


@record
class FastPathState(Record):
    """One communicator's state of the fast path, and the objects that compiled code needs."""

    # Whether compiled code may begin calls: 0 or 1.
    enabled: Word
    # The address of a word that is not 0 while calls are refused.
    refused: Address
    # 1: a call is under way, perhaps with the interpreter's lock released; 0: none is.
    busy: Word
    # The thread of the call under way.
    owner: Word
    next_number: Word
    # Whether the agreement's counters include all calls of the fast path: 0 or 1.
    settled: Word
    # 1: `Engine.finish` handles the errors of the call under way; 0: it does not yet.
    taken_over: Word
    # 1: an exception ended a call before `Engine.finish` handled its errors; 0: none did.
    orphaned: Word
    ranks: Word
    table: Address
    # The address of the `Arguments` of the call that is looked up.
    arguments: Address
    # The address of the counts of the call that is looked up: one word a rank.
    counts: Address
    # Scratch, an int of C: whether a Python int was too large.
    overflow: Word
    # A function of Python: remembers the signature of a completed call.
    remember: Address
    # A function of Python: marks an executable as running.
    begin: Address
    # A function of Python: `Engine.finish`.
    finish: Address
    # ``numpy.empty``.
    empty: Address
    # A function of Python: views an array of another library, or a list of these.
    view_of: Address
    tensors: Address
    none: Address
    array_type: Address
    list_type: Address
    tuple_type: Address
    int_type: Address
    str_type: Address
    # ``sys.intern``.
    intern: Address
    # The address of the `EventRing` of the trace; 0: this process records none.
    events: Address
    name_out: Address
    name_op: Address
    name_root: Address
    name_counts: Address
    name_algorithm: Address
    name_wire: Address
    name_timeout_s: Address
    name_async_op: Address
    false: Address
    default_op: Address
    default_algorithm: Address
    # Scratch: the arguments of the Python function that is called.
    argument0: Word
    argument1: Word
    argument2: Word
    argument3: Word


@record
class Arguments(Record):
    """The arguments of a call.  All except `out` are the key of the call in the table."""

    collective: Word
    # The array, or the first member of the list.
    x: Address
    # The list or tuple of arrays; 0: `x` is the only array.
    members: Address
    # Length of the list or tuple; 0: no list.
    member_count: Word
    # The last member of the list; 0: no list.
    last: Address
    # The text of the op, interned; 0: the collective has none.
    op: Address
    algorithm: Address
    # The root's rank; 0 if the collective has no root.
    root: Word
    # The address of the counts, a word each.
    counts: Address
    # Number of counts; 0: the collective has none.
    count_of_counts: Word
    # The array, list or tuple for the result; 0: none was passed.
    out: Address


@record
class EntryPoint(Record):
    """One function that CPython calls: a collective of a communicator, or a planned call."""

    # The address of `FastPathState`.
    path: Address
    # The number of the collective, if it has arguments.
    collective: Word
    # The Python function that makes a call on the general path.
    general: Address
    # The address of the only `CachedCall` of a function without arguments; 0: there is none yet.
    own_call: Address
    # The least and the greatest number of positional arguments.
    least: Word
    most: Word
    # The position of `root`; -1: the collective has none.
    root_at: Word
    # The position of `op`; -1: the collective has none.
    op_at: Word
    # Whether the collective takes `counts`: 0 or 1.
    takes_counts: Word
    # The address of the `CachedCall` that was found last; 0: none was.
    latest: Address


@record
class CachedCall(Record):
    """A call that compiled code can make."""

    # The hash of the key; EMPTY: the slot has no call.
    hash: Word
    collective: Word
    # An array with the dtype and shape of `Arguments.x`, but without its memory.
    input: Address
    # An array like `Arguments.last`; not used without a list.
    last: Address
    # Length of the list; 0: no list.
    member_count: Word
    # The text of the op, interned; 0: the collective has none.
    op: Address
    algorithm: Address
    # The root's rank; 0 if the collective has no root.
    root: Word
    # The address of the counts, a word each.
    counts: Address
    # Number of counts; 0: the collective has none.
    count_of_counts: Word
    # The Python object `CompiledCall`, which keeps alive all that is named here.
    call: Address
    signature: Address
    # The address of the program; 0: a list has programs in its table.
    program: Address
    # The executable with that program, a Python object; 0: as for `program`.
    executable: Address
    # The address of `ListState`; 0: no list.
    list: Address
    # An array like the result.  If `result` is not 0, the program may write to this array.
    output: Address
    shape: Address
    # The object that the call returns; 0: the array with the result.
    result: Address
    # The address of the words of the call in a trace; 0: this process records none.
    words: Address
    # Bytes of the call's arrays, for the trace.
    nbytes: Word


CALL_BYTES = size_of(CachedCall)


@compilable
def _mix(mixed: int, value: int) -> int:
    return (mixed * 31 + value) & _MASK


@compilable
def _mix_array(mixed: int, array: PyArray) -> int:
    mixed = _mix(mixed, array.descr >> 5)
    for i in range(array.ndim):
        mixed = _mix(mixed, load(array.shape + i * WORD))
    return mixed


@compilable
def hash_of(given: Arguments) -> int:
    """Compute the hash of a call, 0 or more."""
    mixed = _mix(_mix(given.collective, given.root), given.op >> 4)
    mixed = _mix(mixed, given.algorithm >> 4)
    mixed = _mix_array(mixed, PyArray(given.x))
    if given.member_count:
        mixed = _mix_array(_mix(mixed, given.member_count), PyArray(given.last))
    for i in range(given.count_of_counts):
        mixed = _mix(mixed, load(given.counts + i * WORD))
    return (mixed * _SPREAD) & _MASK


@compilable
def slot_address(table: Address, hashed: int, way: int) -> Address:
    slot = ((hashed >> (_HASH_BITS - _SLOT_BITS)) + way) & (SLOTS - 1)
    return table + slot * CALL_BYTES


@compilable
def _matches(call: CachedCall, given: Arguments) -> bool:
    if (
        call.collective != given.collective
        or call.op != given.op
        or call.algorithm != given.algorithm
        or call.root != given.root
        or call.member_count != given.member_count
        or call.count_of_counts != given.count_of_counts
    ):
        return False
    for i in range(given.count_of_counts):
        if load(call.counts + i * WORD) != load(given.counts + i * WORD):
            return False
    if given.member_count and not same_kind(PyArray(given.last), PyArray(call.last)):
        return False
    return same_kind(PyArray(given.x), PyArray(call.input))


@compilable
def find(table: Address, given: Arguments, latest: Address) -> Address:
    """Return the address of the `CachedCall` with these arguments, or 0 if there is none.

    The slot at `latest`, if it is not 0, is tried first: most calls repeat the one before.
    """
    if latest and CachedCall(latest).hash != EMPTY and _matches(CachedCall(latest), given):
        return latest
    hashed = hash_of(given)
    for way in range(WAYS):
        place = slot_address(table, hashed, way)
        call = CachedCall(place)
        if call.hash == hashed and _matches(call, given):
            return place
    return 0
