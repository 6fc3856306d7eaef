"""The fast path: compiled code makes repeated calls without Python.

After the general path has made a call, the call is admitted to a table (`shm.call_table`) if it is
one compiled program, or one program for each batch of a list.  From then on compiled code
(`shm.entry`) makes the same call.  It makes one call at a time, without the communicator's lock.
The fast path is enabled while nobody holds that lock, no call is under way, and the communicator is
usable.  The agreement's counters are updated when a thread acquires the lock again.
"""

from __future__ import annotations

import inspect
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from types import MethodType
from typing import Any, NamedTuple, Protocol

import numpy as np

from ringreduce.compiler.records import address_of, array_address, offset_of, size_of
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
from ringreduce.shm.executable import ShmExecutable
from ringreduce.shm.layout import WORD
from ringreduce.shm.list_table import ListTable
from ringreduce.shm.tensor_views import Tensors
from ringreduce.trace.recorder import CALL, RECORDERS
from ringreduce.trace.ring import kept_words

_BETWEEN_LOOKS_S = 2e-5
"""Seconds between two looks at whether a call of the fast path is still under way."""
Shape = tuple[int, ...]
Function = Callable[..., Any]


SCATTER_TO_OUT = "scatter to out"
"""The collective of a `Key` for a scatter on a rank that passes no array; `shape` is out's."""
BARRIER = "barrier"


class ReentrantLock(Protocol):
    def acquire(self, blocking: bool = ..., /) -> Any: ...
    def release(self) -> None: ...


class EngineCall(Protocol):
    @property
    def signature(self) -> Signature: ...
    @property
    def schedule(self) -> Any:
        """For the error text of a call that fails."""

    @property
    def nbytes(self) -> int: ...


@dataclass(slots=True, eq=False)
class CompiledCall:
    """A call that compiled code makes, with all that `Engine.finish` needs to complete it."""

    engine_call: EngineCall
    executables: Sequence[ShmExecutable]
    """The executable of each batch, with one program each; a call on one array is one batch."""
    timeout_s: float | None = None
    """Seconds without progress until the call times out; None: those of the communicator."""
    table: ListTable | None = None
    """The batches of a list; None: the call is on one array."""
    named: tuple[Any, ...] = ()
    """Keeps alive the objects with addresses in a `CachedCall`."""


class _Records(NamedTuple):
    entry: EntryPoint
    cached: CachedCall
    memory: np.ndarray
    """The memory of both records."""


class Key(NamedTuple):
    """The arguments by which compiled code finds a call.

    `counts` are the first dimensions of the arrays, by rank.  For a list, `shape` is the shape of
    the first member, and `last` the shape of the last member.
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
    """Return the key of a call; None if compiled code does not know the arguments' types."""
    op, algorithm = arguments.get("op"), arguments["algorithm"]
    root, counts = arguments.get("root", 0), arguments.get("counts") or ()
    texts = [algorithm] if op is None else [op, algorithm]
    if any(type(text) is not str for text in texts) or arguments.get("wire") is not None:
        return None
    if any(type(number) is not int for number in (root, *counts)):
        return None
    ends = (len(shapes), shapes[-1]) if is_list else (0, ())
    return Key(collective, dtype, shapes[0], op, algorithm, root, counts, *ends)


def _view(tensors: Tensors, view_of: Callable[[Any], Any], x: Any) -> Any:
    tensors.look()
    return view_of(x)


class FastPath:
    """Wraps the communicator's `lock`.

    While nobody holds the lock and `is_idle()`, compiled calls run without it.  A call that waits
    or pauses is appended to `running` and completed by ``finish(call, x, out, batch)``.  If a
    signal handler raises between the two, `on_orphaned()` ends the communicator.  While the word at
    the address `refused` is not 0, all calls take the general path, which refuses some.

    ``view_of(x)`` returns a NumPy array over the memory of an array of another library, or a list
    of these for a list; None for anything else.
    """

    def __init__(
        self,
        lock: ReentrantLock,
        is_idle: Callable[[], bool],
        agreement: Agreement,
        running: list[Any],
        finish: Callable[[CompiledCall, Any, Any, int], None],
        on_orphaned: Callable[[], None],
        view_of: Callable[[Any], Any],
        ranks: int,
        refused: int,
    ) -> None:
        self._take: Callable[[bool], Any] = lock.acquire
        self._give: Callable[[], None] = lock.release
        self._is_idle, self._agreement, self._on_orphaned = is_idle, agreement, on_orphaned
        self._depth = 0
        self._waiting: list[None] = []
        """One item for each thread that waits for the lock."""
        head = size_of(FastPathState) + size_of(Arguments) + ranks * WORD
        self._memory = np.zeros((head + SLOTS * CALL_BYTES) // WORD, np.int64)
        self._slots = self._memory[head // WORD :].reshape(SLOTS, -1)
        self._tensors = Tensors()
        self._named = {
            "remember": agreement.remember,
            "begin": running.append,
            "finish": finish,
            "empty": np.empty,
            "view_of": partial(_view, self._tensors, view_of),
            "none": None,
            "array_type": np.ndarray,
            "list_type": list,
            "tuple_type": tuple,
            "int_type": int,
            "str_type": str,
            "intern": sys.intern,
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
        address = array_address(self._memory)
        self.state = state = FastPathState(address)
        for field, named in self._named.items():
            setattr(state, field, id(named))
        state.settled, state.ranks, state.refused = 1, ranks, refused
        state.tensors = address_of(self._tensors.views)
        state.arguments = address + size_of(FastPathState)
        state.counts = state.arguments + size_of(Arguments)
        for recorder in RECORDERS:
            state.events = recorder.ring
        state.table = address + head
        self._places: dict[Key, int] = {}
        self._calls: dict[int, tuple[Key, CompiledCall]] = {}
        """The call in each slot, by the slot's address, in the order of admission."""
        self._numbers = {
            "all_reduce": call_table.ALL_REDUCE,
            "scatter": call_table.SCATTER,
            SCATTER_TO_OUT: call_table.SCATTER_TO_OUT,
        }
        """Collective -> its number in the table; others are numbered as they come."""
        self._barrier: _Records | None = None
        self._barrier_call: CompiledCall | None = None
        self._clear()

    # --- the lock ---

    def acquire(self, blocking: bool = True) -> bool:
        """Acquire the lock, and disable the fast path; return whether this thread has the lock."""
        state = self.state
        self._waiting.append(None)
        try:
            while True:
                if not self._take(blocking):
                    return False
                self._depth += 1
                try:
                    state.enabled = 0
                    if not state.busy or state.owner == threading.get_ident():
                        break
                except BaseException:  # a signal handler may raise anywhere
                    self._leave()
                    raise
                self._leave()
                if not blocking:
                    return False
                time.sleep(_BETWEEN_LOOKS_S)
        finally:
            self._waiting.pop()
        self._settle()
        if state.orphaned:
            state.orphaned = 0
            self._on_orphaned()
        return True

    def release(self) -> None:
        """Release the lock; enable the fast path if the communicator is idle and usable.

        The fast path stays disabled while another thread waits for the lock: that thread might
        otherwise find a call under way each time that it looks.
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
        """Update the agreement's counters.  No statement here lets a signal handler run."""
        state, agreement = self.state, self._agreement
        if not state.settled:
            agreement.completed, agreement.number = state.next_number, state.next_number - 1
            state.settled = 1

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def disable(self) -> None:
        self.state.enabled = 0
        self._settle()

    def take_over(self) -> None:
        """Note that `Engine.finish` handles all errors of the call under way from now on."""
        self.state.taken_over = 1

    def forget(self) -> None:
        """Disable the fast path for good, and drop its calls."""
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
        self.state.enabled = self.state.busy = 0
        lock = threading.RLock()
        self._take, self._give, self._depth = lock.acquire, lock.release, 0

    # --- functions that CPython calls ---

    def entry(self, collective: str, general: MethodType, takes_counts: bool = False) -> Function:
        """Return a compiled function for a collective.

        It calls the method `general` on the general path.  `takes_counts`: all ranks pass a
        list of ints, `counts`.
        """
        if collective == BARRIER:
            function, self._barrier = self._function(collective, general)
            return function
        function, (entry, *_) = self._function(collective, general)
        entry.collective, entry.takes_counts = self._number_of(collective), int(takes_counts)
        places = _places_of(general.__func__)
        entry.least, entry.most = 1, len(places)
        entry.root_at, entry.op_at = places.get("root", -1), places.get("op", -1)
        return function

    def _number_of(self, collective: str) -> int:
        return self._numbers.setdefault(collective, len(self._numbers))

    def planned(self, call: CompiledCall, result: Any, general: Function) -> Function:
        call.named = (result, call.engine_call.signature)
        function, made = self._function("planned", general, call)
        _fill_own(made, call, result)
        return function

    def _function(self, name: str, general: Function, *kept: Any) -> tuple[Function, _Records]:
        memory = np.zeros((size_of(EntryPoint) + CALL_BYTES) // WORD, np.int64)
        entry = EntryPoint(array_address(memory))
        entry.path, entry.general = array_address(self._memory), id(general)
        me = (memory, self._memory, general, *kept)
        function = functions.python_function("call", me, _documentation(name, general), name)
        assert function is not None
        cached = CachedCall(array_address(memory) + size_of(EntryPoint))
        return function, _Records(entry, cached, memory)

    # --- admitted calls ---

    def call_of(self, key: Key) -> CompiledCall | None:
        place = self._places.get(key)
        return None if place is None else self._calls[place][1]

    def admit_barrier(self, call: CompiledCall) -> None:
        if self._barrier is not None:
            call.named = (call.engine_call.signature,)
            self._barrier_call = call
            _fill_own(self._barrier, call, None)

    def drop(self, engine_call: EngineCall) -> None:
        """Drop a call.  The fast path is disabled."""
        for place, (key, call) in list(self._calls.items()):
            if call.engine_call is engine_call:
                cached = CachedCall(place)
                cached.hash, cached.call = EMPTY, 0
                del self._places[key], self._calls[place]
        barrier = self._barrier_call
        if self._barrier is not None and barrier is not None and barrier.engine_call is engine_call:
            self._barrier.entry.own_call, self._barrier_call = 0, None

    @property
    def has_barrier(self) -> bool:
        """Whether the barrier is admitted, or cannot be."""
        return self._barrier is None or self._barrier_call is not None

    def admit(self, key: Key, call: CompiledCall, shape: Any) -> None:
        """Admit a call.

        `shape` is that of the result, for a list all shapes; None if this rank gets no
        result.
        """
        memory = np.zeros(size_of(Arguments) // WORD, np.int64)
        given, like = Arguments(array_address(memory)), _like(key.shape, key.dtype)
        last, counts = _like(key.last, key.dtype), np.array(key.counts, np.int64)
        op, algorithm = key.op and sys.intern(key.op), sys.intern(key.algorithm)
        given.collective = self._number_of(key.collective)
        given.x, given.member_count, given.last = id(like), key.member_count, id(last)
        given.op, given.algorithm = id(op) if op else 0, id(algorithm)
        given.root, given.counts = key.root, array_address(counts)
        given.count_of_counts = len(key.counts)
        cached = CachedCall(self._slot(key, hash_of(given)))
        signature = call.engine_call.signature
        has_result = shape is not None
        output = _like(shape, key.dtype) if has_result and call.table is None else like
        if not has_result:
            output = np.empty(0, key.dtype)
        call.named = (like, last, op, algorithm, counts, signature, output, shape)
        for field in ("collective", "member_count", "op", "algorithm", "root", "counts"):
            setattr(cached, field, getattr(given, field))
        cached.input, cached.last, cached.count_of_counts = id(like), id(last), len(key.counts)
        cached.signature, cached.output, cached.shape = id(signature), id(output), id(shape)
        cached.result = 0 if has_result else id(None)
        _fill_programs(cached, call, self.state.events != 0)
        self._calls[self._places[key]] = key, call
        cached.hash, cached.call = hash_of(given), id(call)

    def _slot(self, key: Key, hashed: int) -> int:
        """Empty and return the slot for a call: its own, a free slot, or the oldest call's slot."""
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


def _fill_own(made: _Records, call: CompiledCall, result: Any) -> None:
    cached = made.cached
    cached.signature, cached.call = id(call.engine_call.signature), id(call)
    cached.output = cached.result = id(result)
    _fill_programs(cached, call, FastPathState(made.entry.path).events != 0)
    made.entry.own_call = address_of(cached)


def _fill_programs(cached: CachedCall, call: CompiledCall, traced: bool) -> None:
    if traced:
        made = call.engine_call
        words = kept_words(CALL, made.signature.collective, made.schedule.algorithm)
        call.named += (words,)
        cached.words, cached.nbytes = array_address(words), made.nbytes
    if call.table is None:
        (executable,) = call.executables
        cached.program, cached.executable = executable.program.address, id(executable)
        cached.list = 0
        return
    cached.program, cached.executable, cached.list = 0, 0, call.table.address
    for index, executable in enumerate(call.executables):
        batch = call.table.batch(index)
        batch.program, batch.executable = executable.program.address, id(executable)


def _like(shape: Shape, dtype: np.dtype[Any]) -> np.ndarray:
    """Make an array of this shape and dtype that has the memory of one element."""
    return np.broadcast_to(np.empty((), dtype), shape)


@cache
def _places_of(method: Function) -> Mapping[str, int]:
    """Return the parameters that may be passed by position: name -> place after `self`."""
    parameters = [*inspect.signature(method).parameters.values()][1:]
    return {p.name: place for place, p in enumerate(parameters) if p.kind is not p.KEYWORD_ONLY}


@cache
def _text_signature(function: Function) -> str:
    signature = inspect.signature(function)
    bare = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for parameter in signature.parameters.values()
    ]
    text = str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))
    return text.replace("(self", "($self", 1)


def _documentation(name: str, general: Function) -> str:
    method = getattr(general, "__func__", None) or type(general).__call__
    return f"{name}{_text_signature(method)}\n--\n\n{method.__doc__ or ''}"
