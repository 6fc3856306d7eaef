"""Lists that are reduced again and again: wherever their arrays lie, on whichever rank."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ringreduce as rr
from ringreduce.calls import cache
from ringreduce.compiler.pyobjects import PyList
from ringreduce.shm.call_table import SLOTS
from ringreduce.shm.fast_path import CompiledCall
from ringreduce.shm.list_table import ListTable, locate_all, mixes
from tests.shm.test_fast_path import general_calls
from tests.support.cases import CONFIG

SHARED = replace(CONFIG, shared_memory=True)
pytestmark = pytest.mark.skipif(
    os.environ.get("NUMBA_DISABLE_JIT") == "1", reason="nothing is compiled"
)
DTYPES = [np.dtype(t) for t in (np.float32, np.int64, np.bool_, ml_dtypes.bfloat16, np.complex64)]
LIES = ("apart", "end to end", "registered", "strided", "reversed", "read-only")
OUTS = ("new", "the same", "rotated", "apart", "end to end", "registered", "strided")
Shape = tuple[int, ...]


def laid(comm: rr.Communicator, lies: str, shapes: list[Shape], dtype: Any) -> list[np.ndarray]:
    """Arrays of these shapes, somewhere."""
    sizes = [int(np.prod(shape)) for shape in shapes]
    if lies == "registered":
        return [comm.empty(shape, dtype) for shape in shapes]
    if lies == "strided":
        return [np.empty((*shape, 2), dtype)[..., 1] for shape in shapes]
    if lies in ("end to end", "reversed"):
        whole = np.empty(sum(sizes), dtype)
        order = list(range(len(shapes)))[:: -1 if lies == "reversed" else 1]
        parts: dict[int, np.ndarray] = {}
        at = 0
        for i in order:
            parts[i] = whole[at : at + sizes[i]].reshape(shapes[i])
            at += sizes[i]
        return [parts[i] for i in range(len(shapes))]
    return [np.empty(shape, dtype) for shape in shapes]


def values(rank: int, turn: int, member: int, shape: Shape, dtype: Any) -> np.ndarray:
    """What a rank passes: small whole numbers, which every dtype adds exactly."""
    rng = np.random.default_rng((rank, turn, member))
    return rng.integers(0, 2 if dtype == np.bool_ else 9, shape).astype(dtype)


def wanted(size: int, turn: int, shapes: list[Shape], dtype: Any) -> list[np.ndarray]:
    results = []
    for member, shape in enumerate(shapes):
        given = [values(rank, turn, member, shape, dtype) for rank in range(size)]
        combine = np.logical_or if dtype == np.bool_ else np.add
        total = given[0]
        for array in given[1:]:
            total = combine(total, array).astype(dtype)
        results.append(total)
    return results


def reduce_in_turns(
    comm: rr.Communicator,
    shapes: list[list[Shape]],
    dtype: Any,
    places: list[list[tuple[str, str]]],
) -> None:
    """`places` has for each turn, for each rank, how its arrays and its results lie."""
    for turn, of_ranks in enumerate(places):
        now = shapes[turn % len(shapes)]
        lies, out = of_ranks[comm.rank % len(of_ranks)]
        x = laid(comm, lies, now, dtype)
        if out == "rotated" and len(set(now)) > 1:
            out = "the same"
        for member, array in enumerate(x):
            array[...] = values(comm.rank, turn, member, array.shape, dtype)
            array.flags.writeable = lies != "read-only" or out in ("the same", "rotated")
        given = [array.copy() for array in x]
        into: Any = {"new": None, "the same": x, "rotated": [*x[1:], *x[:1]]}.get(out)
        if into is None and out != "new":
            into = laid(comm, out, now, dtype)
        members: Any = tuple(x) if turn % 3 == 2 else x
        came = comm.all_reduce(members, "or" if dtype == np.bool_ else "sum", out=into)
        assert into is None or came is into
        for result, right in zip(came, wanted(comm.size, turn, now, dtype), strict=True):
            assert result.dtype == dtype
            assert np.array_equal(result, right)
        if out not in ("the same", "rotated"):
            assert all(np.array_equal(*pair) for pair in zip(x, given, strict=True))


some_shapes = st.lists(
    st.sampled_from(
        [(), (1,), (3,), (0,), (2, 3), (64,), (5, 0), (700,), (4, 1, 2), (1025,), (50, 47)]
    ),
    min_size=1,
    max_size=9,
)


@pytest.mark.slow
@settings(max_examples=25)
@given(
    ranks=st.integers(2, 4),
    shapes=st.lists(some_shapes, min_size=1, max_size=2),
    dtype=st.sampled_from(DTYPES),
    most=st.sampled_from([60, 600, 3000, 1 << 20]),
    places=st.lists(
        st.lists(st.tuples(st.sampled_from(LIES), st.sampled_from(OUTS)), min_size=1, max_size=4),
        min_size=2,
        max_size=8,
    ),
)
def test_any_lists_in_turns_give_what_numpy_gives(ranks, shapes, dtype, most, places):
    config = replace(SHARED, slice_bytes=most, most_slices=2)
    rr.spawn(reduce_in_turns, ranks, shapes, dtype, places, config=config, timeout_s=120)


def compiled_lists(comm: rr.Communicator) -> list[CompiledCall]:
    """The lists that compiled code reduces."""
    path = comm._engine.fast_path
    assert path is not None
    return [made for _, made in path._calls.values() if made.table is not None]


def drawn_lists() -> list[int]:
    """Lists that lie anywhere, in parts of 30 kB.  How many lists are kept, and their batches."""
    rng = np.random.default_rng(1)
    choices = [(), (3,), (0,), (64,), (700,), (1024,), (2050,), (30, 200)]
    shapes = [[choices[i] for i in rng.integers(0, 8, count)] for count in (40, 9, 100)]
    places = [[(str(rng.choice(LIES)), str(rng.choice(OUTS))) for _ in range(4)] for _ in range(21)]
    config = rr.Config(slice_bytes=30_000)
    with rr.init(transport="shm", timeout_s=120, config=config) as comm:
        reduce_in_turns(comm, shapes, np.float32, places)
        return [len(made.executables) for made in compiled_lists(comm)]


def single_copy_lists(algorithm: str) -> int:
    """Reduce single-copy lists, which only "auto" cuts; return how many calls are compiled."""
    rng, shapes = np.random.default_rng(1), [(300,), (0,), (1500,), (700,)]
    config = rr.Config(pull_bytes=5000)
    with rr.init(transport="shm", timeout_s=120, config=config) as comm:
        for turn in range(20):
            lies, out = str(rng.choice(LIES[:5])), str(rng.choice(OUTS))
            x = laid(comm, lies, shapes, np.float32)
            for member, array in enumerate(x):
                array[...] = values(comm.rank, turn, member, array.shape, np.float32)
            into = laid(comm, out, shapes, np.float32) if out not in ("new", "the same") else x
            came = comm.all_reduce(x, out=None if out == "new" else into, algorithm=algorithm)
            right = wanted(comm.size, turn, shapes, np.float32)
            assert all(np.array_equal(*pair) for pair in zip(came, right, strict=True))
        return len(compiled_lists(comm))


def over_mpi() -> list[list[int]]:
    algorithms = ("auto", "two_shot", "ring")
    return [drawn_lists(), [single_copy_lists(algorithm) for algorithm in algorithms]]


@pytest.mark.few(1)
@pytest.mark.mpi
@pytest.mark.parametrize("ranks", [2, 4])
def test_lists_over_processes_are_single_copy_only_where_they_lie_end_to_end(mpi, ranks):
    for turns, compiled in mpi.run_ok("call", ranks, "tests.shm.test_lists:over_mpi"):
        assert len(turns) == 3
        assert max(turns) > 5
        assert compiled == [1, 1, 1]


@given(sizes=st.lists(st.integers(0, 50), max_size=40), most=st.integers(1, 100))
def test_a_list_is_cut_so_that_no_part_is_empty_or_too_large(sizes, most):
    parts = [sizes[begin:end] for begin, end in cache._cut(sizes, most)]
    assert [size for part in parts for size in part] == sizes
    assert len(parts) == 1 or all(map(sum, parts))
    assert all(sum(part) <= max(most, *part, 0) for part in parts)


def test_one_array_twice_in_a_list_is_read_before_it_is_written():
    def program(comm: rr.Communicator) -> None:
        for turn in range(4):
            x, y = np.full(50, turn + comm.rank), np.full(50, 7 * comm.rank)
            comm.all_reduce([x, y, x], out=[x, y, x])
            assert (x == 2 * turn + 1).all()
            assert (y == 7).all()

    rr.spawn(program, 2, config=replace(SHARED, slice_bytes=500), timeout_s=20)


def test_a_list_that_was_reduced_before_takes_no_python():
    def program(comm: rr.Communicator) -> list[str]:
        near, far = (laid(comm, "end to end", [(64,)] * 20, np.float32) for _ in range(2))
        made = general_calls(comm)
        for turn in range(5):
            for i, array in enumerate(near):
                array[...] = comm.rank + turn + i
            comm.all_reduce(near, out=far)
            for i, array in enumerate(far):
                assert (array == 1 + 2 * (turn + i)).all()
        return list(made)

    assert rr.spawn(program, 2, config=SHARED, timeout_s=120) == [["all_reduce"]] * 2


@pytest.mark.parametrize(
    ("lies", "count", "brought"), [("end to end", 64, 0), ("apart", 1024, 0), ("reversed", 60, 1)]
)
def test_only_short_arrays_that_lie_apart_are_brought_together(lies, count, brought):
    """There is no other memory that they could be copied to, but where others read them."""

    def program(comm: rr.Communicator) -> bool:
        near, far = (laid(comm, lies, [(count,)] * 20, np.float32) for _ in range(2))
        together = comm._engine.executables._shared_memory._gather_buffer
        for turn in range(3):
            together[...] = 111
            for i, array in enumerate(near):
                array[...] = comm.rank + turn + i
            for i, array in enumerate(comm.all_reduce(near, out=far)):
                assert (array == 1 + 2 * (turn + i)).all()
        return bool((together != 111).any())

    assert rr.spawn(program, 2, config=SHARED, timeout_s=120) == [bool(brought)] * 2


@given(
    sizes=st.lists(st.integers(0, 4), min_size=1, max_size=30),
    slots=st.permutations(range(60)),
    same=st.sets(st.integers(0, 29)),
    moved=st.none() | st.tuples(st.integers(0, 29), st.integers(0, 239)),
)
def test_arrays_that_overlap_are_found(sizes, slots, same, moved):
    """Slots of four words, so that nothing overlaps but what is moved."""
    begins = [(4 * slots[2 * i], 4 * slots[2 * i + (i not in same)]) for i in range(len(sizes))]
    if moved is not None and moved[0] < len(sizes):
        begins[moved[0]] = begins[moved[0]][0], moved[1]
    memory = np.zeros(250)
    placed = [*zip(begins, sizes, strict=True)]
    given, out = ([memory[pair[k] :][:n] for pair, n in placed] for k in (0, 1))
    table = ListTable([[array.shape for array in given]], memory.dtype, None)
    assert locate_all(table.state, PyList(id(given)).items, PyList(id(out)).items) >= 0
    words = Counter(
        place
        for (source, target), n in placed
        for begin in {source, target}
        for place in range(begin, begin + n)
    )
    assert mixes(table.state) == any(times > 1 for times in words.values())


@pytest.mark.parametrize("most", [2000, 1 << 20])
@pytest.mark.parametrize("further", [-1, 1, 3])
def test_results_may_go_to_where_the_next_arrays_lie(further, most):
    def program(comm: rr.Communicator) -> None:
        for turn in range(4):
            parts = laid(comm, "end to end", [(300,)] * 9, np.float32)
            x, out = parts[3:-3], parts[3 + further : 6 + further]
            for i, array in enumerate(x):
                array[...] = np.arange(300) + i + comm.rank * turn
            for i, array in enumerate(comm.all_reduce(x, out=out)):
                assert np.array_equal(array, 2 * (np.arange(300) + i) + turn)

    rr.spawn(program, 2, config=replace(SHARED, slice_bytes=most), timeout_s=20)


def test_what_was_looked_at_in_vain_is_looked_at_again():
    def program(comm: rr.Communicator) -> None:
        a, b, c, d = np.empty((4, 50))
        strided = np.empty((50, 2))[:, 0]
        for source, out in [((a, b), (c, d))] * 3 + [((a, strided), (b, d)), ((a, b), (b, d))]:
            for number, array in enumerate(source):
                array[...] = number + comm.rank
            comm.all_reduce(source, out=out)
            assert (out[0] == 1).all()
            assert (out[1] == 3).all()

    rr.spawn(program, 2, config=replace(SHARED, slice_bytes=500), timeout_s=20)


WRONG = {
    "a list that is too short": (lambda x: x[:-1], ValueError, "a list of 3"),
    "an array": (lambda x: x[0], ValueError, "a list of 3"),
    "what overlaps": (lambda x: [x[0], x[1], shifted(x[2])], ValueError, "overlaps"),
    "another dtype": (lambda x: [x[0], x[1], x[2].astype("i4")], TypeError, "int32"),
    "another shape": (lambda x: [x[0], x[1], x[2][:-1].copy()], ValueError, "shape"),
    "what is read-only": (lambda x: [x[0], x[1], locked(x[2])], ValueError, "read-only"),
    "no array": (lambda x: [x[0], x[1], 5], TypeError, "out is 5"),
}


def shifted(array: np.ndarray) -> np.ndarray:
    return array.base[1 : 1 + array.size]


def locked(array: np.ndarray) -> np.ndarray:
    other = array.copy()
    other.flags.writeable = False
    return other


@pytest.mark.parametrize("what", WRONG)
def test_results_that_cannot_go_there_are_refused_each_time(what):
    make, error, said = WRONG[what]

    def program(comm: rr.Communicator) -> None:
        x = [np.full(101, comm.rank + 1.0)[:100] for _ in range(3)]
        for _ in range(3):
            assert all((y == 3).all() for y in comm.all_reduce(x))
            with pytest.raises(error, match=said):
                comm.all_reduce(x, out=make(x))
            assert all((y == 3).all() for y in comm.all_reduce(tuple(x)))

    rr.spawn(program, 2, config=SHARED, timeout_s=120)


def test_members_that_are_no_arrays_of_the_list_are_refused_each_time():
    def program(comm: rr.Communicator) -> None:
        x = [np.full(5, comm.rank + 1.0) for _ in range(3)]
        for _ in range(3):
            assert all((y == 3).all() for y in comm.all_reduce(x))
            with pytest.raises(TypeError, match="masked"):
                comm.all_reduce([x[0], np.ma.masked_array(x[1], mask=[1, 0, 0, 0, 0]), x[2]])
            numbers = comm.all_reduce([x[0], 1.0 + comm.rank, x[2]])
            assert numbers[1] == 3

    rr.spawn(program, 2, config=SHARED, timeout_s=120)


def test_ranks_whose_lists_differ_are_told_so_and_go_on():
    def program(comm: rr.Communicator) -> None:
        x = [np.full(n, comm.rank + 1.0) for n in (5, 6, 7)]
        y = [np.full(n, comm.rank + 1.0) for n in (5, 9, 7)]
        for _ in range(3):
            assert all((each == 3).all() for each in comm.all_reduce(x))
            assert all((each == 3).all() for each in comm.all_reduce(y))
            with pytest.raises(rr.MismatchError, match="float64"):
                comm.all_reduce(x if comm.rank else y)

    rr.spawn(program, 2, config=SHARED, timeout_s=120)


def test_lists_that_differ_in_the_last_member_have_a_place_each():
    def program(comm: rr.Communicator) -> int:
        x = [np.ones(6), np.ones(2)]
        y = [np.ones(6), np.ones(3)]
        for lists in ([x], [y], [x, y] * 3):
            for _ in range(3):
                for each in lists:
                    assert all((total == 2).all() for total in comm.all_reduce(each))
        made = general_calls(comm)
        for each in (x, y, y, x, y, x):
            comm.all_reduce(each)
        assert made == []
        return len(compiled_lists(comm))

    assert rr.spawn(program, 2, config=SHARED, timeout_s=120) == [2, 2]


@pytest.mark.slow
def test_more_lists_than_there_is_room_for():
    def program(comm: rr.Communicator) -> int:
        for n in range(1, 540):
            for _ in range(2):
                x = [np.ones(n), np.ones(2)]
                assert all((y == 2).all() for y in comm.all_reduce(x))
        return len(compiled_lists(comm))

    for kept in rr.spawn(program, 2, config=SHARED, timeout_s=120):
        assert SLOTS * 3 // 4 < kept <= SLOTS


def test_a_list_that_differs_in_the_middle_takes_the_place_of_another():
    """Lists are told apart by their length and their ends; the rest is compared afterwards."""

    def program(comm: rr.Communicator) -> int:
        for turn in range(4):
            for n in (5, 9):
                x = [np.full(size, comm.rank + turn) for size in (3, n, 4)]
                assert all((y == 2 * turn + 1).all() for y in comm.all_reduce(x))
        return len(compiled_lists(comm))

    assert rr.spawn(program, 2, config=SHARED, timeout_s=120) == [1, 1]
