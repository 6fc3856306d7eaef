"""The compiled functions that CPython calls: repeated calls of a communicator, without Python.

CPython passes arguments to `call` by its vectorcall convention, as to a function of a C extension:
a wrapper by Numba would convert each argument, which takes 0.3 us.  `call` looks the call up in the
table of `ringreduce.shm.call_table`, runs its program with the interpreter's lock released, and
counts it.  If the program waits or pauses, `Engine.finish` completes the call.  Everything
else goes to the general path: the Python method, with the same arguments.

The fields of `FastPathState` are read and written with the interpreter's lock held, so no two
threads begin a call at once.  `busy` keeps other threads out while that lock is released.
"""

from __future__ import annotations

from ringreduce.compiler.interpreter import (
    call_object,
    enter_interpreter,
    integer,
    keep_object,
    leave_interpreter,
    let_go_of_object,
    new_list,
    number_of,
    number_within,
    set_item,
    this_thread,
    tuple_of,
)
from ringreduce.compiler.memory import call_run, load, nanoseconds, store
from ringreduce.compiler.pyobjects import (
    CONTIGUOUS_AND_ALIGNED,
    WRITABLE,
    PyArray,
    PyList,
    PyObject,
    PyVarObject,
    same_kind,
    tuple_item,
    tuple_items,
)
from ringreduce.compiler.records import Address, address_of, compilable, offset_of
from ringreduce.shm.call_table import (
    ALL_REDUCE,
    SCATTER,
    SCATTER_TO_OUT,
    Arguments,
    CachedCall,
    EntryPoint,
    FastPathState,
    find,
)
from ringreduce.shm.layout import DONE, PENDING, WORD, Program, Team
from ringreduce.shm.list_table import (
    DIFFERENT,
    MIXED,
    SEPARATE,
    UNKNOWN,
    ListState,
    batch_of,
    locate_all,
    mixes,
)
from ringreduce.shm.protocol import leave
from ringreduce.shm.tensor_views import TensorViews, view_tensor
from ringreduce.trace.ring import EventRing, record_event

GENERAL = -1
"""Returned in place of a result's address: the call takes the general path."""
_NOT_NATURAL = -1
_SHORT_BYTES, _SHORT_SPINS = 4 << 10, 200
"""The most bytes of a short call, and its polls before it releases the interpreter's lock."""
_OVERFLOW = offset_of(FastPathState, "overflow")
_ARGUMENTS = offset_of(FastPathState, "argument0")


# --- arguments ------------------------------------------------------------------------------------


@compilable
def _is_idle(path: FastPathState) -> bool:
    return path.enabled != 0 and path.busy == 0 and load(path.refused) == 0


@compilable
def _natural(path: FastPathState, value: Address) -> int:
    """The value of a Python int; _NOT_NATURAL if it is negative, too large or no exact int."""
    if PyObject(value).type != path.int_type:
        return _NOT_NATURAL
    number = number_within(value, address_of(path) + _OVERFLOW)
    return number if number >= 0 else _NOT_NATURAL


@compilable
def _is_sequence(path: FastPathState, value: Address) -> bool:
    kind = PyObject(value).type
    return kind == path.list_type or kind == path.tuple_type


@compilable
def _items(path: FastPathState, sequence: Address) -> Address:
    if PyObject(sequence).type == path.list_type:
        return PyList(sequence).items
    return tuple_items(sequence)


@compilable
def _read_counts(path: FastPathState, given: Arguments, counts: Address) -> bool:
    """Read one count for each rank; False if `counts` has anything else."""
    if not _is_sequence(path, counts) or PyVarObject(counts).size != path.ranks:
        return False
    items = _items(path, counts)
    for i in range(path.ranks):
        count = _natural(path, load(items + i * WORD))
        if count == _NOT_NATURAL:
            return False
        store(path.counts + i * WORD, count)
    given.counts, given.count_of_counts = path.counts, path.ranks
    return True


@compilable
def _read_arrays(path: FastPathState, given: Arguments, x: Address) -> bool:
    """Read an array, or for an all-reduce a list or tuple that begins and ends with arrays."""
    given.x, given.members, given.last, given.member_count = x, 0, 0, 0
    if PyObject(x).type == path.array_type:
        return True
    if given.collective != ALL_REDUCE or not _is_sequence(path, x) or PyVarObject(x).size == 0:
        return False
    items, count = _items(path, x), PyVarObject(x).size
    given.members, given.member_count = x, count
    given.x, given.last = load(items), load(items + (count - 1) * WORD)
    first, last = PyObject(given.x).type, PyObject(given.last).type
    return first == path.array_type and last == path.array_type


@compilable
def _is_default(path: FastPathState, entry: EntryPoint, name: Address, value: Address) -> bool:
    """Whether an argument is the default of a parameter that only the general path knows."""
    if name == path.name_async_op:
        return value == path.false
    has_wire = entry.op_at >= 0
    known = name == path.name_timeout_s or (name == path.name_wire and has_wire)
    return known and value == path.none


@compilable
def _read(
    path: FastPathState,
    entry: EntryPoint,
    given: Arguments,
    args: Address,
    nargs: int,
    kwnames: Address,
) -> bool:
    """Read the arguments of a call except the array; False if only Python understands them."""
    if nargs < entry.least or nargs > entry.most:
        return False
    if nargs == 0:
        return kwnames == 0
    root, counts, out = 0, 0, 0
    op = path.default_op if entry.op_at >= 0 else 0
    algorithm = path.default_algorithm
    if 0 <= entry.root_at < nargs:
        root = load(args + entry.root_at * WORD)
    if 0 <= entry.op_at < nargs:
        op = load(args + entry.op_at * WORD)
    for i in range(PyVarObject(kwnames).size if kwnames else 0):
        name, value = tuple_item(kwnames, i), load(args + (nargs + i) * WORD)
        if name == path.name_out:
            out = 0 if value == path.none else value
        elif name == path.name_op and nargs <= entry.op_at:
            op = value
        elif name == path.name_root and nargs <= entry.root_at:
            root = value
        elif name == path.name_counts and entry.takes_counts:
            counts = value
        elif name == path.name_algorithm:
            algorithm = value
        elif not _is_default(path, entry, name, value):
            return False
    given.collective, given.op, given.algorithm, given.out = entry.collective, op, algorithm, out
    given.root = _natural(path, root) if root else 0
    given.count_of_counts = 0
    if given.root == _NOT_NATURAL or entry.takes_counts != (counts != 0):
        return False
    return counts == 0 or _read_counts(path, given, counts)


@compilable
def _is_foreign(path: FastPathState, value: Address) -> bool:
    """Whether `value` may be an array of another library, or a list that begins with one."""
    if PyObject(value).type == path.array_type:
        return False
    if _is_sequence(path, value):
        if PyVarObject(value).size == 0:
            return False
        return PyObject(load(_items(path, value))).type != path.array_type
    return True


@compilable
def _view(path: FastPathState, value: Address) -> Address:
    """A new reference to a view of a foreign array, to an array of NumPy itself; 0 if it raised."""
    if _is_foreign(path, value):
        tensors = TensorViews(path.tensors)
        if PyObject(value).type == tensors.type:
            view = view_tensor(tensors, value)
            if view:
                return view
        path.argument0 = value
        return call_object(path.view_of, address_of(path) + _ARGUMENTS, 1, 0)
    keep_object(value)
    return value


# --- running programs -----------------------------------------------------------------------------


@compilable
def _run(path: FastPathState, program: Address, source: Address, target: Address) -> int:
    """Run a program for the call under way, with the interpreter's lock released.

    A short call keeps the lock for about a microsecond first: most are over by then.
    """
    number, run = path.next_number, Program(program).run
    short = Program(program).input_bytes <= _SHORT_BYTES
    # Another thread may be inside MPI, and wait for the interpreter's lock there.
    if short and Program(program).message_count == 0:
        team = Team(Program(program).team)
        spins, yields = team.spins, team.yields
        team.spins, team.yields = min(spins, _SHORT_SPINS), 0
        result = call_run(run, program, number, source, target)
        team.spins, team.yields = spins, yields
        if result != PENDING:
            return result
        number, source, target = -1, 0, 0
    state = leave_interpreter()
    result = call_run(run, program, number, source, target)
    enter_interpreter(state)
    return result


@compilable
def _begin(path: FastPathState) -> None:
    path.owner = this_thread()
    path.busy = 1


@compilable
def _count(path: FastPathState, signature: Address) -> None:
    path.next_number = path.next_number + 1
    path.argument0 = signature
    remembered = call_object(path.remember, address_of(path) + _ARGUMENTS, 1, 0)
    if remembered:
        let_go_of_object(remembered)


@compilable
def _finish(
    path: FastPathState,
    program: Program,
    call: Address,
    executable: Address,
    x: Address,
    out: Address,
    batch: int,
) -> bool:
    """Let Python complete the call under way; False if it has raised.

    A signal handler may raise before `Engine.finish` handles errors.  So the executable is marked
    as running here, where no signal handler runs.  If `Engine.finish` does not take over, no later
    call may continue the executable: the fast path is disabled, and the call is orphaned.
    """
    path.taken_over = 0
    path.argument0 = executable
    arguments = address_of(path) + _ARGUMENTS
    begun = call_object(path.begin, arguments, 1, 0)
    done = 0
    if begun:
        let_go_of_object(begun)
        index = integer(batch)
        path.argument0, path.argument1, path.argument2, path.argument3 = call, x, out, index
        done = call_object(path.finish, arguments, 4, 0)
        let_go_of_object(index)
    if done:
        let_go_of_object(done)
    elif path.taken_over == 0:
        path.enabled = 0
        path.orphaned = 1
        leave(Team(program.team))
        keep_object(x)  # for good: peers may still read the arrays, and one that is stopped write
        keep_object(out)
    return done != 0


@compilable
def _began_ns(path: FastPathState, words: Address) -> int:
    """Read the clock if a call with these words is recorded in a trace."""
    return nanoseconds(address_of(path) + _ARGUMENTS) if words else 0


@compilable
def _record(path: FastPathState, began_ns: int, nbytes: int, words: Address) -> None:
    """Record a call that ends now in the trace, if there is one."""
    if words:
        scratch = address_of(path) + _ARGUMENTS
        record_event(EventRing(path.events), began_ns, nbytes, words, scratch)


# --- calls on one array ---------------------------------------------------------------------------


@compilable
def _fits(program: Program, x: PyArray, out: PyArray, like: PyArray) -> bool:
    """Whether a call from `x` to `out` is eligible; `like` has the result's dtype and shape."""
    writable = CONTIGUOUS_AND_ALIGNED | WRITABLE
    if not same_kind(out, like) or out.flags & writable != writable:
        return False
    if x.flags & CONTIGUOUS_AND_ALIGNED != CONTIGUOUS_AND_ALIGNED:
        return False
    if x.data == out.data and program.in_place:
        return True
    behind = out.data >= x.data + program.input_bytes
    before = x.data >= out.data + program.output_bytes
    return behind or before


@compilable
def _new_array(path: FastPathState, shape: Address, like: PyArray) -> Address:
    path.argument0, path.argument1 = shape, like.descr
    return call_object(path.empty, address_of(path) + _ARGUMENTS, 2, 0)


@compilable
def _run_one(
    path: FastPathState, cached: CachedCall, call: Address, x: Address, target: Address
) -> bool:
    source, into = 0, 0
    if x:
        source, into = PyArray(x).data, PyArray(target).data
    signature, executable, program = cached.signature, cached.executable, cached.program
    words, nbytes = cached.words, cached.nbytes  # a signal handler may fill the slot anew
    began_ns = _began_ns(path, words)
    _begin(path)
    done = _run(path, program, source, into) == DONE
    if done:
        _count(path, signature)
    else:
        given = x if x else path.none
        done = _finish(path, Program(program), call, executable, given, target, 0)
    if done:
        _record(path, began_ns, nbytes, words)
    path.busy = 0
    return done


@compilable
def _call_one(path: FastPathState, cached: CachedCall, x: Address, out: Address) -> Address:
    """Make a call on `x`, or on the arrays it is bound to if `x` is 0; return the result."""
    call, result = cached.call, cached.result
    if out and result:
        return GENERAL
    target = cached.output if result else out
    keep_object(call)  # this also keeps the objects whose addresses are in `cached`
    eligible = True
    if target:
        keep_object(target)
    else:
        target = _new_array(path, cached.shape, PyArray(cached.output))
        if target == 0:
            let_go_of_object(call)
            return 0
        # Python code may have run meanwhile: a finalizer that makes a call, another thread.
        eligible = _is_idle(path) and cached.call == call
        eligible = eligible and same_kind(PyArray(x), PyArray(cached.input))
    if eligible and x:
        like = PyArray(cached.output)
        eligible = _fits(Program(cached.program), PyArray(x), PyArray(target), like)
    if not eligible:
        let_go_of_object(target)
        let_go_of_object(call)
        return GENERAL
    done = _run_one(path, cached, call, x, target)
    if result:
        keep_object(result)
        let_go_of_object(target)
    else:
        result = target
    if not done:
        let_go_of_object(result)
        result = 0
    let_go_of_object(call)
    return result


# --- calls on lists -------------------------------------------------------------------------------


@compilable
def _new_arrays(path: FastPathState, cached: CachedCall, state: ListState) -> Address:
    results = new_list(state.members)
    if results == 0:
        return 0
    shapes, likes = cached.shape, batch_of(state, 0).likes
    for i in range(state.members):
        array = _new_array(path, tuple_item(shapes, i), PyArray(load(likes + i * WORD)))
        if array == 0:
            let_go_of_object(results)
            return 0
        set_item(results, i, array)
    return results


@compilable
def _can_reduce(
    path: FastPathState, state: ListState, x: Address, into: Address, fresh: bool
) -> bool:
    """Locate the arrays of two lists; return whether the programs can reduce `x` to `into`."""
    if PyVarObject(x).size != state.members or PyVarObject(into).size != state.members:
        return False
    mixing, state.mixing = state.mixing, UNKNOWN
    found = locate_all(state, _items(path, x), _items(path, into))
    if found == DIFFERENT:
        return False
    if found or mixing == UNKNOWN:
        mixing = MIXED if not fresh and mixes(state) else SEPARATE
    state.mixing = mixing
    return mixing == SEPARATE


@compilable
def _run_list(
    path: FastPathState, cached: CachedCall, call: Address, x: Address, into: Address
) -> bool:
    """Run the programs of a list's batches one after another; False if the call raised."""
    state, signature = ListState(cached.list), cached.signature
    words, nbytes = cached.words, cached.nbytes  # a signal handler may fill the slot anew
    began_ns = _began_ns(path, words)
    _begin(path)
    pending, done = False, True
    for index in range(state.batches):
        batch = batch_of(state, index)
        if _run(path, batch.program, batch.source, batch.target) != DONE:
            pending = True
            break
    if pending:  # Python completes this batch and runs the later batches
        done = _finish(path, Program(batch.program), call, batch.executable, x, into, index)
    else:
        _count(path, signature)
    if done:
        _record(path, began_ns, nbytes, words)
    path.busy = 0
    return done


@compilable
def _call_list(path: FastPathState, cached: CachedCall, members: Address, out: Address) -> Address:
    fresh = out == 0
    if not fresh and not _is_sequence(path, out):
        return GENERAL
    call, state = cached.call, ListState(cached.list)
    keep_object(call)  # this also keeps the objects whose addresses are in `cached`
    # Other threads may change the caller's lists meanwhile.
    x = tuple_of(members)
    if x == 0:
        let_go_of_object(call)
        return 0
    if fresh:
        result = _new_arrays(path, cached, state)
        into = result
    else:
        keep_object(out)
        result = out
        into = x if out == members else tuple_of(out)
    eligible, done = True, False
    if into:
        # Python code may have run meanwhile: a finalizer that makes a call, another thread.
        eligible = _is_idle(path) and cached.call == call
        eligible = eligible and _can_reduce(path, state, x, into, fresh)
        done = eligible and _run_list(path, cached, call, x, into)
    if into and into != x and not fresh:
        let_go_of_object(into)
    if result and not done:
        let_go_of_object(result)
        result = 0
    let_go_of_object(x)
    let_go_of_object(call)
    return result if eligible else GENERAL


# --- functions that CPython calls -----------------------------------------------------------------


@compilable
def _interned(path: FastPathState, text: Address, default: Address) -> Address:
    """Return the interned text, as the table has it, of an op or an algorithm."""
    if text == 0 or text == default or PyObject(text).type != path.str_type:
        return text
    path.argument0 = text
    known = call_object(path.intern, address_of(path) + _ARGUMENTS, 1, 0)
    if known:
        let_go_of_object(known)  # the calls in the table keep theirs
    return known


@compilable
def _call_arrays(
    path: FastPathState, entry: EntryPoint, given: Arguments, x: Address, out: Address
) -> Address:
    if not _read_arrays(path, given, x):
        return GENERAL
    place = entry.latest = find(path.table, given, entry.latest)
    if place == 0:
        given.op = _interned(path, given.op, path.default_op)
        given.algorithm = _interned(path, given.algorithm, path.default_algorithm)
        place = entry.latest = find(path.table, given, 0)
    if place == 0:
        return GENERAL
    if given.members:
        return _call_list(path, CachedCall(place), given.members, out)
    return _call_one(path, CachedCall(place), given.x, out)


@compilable
def _call_foreign(
    path: FastPathState, entry: EntryPoint, args: Address, nargs: int, kwnames: Address
) -> Address:
    """Make a call on arrays of other libraries; a scatter without an array is one on `out`."""
    given = Arguments(path.arguments)
    x, out = load(args), given.out
    takes_out = out != 0 and x == path.none and entry.collective == SCATTER
    if takes_out:
        x = out
    view, into = _view(path, x), 0
    if view and out:
        if out == x:
            keep_object(view)
            into = view
        else:
            into = _view(path, out)
    result = 0
    if view and (into or out == 0):
        result = GENERAL
        # Python code has run meanwhile, and may have made calls.
        if _is_idle(path) and _read(path, entry, given, args, nargs, kwnames):
            if takes_out:
                given.collective = SCATTER_TO_OUT
            result = _call_arrays(path, entry, given, view, into)
    if out and result != GENERAL and result != 0:
        let_go_of_object(result)
        keep_object(out)
        result = out
    if view:
        let_go_of_object(view)
    if into:
        let_go_of_object(into)
    return result


def call(self: Address, args: Address, nargs: int, kwnames: Address) -> Address:
    """Make a collective, barrier or planned call; `self` is a tuple that begins with its record."""
    entry = EntryPoint(PyArray(tuple_item(self, 0)).data)
    path = FastPathState(entry.path)
    given = Arguments(path.arguments)
    result = GENERAL
    if _is_idle(path) and _read(path, entry, given, args, nargs, kwnames):
        if nargs == 0:
            if entry.own_call:
                result = _call_one(path, CachedCall(entry.own_call), 0, 0)
        elif _is_foreign(path, load(args)) or (given.out and _is_foreign(path, given.out)):
            result = _call_foreign(path, entry, args, nargs, kwnames)
        else:
            result = _call_arrays(path, entry, given, load(args), given.out)
    if result == GENERAL:
        result = call_object(entry.general, args, nargs, kwnames)
    return result


def enter(_: Address, args: Address, nargs: int) -> Address:
    """``enter(program, number[, source, target])``: call `shm.executor.run`.

    ``enter(team)``: call `shm.protocol.leave`.
    """
    if nargs == 1:
        team, state = number_of(load(args)), leave_interpreter()
        leave(Team(team))
        enter_interpreter(state)
        return integer(DONE)
    program, number = number_of(load(args)), number_of(load(args + WORD))
    source, target = 0, 0
    if nargs == 4:
        source, target = number_of(load(args + 2 * WORD)), number_of(load(args + 3 * WORD))
    state = leave_interpreter()
    result = call_run(Program(program).run, program, number, source, target)
    enter_interpreter(state)
    return integer(result)
