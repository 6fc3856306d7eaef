"""Programs of mpi4py on wrapped communicators: random ones beside MPI's own, and single facts."""

from __future__ import annotations

import array
import pickle
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any, Self

import numpy as np
import pytest
from hypothesis import strategies as st
from mpi4py import MPI

import ringreduce as rr
from tests.support.mpi_checks import outcomes

REDUCTIONS = (
    *("Allreduce", "Iallreduce", "Reduce", "Ireduce", "Reduce_scatter_block", "Reduce_scatter"),
)
OBJECTS = "allreduce", "reduce"
OPS = ("SUM", "PROD", "MIN", "MAX", "BAND", "BOR", "BXOR", "LAND", "LOR", "LXOR", "own")
"""Names of MPI's ops; "own": an op of the program."""
TYPES = "bhilqBHILQfdgFD?"
FORMS = (
    "array",
    "typed",
    "named",
    "counted",
    "displaced",
    "four",
    "rows",
    "columns",
    "buffer",
    "dlpack",
)
COUNTS = (0, 1, 2, 3, 7, 64, 1000, 40_000)


@dataclass(frozen=True)
class Call:
    """One call of a program; a list has an item for each rank."""

    method: str
    op: str
    dtype: str
    count: int
    root: int
    in_place: bool
    """In a call on objects: ranks may pass arrays of unequal shapes."""
    uneven: bool
    """The parts of a Reduce_scatter are not those of ``np.array_split``.

    In a call on objects: arrays have two dimensions.
    """
    gives_counts: bool
    derived: bool
    """Whether an item is a pair of elements, by a derived type.  Not for objects."""
    sent_as: list[str]
    received_as: list[str]
    message_bytes: int
    """Bytes of a message of MPI to the next rank, under way during the call."""
    waits: bool
    """Whether to wait for the requests so far after this call."""


@dataclass(frozen=True)
class Program:
    """Calls that all ranks make in this order."""

    ranks: int
    calls: list[Call]

    def to_json(self) -> Any:
        return asdict(self)

    @classmethod
    def from_json(cls, values: Any) -> Self:
        return cls(values["ranks"], [Call(**call) for call in values["calls"]])


def programs(ranks: range) -> st.SearchStrategy[Program]:
    """Draw programs for these numbers of ranks."""
    return st.sampled_from(ranks).flatmap(
        lambda n: st.builds(Program, st.just(n), st.lists(_calls(n), min_size=1, max_size=6))
    )


def _calls(ranks: int) -> st.SearchStrategy[Call]:
    forms = st.lists(st.sampled_from(FORMS), min_size=ranks, max_size=ranks)
    return st.builds(
        Call,
        st.sampled_from(REDUCTIONS + OBJECTS),
        st.sampled_from(OPS),
        st.sampled_from(TYPES),
        st.sampled_from(COUNTS),
        st.integers(0, ranks - 1),
        *(st.booleans(), st.booleans(), st.booleans(), st.integers(0, 7).map(lambda n: n == 7)),
        *(forms, forms),
        st.sampled_from((0, 0, 8, 200_000)),
        st.booleans(),
    )


def run(comm: MPI.Intracomm, program: Program) -> None:
    """Make each call on `comm`, wrapped and as it is; both must have the same outcome."""
    wrapped = rr.wrap(comm)
    wrapped.allreduce(np.ones(1))  # until this, asynchronous calls are MPI's
    wrapped.routes.clear()
    waiting: list[MPI.Request] = []
    checks: list[Callable[[], None]] = []
    for number, call in enumerate(program.calls):
        sent = np.full(call.message_bytes, number, np.uint8)
        came = np.empty_like(sent)
        message = [
            comm.Isend(sent, (comm.rank + 1) % comm.size, number),
            comm.Irecv(came, (comm.rank - 1) % comm.size, number),
        ]
        outcomes = [_outcome(each, call, number) for each in (wrapped, comm)]
        waiting += [request for request, *_ in outcomes if request is not None] + message
        checks.append(lambda call=call, outcomes=outcomes: _check_same(call, *outcomes))
        if call.waits:
            MPI.Request.Waitall(waiting)
            waiting = []
    MPI.Request.Waitall(waiting)
    for check in checks:
        check()
    made = sum(count for (_, by), count in wrapped.routes.items() if by == "ringreduce")
    assert made == sum(map(_is_routed, program.calls)), (wrapped.routes, program)
    wrapped._made.close()  # its handle is that of `comm`


def _is_routed(call: Call) -> bool:
    """Return whether ringreduce makes a call."""
    if call.method in OBJECTS:
        zeros = np.zeros(call.count, call.dtype)
        passed = [_object(call, form, zeros) for form in call.sent_as]
        dtypes = [x.dtype if isinstance(x, np.ndarray) else None for x in passed]
        (dtype, _), *others = {
            (dtype, np.shape(x)) for dtype, x in zip(dtypes, passed, strict=True)
        }
        return not others and dtype is not None and (dtype != "?" or _op_of_objects(call)[0] == "B")
    if call.derived or call.op == "own":
        return False
    kind = np.dtype(call.dtype).kind
    kinds = {"SUM": "iufc", "PROD": "iufc", "MIN": "iuf", "MAX": "iuf"}
    is_split = call.method != "Reduce_scatter" or not call.uneven
    is_split |= call.count < 2 or len(call.sent_as) == 1
    return is_split and kind in kinds.get(call.op, "b" if call.op[0] == "L" else "iu")


def _object(call: Call, form: str, x: np.ndarray) -> Any:
    """Return what a rank passes in a call on objects: a number, or an array of these elements.

    Arrays of unequal shapes can be added: NumPy broadcasts them.
    """
    if form == "counted":
        return x[:1].sum()
    if form == "typed":
        x = x.astype("?" if x.dtype.kind in "iub" else "DF"[x.dtype == "D"])
    if call.uneven and len(x) % 2 == 0:
        x = x.reshape(2, -1)
    if call.in_place and form in ("named", "displaced"):
        return x[tuple([slice(1)] * x.ndim)] if form == "named" else x[np.newaxis]
    return np.asfortranarray(x) if form == "columns" else x


def _op_of_objects(call: Call) -> str:
    """Return the op of a call on objects: SUM in place of what Python's operators refuse."""
    is_bitwise = call.op in ("BAND", "BOR", "BXOR") and np.dtype(call.dtype).kind in "iub"
    return call.op if is_bitwise or call.op == "PROD" else "SUM"


def _outcome(comm: Any, call: Call, number: int) -> tuple[MPI.Request | None, Any, Any]:
    """Make a call; return its request, its result or the type of its error, and its buffers.

    A request of MPI does not keep the buffers alive.
    """
    me, size, method = comm.rank, comm.size, call.method
    blocks = size if method == "Reduce_scatter_block" else 1
    width = 1 + (call.derived and method not in OBJECTS)
    values = np.random.default_rng((number, me)).integers(0, 3, blocks * call.count * width)
    x: Any = values.astype(call.dtype)
    root = [call.root] if method in ("Reduce", "Ireduce", "reduce") else []
    if method in OBJECTS:
        x = _object(call, call.sent_as[me], x)
        return None, getattr(comm, method)(x, getattr(MPI, _op_of_objects(call)), *root), None
    counts = [call.count] * size
    if method == "Reduce_scatter":
        bounds = np.arange(size + 1) * call.count // size
        counts = [len(part) for part in np.array_split(bounds[:-1].repeat(np.diff(bounds)), size)]
        counts = [call.count, *[0] * (size - 1)] if call.uneven else counts
    gets = root in ([], [me])
    in_place = call.in_place and gets
    result = x if in_place else np.zeros(counts[me] * width, x.dtype)
    written = _in_pairs if call.derived else _written
    received, memory = written(call.received_as[me], result, blocks if in_place else 1)
    sent = MPI.IN_PLACE if in_place else written(call.sent_as[me], x, blocks)[0]
    op = _own_op() if call.op == "own" else getattr(MPI, call.op)
    given = [counts if call.gives_counts or call.in_place else None] * (method == "Reduce_scatter")
    try:
        request = getattr(comm, method)(sent, received, *given, op, *root)
    except Exception as error:
        return None, type(error), None
    return request, memory[: counts[me] * width] if gets else None, (sent, received)


@cache
def _own_op() -> MPI.Op:
    """Return an op that takes the larger of two bytes."""

    def larger(some: Any, others: Any, _: MPI.Datatype) -> None:
        result = np.frombuffer(others, np.uint8)
        np.maximum(np.frombuffer(some, np.uint8), result, out=result)

    return MPI.Op.Create(larger, commute=True)


@cache
def _pair(char: str) -> MPI.Datatype:
    return MPI._typedict[char].Create_contiguous(2).Commit()


def _in_pairs(form: str, values: np.ndarray, blocks: int) -> tuple[Any, np.ndarray]:
    """Return a specification of these elements with a derived type, and their array."""
    values, datatype, count = values.copy(), _pair(values.dtype.char), len(values) // (2 * blocks)
    return [values, count, datatype] if form == "counted" else [values, datatype], values


class _OnlyDlpack:
    def __init__(self, array: np.ndarray) -> None:
        self.__dlpack__, self.__dlpack_device__ = array.__dlpack__, array.__dlpack_device__


def _written(form: str, values: np.ndarray, blocks: int) -> tuple[Any, np.ndarray]:
    """Return a specification of these elements, and the flat array over its memory."""
    datatype, count = MPI._typedict[values.dtype.char], len(values) // blocks
    if form in ("displaced", "four"):
        padded = np.concatenate([np.ones(3, values.dtype), values])
        three = [padded, (count, 3), datatype]
        return three if form == "displaced" else [padded, count, 3, datatype], padded[3:]
    values = values.copy()
    if form == "columns" and len(values) % 2 == 0:
        return values.reshape(2, -1).T, values
    if form == "rows" and len(values) % 2 == 0:
        return values.reshape(2, -1), values
    if form == "buffer" and values.dtype.char in "bhilqBHILQfd":
        numbers = array.array(values.dtype.char, values.tobytes())
        return numbers, np.frombuffer(numbers, values.dtype)
    if form == "dlpack" and values.dtype.char in "fd":
        return _OnlyDlpack(values), values
    specs = {
        "typed": [values, datatype],
        "named": (values, values.dtype.char),
        "counted": [values, count, datatype],
    }
    return specs.get(form, values), values


def _check_same(call: Call, found: tuple[Any, ...], wanted: tuple[Any, ...]) -> None:
    got, right = found[1], wanted[1]
    assert type(got) is type(right), (call, got, right)
    if isinstance(got, (np.ndarray, np.generic)):
        assert got.dtype == right.dtype, (call, got.dtype, right.dtype)
        assert np.array_equal(got, right), (call, got[:8], right[:8])
    else:
        assert got == right, (call, got, right)


# --- facts ---


def communicators_made_from_a_wrapped_one_are_wrapped(world: Any) -> None:
    ranks, (me, size) = list(range(world.size)), (world.rank, world.size)
    group = world.Get_group()
    made = [
        *(world.Dup(), world.Clone(), world.Split(0, -me), world.Split_type(MPI.COMM_TYPE_SHARED)),
        *(world.Create(group), world.Create_group(group), world.Create_cart([size, 1])),
        world.Create_graph([1 + rank for rank in ranks], [(rank + 1) % size for rank in ranks]),
        world.Create_dist_graph([me], [1], [(me + 1) % size]),
        world.Create_dist_graph_adjacent([(me - 1) % size], [(me + 1) % size]),
    ]
    made.append(made[6].Sub([True, False]))
    duplicate, request = world.Idup()
    request.Wait()
    for comm, kind in zip(
        (*made, duplicate),
        (MPI.Intracomm,) * 6
        + (MPI.Cartcomm, MPI.Graphcomm)
        + (MPI.Distgraphcomm,) * 2
        + (MPI.Cartcomm, MPI.Intracomm),
        strict=True,
    ):
        assert isinstance(comm, kind)
        assert comm.allreduce(np.ones(2)).tolist() == [comm.size] * 2
        assert comm.routes == {("allreduce", "ringreduce"): 1}
        comm.Free()
        assert comm == MPI.COMM_NULL
    assert world.Split(MPI.UNDEFINED) == MPI.COMM_NULL
    assert type(world.Split(MPI.UNDEFINED)) is MPI.Intracomm


def a_wrapped_communicator_is_that_of_mpi(world: Any) -> None:
    assert isinstance(world, MPI.Intracomm)
    assert world == MPI.COMM_WORLD
    assert rr.wrap(world) is world
    assert pickle.loads(pickle.dumps(world)) == MPI.COMM_WORLD
    assert world.bcast(world.rank, root=1) == 1


def what_is_no_intracommunicator_is_refused(world: Any) -> None:
    inter = (
        MPI.COMM_SELF.Create_intercomm(0, MPI.COMM_WORLD, 1 - min(world.rank, 1))
        if (world.size == 2)
        else None
    )
    wrong = [(3, TypeError), (rr, TypeError), (MPI.COMM_NULL, ValueError)]
    for comm, error in [*wrong, *[(inter, ValueError)] * (inter is not None)]:
        with pytest.raises(error, match="wrap: comm is "):
            rr.wrap(comm)


def wrong_calls_raise_what_they_raise_on_mpi(world: Any) -> None:
    x, read_only = np.ones(3), np.ones(3)
    read_only.flags.writeable = False
    every_second = np.ones(6)[::2]
    wrong = [
        (x, np.ones(2)),
        (x, np.ones(3, "f")),
        (x, read_only),
        (x, every_second),
        (every_second, x),
        (3, x),
        (x, "text"),
        ([x, 4, "d", 1, 2], x),
        ([x, -1, MPI.DOUBLE], x),
        ([x, "no type"], x),
        (x.astype(">f8"), x),
        ([x, (1, -1), MPI.DOUBLE], x),
        (x[:1].view(np.uint8)[:3], x),
    ]
    for sent, received in wrong:
        errors = []
        for comm in (world, MPI.Intracomm(world)):
            with pytest.raises(Exception) as caught:  # noqa: PT011 - the types are compared
                comm.Allreduce(sent, received)
            errors.append(caught.type)
        assert errors[0] is errors[1], (sent, received, errors)


def calls_that_only_mpi_can_make_are_mpis(world: Any) -> None:
    own = MPI.Op.Create(lambda a, b, _: np.copyto(np.frombuffer(b), np.frombuffer(a)), commute=True)
    pairs = np.zeros(2, np.dtype("d,i", align=True))
    triple = MPI.DOUBLE.Create_contiguous(3).Commit()
    world.routes.clear()
    world.Allreduce(np.ones(2), np.ones(2), own)
    world.Allreduce(MPI.IN_PLACE, [pairs, MPI.DOUBLE_INT], MPI.MINLOC)
    world.Allreduce(np.ones(2, "i"), np.ones(2, "i"), MPI.LAND)
    assert world.allreduce(world.rank, MPI.MAX) == world.size - 1
    assert world.allreduce(2.5) == 2.5 * world.size
    with pytest.raises(MPI.Exception):
        world.Allreduce([np.ones(3), triple], [np.ones(3), triple])
    assert world.routes == {("Allreduce", "MPI"): 4, ("allreduce", "MPI"): 2}
    triple.Free()
    own.Free()


def a_first_call_that_is_asynchronous_does_not_wait_for_other_ranks(world: Any) -> None:
    comm, x, total = world.Dup(), np.ones(1), np.empty(1)
    if comm.rank == 0:
        request = comm.Iallreduce(x, total)
        for peer in range(1, comm.size):
            comm.Send(np.ones(1), peer)
    else:
        comm.Recv(np.empty(1), 0)
        request = comm.Iallreduce(x, total)
    request.Wait()
    assert total[0] == comm.size
    comm.Free()


def nothing_can_be_reduced(world: Any) -> None:
    world.Allreduce([None, 0, MPI.DOUBLE], [None, MPI.DOUBLE])
    world.Allreduce(np.empty(0), [None, 0, "d"])


def a_view_in_another_order_is_summed_as_it_lies_in_memory(world: Any) -> None:
    x, total = np.arange(6.0).reshape(2, 3), np.empty(6)
    world.Allreduce(memoryview(x.T), total)
    assert np.array_equal(total, np.arange(6.0) * world.size)


class OwnComm(MPI.Intracomm):
    def greet(self) -> str:
        return f"rank {self.rank}"


def a_class_of_the_programs_own_is_kept(world: Any) -> None:
    comm = rr.wrap(OwnComm(world))
    assert comm.greet() == f"rank {world.rank}"
    part = comm.Dup()
    assert part.allreduce(np.ones(1))[0] == world.size
    made = part._made
    assert part.greet() == comm.greet()
    part.Disconnect()
    assert made._ending.closed


def arguments_can_be_named_and_placed_as_on_mpi(world: Any) -> None:
    me, size, top = world.rank, world.size, world.size - 1
    world.allreduce(np.ones(1))
    world.routes.clear()
    x, total, parts, part = np.full(1, me), np.empty(1, int), np.arange(size), np.empty(1, int)
    both = {"sendbuf": x, "recvbuf": total, "op": MPI.MAX}
    by_name = [
        lambda: world.Allreduce(**both),
        lambda: world.Iallreduce(**both).Wait(),
        lambda: world.Reduce(root=0, **both),
        lambda: world.Ireduce(root=0, **both).Wait(),
        lambda: world.Reduce(x, total, MPI.MAX, 0),
        lambda: world.Ireduce(x, total, MPI.MAX, root=0).Wait(),
    ]
    for call in by_name:
        total[0] = -1
        call()
        assert total[0] == (top if me == 0 or call in by_name[:2] else -1)
    every = {"sendbuf": parts, "recvbuf": part, "op": MPI.MAX}
    by_name = [
        lambda: world.Reduce_scatter_block(**every),
        lambda: world.Reduce_scatter(recvcounts=[1] * size, **every),
        lambda: world.Reduce_scatter(parts, part, None, MPI.MAX),
    ]
    for call in by_name:
        part[0] = -1
        call()
        assert part[0] == me
    assert world.allreduce(sendobj=x, op=MPI.SUM)[0] == sum(range(size))
    assert (world.reduce(root=top, sendobj=x, op=MPI.SUM) is None) == (me != top)
    assert {by for _, by in world.routes} == {"ringreduce"}
    with pytest.raises(TypeError):
        world.Iallreduce(x, total, root=0)


def requests_of_both_kinds_complete_together(world: Any) -> None:
    world.allreduce(np.ones(1))
    x, total, mpis = np.full(1000, world.rank), np.empty(1000, int), np.empty(1000, int)
    requests = [world.Iallreduce(x, total), MPI.Intracomm(world).Iallreduce(x, mpis)]
    MPI.Request.Waitall(requests)
    assert np.array_equal(total, mpis)
    requests = [world.Iallreduce(x, total), world.Ireduce(x, mpis, root=1)]
    first = MPI.Request.Waitany(requests)
    assert first in (0, 1)
    while not requests[1 - first].Test():
        pass
    assert total[0] == sum(range(world.size))
    assert isinstance(requests[0], MPI.Grequest)


def the_error_of_a_call_is_raised(world: Any) -> None:
    x = np.ones(3 + (world.rank == 0))
    for wait in ("none", "Wait", "wait", "Test"):
        comm = world.Dup()
        comm.allreduce(np.ones(1))
        with pytest.raises(rr.MismatchError, match="rank 0"):
            _complete(comm, x, wait)
        comm.Free()
    comm = world.Dup()
    comm.allreduce(np.ones(1))
    requests = [comm.Iallreduce(x, x.copy()), comm.Ibarrier()]
    with pytest.raises(MPI.Exception):
        MPI.Request.Waitall(requests)
    comm.Free()


def _complete(comm: Any, x: np.ndarray, wait: str) -> None:
    if wait == "none":
        comm.Allreduce(x, x.copy())
    else:
        request = comm.Iallreduce(x, x.copy())
        while getattr(request, wait)() in (False, (False, None)):
            pass


def a_message_advances_while_its_sender_waits_in_a_call(world: Any) -> None:
    data, total = np.arange(4e6), np.empty(1)
    if world.rank == 0:
        request = world.Isend(data, 1)
        world.Allreduce(np.ones(1), total)
        request.Wait()
    else:
        if world.rank == 1:
            came = np.empty_like(data)
            world.Recv(came, 0)
            assert np.array_equal(came, data)
        world.Allreduce(np.ones(1), total)
    assert total[0] == world.size


FACTS = (
    communicators_made_from_a_wrapped_one_are_wrapped,
    a_wrapped_communicator_is_that_of_mpi,
    what_is_no_intracommunicator_is_refused,
    wrong_calls_raise_what_they_raise_on_mpi,
    calls_that_only_mpi_can_make_are_mpis,
    a_first_call_that_is_asynchronous_does_not_wait_for_other_ranks,
    nothing_can_be_reduced,
    a_view_in_another_order_is_summed_as_it_lies_in_memory,
    a_class_of_the_programs_own_is_kept,
    arguments_can_be_named_and_placed_as_on_mpi,
    requests_of_both_kinds_complete_together,
    the_error_of_a_call_is_raised,
    a_message_advances_while_its_sender_waits_in_a_call,
)


def facts() -> dict[str, str]:
    """Return the outcomes of all facts."""
    return outcomes(FACTS, rr.wrap(MPI.COMM_WORLD))


def without_threads() -> list[Any]:
    """Return how an Iallreduce was made, and its result."""
    comm, total = rr.wrap(MPI.COMM_WORLD), np.empty(1)
    comm.allreduce(np.ones(1))
    comm.routes.clear()
    x = np.ones(1)
    comm.Iallreduce(x, total).Wait()
    return [*map(list, comm.routes), total[0]]
