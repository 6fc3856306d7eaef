"""The way past Python: calls that were made before, when nothing else is under way.

What takes the time of a small call is Python: a key, a lock, an account of the call.  Here compiled
code does all that for one that was made before, if the gate is open.
`ringreduce.shm.fast_path` says when it is, and does what may have to wait.

The interpreter's lock is held wherever the words of a gate are looked at, so that no two threads
pass it at once.  While a call is under way, and that lock is not held, BUSY keeps others out.
"""

from __future__ import annotations

from typing import Any

from ringreduce.compiler.interpreter import (
    call_object,
    enter_interpreter,
    integer,
    keep_object,
    leave_interpreter,
    let_go_of_object,
    number_of,
    this_thread,
)
from ringreduce.compiler.memory import call_run, load, store
from ringreduce.compiler.pyobjects import (
    ACCOUNTED,
    ARGUMENTS,
    ARRAY,
    BEGUN,
    BUSY,
    DATA,
    DEFAULT_OP,
    DIMENSIONS,
    DTYPE,
    EMPTY,
    ENTRIES,
    ENTRY_DIMENSIONS,
    ENTRY_DTYPE,
    ENTRY_FINISH,
    ENTRY_FLOW,
    ENTRY_LIKE,
    ENTRY_OP,
    ENTRY_PROGRAM,
    ENTRY_SHAPE,
    ENTRY_SHAPE_TUPLE,
    ENTRY_SIGNATURE,
    ENTRY_WORDS,
    GATE_WORDS,
    HALF,
    ITEMS_OF_TUPLE,
    LENGTH,
    LOST,
    MOST_DIMENSIONS,
    NEXT,
    NONE,
    OP,
    OPEN,
    OUT,
    OWNER,
    REMEMBER,
    SHAPE,
    TAKEN_OVER,
    TYPE,
    USUAL_WAY,
)
from ringreduce.compiler.records import compilable
from ringreduce.shm.entry import fits
from ringreduce.shm.layout import FINISHED, RUN, WORD


@compilable
def _passes(gate: Any) -> bool:
    passes: bool = load(gate + OPEN * WORD) != 0 and load(gate + BUSY * WORD) == 0
    return passes


@compilable
def _pass(gate: Any, program: Any, source: Any, target: Any, signature: Any) -> Any:
    """Make the call; what the run came to.  If it is over, so is the call; if not, still BUSY."""
    store(gate + OWNER * WORD, this_thread())
    store(gate + BUSY * WORD, 1)
    number = load(gate + NEXT * WORD)
    state = leave_interpreter()
    came = call_run(load(program + RUN * WORD), program, number, source, target)
    enter_interpreter(state)
    if came == FINISHED:
        store(gate + NEXT * WORD, number + 1)
        store(gate + ARGUMENTS * WORD, signature)
        told = call_object(load(gate + REMEMBER * WORD), gate + ARGUMENTS * WORD, 1, 0)
        if told:
            let_go_of_object(told)
        store(gate + BUSY * WORD, 0)
    return came


@compilable
def _place(x: Any, op: Any) -> Any:
    """Where among the entries it stands what is known of such a call."""
    dimensions, shape = load(x + DIMENSIONS) & HALF, load(x + SHAPE)
    mixed = dimensions
    for i in range(dimensions):
        mixed = mixed * 31 + load(shape + i * WORD)
    mixed = mixed * 7 + (mixed >> 9) + (load(x + DTYPE) >> 5) + (op >> 4)
    return mixed & (ENTRIES - 1)


@compilable
def _entry(gate: Any, x: Any, op: Any) -> Any:
    """What is known of such a call; 0 if it was not made before."""
    if load(x + TYPE) != load(gate + ARRAY * WORD):
        return 0
    dimensions, shape = load(x + DIMENSIONS) & HALF, load(x + SHAPE)
    if dimensions > MOST_DIMENSIONS:
        return 0
    entry = gate + (GATE_WORDS + _place(x, op) * ENTRY_WORDS) * WORD
    if (
        load(entry + ENTRY_PROGRAM * WORD) == 0
        or load(entry + ENTRY_DTYPE * WORD) != load(x + DTYPE)
        or load(entry + ENTRY_OP * WORD) != op
        or load(entry + ENTRY_DIMENSIONS * WORD) != dimensions
    ):
        return 0
    for i in range(dimensions):
        if load(shape + i * WORD) != load(entry + (ENTRY_SHAPE + i) * WORD):
            return 0
    return entry


def place(_: Any, arguments: Any, __: Any) -> Any:
    """``place(x, op)``: where among the entries an all-reduce of such an array stands."""
    return integer(_place(load(arguments), load(arguments + WORD)))


@compilable
def _finish(gate: Any, flow: Any, finish: Any, arguments: Any, count: Any) -> Any:
    """Let Python wait for the call; its result, 0 if it has raised.

    A signal's handler may run, and raise, before Python has got to what would break the call off.
    So it is known to be running from here, where none runs; and if nothing answers for it, no other
    call may go on with what this one began.
    """
    store(gate + TAKEN_OVER * WORD, 0)
    behind = gate + (ARGUMENTS + 2) * WORD
    store(behind, flow)
    told = call_object(load(gate + BEGUN * WORD), behind, 1, 0)
    result = 0
    if told:
        let_go_of_object(told)
        result = call_object(finish, arguments, count, 0)
    if result == 0 and load(gate + TAKEN_OVER * WORD) == 0:
        store(gate + OPEN * WORD, 0)
        store(gate + LOST * WORD, 1)
    store(gate + BUSY * WORD, 0)
    return result


def all_reduce(me: Any, arguments: Any, count: Any, names: Any) -> Any:
    """`Communicator.all_reduce`; `me` is a tuple with the gate's words before anything else."""
    gate = load(load(me + ITEMS_OF_TUPLE) + DATA)
    usual_way = load(gate + USUAL_WAY * WORD)
    out, op, known = 0, load(gate + DEFAULT_OP * WORD), _passes(gate)
    if count == 2:
        op = load(arguments + WORD)
    for i in range(load(names + LENGTH) if names else 0):
        name = load(names + ITEMS_OF_TUPLE + i * WORD)
        value = load(arguments + (count + i) * WORD)
        if name == load(gate + OUT * WORD):
            out = 0 if value == load(gate + NONE * WORD) else value
        elif name == load(gate + OP * WORD) and count == 1:
            op = value
        else:
            known = False
    if not known or count < 1 or count > 2:
        return call_object(usual_way, arguments, count, names)
    x = load(arguments)
    entry = _entry(gate, x, op)
    if entry == 0:
        return call_object(usual_way, arguments, count, names)
    if out == 0:
        store(gate + ARGUMENTS * WORD, load(entry + ENTRY_SHAPE_TUPLE * WORD))
        store(gate + (ARGUMENTS + 1) * WORD, load(entry + ENTRY_DTYPE * WORD))
        out = call_object(load(gate + EMPTY * WORD), gate + ARGUMENTS * WORD, 2, 0)
        if out == 0:
            return 0
    else:
        keep_object(out)
    program = load(entry + ENTRY_PROGRAM * WORD)
    # While an array was made Python may have done anything.
    known = _passes(gate) and _entry(gate, x, op) == entry
    if not known or not fits(program, x, out, load(entry + ENTRY_LIKE * WORD)):
        let_go_of_object(out)
        return call_object(usual_way, arguments, count, names)
    signature = load(entry + ENTRY_SIGNATURE * WORD)
    finish, flow = load(entry + ENTRY_FINISH * WORD), load(entry + ENTRY_FLOW * WORD)
    keep_object(signature)
    keep_object(finish)
    keep_object(flow)
    came = _pass(gate, program, load(x + DATA), load(out + DATA), signature)
    result = out
    if came != FINISHED:
        store(gate + ARGUMENTS * WORD, x)
        store(gate + (ARGUMENTS + 1) * WORD, out)
        result = _finish(gate, flow, finish, gate + ARGUMENTS * WORD, 2)
        if load(gate + LOST * WORD):  # peers may still read and write them
            keep_object(x)
            keep_object(out)
        let_go_of_object(out)
    let_go_of_object(flow)
    let_go_of_object(finish)
    let_go_of_object(signature)
    return result


def again(me: Any, arguments: Any, count: Any) -> Any:
    """``again()``: make a persistent call.

    `me` is ``(words, program, signature, finish, flow, result, usual way)``.
    """
    mine = me + ITEMS_OF_TUPLE
    gate, result = load(load(mine) + DATA), load(mine + 5 * WORD)
    if count or not _passes(gate):
        return call_object(load(mine + 6 * WORD), arguments, count, 0)
    came = _pass(gate, number_of(load(mine + WORD)), 0, 0, load(mine + 2 * WORD))
    if came == FINISHED:
        keep_object(result)
        return result
    store(gate + ARGUMENTS * WORD, load(gate + NONE * WORD))
    store(gate + (ARGUMENTS + 1) * WORD, result)
    return _finish(gate, load(mine + 4 * WORD), load(mine + 3 * WORD), gate + ARGUMENTS * WORD, 2)


def shut(me: Any, _: Any, __: Any) -> Any:
    """``shut()``: let no more calls pass; -1 if another thread has one under way, else 0."""
    gate = load(load(me + ITEMS_OF_TUPLE) + DATA)
    store(gate + OPEN * WORD, 0)
    if load(gate + BUSY * WORD) and load(gate + OWNER * WORD) != this_thread():
        return integer(-1)
    return integer(0)


def reopen(me: Any, arguments: Any, _: Any) -> Any:
    """``reopen(number)``: let calls pass, the next with that number."""
    gate = load(load(me + ITEMS_OF_TUPLE) + DATA)
    store(gate + NEXT * WORD, number_of(load(arguments)))
    store(gate + ACCOUNTED * WORD, 0)
    store(gate + OPEN * WORD, 1)
    return integer(0)
