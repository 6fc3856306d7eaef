"""How Python gets into the machine: functions of CPython's own calling convention, compiled.

A compiled function that Numba wraps asks of each argument anew what it is, and takes 0.3 us for it;
arrays take more.  These are called by CPython itself, as those of C extensions are, and take the
arrays' addresses from where NumPy's C API has them (``PyArrayObject``, the same since NumPy 1.7).
"""

from __future__ import annotations

from typing import Any

from ringreduce.compiler.interpreter import enter_interpreter, integer, leave_interpreter, number_of
from ringreduce.compiler.memory import call_run, load, store
from ringreduce.compiler.pyobjects import (
    AFTER,
    AREAS,
    ARRAY_DTYPE,
    ARRAY_TYPE,
    CONTIGUOUS_AND_ALIGNED,
    DATA,
    DIMENSIONS,
    DTYPE,
    FLAGS,
    HALF,
    ITEMS_OF_LIST,
    ITEMS_OF_TUPLE,
    LAYOUT,
    LENGTH,
    LIST_TYPE,
    MEMBERS,
    MOVED,
    PULLED,
    SCATTERED,
    SHAPE,
    SOURCE,
    SOURCES,
    TABLE_WORDS,
    TARGET,
    TARGETS,
    TUPLE_TYPE,
    TURN_BYTES,
    TURN_MEMBERS,
    TURN_WORDS,
    TURNS,
    TYPE,
    WRITABLE,
)
from ringreduce.compiler.records import compilable
from ringreduce.shm.intervals import add_interval, overlap
from ringreduce.shm.layout import (
    IN_PLACE,
    INPUT_BYTES,
    OUTPUT_BYTES,
    PLACES,
    RUN,
    SIZES,
    UNUSUAL,
    WORD,
)


@compilable
def fits(program: Any, x: Any, out: Any, like: Any) -> bool:
    """Whether the result of `x`, one such as `like`, can go to `out` with no more to be asked."""
    whole, wanted = CONTIGUOUS_AND_ALIGNED, CONTIGUOUS_AND_ALIGNED | WRITABLE
    kind = load(like + TYPE)
    if load(out + TYPE) != kind or load(out + FLAGS) & wanted != wanted:
        return False
    if out == x:
        in_place: bool = load(program + IN_PLACE * WORD) != 0
        return in_place
    if load(x + TYPE) != kind or load(x + FLAGS) & whole != whole:
        return False
    dimensions = load(like + DIMENSIONS) & HALF
    if load(out + DTYPE) != load(like + DTYPE) or load(out + DIMENSIONS) & HALF != dimensions:
        return False
    for i in range(dimensions):
        if load(load(out + SHAPE) + i * WORD) != load(load(like + SHAPE) + i * WORD):
            return False
    first, second = load(x + DATA), load(out + DATA)
    if first == second and load(program + IN_PLACE * WORD):
        return True
    behind: bool = second >= first + load(program + INPUT_BYTES * WORD)
    before: bool = first >= second + load(program + OUTPUT_BYTES * WORD)
    return behind or before


def enter(_: Any, arguments: Any, count: Any) -> Any:
    """``enter(program, number[, x, out, like])`` or ``(program, number, turn)``: `machine.run`.

    `x` is an array as the program is made for; `out` is whatever the caller has passed for it, or
    `x`; `like` is an array as the result is.  At the address `turn` stands what `find` has found.
    Returns UNUSUAL where the result may not go to `out`.
    """
    program, number = number_of(load(arguments)), number_of(load(arguments + WORD))
    source, target = 0, 0
    if count == 3:
        turn = number_of(load(arguments + 2 * WORD))
        source, target = load(turn + SOURCE * WORD), load(turn + TARGET * WORD)
    elif count == 5:
        x, out = load(arguments + 2 * WORD), load(arguments + 3 * WORD)
        if not fits(program, x, out, load(arguments + 4 * WORD)):
            return integer(UNUSUAL)
        source, target = load(x + DATA), load(out + DATA)
    state = leave_interpreter()
    came = call_run(load(program + RUN * WORD), program, number, source, target)
    enter_interpreter(state)
    return integer(came)


@compilable
def _items(table: Any, members: Any) -> Any:
    """Where the items of a list or a tuple stand; 0 if it is neither, or not as long."""
    items = members + ITEMS_OF_TUPLE
    if load(members + TYPE) == load(table + LIST_TYPE * WORD):
        items = load(members + ITEMS_OF_LIST)
    elif load(members + TYPE) != load(table + TUPLE_TYPE * WORD):
        return 0
    return items if load(members + LENGTH) == load(table + MEMBERS * WORD) else 0


@compilable
def _places(table: Any, turn: Any, items: Any, wanted: Any, places: Any, also: Any) -> Any:
    """Write, twice, where arrays of a turn lie: SCATTERED, MOVED, both; -1 if one is another."""
    kind, dtype = load(table + ARRAY_TYPE * WORD), load(table + ARRAY_DTYPE * WORD)
    layout, state, after = load(turn + LAYOUT * WORD), 0, 0
    for i in range(load(turn + TURN_MEMBERS * WORD)):
        array = load(items + i * WORD)
        if load(array + TYPE) != kind or load(array + DTYPE) != dtype:
            return -1
        dimensions, nbytes = load(layout), load(layout + WORD)
        if load(array + FLAGS) & wanted != wanted or load(array + DIMENSIONS) & HALF != dimensions:
            return -1
        layout += 2 * WORD
        for k in range(dimensions):
            if load(load(array + SHAPE) + k * WORD) != load(layout):
                return -1
            layout += WORD
        place = load(array + DATA)
        if load(places + i * WORD) != place or load(also + i * WORD) != place:
            state |= MOVED
            store(places + i * WORD, place)
            store(also + i * WORD, place)
        if nbytes:
            if after and place != after:
                state |= SCATTERED
            after = place + nbytes
    store(table + AFTER * WORD, after)
    return state


@compilable
def _look(table: Any, turn: Any, given: Any, out: Any) -> Any:
    """Say in a turn where to read and where to leave the result: MOVED, 0, or -1 as `_places`."""
    sources, targets = turn + SOURCES * WORD, turn + TARGETS * WORD
    nbytes = load(turn + TURN_BYTES * WORD)
    readable, writable = CONTIGUOUS_AND_ALIGNED, CONTIGUOUS_AND_ALIGNED | WRITABLE
    first, second = load(sources + PLACES * WORD), load(targets + PLACES * WORD)
    if given == out:
        read = written = _places(table, turn, out, writable, first, second)
        source = target = load(table + AFTER * WORD) - nbytes
    else:
        read = _places(table, turn, given, readable, first, first)
        source = load(table + AFTER * WORD) - nbytes
        written = _places(table, turn, out, writable, second, second)
        target = load(table + AFTER * WORD) - nbytes
    scattered = (read | written) & SCATTERED
    if read < 0 or written < 0 or (scattered and load(turn + PULLED * WORD)):
        return -1
    store(turn + SOURCE * WORD, -sources if read & SCATTERED else source)
    store(turn + TARGET * WORD, -targets if written & SCATTERED else target)
    return (read | written) & MOVED


def find(_: Any, arguments: Any, __: Any) -> Any:
    """``find(table, members, out)``: where the arrays of two lists lie, and so where to read.

    MOVED if one does not lie where it did, else 0; -1 if the lists are not as the table says, or
    lie in pieces and would have to be pulled.
    """
    table = number_of(load(arguments))
    given = _items(table, load(arguments + WORD))
    out = _items(table, load(arguments + 2 * WORD))
    if given == 0 or out == 0:
        return integer(-1)
    turn, state = table + TABLE_WORDS * WORD, 0
    for _turn in range(load(table + TURNS * WORD)):
        seen = _look(table, turn, given, out)
        if seen < 0:
            return integer(-1)
        state |= seen
        given += load(turn + TURN_MEMBERS * WORD) * WORD
        out += load(turn + TURN_MEMBERS * WORD) * WORD
        turn += TURN_WORDS * WORD
    return integer(state)


@compilable
def _areas(table: Any, joined: Any) -> Any:
    """How many areas the arrays of two lists are, in the table's memory for those.

    If they are `joined`, those that follow each other in a list and in memory are one.
    """
    areas, turn = load(table + AREAS * WORD), table + TABLE_WORDS * WORD
    sources, targets = turn + (SOURCES + PLACES) * WORD, turn + (TARGETS + PLACES) * WORD
    sizes, count = load(turn + (SOURCES + SIZES) * WORD), 0
    for list_ in (sources, targets):
        first = count
        for i in range(load(table + MEMBERS * WORD)):
            place = load(load(list_) + i * WORD)
            if list_ == sources or place != load(load(sources) + i * WORD):
                joins = joined and count > first
                count = add_interval(areas, count, place, load(sizes + i * WORD), joins)
    return count


def mixes(_: Any, arguments: Any, __: Any) -> Any:
    """``mixes(table)``: whether what is written for an array might be read for another, 1 or 0.

    That is asked of the arrays that `find` has seen.
    """
    table = number_of(load(arguments))
    areas = load(table + AREAS * WORD)
    mixed = overlap(areas, _areas(table, True)) and overlap(areas, _areas(table, False))
    return integer(1 if mixed else 0)
