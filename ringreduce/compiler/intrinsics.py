"""What compiled code does that Python has no words for: memory by its address, other processes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

_intrinsic: Callable[[Callable[..., Any]], Any] = intrinsic
_WORD, _BYTE, _INT = ir.IntType(64), ir.IntType(8), ir.IntType(32)


@_intrinsic
def load(_context: Any, address: Any) -> Any:
    """The word at an address."""

    def generate(_: Any, builder: Any, __: Any, arguments: Any) -> Any:
        return builder.load(builder.inttoptr(arguments[0], _WORD.as_pointer()))

    return types.int64(types.int64), generate


@_intrinsic
def store(_context: Any, address: Any, value: Any) -> Any:
    """Write a word to an address."""

    def generate(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
        builder.store(arguments[1], builder.inttoptr(arguments[0], _WORD.as_pointer()))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@_intrinsic
def acquire(_context: Any, address: Any) -> Any:
    """The word at an address; what its writer wrote before it is seen by all that follows."""

    def generate(_: Any, builder: Any, __: Any, arguments: Any) -> Any:
        place = builder.inttoptr(arguments[0], _WORD.as_pointer())
        return builder.load_atomic(place, "acquire", 8)

    return types.int64(types.int64), generate


@_intrinsic
def release(_context: Any, address: Any, value: Any) -> Any:
    """Write a word to an address, after all that was read and written before."""

    def generate(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
        place = builder.inttoptr(arguments[0], _WORD.as_pointer())
        builder.store_atomic(arguments[1], place, "release", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@_intrinsic
def copy(_context: Any, into: Any, source: Any, nbytes: Any) -> Any:
    """Copy bytes from one address to another; they do not overlap."""

    def generate(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
        into, source = (builder.inttoptr(each, _BYTE.as_pointer()) for each in arguments[:2])
        cgutils.raw_memcpy(builder, into, source, arguments[2], 1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@_intrinsic
def stream_line(_context: Any, into: Any, source: Any) -> Any:
    """Copy 64 bytes past the caches; `into` is a multiple of 32."""

    def generate(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
        past = builder.module.add_metadata([ir.Constant(_INT, 1)])
        half = ir.VectorType(_WORD, 4).as_pointer()
        for offset in (ir.Constant(_WORD, 0), ir.Constant(_WORD, 32)):
            into, source = (builder.add(each, offset) for each in arguments)
            words = builder.load(builder.inttoptr(source, half), align=1)
            stored = builder.store(words, builder.inttoptr(into, half), align=32)
            stored.set_metadata("nontemporal", past)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


def prefetch(builder: Any, address: Any, to_write: bool) -> None:
    """Generate what has the line at an address ready to be read, or written to."""
    kind = ir.FunctionType(ir.VoidType(), (_BYTE.as_pointer(), _INT, _INT, _INT))
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    write, keep, data = (ir.Constant(_INT, value) for value in (int(to_write), 3, 1))
    builder.call(function, (builder.inttoptr(address, _BYTE.as_pointer()), write, keep, data))


@_intrinsic
def claim(_context: Any, address: Any) -> Any:
    """Have the line at an address ready to be written to, some time from now on."""

    def generate(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
        prefetch(builder, arguments[0], to_write=True)
        return context.get_dummy_value()

    return types.void(types.int64), generate


@_intrinsic
def fence(_context: Any) -> Any:
    """All that was written before, past the caches too, is seen before what is written after."""

    def generate(context: Any, builder: Any, _: Any, __: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


@_intrinsic
def pointer(_context: Any, address: Any) -> Any:
    """An address as `numba.carray` takes it."""

    def generate(_: Any, builder: Any, __: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], _BYTE.as_pointer())

    return types.voidptr(types.int64), generate


@_intrinsic
def yield_core(_context: Any) -> Any:
    """Let another process have the core."""

    def generate(context: Any, builder: Any, _: Any, __: Any) -> Any:
        kind = ir.FunctionType(_INT, ())
        builder.call(cgutils.get_or_insert_function(builder.module, kind, "sched_yield"), ())
        return context.get_dummy_value()

    return types.void(), generate


@_intrinsic
def nanoseconds(_context: Any, memory: Any) -> Any:
    """What time it is, by a clock that only goes on; `memory` is two words to be used at will."""

    def generate(_: Any, builder: Any, __: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(_INT, (_INT, _WORD))
        function = cgutils.get_or_insert_function(builder.module, kind, "clock_gettime")
        builder.call(function, (ir.Constant(_INT, time.CLOCK_MONOTONIC), arguments[0]))
        seconds, rest = (
            builder.load(builder.inttoptr(builder.add(arguments[0], offset), _WORD.as_pointer()))
            for offset in (ir.Constant(_WORD, 0), ir.Constant(_WORD, 8))
        )
        return builder.add(builder.mul(seconds, ir.Constant(_WORD, 10**9)), rest)

    return types.int64(types.int64), generate


@_intrinsic
def read_process(_context: Any, process: Any, vectors: Any) -> Any:
    """Read another process's memory: ``process_vm_readv``; how many bytes, -1 if it failed.

    At `vectors` stand two address-and-length pairs: into what, and from where.
    """

    def generate(_: Any, builder: Any, __: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(_WORD, (_INT, _WORD, _WORD, _WORD, _WORD, _WORD))
        function = cgutils.get_or_insert_function(builder.module, kind, "process_vm_readv")
        process = builder.trunc(arguments[0], _INT)
        one, two_words = ir.Constant(_WORD, 1), ir.Constant(_WORD, 16)
        remote = builder.add(arguments[1], two_words)
        return builder.call(
            function, (process, arguments[1], one, remote, one, ir.Constant(_WORD, 0))
        )

    return types.int64(types.int64, types.int64), generate


@_intrinsic
def call_fold(
    _context: Any, fold: Any, into: Any, sources: Any, n: Any, count: Any, by: Any, memory: Any
) -> Any:
    """Call the compiled fold at an address, as `devices.folds` describes them."""

    def generate(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), (_WORD,) * 6)
        builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), arguments[1:])
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 7), generate


def _c_function(name: str, arguments: int, result: Any = _WORD) -> Any:
    """What generates a call of a C function of words."""

    def generate(context: Any, builder: Any, _: Any, given: Any) -> Any:
        kind = ir.FunctionType(result, (_WORD,) * arguments)
        called = builder.call(cgutils.get_or_insert_function(builder.module, kind, name), given)
        return called if result is _WORD else context.get_dummy_value()

    return generate


@_intrinsic
def number_of(_context: Any, integer: Any) -> Any:
    """The value of a Python int at an address."""
    return types.int64(types.int64), _c_function("PyLong_AsLongLong", 1)


@_intrinsic
def integer(_context: Any, value: Any) -> Any:
    """The address of a new reference to a Python int."""
    return types.int64(types.int64), _c_function("PyLong_FromLongLong", 1)


@_intrinsic
def leave_interpreter(_context: Any) -> Any:
    """Let other threads of Python run; what is to be given to `enter_interpreter`."""
    return types.int64(), _c_function("PyEval_SaveThread", 0)


@_intrinsic
def enter_interpreter(_context: Any, state: Any) -> Any:
    """Go on as a thread of Python."""
    return types.void(types.int64), _c_function("PyEval_RestoreThread", 1, ir.VoidType())


@_intrinsic
def call_run(_context: Any, run: Any, program: Any, number: Any, source: Any, target: Any) -> Any:
    """Call `machine.run`, compiled, at an address."""

    def generate(_: Any, builder: Any, __: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(_WORD, (_WORD,) * 4)
        return builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), arguments[1:])

    return types.int64(*(types.int64,) * 5), generate


@_intrinsic
def call_object(_context: Any, function: Any, arguments: Any, count: Any, names: Any) -> Any:
    """Call a Python function, as ``PyObject_Vectorcall``; its result, 0 if it has raised."""
    return types.int64(*(types.int64,) * 4), _c_function("PyObject_Vectorcall", 4)


@_intrinsic
def keep_object(_context: Any, address: Any) -> Any:
    """One reference more."""
    return types.void(types.int64), _c_function("Py_IncRef", 1, ir.VoidType())


@_intrinsic
def let_go_of_object(_context: Any, address: Any) -> Any:
    """One reference less."""

    def generate(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
        # Numba's own declaration of it takes a pointer.
        kind = ir.FunctionType(ir.VoidType(), (_BYTE.as_pointer(),))
        function = cgutils.get_or_insert_function(builder.module, kind, "Py_DecRef")
        builder.call(function, (builder.inttoptr(arguments[0], _BYTE.as_pointer()),))
        return context.get_dummy_value()

    return types.void(types.int64), generate


@_intrinsic
def this_thread(_context: Any) -> Any:
    """What tells one thread from another."""
    return types.int64(), _c_function("PyThread_get_thread_ident", 0)
