"""A value in the wrong argument is refused by name, and the ops of mpi4py are understood."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace

import numpy as np
import pytest

import ringreduce as rr
from tests.support.cases import CONFIG

X, Y, TEXTS = np.arange(4.0), np.zeros(4), np.array(["a"], np.dtypes.StringDType())
MASKED = np.ma.array(X, mask=X > 1)
CONFIGS = {"messages": CONFIG, "shared memory": replace(CONFIG, shared_memory=True)}


@pytest.fixture(scope="module")
def predefined():
    """The module of mpi4py that has its predefined ops; MPI itself is not initialised."""
    import mpi4py

    mpi4py.rc.initialize = False
    from mpi4py import MPI

    return MPI


def refused(misuse, config=CONFIG) -> str:
    """The text of the TypeError that `misuse` raises on rank 0; nothing was sent before it."""

    def program(comm):
        text = ""
        if comm.rank == 0:
            with pytest.raises(TypeError) as raised:
                misuse(comm)
            text = str(raised.value)
        assert comm.all_reduce(comm.rank + 1) == 3
        return text

    return rr.spawn(program, 2, config=config, timeout_s=5)[0]


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize(
    ("misuse", "place"),
    [
        (lambda c: c.all_reduce([X, X], Y), "all_reduce: op"),
        (lambda c: c.reduce_scatter(X, Y), "reduce_scatter: op"),
        (lambda c: c.reduce(X, 0, Y), "reduce: op"),
        (lambda c: c.gather(X, Y), "gather: root"),
        (lambda c: c.gather(X, Y, counts=[4, 4]), "gather: root"),
        (lambda c: c.scatter(X, Y), "scatter: root"),
        (lambda c: c.plan("all_reduce", X, op=Y), "all_reduce: op"),
        (lambda c: c.plan("broadcast", X, root=Y), "broadcast: root"),
    ],
)
def test_an_array_in_the_place_of_out_is_sent_there(misuse, place, config):
    assert refused(misuse, config) == f"{place} is an array; name the result with out="


@pytest.mark.parametrize(
    ("misuse", "text"),
    [
        (lambda c: c.all_reduce(X, algorithm=Y), "all_reduce: algorithm is an array"),
        (lambda c: c.all_reduce([X], algorithm=Y), "all_reduce: algorithm is an array"),
        (lambda c: c.all_reduce(X, wire=Y), "all_reduce: wire is an array"),
        (lambda c: c.reduce_scatter(X, wire=Y), "reduce_scatter: wire is an array"),
        (lambda c: c.reduce(X, algorithm=Y), "reduce: algorithm is an array"),
        (lambda c: c.broadcast(X, algorithm=Y), "broadcast: algorithm is an array"),
        (lambda c: c.all_gather(X, algorithm=Y), "all_gather: algorithm is an array"),
        (
            lambda c: c.all_gather(X, counts=[4, 4], algorithm=Y),
            "all_gather: algorithm is an array",
        ),
        (lambda c: c.gather(X, algorithm=Y), "gather: algorithm is an array"),
        (lambda c: c.scatter(X, algorithm=Y), "scatter: algorithm is an array"),
        (lambda c: c.all_to_all(X, algorithm=Y), "all_to_all: algorithm is an array"),
        (lambda c: c.plan("all_reduce", X, wire=Y), "all_reduce: wire is an array"),
        (lambda c: c.all_reduce(X, algorithm={}), "all_reduce: algorithm is dict"),
        (lambda c: c.send(MASKED, 1), "send: got a masked array"),
        (lambda c: c.recv(MASKED, 1), "recv: out is a masked array"),
        (lambda c: c.exchange({1: Y}, {1: MASKED}), "exchange: out is a masked array"),
        (lambda c: c.all_gather(MASKED), "all_gather: got a masked array"),
        (lambda c: c.plan("all_reduce", X, out=MASKED), "all_reduce: out is a masked array"),
        (lambda c: rr.train.DataParallel(c, {"w": MASKED}), "DataParallel: 'w' is a masked array"),
        (lambda c: c.all_reduce(TEXTS), "all_reduce: dtype StringDType() cannot be sent"),
        (lambda c: c.plan("all_to_all", TEXTS), "all_to_all: dtype StringDType() cannot be sent"),
        (lambda c: c.recv(TEXTS, 1), "recv: dtype StringDType() cannot be sent"),
        (lambda c: c.empty(3, TEXTS.dtype), "empty: dtype StringDType() cannot be sent"),
        (lambda c: c.shared(3, TEXTS.dtype), "shared: dtype StringDType() cannot be sent"),
    ],
)
def test_a_wrong_argument_is_refused_by_name(misuse, text):
    assert refused(misuse).startswith(text)


# --- the ops of mpi4py ----------------------------------------------------------------------------

INTEGERS, BOOLS = np.array([12, 10, 7]), np.array([True, False, True])
SAME = [
    ("SUM", "sum", np.add, X),
    ("PROD", "prod", np.multiply, X),
    ("MIN", "min", np.minimum, X),
    ("MAX", "max", np.maximum, X),
    ("BAND", "and", np.bitwise_and, INTEGERS),
    ("BOR", "or", np.bitwise_or, INTEGERS),
    ("BXOR", "xor", np.bitwise_xor, INTEGERS),
    ("BAND", "and", np.logical_and, BOOLS),
    ("LAND", "and", np.logical_and, BOOLS),
    ("LOR", "or", np.logical_or, BOOLS),
    ("LXOR", "xor", np.logical_xor, BOOLS),
]


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize(("name", "op", "combine", "x"), SAME)
def test_an_op_of_mpi4py_is_the_op_that_means_the_same(predefined, name, op, combine, x, config):
    """One rank passes mpi4py's op and the other ours: they agree, so the signatures are equal."""

    def program(comm):
        mine = x * (comm.rank + 1) if x.dtype != bool else x ^ bool(comm.rank)
        given = getattr(predefined, name) if comm.rank else op
        results = [comm.all_reduce(mine, given), *comm.all_reduce([mine, mine], given)]
        results.append(comm.reduce(mine, 1, given))
        results.append(comm.reduce_scatter(mine, given))
        results.append(comm.plan("all_reduce", mine, op=given)())
        return mine, results

    (x0, zero), (x1, one) = rr.spawn(program, 2, config=config, timeout_s=5)
    wanted = combine(x0, x1)
    parts = np.array_split(wanted, 2)
    for rank, results in enumerate((zero, one)):
        for result in (*results[:3], results[5]):
            assert np.array_equal(result, wanted)
        assert np.array_equal(results[4], parts[rank])
    assert zero[3] is None
    assert np.array_equal(one[3], wanted)


def test_an_op_of_mpi4py_appears_in_errors_by_its_name_here(predefined):
    def program(comm):
        with pytest.raises(rr.MismatchError) as raised:
            comm.all_reduce(X, predefined.SUM if comm.rank else "max")
        return str(raised.value)

    text = rr.spawn(program, 2, timeout_s=5)[0]
    assert "rank 0 passes op='max', rank 1 passes op='sum'" in text


@pytest.mark.parametrize(
    "call",
    [
        lambda c, x, op: c.all_reduce(x, op),
        lambda c, x, op: c.all_reduce([X, x], op),
        lambda c, x, op: c.reduce_scatter(x, op),
        lambda c, x, op: c.reduce(x, 0, op),
        lambda c, x, op: c.plan("reduce", x, op=op),
    ],
)
def test_a_logical_op_on_integers_is_refused(predefined, call):
    text = refused(lambda c: call(c, INTEGERS, predefined.LXOR))
    assert text.partition(": ")[2] == (
        "op=MPI.LXOR on int64 is logical; pass bools, or op='xor', which is bitwise on integers"
    )


@pytest.mark.parametrize("name", ["MINLOC", "REPLACE", "NO_OP", "OP_NULL"])
def test_an_op_of_mpi4py_without_a_counterpart_is_refused(predefined, name):
    text = refused(lambda c: c.all_reduce(X, getattr(predefined, name)))
    assert text.startswith("all_reduce: op is an mpi4py op without a counterpart; pass one of ")
    assert "MPI.SUM, MPI.PROD, MPI.MIN, MPI.MAX" in text


def strided(*steps, at=16):
    """A 2 x 2 array in memory of its own: bytes between its rows, and between its columns."""
    memory = np.zeros(64, np.uint8)
    return np.ndarray((2, 2), np.float32, memory, at, steps)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize(
    "call",
    [
        lambda comm, x, out: comm.all_reduce(x, out=out),
        lambda comm, x, out: comm.all_reduce(out, out=out),
        lambda comm, x, out: comm.all_reduce([x, x], out=[x.copy(), out]),
        lambda comm, x, out: comm.broadcast(x, out=out, async_op=True),
        lambda comm, x, out: comm.all_gather(x[:1], counts=[1, 1], out=out),
        lambda comm, x, out: comm.all_gather(x[:1], out=out),
        lambda comm, x, out: comm.scatter(x, out=out),
        lambda comm, x, out: comm.scatter(x, 0, out=out, counts=[2, 0]),
        lambda comm, x, out: comm.scatter(None, 1, out=out, counts=[2, 0]),
        lambda comm, x, out: comm.all_to_all(x, out=out),
        lambda comm, x, out: comm.plan("all_reduce", x, out=out),
        lambda comm, x, out: comm.recv(out, 1),
        lambda comm, x, out: comm.exchange({}, {1: out}),
    ],
)
def test_an_out_whose_elements_share_memory_is_refused(config, call):
    x = np.ones((2, 2), np.float32)

    def misuse(comm):
        for steps in ((8, 0), (0, 0), (4, 4), (4, 6), (-4, 4), (8, 2)):
            with pytest.raises(ValueError, match="elements of out share memory"):
                call(comm, x, strided(*steps))
        raise TypeError

    refused(misuse, CONFIGS[config])


def test_an_out_of_any_strides_whose_elements_are_apart_is_written():
    def program(comm):
        for steps in ((8, 4), (4, 8), (12, 8), (8, 12), (-8, -4), (-12, 4), (12, -8)):
            out = strided(*steps)
            comm.all_reduce(np.array([[1, 2], [3, 4]], np.float32), out=out)
            assert out.tolist() == [[2, 4], [6, 8]]

    rr.spawn(program, 2)


def test_results_of_a_list_that_overwrite_each_other_are_refused():
    def program(comm):
        x, memory = np.arange(8.0), np.zeros(8)
        for _ in range(3):  # compiled code knows the call after the first time
            comm.all_reduce([x[:4], x[4:]], out=[memory[:4], memory[4:]])
            comm.all_reduce([x[:4], x[4:]], out=[memory[::2], memory[1::2]])
            comm.all_reduce([x[:4], x[:4]], out=[memory[:4], memory[:4]])  # twice the same
        assert memory.tolist() == [0, 2, 4, 6, 4, 12, 6, 14]
        for first, second in ((0, 0), (0, 2), (3, 0)):
            out = [memory[first : first + 4], memory[second : second + 4]]
            with pytest.raises(ValueError, match="members 0 and 1 of out share memory"):
                comm.all_reduce([x[:4], x[4:]], out=out)

    rr.spawn(program, 2, config=CONFIGS["shared memory"])


def test_numpy_makes_an_array_of_a_shared_array_and_none_of_a_work():
    def program(comm):
        shared, work = comm.shared((2, 3), np.int64), comm.all_reduce(1, async_op=True)
        assert np.asarray(shared) is shared.array
        assert np.array(shared, np.float32).dtype == np.float32
        assert comm.all_reduce(shared).tolist() == [[0] * 3] * 2
        with pytest.raises(TypeError, match="a Work is no array; call its wait"):
            np.asarray(work)
        return work.wait().item(), comm.empty(3).dtype

    config = CONFIGS["shared memory"]
    assert rr.spawn(program, 2, config=config) == [(2, np.dtype(np.float64))] * 2


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, pickle.dumps])
@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda comm: comm, "Communicator"),
        (lambda comm: comm.shared(3, float), "SharedArray"),
        (lambda comm: comm.all_reduce(1, async_op=True), "Work"),
        (lambda comm: comm.exchange({}, {}, async_op=True), "Work"),
        (lambda comm: comm.plan("all_reduce", X[::-1]), "PersistentCall"),  # not compiled
        (lambda comm: rr.State({"w": X}), "State"),
    ],
)
def test_what_belongs_to_a_process_is_neither_copied_nor_pickled(copied, make, kind):
    def program(comm):
        with pytest.raises(TypeError, match=f"a {kind} cannot be copied or pickled"):
            copied(make(comm))

    rr.spawn(program, 1, config=CONFIGS["shared memory"])
