"""Schedules of users: proven, priced, drawn and run by their names."""

from __future__ import annotations

import numpy as np
import pytest

import ringreduce as rr
from ringreduce.algorithms import ALGORITHMS, build
from ringreduce.schedules.check import check
from ringreduce.schedules.collectives import ROOTED
from ringreduce.schedules.draw import draw
from ringreduce.schedules.schedule import Recv, Send, Step
from tests.support.strategies import block_layout


def chain(size, rank):
    """Sum along the ranks up to the last, and pass the result back the same way."""
    before, after = rank - 1, rank + 1
    if rank > 0:
        yield Step(recvs=(Recv(before, (0,), reduce=True),))
    if after < size:
        yield Step(sends=(Send(after, (0,)),))
        yield Step(recvs=(Recv(after, (0,)),))
    if rank > 0:
        yield Step(sends=(Send(before, (0,)),))


def deaf(size, rank):
    """Wrong: rank 1's contribution is never sent."""
    if rank == 0:
        yield Step(sends=tuple(Send(other, (0,)) for other in range(1, size)))
    else:
        yield Step(recvs=(Recv(0, (0,)),))


@pytest.fixture
def named():
    rr.register_algorithm("chain", chain, chunks=lambda size: 1)
    rr.register_algorithm("deaf", deaf, chunks=lambda size: 1)


@pytest.mark.usefixtures("named")
@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_it_is_proven_and_drawn(size):
    schedule = build("all_reduce", "chain", block_layout(size))
    assert check(schedule).messages == 2 * (size - 1)
    assert f"rank {size - 1}" in draw(schedule)


@pytest.mark.usefixtures("named")
@pytest.mark.parametrize("count", [1, 700, 60_000])
def test_it_runs_by_its_name(count):
    def program(comm):
        x = np.arange(count) * (comm.rank + 1.0)
        into_new = comm.all_reduce(x, algorithm="chain")
        planned = comm.plan("all_reduce", x, out=x, algorithm="chain")()
        assert np.array_equal(into_new, np.arange(count) * 10.0)
        assert np.array_equal(planned, into_new)

    rr.spawn(program, 4)


@pytest.mark.usefixtures("named")
def test_a_wrong_one_is_refused_before_anything_is_sent():
    def program(comm):
        with pytest.raises(rr.ScheduleError, match="lacks the contribution"):
            comm.all_reduce(np.ones(3), algorithm="deaf")
        return comm.all_reduce(1).item()

    assert rr.spawn(program, 3) == [3, 3, 3]


def test_ranks_that_mean_different_schedules_by_one_name_are_told_so():
    def reversed_chain(size, rank):
        for step in chain(size, size - 1 - rank):
            sends = tuple(Send(size - 1 - m.peer, m.chunks) for m in step.sends)
            recvs = tuple(Recv(size - 1 - m.peer, m.chunks, m.reduce) for m in step.recvs)
            yield Step(sends, recvs)

    def program(comm):
        for rank, steps in ((0, chain), (1, reversed_chain)):
            if comm.rank == rank:
                rr.register_algorithm("mine", steps, chunks=lambda size: 1)
                how = {"op": "sum", "algorithm": "mine", "wire": None}
                comm._runner.calls.get("all_reduce", np.ones(2), how)
            comm.barrier()
        with pytest.raises(rr.MismatchError, match=r"rank 0 passes schedule=.*rank 1 passes sch"):
            comm.all_reduce(np.ones(2), algorithm="mine")

    rr.spawn(program, 2)


@pytest.mark.parametrize("collective", [name for name in ALGORITHMS if name != "barrier"])
def test_any_collective_can_have_one(collective):
    """A schedule of the library is registered under another name, for ranks on one node."""
    first = next(iter(ALGORITHMS[collective]))

    def borrowed(size, rank, *root):
        return build(collective, first, block_layout(size), *root).steps(rank)

    def parts(size):
        return len(build(collective, first, block_layout(size)).weights)

    rr.register_algorithm("borrowed", borrowed, collective=collective, chunks=parts)
    root = 2 if collective in ROOTED else 0
    assert check(build(collective, "borrowed", block_layout(3), root))


def sum_passed_on_to_the_root(size, rank, root):
    """Sum on a rank that is not the root, and send the sum to the root."""
    adder = (root + 1) % size
    others = [other for other in range(size) if other != adder]
    if rank == adder:
        yield Step(recvs=tuple(Recv(other, (0,), reduce=True) for other in others))
        yield Step(sends=(Send(root, (0,)),))
    else:
        yield Step(sends=(Send(adder, (0,)),))
        if rank == root:
            yield Step(recvs=(Recv(adder, (0,)),))


def sum_that_comes_back(size, rank):
    """Sum on rank 0 and pass the sum round; the last rank sends it to rank 0 again."""
    before, after = (rank - 1) % size, (rank + 1) % size
    if rank == 0:
        yield Step(recvs=tuple(Recv(other, (0,), reduce=True) for other in range(1, size)))
        yield Step(sends=(Send(after, (0,)),))
        yield Step(recvs=(Recv(before, (0,)),))
    else:
        yield Step(sends=(Send(0, (0,)),))
        yield Step(recvs=(Recv(before, (0,)),))
        yield Step(sends=(Send(after, (0,)),))


@pytest.mark.parametrize("count", [3, 5000, 60_000])
def test_a_mean_is_divided_once_wherever_the_sum_is_complete(count):
    rr.register_algorithm("passed_on", sum_passed_on_to_the_root, collective="reduce", chunks=one)
    rr.register_algorithm("comes_back", sum_that_comes_back, chunks=one)

    def program(comm):
        x = np.arange(count, dtype=np.float64) * (comm.rank + 1)
        whole = comm.all_reduce(x, "mean", algorithm="comes_back")
        at_root = comm.reduce(x, 2, "mean", algorithm="passed_on")
        return whole, at_root

    results = rr.spawn(program, 3)
    assert all(np.array_equal(whole, np.arange(count) * 2.0) for whole, _ in results)
    assert np.array_equal(results[2][1], np.arange(count) * 2.0)


def one(size):
    return 1
