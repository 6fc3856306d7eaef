"""The fast path: repeated calls that compiled code makes without Python.

A call that the general path has made is admitted to a table (`shm.call_table`) if it is one
compiled program, or one for each batch of a list.  From then on compiled code (`shm.entry`) makes
the same call, one at a time and without the communicator's lock, while nobody holds that lock and
nothing is under way or wrong.  The calls' numbers are settled with the agreement when the lock is
taken again.
"""

from __future__ import annotations

import inspect
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, Protocol

import numpy as np

from ringreduce.compiler.records import address_of, offset_of, size_of
from ringreduce.control.agreement import Agreement
from ringreduce.control.signature import Signature
from ringreduce.shm import call_table, functions
from ringreduce.shm.call_table import (
    CALL_BYTES,
    EMPTY,
    SLOTS,
    WAYS,
    Arguments,
    CachedCall,
    EntryPoint,
    FastPathState,
    hash_of,
    slot_address,
)
from ringreduce.shm.executable import Executable
from ringreduce.shm.layout import WORD
from ringreduce.shm.list_table import ListTable

_BETWEEN_LOOKS_S = 2e-5
Shape = tuple[int, ...]
Function = Callable[..., Any]


class _Collective(NamedTuple):
    """How a collective is called."""

    number: int
    """As in `call_table`."""
    positional: tuple[str, ...]
    """The parameters behind `x` that may be passed by position."""
    takes_counts: bool = False


_COLLECTIVES = {
    "all_reduce": _Collective(call_table.ALL_REDUCE, ("op",)),
    "reduce_scatter": _Collective(call_table.REDUCE_SCATTER, ("op",)),
    "reduce": _Collective(call_table.REDUCE, ("root", "op")),
    "broadcast": _Collective(call_table.BROADCAST, ("root",)),
    "all_gather": _Collective(call_table.ALL_GATHER, (), takes_counts=True),
    "gather": _Collective(call_table.GATHER, ("root",), takes_counts=True),
    "all_to_all": _Collective(call_table.ALL_TO_ALL, ()),
}
BARRIER = "barrier"
COLLECTIVES = (*_COLLECTIVES, BARRIER)
"""The methods of a communicator that have a compiled entry."""


class Lock(Protocol):
    """A lock that its owner may acquire again."""

    def acquire(self) -> Any: ...
    def release(self) -> None: ...


class Opening(Protocol):
    """A call as the engine knows it."""

    @property
    def signature(self) -> Signature: ...
    @property
    def schedule(self) -> Any:
        """What `Engine.finish` needs to report a call that is broken off."""


@dataclass(slots=True, eq=False)
class CompiledCall:
    """A call that compiled code makes, as `Engine.finish` needs it."""

    opening: Opening
    executables: Sequence[Executable]
    """One for each batch, each with one program; a call on one array is one batch."""
    timeout_s: float | None = None
    """Seconds without progress until the call is given up; None: the communicator's."""
    table: ListTable | None = None
    """The batches of a list; None: no list."""
    named: tuple[Any, ...] = ()
    """The objects that a `CachedCall` names by their addresses."""


class _Function(NamedTuple):
    """A compiled function, and the records that it reads."""

    function: Function
    entry: EntryPoint
    cached: CachedCall
    """The call of a function without arguments."""
    memory: np.ndarray
    """The memory of both records, which the function keeps alive too."""


class Key(NamedTuple):
    """All by which compiled code tells one call from another.

    `counts` are the first dimensions of all ranks' arrays.  Of a list, `shape` is that of the
    first member, `last` that of the last.
    """

    collective: str
    dtype: np.dtype[Any]
    shape: Shape
    op: str | None
    algorithm: str
    root: int
    counts: tuple[int, ...]
    member_count: int = 0
    last: Shape = ()


def key_of(
    collective: str,
    dtype: np.dtype[Any],
    shapes: Sequence[Shape],
    arguments: Mapping[str, Any],
    is_list: bool = False,
) -> Key | None:
    """The key of a call with these arguments; None if compiled code does not know their types."""
    op, algorithm = arguments.get("op"), arguments["algorithm"]
    root, counts = arguments.get("root", 0), arguments.get("counts", ())
    texts = [algorithm] if op is None else [op, algorithm]
    if any(type(text) is not str for text in texts) or arguments.get("wire") is not None:
        return None
    if any(type(number) is not int for number in (root, *counts)):
        return None
    ends = (len(shapes), shapes[-1]) if is_list else (0, ())
    return Key(collective, dtype, shapes[0], op, algorithm, root, counts, *ends)


class FastPath:
    """Wraps the communicator's `lock`.

    While nobody holds the lock and `is_idle()`, compiled calls run without it.  A call that must
    wait is appended to `running` and completed by ``finish(call, x, out, batch)``.  If a signal
    handler raises between the two, `on_orphaned()` ends the communicator.
    """

    def __init__(
        self,
        lock: Lock,
        is_idle: Callable[[], bool],
        agreement: Agreement,
        running: list[Any],
        finish: Callable[[CompiledCall, Any, Any, int], None],
        on_orphaned: Callable[[], None],
        ranks: int,
    ) -> None:
        self._take: Callable[[], Any] = lock.acquire
        self._give: Callable[[], None] = lock.release
        self._is_idle, self._agreement, self._on_orphaned = is_idle, agreement, on_orphaned
        self._depth = 0
        self._waiting: list[None] = []
        """An item for each thread that waits for the lock."""
        head = size_of(FastPathState) + size_of(Arguments) + ranks * WORD
        self._memory = np.zeros((head + SLOTS * CALL_BYTES) // WORD, np.int64)
        self._slots = self._memory[head // WORD :].reshape(SLOTS, -1)
        self._named = {
            "remember": agreement.remember,
            "begin": running.append,
            "finish": finish,
            "empty": np.empty,
            "none": None,
            "array_type": np.ndarray,
            "list_type": list,
            "tuple_type": tuple,
            "int_type": int,
            "name_out": "out",
            "name_op": "op",
            "name_root": "root",
            "name_counts": "counts",
            "name_algorithm": "algorithm",
            "name_wire": "wire",
            "name_timeout_s": "timeout_s",
            "name_async_op": "async_op",
            "false": False,
            "default_op": "sum",
            "default_algorithm": "auto",
        }
        """The objects that the state names by their addresses."""
        address = _address(self._memory)
        self.state = state = FastPathState(address)
        for field, named in self._named.items():
            setattr(state, field, id(named))
        state.settled, state.ranks = 1, ranks
        state.arguments = address + size_of(FastPathState)
        state.counts = state.arguments + size_of(Arguments)
        state.table = address + head
        self._places: dict[Key, int] = {}
        """The address of the slot of each admitted call."""
        self._calls: dict[int, tuple[Key, CompiledCall]] = {}
        """The call in each slot, by its address; the call admitted first comes first."""
        self._barrier: _Function | None = None
        self._barrier_call: CompiledCall | None = None
        self._clear()

    # --- the lock ---

    def acquire(self) -> None:
        """Acquire the lock, and disable the fast path."""
        state = self.state
        self._waiting.append(None)
        try:
            while True:
                self._take()
                self._depth += 1
                try:
                    state.enabled = 0
                    if not state.busy or state.owner == threading.get_ident():
                        break
                except BaseException:  # a signal handler may raise anywhere
                    self._leave()
                    raise
                self._leave()
                time.sleep(_BETWEEN_LOOKS_S)
        finally:
            self._waiting.pop()
        self._settle()
        if state.orphaned:
            state.orphaned = 0
            self._on_orphaned()

    def release(self) -> None:
        """Release the lock; enable the fast path if nothing is under way or wrong.

        It stays disabled if another thread waits for the lock, which would find a call under way
        each time that it looks.
        """
        try:
            if self._depth == 1 and not self._waiting and self._is_idle():
                self.state.next_number = self._agreement.completed
                self.state.settled = 0
                self.state.enabled = 1
        finally:
            self._leave()

    def _leave(self) -> None:
        self._depth -= 1
        self._give()

    def _settle(self) -> None:
        """Count the calls of the fast path.  No statement here lets a signal handler run."""
        state, agreement = self.state, self._agreement
        if not state.settled:
            agreement.completed, agreement.number = state.next_number, state.next_number - 1
            state.settled = 1

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def disable(self) -> None:
        """Let compiled code begin no more calls, whoever has the lock."""
        self.state.enabled = 0
        self._settle()

    def take_over(self) -> None:
        """Answer for the errors of the call under way from now on: `Engine.finish` calls this."""
        self.state.taken_over = 1

    def forget(self) -> None:
        """Disable the fast path for good, and drop all that is kept for it."""
        self.disable()
        self._clear()

    def _clear(self) -> None:
        if self._barrier is not None:
            self._barrier.entry.own_call = 0
        self._barrier_call = None
        self._slots[...] = 0
        self._slots[:, offset_of(CachedCall, "hash") // WORD] = EMPTY
        self._places.clear()
        self._calls.clear()

    def forked(self) -> None:
        """Disable the fast path in a child process, where nobody holds the lock."""
        self.state.enabled = self.state.busy = 0
        lock = threading.RLock()
        self._take, self._give, self._depth = lock.acquire, lock.release, 0

    # --- functions that CPython calls ---

    def entry(self, collective: str, general: Function) -> Function:
        """A compiled function in place of the method `general`, which it calls if need be."""
        if collective == BARRIER:
            self._barrier = self._function(collective, general)
            return self._barrier.function
        number, positional, takes_counts = _COLLECTIVES[collective]
        made = self._function(collective, general)
        entry = made.entry
        entry.collective, entry.takes_counts = number, int(takes_counts)
        entry.least, entry.most = 1, 1 + len(positional)
        places = {name: 1 + place for place, name in enumerate(positional)}
        entry.root_at, entry.op_at = places.get("root", -1), places.get("op", -1)
        return made.function

    def planned(self, call: CompiledCall, result: Any, general: Function) -> Function:
        """A compiled function that makes `call` on the arrays that it is bound to."""
        call.named = (result, call.opening.signature)
        made = self._function("planned", general, call)
        _fill_own(made, call, result)
        return made.function

    def _function(self, name: str, general: Function, *kept: Any) -> _Function:
        memory = np.zeros((size_of(EntryPoint) + CALL_BYTES) // WORD, np.int64)
        entry = EntryPoint(_address(memory))
        entry.path, entry.general = _address(self._memory), id(general)
        me = (memory, self._memory, general, *kept)
        function = functions.python_function("call", me, _documentation(name, general), name)
        assert function is not None
        cached = CachedCall(_address(memory) + size_of(EntryPoint))
        return _Function(function, entry, cached, memory)

    # --- which calls ---

    def call_of(self, key: Key) -> CompiledCall | None:
        """The call that was admitted under a key; None without one."""
        place = self._places.get(key)
        return None if place is None else self._calls[place][1]

    def admit_barrier(self, call: CompiledCall) -> None:
        """Let compiled code make the communicator's barrier from now on."""
        if self._barrier is not None:
            call.named = (call.opening.signature,)
            self._barrier_call = call
            _fill_own(self._barrier, call, None)

    @property
    def has_barrier(self) -> bool:
        """Whether compiled code makes the communicator's barrier, or never will."""
        return self._barrier is None or self._barrier_call is not None

    def admit(self, key: Key, call: CompiledCall, shape: Any) -> None:
        """Let compiled code make a call from now on.

        `shape` is that of the result; None: this rank gets none.  Of a list they are the shapes of
        all results.
        """
        memory = np.zeros(size_of(Arguments) // WORD, np.int64)
        given, like = Arguments(_address(memory)), _like(key.shape, key.dtype)
        last, counts = _like(key.last, key.dtype), np.array(key.counts, np.int64)
        op, algorithm = key.op and sys.intern(key.op), sys.intern(key.algorithm)
        given.collective = _COLLECTIVES[key.collective].number
        given.x, given.member_count, given.last = id(like), key.member_count, id(last)
        given.op, given.algorithm = id(op) if op else 0, id(algorithm)
        given.root, given.counts = key.root, _address(counts)
        given.count_of_counts = len(key.counts)
        cached = CachedCall(self._slot(key, hash_of(given)))
        signature = call.opening.signature
        has_result = shape is not None
        output = _like(shape, key.dtype) if has_result and call.table is None else like
        if not has_result:
            output = np.empty(0, key.dtype)
        call.named = (like, op, algorithm, counts, signature, output, shape)
        for field in ("collective", "member_count", "op", "algorithm", "root", "counts"):
            setattr(cached, field, getattr(given, field))
        cached.input, cached.count_of_counts = id(like), given.count_of_counts
        cached.signature, cached.output, cached.shape = id(signature), id(output), id(shape)
        cached.result = 0 if has_result else id(None)
        _fill_programs(cached, call)
        self._calls[self._places[key]] = key, call
        cached.hash, cached.call = hash_of(given), id(call)

    def _slot(self, key: Key, hashed: int) -> int:
        """The address of the slot for a call: its own, a free one, or that of the oldest call."""
        table = self.state.table
        places = [slot_address(table, hashed, way) for way in range(WAYS)]
        if key in self._places:
            place = self._places[key]
        else:
            free = (place for place in places if place not in self._calls)
            oldest = (place for place in self._calls if place in places)
            place = next(free, 0) or next(oldest)
        if place in self._calls:
            del self._places[self._calls.pop(place)[0]]
        cached = CachedCall(place)
        cached.hash, cached.call = EMPTY, 0
        self._places[key] = place
        return place


def _fill_own(made: _Function, call: CompiledCall, result: Any) -> None:
    """Let a function without arguments make `call`, and return `result`."""
    cached = made.cached
    cached.signature, cached.call = id(call.opening.signature), id(call)
    cached.output = cached.result = id(result)
    _fill_programs(cached, call)
    made.entry.own_call = address_of(cached)


def _fill_programs(cached: CachedCall, call: CompiledCall) -> None:
    if call.table is None:
        (executable,) = call.executables
        cached.program, cached.executable = _program_address(executable), id(executable)
        cached.list = 0
        return
    cached.program, cached.executable, cached.list = 0, 0, call.table.address
    for index, executable in enumerate(call.executables):
        batch = call.table.batch(index)
        batch.program, batch.executable = _program_address(executable), id(executable)


def _program_address(executable: Executable) -> int:
    assert executable.program is not None
    return executable.program.address


def _like(shape: Shape, dtype: np.dtype[Any]) -> np.ndarray:
    """An array of this kind without memory of its own."""
    return np.broadcast_to(np.empty((), dtype), shape)


@cache
def _text_signature(function: Function) -> str:
    """The parameters of a method without their annotations, as CPython reads them."""
    signature = inspect.signature(function)
    bare = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for parameter in signature.parameters.values()
    ]
    text = str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))
    return text.replace("(self", "($self", 1)


def _documentation(name: str, general: Function) -> str:
    """The docstring of a compiled function, which begins with its signature."""
    method = getattr(general, "__func__", None) or type(general).__call__
    return f"{name}{_text_signature(method)}\n--\n\n{method.__doc__ or ''}"


def _address(memory: np.ndarray) -> int:
    return int(memory.ctypes.data)
