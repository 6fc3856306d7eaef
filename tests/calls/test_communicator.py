"""The facts that a communicator shows of itself."""

from __future__ import annotations

import contextlib
import os
import weakref
from dataclasses import replace
from itertools import chain

import numpy as np
import pytest

import ringreduce as rr
from ringreduce.calls.elsewhere import METHODS_ELSEWHERE
from tests.support.cases import CONFIG
from tests.support.dropped import facts
from tests.support.public import PRIVATE

SHARED = replace(CONFIG, shared_memory=True)


@pytest.mark.parametrize(
    ("ranks", "nodes", "shown"),
    [
        (1, None, "rank 0 of 1, node (0)"),
        (2, None, "rank 0 of 2, node (0, 1)"),
        (4, (2, 2), "rank 0 of 4, nodes (0, 1), (2, 3)"),
        (3, ((0, 2), (1,)), "rank 0 of 3, nodes (0, 2), (1)"),
        (
            16,
            (8, 8),
            "rank 0 of 16, nodes (0, 1, 2, 3, 4, 5, 6, 7), (8, 9, 10, 11, 12, 13, 14, 15)",
        ),
        (18, (6, 6, 6), "rank 0 of 18, 3 nodes"),
    ],
)
@pytest.mark.parametrize("config", [CONFIG, SHARED], ids=["messages", "shared memory"])
def test_a_communicator_shows_rank_size_nodes_and_transport(ranks, nodes, shown, config):
    texts = rr.spawn(repr, ranks, nodes=nodes, config=config)
    assert texts[0] == f"<ringreduce.Communicator: {shown}, among threads>"
    assert f": rank {ranks - 1} of {ranks}, " in texts[-1]


def test_its_public_methods_are_for_users_but_two_that_trainers_call():
    """Trainers use public names alone; other packages reach what is inside."""
    methods = {name: getattr(rr.Communicator, name) for name in dir(rr.Communicator)}
    hidden = {n for n, each in methods.items() if PRIVATE in (each.__doc__ or "")}
    assert hidden == {"lost_peers", "survive_losses"}


def test_neither_a_communicator_nor_its_methods_keep_it_alive():
    def program(comm):
        part = comm.split(0)
        reduce, send, left = part.all_reduce, part.send, weakref.ref(part)
        part = None
        return left() is None and reduce(comm.rank).item() == 1 and send is not None

    assert rr.spawn(program, 2, config=SHARED, timeout_s=120) == [True, True]


def over_mpi():
    with rr.init(transport="shm") as by_memory, rr.init(transport="mpi") as by_messages:
        return [repr(by_memory), repr(by_messages)]


@pytest.mark.mpi
def test_a_communicator_shows_how_data_travel_over_mpi(mpi):
    texts = mpi.run_ok("call", 2, "tests.calls.test_communicator:over_mpi")
    shown = "<ringreduce.Communicator: rank {} of 2, node (0, 1), over {}>"
    ways = ("shared memory", "MPI messages")
    assert texts == [[shown.format(rank, way) for way in ways] for rank in (0, 1)]


def test_a_communicator_shows_that_it_is_closed():
    def program(comm):
        comm.close()
        return repr(comm)

    shown = "<ringreduce.Communicator: rank 0 of 2, node (0, 1), among threads, closed>"
    assert rr.spawn(program, 2)[0] == shown


def test_a_communicator_shows_that_it_is_broken():
    def program(comm):
        comm.barrier()
        if comm.rank == 1:
            comm.leave("no more")
        with contextlib.suppress(rr.PeerLostError):
            comm.barrier()
        return repr(comm)

    for rank, text in enumerate(rr.spawn(program, 2)):
        shown = f"<ringreduce.Communicator: rank {rank} of 2, node (0, 1), among threads, broken>"
        assert text == shown


def test_a_communicator_shows_in_a_child_process_that_it_is_the_parents():
    def program(comm):
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(writing, repr(comm).encode())
            os._exit(0)
        os.waitpid(child, 0)
        return os.read(reading, 1000).decode()

    said = "this process was forked from the one that made the communicator"
    assert rr.spawn(program, 1)[0].endswith(f"among threads, {said}>")


# --- errors that name ranks -----------------------------------------------------------------------


def test_errors_of_a_part_name_its_ranks_and_those_of_the_job():
    def program(comm):
        part = comm.split(comm.rank // 2)
        if comm.rank == 3:
            part.leave("no more")
            return None
        try:
            part.barrier()
            return "nothing was raised"
        except rr.PeerLostError as error:
            return error.ranks, error.job_ranks

    found = rr.spawn(program, 4)
    assert found[2] == ((1,), (3,))


def test_a_rank_that_loses_another_tells_which_one():
    def program(comm):
        if comm.rank == 2:
            comm.leave("no more")
            return None
        try:
            comm.barrier()
            comm.barrier()
        except rr.PeerLostError as error:
            return error.ranks

    assert set(rr.spawn(program, 3)[:2]) == {(2,)}


# --- names of other libraries ---------------------------------------------------------------------


def test_a_name_of_another_library_leads_to_a_name_here():
    def program(comm):
        methods = {meant.partition("(")[0] for meant in METHODS_ELSEWHERE.values()}
        assert [name for name in methods if not hasattr(comm, name)] == []

    rr.spawn(program, 1)


# --- bytes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("collective", "arguments"),
    [
        ("all_reduce", {"algorithm": "ring"}),
        ("all_reduce", {"algorithm": "two_shot", "wire": "float16"}),
        ("all_reduce", {"algorithm": "star"}),
        ("reduce_scatter", {"algorithm": "ring"}),
        ("broadcast", {"algorithm": "tree", "root": 1}),
    ],
)
@pytest.mark.parametrize("slice_bytes", [None, 400])
def test_sent_bytes_are_those_of_the_messages(collective, arguments, slice_bytes):
    def program(comm):
        x = np.ones(301, np.float32)
        getattr(comm, collective)(x, **arguments)
        sent = sum(m.nbytes for m in comm.message_log if m.direction == "send")
        return comm.sent_bytes(collective, x, **arguments), sent

    config = rr.Config(slice_bytes=slice_bytes, log_messages=True)
    for predicted, sent in rr.spawn(program, 3, config=config):
        assert predicted == sent


# --- shards ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 4, 5, 97])
@pytest.mark.parametrize("nodes", [(5,), ((0, 3), (1, 2, 4))])
@pytest.mark.parametrize("slice_bytes", [None, 48])
def test_shards_have_each_element_once(count, nodes, slice_bytes):
    shards = rr.spawn(
        lambda comm: comm.shards(np.zeros(count)),
        5,
        nodes=nodes,
        config=rr.Config(slice_bytes=slice_bytes),
    )
    assert all(each == shards[0] for each in shards)
    places = [range(count)[part] for parts in shards[0] for part in parts]
    assert sorted(chain.from_iterable(places)) == list(range(count))


def reduced_in_two_halves(comm, count, dtype, algorithm, half):
    """Reduce random numbers as an all-reduce, and shard by shard; return both."""
    x = np.random.default_rng(comm.rank).normal(size=count).astype(dtype)
    shards = comm.shards(x)
    longest = max(sum(p.stop - p.start for p in parts) for parts in shards)
    packed = np.zeros((comm.size, longest), dtype)
    for row, parts in zip(packed, shards, strict=True):
        values = np.concatenate([x[part] for part in parts])
        row[: len(values)] = values
    mine = comm.reduce_scatter(packed, "mean", algorithm=half)
    rows = comm.all_gather(mine.reshape(1, -1), algorithm=half)
    whole = np.empty_like(x)
    for row, parts in zip(rows, shards, strict=True):
        start = 0
        for part in parts:
            stop = start + part.stop - part.start
            whole[part], start = row[start:stop], stop
    return comm.all_reduce(x, "mean", algorithm=algorithm), whole


@pytest.mark.few(12)
@pytest.mark.parametrize(
    ("algorithm", "half", "dtype"),
    [("ring", "ring", "float32"), ("two_shot", "direct", "float64")],
)
@pytest.mark.parametrize("slice_bytes", [None, 100])
@pytest.mark.parametrize(
    ("ranks", "nodes"), [(1, None), (3, None), (4, (1, 3)), (5, ((0, 3), (1, 2, 4))), (8, None)]
)
@pytest.mark.parametrize("config", [CONFIG, SHARED], ids=["messages", "shared memory"])
def test_two_halves_on_shards_are_bitwise_the_all_reduce(
    config, ranks, nodes, slice_bytes, dtype, algorithm, half
):
    how = {"nodes": nodes, "config": replace(config, slice_bytes=slice_bytes)}
    arguments = 101, dtype, algorithm, half
    for whole, halves in rr.spawn(reduced_in_two_halves, ranks, *arguments, **how):
        assert np.array_equal(whole, halves)


@pytest.mark.parametrize("config", [CONFIG, SHARED], ids=["messages", "memory"])
def test_parts_that_all_ranks_have_dropped_are_closed_and_no_others(config):
    rr.spawn(facts, 3, config=config)
