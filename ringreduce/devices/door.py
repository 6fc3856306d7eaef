"""How Python gets into the machine: a function of CPython's own calling convention, compiled.

A compiled function that Numba wraps asks of each argument anew what it is, and takes 0.3 us for it;
arrays take more.  This one is called by CPython itself, as those of C extensions are, and takes the
arrays' addresses from where NumPy's C API has them (``PyArrayObject``, the same since NumPy 1.7).
"""

from __future__ import annotations

from typing import Any

from ringreduce.devices.blocks import ARRAY_BYTES, UNUSUAL, WORD
from ringreduce.devices.compilable import compilable
from ringreduce.devices.machine import run
from ringreduce.devices.native import (
    enter_interpreter,
    integer,
    leave_interpreter,
    load,
    number_of,
)
from ringreduce.devices.python_calls import (
    CONTIGUOUS_AND_ALIGNED,
    DATA,
    DIMENSIONS,
    DTYPE,
    FLAGS,
    HALF,
    SHAPE,
    TYPE,
    WRITABLE,
)


@compilable
def _fits(x: Any, out: Any, nbytes: Any) -> bool:
    """Whether the result of `x` can go to `out` with no more to be asked."""
    whole, wanted = CONTIGUOUS_AND_ALIGNED, CONTIGUOUS_AND_ALIGNED | WRITABLE
    if load(out + TYPE) != load(x + TYPE) or load(out + FLAGS) & wanted != wanted:
        return False
    if out == x:
        return True
    if load(x + FLAGS) & whole != whole or load(out + DTYPE) != load(x + DTYPE):
        return False
    dimensions = load(x + DIMENSIONS) & HALF
    if load(out + DIMENSIONS) & HALF != dimensions:
        return False
    for i in range(dimensions):
        if load(load(out + SHAPE) + i * WORD) != load(load(x + SHAPE) + i * WORD):
            return False
    apart: bool = abs(load(out + DATA) - load(x + DATA)) >= nbytes
    return apart


def enter(_: Any, arguments: Any, count: Any) -> Any:
    """``enter(program, number[, x, out])``: `machine.run`, or UNUSUAL.

    `x` is an array as the program is made for; `out` is whatever the caller has passed for it.
    """
    program, number = number_of(load(arguments)), number_of(load(arguments + WORD))
    source, target = 0, 0
    if count > 2:
        x, out = load(arguments + 2 * WORD), load(arguments + 3 * WORD)
        if not _fits(x, out, load(program + ARRAY_BYTES * WORD)):
            return integer(UNUSUAL)
        source, target = load(x + DATA), load(out + DATA)
    state = leave_interpreter()
    came = run(program, number, source, target)
    enter_interpreter(state)
    return integer(came)
