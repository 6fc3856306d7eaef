"""Instructions for functions that Numba cannot compile from Python.

The functions themselves, with bodies for Python, are in `records`, `memory` and `interpreter`.
This module gives Numba the types and instructions of each.  It is imported only to compile.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from typing import Any, TypeVar

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import lower_builtin, register_jitable, type_callable
from numba.np.numpy_support import from_dtype
from numpy import dtype

from ringreduce.compiler import interpreter, memory, pyobjects, records
from ringreduce.compiler.records import Record

_WORD, _BYTE, _INT = ir.IntType(64), ir.IntType(8), ir.IntType(32)
_VOID, _INT64 = types.void, types.int64

Generate = Callable[[Any, Any, Any, Any], Any]
_Function = TypeVar("_Function", bound=Callable[..., Any])
_types: Callable[..., Callable[[_Function], _Function]] = type_callable
_emits: Callable[..., Callable[[_Function], _Function]] = lower_builtin


# --- records, and functions that are marked -------------------------------------------------------


def register() -> None:
    """Make records and `compilable` functions known to Numba, if they are new.

    To be called before every compilation, by one thread at a time.
    """
    while records.DECLARED:
        _register_record(records.DECLARED.pop())
    while records.MARKED:
        register_jitable(records.MARKED.pop())


def _register_record(record: type[Record]) -> None:
    kind = from_dtype(dtype(record))

    @_types(record)
    def typed(_context: Any) -> Any:
        return lambda address: kind if isinstance(address, types.Integer) else None

    @_emits(record, types.Integer)
    def lowered(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(kind))


@_types(records.address_of)
def _type_of_address_of(_context: Any) -> Any:
    return lambda record: _INT64 if isinstance(record, types.Record) else None


@_emits(records.address_of, types.Record)
def _address_of(_: Any, builder: Any, __: Any, arguments: Any) -> Any:
    return builder.ptrtoint(arguments[0], _WORD)


@_types(records.load_acquire)
def _type_of_load_acquire(_context: Any) -> Any:
    return lambda record, field: _INT64 if _is_word(record, field) else None


@_emits(records.load_acquire, types.Record, types.StringLiteral)
def _load_acquire(_: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    return builder.load_atomic(_field(builder, signature, arguments), "acquire", 8)


@_types(records.store_release)
def _type_of_store_release(_context: Any) -> Any:
    def typer(record: Any, field: Any, value: Any) -> Any:
        known = _is_word(record, field) and isinstance(value, types.Integer)
        return _VOID(record, field, _INT64) if known else None

    return typer


@_emits(records.store_release, types.Record, types.StringLiteral, types.Integer)
def _store_release(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    place = _field(builder, signature, arguments)
    builder.store_atomic(arguments[2], place, "release", 8)
    return context.get_dummy_value()


@_types(records.compare_and_swap)
def _type_of_compare_and_swap(_context: Any) -> Any:
    def typer(record: Any, field: Any, expected: Any, value: Any) -> Any:
        integers = isinstance(expected, types.Integer) and isinstance(value, types.Integer)
        known = _is_word(record, field) and integers
        return types.boolean(record, field, _INT64, _INT64) if known else None

    return typer


@_emits(records.compare_and_swap, types.Record, types.StringLiteral, types.Integer, types.Integer)
def _compare_and_swap(_: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    place = _field(builder, signature, arguments)
    swapped = builder.cmpxchg(place, *arguments[2:], "acq_rel", "acquire")
    return builder.extract_value(swapped, 1)


@_types(records.fetch_and_add)
def _type_of_fetch_and_add(_context: Any) -> Any:
    def typer(record: Any, field: Any, value: Any) -> Any:
        known = _is_word(record, field) and isinstance(value, types.Integer)
        return _INT64(record, field, _INT64) if known else None

    return typer


@_emits(records.fetch_and_add, types.Record, types.StringLiteral, types.Integer)
def _fetch_and_add(_: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    place = _field(builder, signature, arguments)
    return builder.atomic_rmw("add", place, arguments[2], "acq_rel")


def _is_word(record: Any, field: Any) -> bool:
    if not isinstance(record, types.Record) or not isinstance(field, types.StringLiteral):
        return False
    name = field.literal_value
    return name in record.fields and record.typeof(name) == _INT64


def _field(builder: Any, signature: Any, arguments: Any) -> Any:
    record, field, *_ = signature.args
    offset = record.offset(field.literal_value)
    return cgutils.get_record_member(builder, arguments[0], offset, _WORD)


# --- memory ---------------------------------------------------------------------------------------


def _compiles(function: Callable[..., Any], signature: Any) -> Callable[[Generate], Generate]:
    """Let Numba compile a call of `function` to the instructions that a generator emits."""

    def decorate(generate: Generate) -> Generate:
        def typer(*_: Any) -> Any:
            return signature

        typer.pysig = inspect.signature(function)  # type: ignore[attr-defined]  # Numba reads it
        _types(function)(lambda _context: typer)
        _emits(function, *signature.args)(generate)
        return generate

    return decorate


@_compiles(memory.load, _INT64(_INT64))
def _load(_: Any, builder: Any, __: Any, arguments: Any) -> Any:
    return builder.load(builder.inttoptr(arguments[0], _WORD.as_pointer()))


@_compiles(memory.store, _VOID(_INT64, _INT64))
def _store(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
    builder.store(arguments[1], builder.inttoptr(arguments[0], _WORD.as_pointer()))
    return context.get_dummy_value()


@_compiles(memory.copy, _VOID(_INT64, _INT64, _INT64))
def _copy(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
    into, source = (builder.inttoptr(each, _BYTE.as_pointer()) for each in arguments[:2])
    cgutils.raw_memcpy(builder, into, source, arguments[2], 1)
    return context.get_dummy_value()


@_compiles(memory.stream_line, _VOID(_INT64, _INT64))
def _stream_line(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
    nontemporal = builder.module.add_metadata([ir.Constant(_INT, 1)])
    half = ir.VectorType(_WORD, 4).as_pointer()
    for offset in (ir.Constant(_WORD, 0), ir.Constant(_WORD, 32)):
        into, source = (builder.add(each, offset) for each in arguments)
        words = builder.load(builder.inttoptr(source, half), align=1)
        stored = builder.store(words, builder.inttoptr(into, half), align=32)
        stored.set_metadata("nontemporal", nontemporal)
    return context.get_dummy_value()


def prefetch(builder: Any, address: Any, to_write: bool) -> None:
    """Emit a prefetch of the cache line at an address, for reading or for writing."""
    kind = ir.FunctionType(ir.VoidType(), (_BYTE.as_pointer(), _INT, _INT, _INT))
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    write, keep, data = (ir.Constant(_INT, value) for value in (int(to_write), 3, 1))
    builder.call(function, (builder.inttoptr(address, _BYTE.as_pointer()), write, keep, data))


@_compiles(memory.claim, _VOID(_INT64))
def _claim(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
    prefetch(builder, arguments[0], to_write=True)
    return context.get_dummy_value()


@_compiles(memory.fence, _VOID())
def _fence(context: Any, builder: Any, _: Any, __: Any) -> Any:
    builder.fence("seq_cst")
    return context.get_dummy_value()


@_compiles(memory.pointer, types.voidptr(_INT64))
def _pointer(_: Any, builder: Any, __: Any, arguments: Any) -> Any:
    return builder.inttoptr(arguments[0], _BYTE.as_pointer())


@_compiles(memory.yield_core, _VOID())
def _yield_core(context: Any, builder: Any, _: Any, __: Any) -> Any:
    kind = ir.FunctionType(_INT, ())
    builder.call(cgutils.get_or_insert_function(builder.module, kind, "sched_yield"), ())
    return context.get_dummy_value()


@_compiles(memory.nanoseconds, _INT64(_INT64))
def _nanoseconds(_: Any, builder: Any, __: Any, arguments: Any) -> Any:
    kind = ir.FunctionType(_INT, (_INT, _WORD))
    function = cgutils.get_or_insert_function(builder.module, kind, "clock_gettime")
    builder.call(function, (ir.Constant(_INT, time.CLOCK_MONOTONIC), arguments[0]))
    seconds, rest = (
        builder.load(builder.inttoptr(builder.add(arguments[0], offset), _WORD.as_pointer()))
        for offset in (ir.Constant(_WORD, 0), ir.Constant(_WORD, 8))
    )
    return builder.add(builder.mul(seconds, ir.Constant(_WORD, 10**9)), rest)


def _process_call(name: str) -> Generate:
    def generate(_: Any, builder: Any, __: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(_WORD, (_INT, _WORD, _WORD, _WORD, _WORD, _WORD))
        function = cgutils.get_or_insert_function(builder.module, kind, name)
        process, one = builder.trunc(arguments[0], _INT), ir.Constant(_WORD, 1)
        remote = builder.add(arguments[1], ir.Constant(_WORD, 16))
        given = process, arguments[1], one, remote, one, ir.Constant(_WORD, 0)
        return builder.call(function, given)

    return generate


_read_process = _compiles(memory.read_process, _INT64(_INT64, _INT64))(
    _process_call("process_vm_readv")
)
_write_process = _compiles(memory.write_process, _INT64(_INT64, _INT64))(
    _process_call("process_vm_writev")
)


@_compiles(memory.call_fold, _VOID(*(_INT64,) * 7))
def _call_fold(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
    kind = ir.FunctionType(ir.VoidType(), (_WORD,) * 6)
    builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), arguments[1:])
    return context.get_dummy_value()


@_compiles(memory.call_mpi, _INT64(*(_INT64,) * 8))
def _call_mpi(_: Any, builder: Any, __: Any, arguments: Any) -> Any:
    kind = ir.FunctionType(ir.IntType(32), (_WORD,) * 7)
    error = builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), arguments[1:])
    return builder.sext(error, _WORD)


@_compiles(memory.call_run, _INT64(*(_INT64,) * 5))
def _call_run(_: Any, builder: Any, __: Any, arguments: Any) -> Any:
    kind = ir.FunctionType(_WORD, (_WORD,) * 4)
    return builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), arguments[1:])


# --- CPython --------------------------------------------------------------------------------------


def _c_function(name: str, arguments: int, result: Any = _WORD) -> Generate:
    def generate(context: Any, builder: Any, _: Any, given: Any) -> Any:
        kind = ir.FunctionType(result, (_WORD,) * arguments)
        called = builder.call(cgutils.get_or_insert_function(builder.module, kind, name), given)
        return called if result is _WORD else context.get_dummy_value()

    return generate


_number_of = _compiles(interpreter.number_of, _INT64(_INT64))(_c_function("PyLong_AsLongLong", 1))
_integer = _compiles(interpreter.integer, _INT64(_INT64))(_c_function("PyLong_FromLongLong", 1))
_leave_interpreter = _compiles(interpreter.leave_interpreter, _INT64())(
    _c_function("PyEval_SaveThread", 0)
)
_enter_interpreter = _compiles(interpreter.enter_interpreter, _VOID(_INT64))(
    _c_function("PyEval_RestoreThread", 1, ir.VoidType())
)
_call_object = _compiles(interpreter.call_object, _INT64(*(_INT64,) * 4))(
    _c_function("PyObject_Vectorcall", 4)
)
_keep_object = _compiles(interpreter.keep_object, _VOID(_INT64))(
    _c_function("Py_IncRef", 1, ir.VoidType())
)
_this_thread = _compiles(interpreter.this_thread, _INT64())(
    _c_function("PyThread_get_thread_ident", 0)
)


@_compiles(interpreter.let_go_of_object, _VOID(_INT64))
def _let_go_of_object(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
    # Numba's own declaration of it takes a pointer.
    kind = ir.FunctionType(ir.VoidType(), (_BYTE.as_pointer(),))
    function = cgutils.get_or_insert_function(builder.module, kind, "Py_DecRef")
    builder.call(function, (builder.inttoptr(arguments[0], _BYTE.as_pointer()),))
    return context.get_dummy_value()


_number_within = _compiles(interpreter.number_within, _INT64(_INT64, _INT64))(
    _c_function("PyLong_AsLongLongAndOverflow", 2)
)
_tuple_of = _compiles(interpreter.tuple_of, _INT64(_INT64))(_c_function("PySequence_Tuple", 1))
_new_list = _compiles(interpreter.new_list, _INT64(_INT64))(_c_function("PyList_New", 1))
_set_item = _compiles(interpreter.set_item, _VOID(*(_INT64,) * 3))(
    _c_function("PyList_SetItem", 3, _INT)
)
_attribute = _compiles(interpreter.attribute, _INT64(_INT64, _INT64))(
    _c_function("PyObject_GetAttr", 2)
)
_forget_exception = _compiles(interpreter.forget_exception, _VOID())(
    _c_function("PyErr_Clear", 0, ir.VoidType())
)


# --- functions by their addresses -----------------------------------------------------------------


def _call_int(_: Any, builder: Any, __: Any, arguments: Any) -> Any:
    """Call the function at an address with two words; it returns an int of C."""
    kind = ir.FunctionType(_INT, (_WORD, _WORD))
    called = builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), arguments[1:])
    return builder.sext(called, _WORD)


_describe = _compiles(interpreter.describe, _INT64(*(_INT64,) * 3))(_call_int)
_set_base = _compiles(interpreter.set_base, _INT64(*(_INT64,) * 3))(_call_int)


@_compiles(interpreter.new_array, _INT64(*(_INT64,) * 7))
def _new_array(_: Any, builder: Any, __: Any, arguments: Any) -> Any:
    words = (_WORD, _WORD, _INT, _WORD, _WORD, _WORD, _INT, _WORD)
    kind = ir.FunctionType(_WORD, words)
    function, array_type, dtype, ndim, *memory = arguments
    flags, nothing = ir.Constant(_INT, pyobjects.WRITABLE), ir.Constant(_WORD, 0)
    given = (array_type, dtype, builder.trunc(ndim, _INT), *memory, flags, nothing)
    return builder.call(builder.inttoptr(function, kind.as_pointer()), given)
