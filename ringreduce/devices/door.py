"""How Python gets into the machine: functions of CPython's own calling convention, compiled.

A compiled function that Numba wraps asks of each argument anew what it is, and takes 0.3 us for it;
arrays take more.  These are called by CPython itself, as those of C extensions are, and take the
arrays' addresses from where NumPy's C API has them (``PyArrayObject``, the same since NumPy 1.7).
"""

from __future__ import annotations

from typing import Any

from ringreduce.devices.blocks import IN_PLACE, INPUT_BYTES, OUTPUT_BYTES, RUN, UNUSUAL, WORD
from ringreduce.devices.compilable import compilable
from ringreduce.devices.native import (
    call_run,
    copy,
    enter_interpreter,
    integer,
    leave_interpreter,
    load,
    number_of,
    store,
)
from ringreduce.devices.python_calls import (
    AFTER,
    ARRAY_DTYPE,
    ARRAY_TYPE,
    CONTIGUOUS_AND_ALIGNED,
    DATA,
    DEALS,
    DIMENSIONS,
    DTYPE,
    END_TO_END,
    FLAGS,
    HALF,
    ITEMS_OF_LIST,
    ITEMS_OF_TUPLE,
    LENGTH,
    LIST_TYPE,
    MEMBERS,
    SCATTERED,
    SHAPE,
    SOURCE,
    SOURCES,
    TABLE_WORDS,
    TARGET,
    TARGETS,
    TUPLE_TYPE,
    TYPE,
    WHOLE,
    WHOLE_BYTES,
    WRITABLE,
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
    """``enter(program, number[, x, out, like])`` or ``(program, number, table)``: `machine.run`.

    `x` is an array as the program is made for; `out` is whatever the caller has passed for it, or
    `x`; `like` is an array as the result is.  At the address `table` stands what `bring` has found.
    Returns UNUSUAL where the result may not go to `out`.
    """
    program, number = number_of(load(arguments)), number_of(load(arguments + WORD))
    source, target = 0, 0
    if count == 3:
        table = number_of(load(arguments + 2 * WORD))
        source, target = load(table + SOURCE * WORD), load(table + TARGET * WORD)
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
def _places(table: Any, members: Any, wanted: Any, places: Any) -> Any:
    """Write where the arrays of a list lie: SCATTERED, END_TO_END, or UNUSUAL if it is another."""
    items = members + ITEMS_OF_TUPLE
    if load(members + TYPE) == load(table + LIST_TYPE * WORD):
        items = load(members + ITEMS_OF_LIST)
    elif load(members + TYPE) != load(table + TUPLE_TYPE * WORD):
        return UNUSUAL
    count = load(table + MEMBERS * WORD)
    if load(members + LENGTH) != count:
        return UNUSUAL
    kind, dtype = load(table + ARRAY_TYPE * WORD), load(table + ARRAY_DTYPE * WORD)
    layout, state, after = table + TABLE_WORDS * WORD, END_TO_END, 0
    for i in range(count):
        array = load(items + i * WORD)
        if load(array + TYPE) != kind or load(array + DTYPE) != dtype:
            return UNUSUAL
        dimensions, nbytes = load(layout), load(layout + WORD)
        if load(array + FLAGS) & wanted != wanted or load(array + DIMENSIONS) & HALF != dimensions:
            return UNUSUAL
        layout += 2 * WORD
        for k in range(dimensions):
            if load(load(array + SHAPE) + k * WORD) != load(layout):
                return UNUSUAL
            layout += WORD
        place = load(array + DATA)
        store(places + i * WORD, place)
        if nbytes:
            if after and place != after:
                state = SCATTERED
            after = place + nbytes
    store(table + AFTER * WORD, after)
    return state


@compilable
def _copy_members(table: Any, places: Any, whole: Any, together: Any) -> None:
    """From where the arrays of a list lie to end to end at `whole`, or back."""
    layout = table + TABLE_WORDS * WORD
    for i in range(load(table + MEMBERS * WORD)):
        place, nbytes = load(places + i * WORD), load(layout + WORD)
        layout += (2 + load(layout)) * WORD
        if together:
            copy(whole, place, nbytes)
        else:
            copy(place, whole, nbytes)
        whole += nbytes


def bring(_: Any, arguments: Any, __: Any) -> Any:
    """``bring(table, members, out)``: have the arrays of a list end to end; 0, or UNUSUAL.

    Where they are so already, or the results shall be, nothing is copied.  Says in the table where
    to read and where to leave the result.
    """
    table = number_of(load(arguments))
    sources, targets = load(table + SOURCES * WORD), load(table + TARGETS * WORD)
    nbytes, whole = load(table + WHOLE_BYTES * WORD), load(table + WHOLE * WORD)
    readable, writable = CONTIGUOUS_AND_ALIGNED, CONTIGUOUS_AND_ALIGNED | WRITABLE
    given = _places(table, load(arguments + WORD), readable, sources)
    source = load(table + AFTER * WORD) - nbytes
    wanted = _places(table, load(arguments + 2 * WORD), writable, targets)
    target = load(table + AFTER * WORD) - nbytes
    if given == UNUSUAL or wanted == UNUSUAL:
        return integer(UNUSUAL)
    layout = table + TABLE_WORDS * WORD
    for i in range(load(table + MEMBERS * WORD)):
        apart = abs(load(targets + i * WORD) - load(sources + i * WORD))
        if 0 < apart < load(layout + WORD):
            return integer(UNUSUAL)
        layout += (2 + load(layout)) * WORD
    # All are read before any is written: a target may be any of the arrays.
    if given == SCATTERED:
        source = whole
        state = leave_interpreter()
        _copy_members(table, sources, whole, True)
        enter_interpreter(state)
    elif 0 < abs(target - source) < nbytes:
        wanted = SCATTERED
    store(table + SOURCE * WORD, source)
    store(table + TARGET * WORD, whole if wanted == SCATTERED else target)
    store(table + DEALS * WORD, 1 if wanted == SCATTERED else 0)
    return integer(0)


def deal(_: Any, arguments: Any, __: Any) -> Any:
    """``deal(table)``: the result to the arrays of `out`, where it is not left there; 0."""
    table = number_of(load(arguments))
    if load(table + DEALS * WORD):
        state = leave_interpreter()
        whole, targets = load(table + WHOLE * WORD), load(table + TARGETS * WORD)
        _copy_members(table, targets, whole, False)
        enter_interpreter(state)
    return integer(0)
