"""Calls of the fast path: their arguments, what they keep, what goes wrong."""

from __future__ import annotations

import ctypes
import gc
import inspect
import os
import sys
import threading
import time
import types
import weakref
from dataclasses import replace

import numpy as np
import pytest

import ringreduce as rr
from ringreduce.calls.collectives import ENTRIES
from ringreduce.compiler.interpreter import let_go_of_object
from ringreduce.shm import entry
from ringreduce.start import init
from tests.support.cases import CONFIG

SHARED = replace(CONFIG, shared_memory=True)
pytestmark = pytest.mark.skipif(
    os.environ.get("NUMBA_DISABLE_JIT") == "1", reason="nothing is compiled"
)


def general_calls(comm: rr.Communicator) -> list[str]:
    """From now on, the names of the calls that the general path makes."""
    made: list[str] = []
    engine = comm._engine
    for name in ("run", "run_now"):
        method = getattr(engine, name)

        def watched(call, *given, method=method, **named):
            made.append(call.signature.collective)
            return method(call, *given, **named)

        setattr(engine, name, watched)
    return made


def spawn(program, ranks=2, **config):
    return rr.spawn(program, ranks, config=replace(SHARED, **config), timeout_s=20)


def made(text):
    """Return a new object, as a text read from a file or the command line is."""
    return "".join(list(text))


FORMS = {
    "x": lambda c, x, _: c.all_reduce(x),
    "x, out": lambda c, x, out: c.all_reduce(x, out=out),
    "x, None": lambda c, x, _: c.all_reduce(x, out=None),
    "x, op": lambda c, x, _: c.all_reduce(x, "sum"),
    "x, op, out": lambda c, x, out: c.all_reduce(x, "sum", out=out),
    "in place": lambda c, x, _: c.all_reduce(x, out=x),
    "op named": lambda c, x, _: c.all_reduce(x, op="sum"),
    "op, out named": lambda c, x, out: c.all_reduce(x, op="sum", out=out),
    "out, op named": lambda c, x, out: c.all_reduce(x, out=out, op="sum"),
    "two named": lambda c, x, out: c.all_reduce(x, out=out, algorithm="auto"),
    "another algorithm": lambda c, x, _: c.all_reduce(x, algorithm="ring"),
    "made texts": lambda c, x, _: c.all_reduce(x, made("sum"), algorithm=made("auto")),
    "no wire": lambda c, x, _: c.all_reduce(x, wire=None),
    "no timeout": lambda c, x, _: c.all_reduce(x, timeout_s=None),
    "not asynchronous": lambda c, x, _: c.all_reduce(x, async_op=False),
}
OTHER_FORMS = {
    "named": lambda c, x, _: c.all_reduce(x=x),
    "a timeout": lambda c, x, _: c.all_reduce(x, timeout_s=5),
    "asynchronous": lambda c, x, _: c.all_reduce(x, async_op=True).wait(),
    "by its class": lambda c, x, _: rr.Communicator.all_reduce(c, x),
}


@pytest.mark.parametrize("form", FORMS | OTHER_FORMS)
@pytest.mark.parametrize("shape", [(), (1,), (3, 4), (2, 1, 3, 2), (1, 2, 1, 3, 2), (0,), (7, 0)])
def test_however_it_is_called_it_gives_the_sum(form, shape):
    call = (FORMS | OTHER_FORMS)[form]

    def program(comm):
        made = []
        for turn in range(4):
            x, out = np.full(shape, comm.rank + turn, np.float32), np.empty(shape, np.float32)
            result = call(comm, x, out)
            assert result.shape == shape
            assert (result == 2 * turn + 1).all()
            assert (result is out) == (
                form in ("x, out", "x, op, out", "two named", "op, out named", "out, op named")
            )
            assert (result is x) == (form == "in place")
            made = made or general_calls(comm)
        return len(made)

    general = spawn(program)
    if form in FORMS and 0 not in shape:
        assert general == [0, 0]


WRONG = {
    "nothing": (lambda c: c.all_reduce(), TypeError, "missing 1 required positional"),
    "too much": (lambda c: c.all_reduce(1, "sum", 2), TypeError, "positional arguments"),
    "another name": (lambda c: c.all_reduce(np.ones(4), outs=1), TypeError, "unexpected keyword"),
    "op twice": (lambda c: c.all_reduce(np.ones(4), "sum", op="sum"), TypeError, "multiple values"),
    "twice": (lambda c: c.all_reduce(np.ones(4), x=1), TypeError, "multiple values"),
    "no array": (lambda c: c.all_reduce("text"), TypeError, "pass an array"),
    "another op": (lambda c: c.all_reduce(np.ones(4), "add"), ValueError, "unknown op"),
    "an out too short": (
        lambda c: c.all_reduce(np.ones(4), out=np.ones(3)),
        ValueError,
        "out has shape",
    ),
    "an out of no array": (lambda c: c.all_reduce(np.ones(4), out=7), TypeError, "out is 7"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_said_as_ever(what):
    call, error, said = WRONG[what]

    def program(comm):
        for _ in range(3):
            assert (comm.all_reduce(np.ones(4)) == 2).all()
            with pytest.raises(error, match=said):
                call(comm)

    spawn(program)


# --- every collective -----------------------------------------------------------------------------


def given_by(rank: int, size: int) -> np.ndarray:
    return np.arange(4 * size) + 100.0 * rank


def of_all(size: int) -> np.ndarray:
    """Return the arrays that all ranks pass, a row each."""
    return np.array([given_by(rank, size) for rank in range(size)])


def counts_of(c) -> list[int]:
    return [4 * c.size] * c.size


def scattered(c, x, out=None, root=0, counts=None):
    """A scatter of the root's array."""
    counts = counts or [4] * c.size
    if c.rank == root:
        return c.scatter(x, root, counts=counts, out=out)
    return c.scatter(None, root, counts=counts, out=np.zeros(4) if out is None else out)


REPEATED = {
    "all_reduce": (
        lambda c, x, out: c.all_reduce(x, out=out),
        lambda rank, rows: rows.sum(axis=0),
    ),
    "all_reduce max": (
        lambda c, x, out: c.all_reduce(x, "max", out=out),
        lambda rank, rows: rows.max(axis=0),
    ),
    "reduce_scatter": (
        lambda c, x, out: c.reduce_scatter(x, out=out),
        lambda rank, rows: np.array_split(rows.sum(axis=0), len(rows))[rank],
    ),
    "reduce_scatter op": (
        lambda c, x, out: c.reduce_scatter(x, "min", out=out),
        lambda rank, rows: np.array_split(rows.min(axis=0), len(rows))[rank],
    ),
    "reduce": (
        lambda c, x, out: c.reduce(x, out=out),
        lambda rank, rows: rows.sum(axis=0) if rank == 0 else None,
    ),
    "reduce root, op": (
        lambda c, x, out: c.reduce(x, c.size - 1, "max", out=out),
        lambda rank, rows: rows.max(axis=0) if rank == len(rows) - 1 else None,
    ),
    "reduce named": (
        lambda c, x, out: c.reduce(x, op="max", out=out, root=c.size - 1),
        lambda rank, rows: rows.max(axis=0) if rank == len(rows) - 1 else None,
    ),
    "broadcast": (lambda c, x, out: c.broadcast(x, out=out), lambda rank, rows: rows[0]),
    "broadcast root": (
        lambda c, x, out: c.broadcast(x, root=c.size - 1, out=out),
        lambda rank, rows: rows[-1],
    ),
    "all_gather": (
        lambda c, x, out: c.all_gather(x, counts=counts_of(c), out=out),
        lambda rank, rows: rows.reshape(-1),
    ),
    "all_gather tuple": (
        lambda c, x, out: c.all_gather(x, counts=tuple(counts_of(c)), out=out),
        lambda rank, rows: rows.reshape(-1),
    ),
    "gather": (
        lambda c, x, out: c.gather(x, counts=counts_of(c), out=out),
        lambda rank, rows: rows.reshape(-1) if rank == 0 else None,
    ),
    "gather root": (
        lambda c, x, out: c.gather(x, c.size - 1, counts=counts_of(c), out=out),
        lambda rank, rows: rows.reshape(-1) if rank == len(rows) - 1 else None,
    ),
    "scatter": (scattered, lambda rank, rows: np.array_split(rows[0], len(rows))[rank]),
    "scatter root": (
        lambda c, x, out: scattered(c, x, out, c.size - 1),
        lambda rank, rows: np.array_split(rows[-1], len(rows))[rank],
    ),
    "all_to_all": (
        lambda c, x, out: c.all_to_all(x, out=out),
        lambda rank, rows: np.concatenate([np.array_split(row, len(rows))[rank] for row in rows]),
    ),
    "another algorithm": (
        lambda c, x, out: c.reduce_scatter(x, out=out, algorithm="ring"),
        lambda rank, rows: np.array_split(rows.sum(axis=0), len(rows))[rank],
    ),
}


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("with_out", [False, True])
@pytest.mark.parametrize("what", REPEATED)
def test_the_second_call_of_every_collective_takes_no_python(what, with_out, ranks):
    call, right = REPEATED[what]

    def program(comm):
        x, wanted = given_by(comm.rank, comm.size), right(comm.rank, of_all(comm.size))
        made = general_calls(comm)
        for _ in range(4):
            out = np.zeros_like(wanted) if with_out and wanted is not None else None
            result = call(comm, x, out)
            assert np.array_equal(result, wanted)
            assert out is None or result is out
        assert np.array_equal(x, given_by(comm.rank, comm.size))
        return list(made)

    assert spawn(program, ranks) == [[what.split()[0].replace("another", "reduce_scatter")]] * ranks


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("way", ["staged", "single-copy"])
@pytest.mark.parametrize("what", REPEATED)
def test_nor_does_a_call_of_several_slices(what, way, ranks):
    call, right = REPEATED[what]

    def program(comm):
        x, wanted = given_by(comm.rank, comm.size), right(comm.rank, of_all(comm.size))
        made = general_calls(comm)
        for _ in range(4):
            assert np.array_equal(call(comm, x, None), wanted)
        return len(made)

    pull_bytes = 1 if way == "single-copy" else 1 << 30
    assert spawn(program, ranks, slice_bytes=8, pull_bytes=pull_bytes) == [1] * ranks


def test_a_long_call_pauses_so_that_signal_handlers_run(monkeypatch):
    monkeypatch.setattr("ringreduce.shm.program._PAUSE_BYTES", 1000)
    pauses = [0, 0]

    def program(comm):
        def counted(executable):
            pauses[comm.rank] += 1
            wait_for(executable)

        x = np.arange(1000.0) + comm.rank
        wanted = 2 * np.arange(1000.0) + 1
        assert np.array_equal(comm.all_reduce(x), wanted)
        wait_for, comm._engine.wait_for = comm._engine.wait_for, counted
        for _ in range(3):
            assert np.array_equal(comm.all_reduce(x), wanted)

    spawn(program, slice_bytes=100)
    assert pauses == [3, 3]


def test_the_second_barrier_takes_no_python():
    def program(comm):
        made = general_calls(comm)
        for _ in range(4):
            assert comm.barrier() is None
        return list(made)

    assert spawn(program) == [["barrier"]] * 2


def test_a_barrier_waits_for_all():
    def program(comm):
        for _ in range(3):
            comm.barrier()
        for turn in range(3):
            if comm.rank == turn % 2:
                time.sleep(0.1)
                arrived.append(turn)
            comm.barrier()
            assert turn in arrived

    arrived: list[int] = []
    spawn(program)


class Text(str):
    __slots__ = ()


NOT_ELIGIBLE = {
    "a root of NumPy": lambda c, x: c.broadcast(x, np.int64(1)),
    "a text of its own kind": lambda c, x: c.reduce(x, 1, Text("sum")),
    "a text of NumPy": lambda c, x: c.reduce(x, 1, np.str_("sum")),
    "counts of NumPy": lambda c, x: c.all_gather(x, counts=np.array(counts_of(c))),
    "a count of NumPy": lambda c, x: c.all_gather(x, counts=[np.int32(8), *counts_of(c)[1:]]),
    "counts that are drawn": lambda c, x: c.all_gather(x, counts=iter(counts_of(c))),
    "no counts": lambda c, x: c.all_gather(x),
    "no counts of a scatter": lambda c, x: c.scatter(None if c.rank else x),
    "counts of this rank": lambda c, x: c.all_to_all(x, counts=[x.size // c.size] * c.size),
    "counts of all ranks": lambda c, x: c.all_to_all(
        x, counts=[[x.size // c.size] * c.size] * c.size
    ),
    "a timeout": lambda c, x: c.broadcast(x, 1, timeout_s=5),
    "asynchronous": lambda c, x: c.all_to_all(x, async_op=True).wait(),
    "named": lambda c, x: c.all_to_all(x=x),
    "a list": lambda c, x: c.broadcast(memoryview(x), 1),
    "strided": lambda c, x: c.broadcast(np.repeat(x, 2)[::2], 1),
    "a strided result": lambda c, x: c.broadcast(x, 1, out=np.zeros(2 * x.size)[::2]),
    "a barrier with a timeout": lambda c, x: c.barrier(timeout_s=5),
}
ELIGIBLE = {
    "broadcast": lambda c, x: c.broadcast(x, 1),
    "reduce": lambda c, x: c.reduce(x, 1),
    "all_gather": lambda c, x: c.all_gather(x, counts=counts_of(c)),
    "gather": lambda c, x: c.gather(x, 1, counts=counts_of(c)),
    "scatter": scattered,
    "all_to_all": lambda c, x: c.all_to_all(x),
    "reduce_scatter": lambda c, x: c.reduce_scatter(x),
    "barrier": lambda c, x: c.barrier(),
}


@pytest.mark.parametrize("what", NOT_ELIGIBLE)
def test_arguments_that_are_not_eligible_take_the_general_path_to_the_same_result(what):
    def program(comm):
        x = given_by(comm.rank, comm.size)
        for call in ELIGIBLE.values():
            for _ in range(2):
                call(comm, x)
        made = general_calls(comm)
        result = NOT_ELIGIBLE[what](comm, x)
        (name,) = made
        assert np.array_equal(result, ELIGIBLE[name](comm, x))

    spawn(program)


REFUSED = {
    "a root that is a bool": (lambda c, x: c.broadcast(x, True), TypeError, "root is True"),
    "a root that is too large": (lambda c, x: c.broadcast(x, 1 << 70), ValueError, "root is 118"),
    "a root below 0": (lambda c, x: c.broadcast(x, -1), ValueError, "root is -1"),
    "a root of text": (lambda c, x: c.broadcast(x, "1"), TypeError, "root is '1'"),
    "a root of a reduce that is a bool": (
        lambda c, x: c.reduce(x, True),
        TypeError,
        "root is True",
    ),
    "a root that is a float": (
        lambda c, x: c.gather(x, 1.0, counts=counts_of(c)),
        TypeError,
        "pass a rank",
    ),
    "a root of other lengths": (lambda c, x: c.gather(x, True), TypeError, "pass a rank"),
    "a root of a scatter": (lambda c, x: c.scatter(x, True), TypeError, "pass a rank"),
    "a scatter without an array at the root": (
        lambda c, x: c.scatter(None, c.rank, out=x[:4], counts=[4, 4]),
        ValueError,
        "pass the array",
    ),
    "an array for a scatter of another rank": (
        lambda c, x: c.scatter(x[:4], 1 - c.rank, out=x[4:], counts=[4, 4]),
        ValueError,
        "passes an array",
    ),
    "a root twice": (lambda c, x: c.broadcast(x, 1, root=1), TypeError, "multiple values"),
    "an op where there is none": (lambda c, x: c.broadcast(x, op="sum"), TypeError, "unexpected"),
    "a wire where there is none": (
        lambda c, x: c.broadcast(x, 1, wire=None),
        TypeError,
        "unexpected",
    ),
    "counts where there are none": (
        lambda c, x: c.broadcast(x, 1, counts=counts_of(c)),
        TypeError,
        "unexpected",
    ),
    "too few counts": (lambda c, x: c.all_gather(x, counts=[8]), ValueError, "one count"),
    "a count below 0": (lambda c, x: c.all_gather(x, counts=[8, -1]), ValueError, "one count"),
    "a count that is too large": (
        lambda c, x: c.all_gather(x[:0], counts=[0, 0][: c.rank] + [1 << 70] + [0] * (1 - c.rank)),
        ValueError,
        "counts",
    ),
    "a count of text": (lambda c, x: c.all_gather(x, counts=[8, "8"]), TypeError, "counts="),
    "a result where there is none": (
        lambda c, x: c.reduce(x, 1 - c.rank, out=x.copy()),
        ValueError,
        "only the root",
    ),
    "a result too short": (
        lambda c, x: c.all_to_all(x, out=np.zeros(3)),
        ValueError,
        "out has shape",
    ),
    "a result in place": (lambda c, x: c.all_to_all(x, out=x), ValueError, "overlaps"),
    "a longer result in place": (
        lambda c, x: c.all_gather(x, out=x, counts=counts_of(c)),
        ValueError,
        "shape",
    ),
    "a part of the input": (
        lambda c, x: c.reduce_scatter(x, out=x[1 : 1 + x.size // c.size]),
        ValueError,
        "overlaps",
    ),
    "a result of another dtype": (
        lambda c, x: c.broadcast(x, 1, out=x.astype("f4")),
        TypeError,
        "out has dtype",
    ),
    "no array": (lambda c, x: c.all_to_all([1, 2]), TypeError, "got a list"),
    "an argument of a barrier": (lambda c, x: c.barrier(1), TypeError, "positional"),
    "an array of a barrier": (lambda c, x: c.barrier(out=x), TypeError, "unexpected"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_wrong_arguments_are_refused_as_by_the_general_path(what):
    call, error, said = REFUSED[what]

    def program(comm):
        x = given_by(comm.rank, comm.size)
        for _ in range(2):
            for usual in ELIGIBLE.values():
                usual(comm, x)
            with pytest.raises(error, match=said):
                call(comm, x)

    spawn(program)


def test_roots_and_counts_are_compared_by_value():
    def program(comm):
        x, other = np.full(300, comm.rank + 1.0), np.full((300, 1), comm.rank + 1.0)
        made = general_calls(comm)
        for turn in range(4):
            for root in (0, 1):
                assert (comm.broadcast(x, root) == root + 1).all()
                gathered = comm.gather(other, root, counts=[int("300"), int("300")])
                assert (gathered is None) == (comm.rank != root)
            # Lengths differ by rank, and so the counts of the same array do.
            mine = np.full(300 if comm.rank else 1000 + turn % 2, comm.rank)
            gathered = comm.all_gather(mine, counts=(1000 + turn % 2, int("300")))
            assert gathered.shape == (1300 + turn % 2,)
            assert gathered.sum() == 300
        return list(made)

    both = ["broadcast", "gather", "broadcast", "gather", "all_gather", "all_gather"]
    assert spawn(program) == [both] * 2


def test_an_array_and_a_result_of_the_same_kind_are_told_apart():
    """The root's whole array is its part: the result of a rank without an array is like it."""

    def program(comm):
        x, nothing = np.arange(8.0), np.zeros(0)
        for root in (0, 1):
            counts = [8 * (rank == root) for rank in range(2)]
            for _ in range(2):
                scattered(comm, x, np.zeros(8) if comm.rank == root else nothing, root, counts)
            if comm.rank == root:
                with pytest.raises(ValueError, match="pass the array"):
                    comm.scatter(None, root, out=x, counts=counts)
            else:
                with pytest.raises(ValueError, match="passes an array"):
                    comm.scatter(nothing, root, out=nothing, counts=counts)

    spawn(program)


def test_a_result_that_overlaps_the_input_is_refused():
    def program(comm):
        memory = np.ones(30)
        for shift in (1, 9):
            x, out = memory[10:20], memory[10 - shift : 20 - shift]
            for pair in ((x, out), (out, x)):
                assert (comm.all_reduce(memory[:10]) == 2).all()
                with pytest.raises(ValueError, match="overlaps"):
                    comm.all_reduce(pair[0], out=pair[1])

    spawn(program)


def test_a_communicator_that_logs_messages_keeps_to_the_general_path():
    def program(comm):
        made = general_calls(comm)
        for _ in range(3):
            comm.all_reduce(np.ones(3))
            comm.all_reduce([np.ones(3), np.ones(4)])
            comm.barrier()
        return len(made)

    assert spawn(program, log_messages=True) == [9, 9]


@pytest.mark.parametrize("name", ENTRIES)
def test_a_collective_still_looks_like_the_method(name):
    def program(comm):
        method, entry = getattr(rr.Communicator, name), getattr(comm, name)
        assert isinstance(entry, types.BuiltinFunctionType)
        assert entry.__name__ == name
        of_method = inspect.signature(method).parameters.values()
        wanted = [(each.name, each.kind, each.default) for each in of_method][1:]
        of_entry = inspect.signature(entry).parameters.values()
        assert [(each.name, each.kind, each.default) for each in of_entry] == wanted
        assert entry.__doc__ == method.__doc__

    spawn(program)


@pytest.mark.parametrize("name", ENTRIES)
def test_a_method_of_ones_own_is_not_hidden(monkeypatch, name):
    """As long as the method is called by its name: other methods may call it, too."""
    called = []

    def ours(self, *given, **named):
        called.append(name)
        return getattr(super(Own, self), name)(*given, **named)

    class Own(rr.Communicator):
        pass

    setattr(Own, name, ours)
    monkeypatch.setattr(init, "Communicator", Own)
    usual = {**ELIGIBLE, "all_reduce": lambda c, x: c.all_reduce(x)}

    def program(comm):
        for _ in range(3):
            usual[name](comm, given_by(comm.rank, comm.size))

    spawn(program)
    assert called == [name] * 6


# --- what is kept, and threads --------------------------------------------------------------------


@pytest.mark.slow
def test_nothing_is_kept_and_nothing_is_freed_too_early():
    def program(comm):
        x, out = np.ones(100), np.empty(100)
        comm.all_reduce(x, out=out)
        planned = comm.plan("all_reduce", x, out=out)
        gc.collect()
        kinds = (x, out, x.dtype, None, "sum", "out", np.empty)
        before = [sys.getrefcount(each) for each in kinds]
        for _ in range(1000):
            comm.all_reduce(x, out=out)
            comm.all_reduce(x)
            planned()
            comm.barrier()
        after = [sys.getrefcount(each) for each in kinds]
        grown = [now - was for now, was in zip(after, before, strict=True)]
        results = [comm.all_reduce(x) for _ in range(50)]
        assert all((each == 2).all() for each in results)
        return grown

    for grown in spawn(program):
        assert grown[:2] == [0, 0]
        assert max(grown) < 500  # others keep, and let go of, some of them, too


@pytest.mark.slow
def test_a_planned_call_takes_no_arguments_and_keeps_its_arrays():
    def program(comm):
        x, out = np.full(9, comm.rank + 1.0), np.empty(9)
        planned = comm.plan("all_reduce", x, out=out)
        assert planned() is out
        passing = general_calls(comm)
        assert planned() is out
        assert passing == []
        with pytest.raises(TypeError):
            planned(9)
        with pytest.raises(TypeError):
            planned(x=9)
        kept = weakref.ref(x), weakref.ref(out)
        del x, out
        assert (planned() == 3).all()
        assert all(array() is not None for array in kept)
        del planned
        comm.plan("all_reduce", np.ones(3))  # now what was bound is let go of
        gc.collect()
        return [array() is None for array in kept]

    assert spawn(program) == [[True, True]] * 2


@pytest.mark.slow
def test_more_kinds_of_calls_than_there_is_room_for():
    def program(comm):
        for turn in range(3):
            for n in range(1, 700):
                result = comm.all_reduce(np.full(n, n + turn))
                assert result.shape == (n,)
                assert (result == 2 * (n + turn)).all()

    spawn(program, kept_plans=1000)


@pytest.mark.slow
def test_a_communicator_that_is_closed_is_let_go_of():
    def program(comm):
        for _ in range(3):
            comm.all_reduce(np.ones(3))
            comm.barrier()
        part = comm.split(0)
        for _ in range(3):
            part.all_reduce(np.ones(3))
        part.close()
        with pytest.raises(ValueError, match="closed"):
            part.all_reduce(np.ones(3))
        left = weakref.ref(part)
        del part
        for _ in range(20):
            gc.collect()  # returns at once where another thread is at it
            if left() is None:
                return True
            time.sleep(0.05)
        return False

    assert spawn(program) == [True, True]


def test_threads_of_one_rank_take_turns():
    def program(comm):
        wrong = []

        def calls():
            x, out = np.full(50, comm.rank + 1.0), np.empty(50)
            for turn in range(300):
                result = comm.all_reduce(x, out=out) if turn % 3 else comm.all_reduce(x)
                wrong.append(not (result == 3).all())

        threads = [threading.Thread(target=calls) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(wrong) == 900
        return any(wrong)

    assert spawn(program) == [False, False]


@pytest.mark.slow
def test_while_a_call_is_under_way_no_other_is_eligible():
    def program(comm):
        x, sums = np.ones(3), []
        for _ in range(3):
            comm.all_reduce(x)
        state = comm._engine.fast_path.state
        if comm.rank:
            return comm.all_reduce(x).tolist()
        state.owner, state.busy = 0, 1
        thread = threading.Thread(target=lambda: sums.append(comm.all_reduce(x).tolist()))
        thread.start()
        time.sleep(0.3)
        early = list(sums)
        state.busy = 0
        thread.join(120)
        assert early == []
        return sums[0]

    assert spawn(program) == [[2, 2, 2]] * 2


def test_asynchronous_calls_come_in_between():
    def program(comm):
        x = np.full(9, comm.rank + 1.0)
        op = comm.plan("all_reduce", x, out=np.empty(9))
        for turn in range(100):
            work = comm.all_reduce(x * turn, async_op=True) if turn % 3 else None
            assert (comm.all_reduce(x) == 3).all()
            assert (op() == 3).all()
            comm.barrier()
            assert work is None or (work.wait() == 3 * turn).all()

    spawn(program)


@pytest.mark.parametrize("passed", [0, 1, 7, 200])
def test_ranks_that_disagree_after_fast_calls_raise_and_continue(passed):
    def program(comm):
        for _ in range(3):
            for _ in range(passed):
                assert (comm.all_reduce(np.ones(5)) == 2).all()
            with pytest.raises(rr.MismatchError, match=r"float64\[6\]") as raised:
                comm.all_reduce(np.ones(5 + comm.rank))
            assert "float64[5]" in str(raised.value)

    spawn(program)


@pytest.mark.slow
def test_a_rank_that_does_not_come_is_named():
    def program(comm):
        for _ in range(5):
            comm.all_reduce(np.ones(5))
        if comm.rank:
            time.sleep(2)
            return
        with pytest.raises(rr.PeerTimeoutError, match="rank 1"):
            comm.all_reduce(np.ones(5))
        for _ in range(3):
            with pytest.raises(rr.PeerTimeoutError):
                comm.all_reduce(np.ones(5))

    with pytest.raises(rr.RingReduceError):
        rr.spawn(program, 2, config=SHARED, timeout_s=0.5)


def test_who_leaves_makes_no_more_calls():
    def program(comm):
        for _ in range(5):
            comm.all_reduce(np.ones(5))
        if comm.rank:
            comm.leave("enough")
        with pytest.raises(rr.PeerLostError, match="enough"):
            comm.all_reduce(np.ones(5))
        return True

    assert spawn(program) == [True, True]


def empty_after_a_loss(comm):
    before = comm.empty(8)
    comm.barrier()
    if comm.rank:
        comm.leave("enough")
    with pytest.raises(rr.PeerLostError, match="enough"):
        comm.barrier()
    after = comm.empty(8)
    return before.base is None, after.base is None, comm._engine.executables.pages(8)


@pytest.mark.slow
def test_after_a_loss_no_array_lies_where_a_stopped_peer_may_still_write():
    """Threads share no segment."""
    found = rr.spawn(empty_after_a_loss, 2, config=SHARED, timeout_s=120, processes=True)
    assert found == [(False, True, None)] * 2


def test_an_exception_from_outside_comes_out_of_a_call_that_waits():
    """As from a signal's handler, which may raise wherever Python is."""

    class AlarmError(Exception):
        pass

    waits, over = threading.Event(), threading.Event()

    def twice(comm):
        for _ in range(2):
            comm.all_reduce(np.ones(5))

    def program(comm):
        for _ in range(5):
            comm.all_reduce(np.ones(5))
        if comm.rank:
            waits.wait(120)
            time.sleep(0.1)
            raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
            assert raise_in(ctypes.c_ulong(threads[0]), ctypes.py_object(AlarmError)) == 1
            over.wait(120)
            # The text has the exception's name unless it came before the call had begun to wait.
            with pytest.raises(rr.PeerLostError, match=r"AlarmError|an exception came"):
                twice(comm)  # its first call may succeed: the other rank has posted that round
            return
        threads.append(threading.get_ident())
        waits.set()
        with pytest.raises(AlarmError):
            comm.all_reduce(np.ones(5))
        over.set()
        with pytest.raises(rr.PeerLostError):
            comm.all_reduce(np.ones(5))

    threads: list[int] = []
    spawn(program)


class StopError(Exception):
    pass


def waiting_calls(comm, first) -> None:
    """On rank 0, let `first` run before `Engine.finish` when a call waits."""

    def finish(*given):
        first(comm)
        return comm._engine.finish(*given)

    if comm.rank == 0:
        path = comm._engine.fast_path
        path._named["finish"] = finish  # keeps the function alive
        path.state.finish = id(finish)


WAITING = {
    "an array": lambda c, x: lambda: c.all_reduce(x),
    "a list": lambda c, x: lambda: c.all_reduce([x, x + 0]),
    "planned": lambda c, x: c.plan("all_reduce", x, out=np.empty(5)),
    "a barrier": lambda c, x: c.barrier,
}


@pytest.mark.parametrize("what", WAITING)
def test_a_call_that_was_begun_and_given_up_is_not_gone_on_with(what):
    """A signal's handler may raise before Python has got to what breaks a call off."""

    armed, stopped = threading.Event(), threading.Event()

    def stop(comm):
        if armed.is_set():
            stopped.set()
            raise StopError

    def program(comm):
        waiting_calls(comm, stop)
        x = np.ones(5)
        call = WAITING[what](comm, x)
        if comm.rank:
            call()
            assert stopped.wait(120)
            result = call()  # what rank 0 has published will do
            assert result is None or (np.array(result) == 2).all()
            with pytest.raises(rr.PeerLostError, match="in the middle of a call"):
                call()
            return
        call()  # on the general path
        armed.set()
        with pytest.raises(StopError):
            call()
        for _ in range(2):
            with pytest.raises(rr.PeerLostError, match="in the middle of a call"):
                comm.all_reduce(np.full(5, 7.0))

    spawn(program)


def test_a_call_from_within_one_that_has_just_begun_is_refused():
    begun = [threading.Event() for _ in range(4)]
    turns = iter(begun)

    def call(comm):
        for another in (comm.barrier, lambda: comm.all_reduce(np.ones(5))):
            with pytest.raises(ValueError, match="within a call"):
                another()
        next(turns).set()

    def program(comm):
        waiting_calls(comm, call)
        comm.all_reduce(np.zeros(5))
        for turn, event in enumerate(begun):
            if comm.rank:
                assert event.wait(120)
            assert (comm.all_reduce(np.full(5, turn, np.float64)) == 2 * turn).all()

    spawn(program)


def test_a_thread_that_wants_the_lock_gets_it():
    def program(comm):
        x = np.ones(3)
        comm.all_reduce(x)
        done = threading.Event()

        def other():
            for _ in range(30):
                comm.empty(10, np.float32)
                comm.explain(8)
                with comm._engine.queue.lock:
                    time.sleep(0)
            done.set()

        thread = threading.Thread(target=other)
        thread.start()
        end = time.monotonic() + 15
        # All go on until all are done.
        while not comm.all_reduce(np.array([done.is_set()]), "and")[0]:
            assert time.monotonic() < end, "the other thread never had its turn"
        thread.join()

    spawn(program)


def test_who_leaves_says_how_far_it_got():
    def program(comm):
        agreement, told = comm._engine.agreement, []
        before, tell = agreement.completed, agreement._send_all
        for _ in range(57):
            comm.all_reduce(np.ones(5))
        agreement._send_all = lambda kind, **said: (
            told.append((kind, said["completed"] - before)) or tell(kind, **said)
        )
        comm.leave("enough")
        return told

    assert spawn(program) == [[("left", 57)]] * 2


def test_a_child_process_makes_no_calls():
    def program(comm):
        for _ in range(5):
            comm.all_reduce(np.ones(5))
        if comm.rank == 0:
            child = os.fork()
            if child == 0:
                try:
                    comm.all_reduce(np.ones(5))
                except ValueError as error:
                    os._exit(7 if "forked" in str(error) else 1)
                os._exit(2)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert (comm.all_reduce(np.ones(5)) == 2).all()

    spawn(program)


def uncompiled(function, *given, **named):
    """Call a compiled function of the fast path by running its source as Python."""
    values = [*given, *named.values()]
    args, names = np.array([*map(id, values)], np.int64), tuple(named)
    kwnames = id(names) if names else 0
    address = entry.call(id(function.__self__), args.ctypes.data, len(given), kwnames)
    result = ctypes.cast(address, ctypes.py_object).value
    let_go_of_object(address)
    return result


def test_the_entry_runs_uncompiled_too():
    def program(comm):
        x, y = np.full(5, comm.rank + 1.0), np.full((2, 3), 1.0 * comm.rank)
        out, members, counts = np.empty(5), [x, y], [2, 2]
        planned = comm.plan("all_reduce", x, out=out)
        for _ in range(2):
            comm.all_reduce(x)
            comm.all_reduce(members)
            comm.gather(y, 1, counts=counts)
            comm.barrier()
            planned()
        made = general_calls(comm)
        for _ in range(3):
            assert (uncompiled(comm.all_reduce, x) == 3).all()
            assert uncompiled(comm.all_reduce, x, "sum", out=out) is out
            first, second = uncompiled(comm.all_reduce, members)
            assert (first == 3).all()
            assert (second == 1).all()
            gathered = uncompiled(comm.gather, y, 1, counts=counts)
            assert gathered is None if comm.rank == 0 else gathered.sum() == 6
            assert uncompiled(comm.barrier) is None
            assert uncompiled(planned) is out
        assert made == []
        assert (uncompiled(comm.all_reduce, x, timeout_s=5) == 3).all()
        assert made == ["all_reduce"]

    spawn(program)


@pytest.mark.slow
def test_the_records_of_a_barrier_outlive_its_function():
    """`close` drops the functions first, and then clears the record of the barrier."""

    def program(comm):
        for _ in range(3):
            comm.barrier()
        memory = weakref.ref(comm.barrier.__self__[0])
        del comm.__dict__["barrier"]
        gc.collect()
        return memory() is not None

    assert spawn(program) == [True, True]
