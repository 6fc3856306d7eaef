"""What type checkers find: mypy reads this file, nothing runs it."""

from typing import Any, assert_type

import numpy as np
from numpy.typing import NDArray

import ringreduce as rr
from ringreduce.planning.select import Choice

Grid = np.ndarray[tuple[int, int], np.dtype[np.float32]]
Flat = np.ndarray[tuple[int], np.dtype[np.float32]]


def collectives(comm: rr.Communicator, x: NDArray[np.float32], grid: Grid, unknown: Any) -> None:
    assert_type(comm.all_reduce(x), NDArray[np.float32])
    assert_type(comm.all_reduce(grid, "mean"), Grid)
    assert_type(comm.all_reduce(x, op="max", wire="bfloat16", timeout_s=3.0), NDArray[np.float32])
    assert_type(comm.all_reduce(unknown, out=x), NDArray[np.float32])
    assert_type(comm.all_reduce(1).dtype, np.dtype[Any])
    assert_type(comm.all_reduce(unknown), Any)
    assert_type(comm.reduce_scatter(grid), Flat)
    assert_type(comm.reduce(grid, root=1), Grid | None)
    assert_type(comm.broadcast(grid), Grid)
    assert_type(comm.all_gather(x, counts=[1, 2]), NDArray[np.float32])
    assert_type(comm.gather(x), NDArray[np.float32] | None)
    assert_type(comm.scatter(x if comm.rank == 0 else None), NDArray[np.float32])
    assert_type(comm.all_to_all(grid), Grid)
    assert_type(comm.barrier(), None)
    assert_type(comm.barrier(async_op=True), rr.Work[None])


def lists(comm: rr.Communicator, x: NDArray[np.float32], y: NDArray[np.int64]) -> None:
    assert_type(comm.all_reduce([x, x]), list[NDArray[np.float32]])
    assert_type(comm.all_reduce((x, x), "mean"), list[NDArray[np.float32]])
    assert_type(comm.all_reduce([x, x], async_op=True), rr.Work[list[NDArray[np.float32]]])
    into = [x, x]
    assert_type(comm.all_reduce([x, x], out=into), list[NDArray[np.float32]])


def asynchronous(comm: rr.Communicator, x: NDArray[np.float32], grid: Grid) -> None:
    work = comm.all_reduce(grid, async_op=True)
    assert_type(work, rr.Work[Grid])
    assert_type(work.wait(), Grid)
    assert_type(work.done(), bool)
    assert_type(work.seconds, float | None)
    assert_type(comm.all_reduce(x, out=x, async_op=True), rr.Work[Any])
    assert_type(comm.reduce_scatter(x, async_op=True), rr.Work[Flat])
    assert_type(comm.reduce(grid, async_op=True), rr.Work[Grid | None])
    assert_type(comm.broadcast(grid, async_op=True), rr.Work[Grid])
    assert_type(comm.all_gather(x, async_op=True), rr.Work[NDArray[np.float32]])
    assert_type(comm.gather(x, async_op=True), rr.Work[NDArray[np.float32] | None])
    assert_type(comm.scatter(None, out=x, counts=[1, 2]), NDArray[np.float32])
    assert_type(comm.scatter(x, async_op=True), rr.Work[NDArray[np.float32]])
    assert_type(comm.all_to_all(grid, async_op=True), rr.Work[Grid])


def others(comm: rr.Communicator) -> None:
    assert_type(comm.empty((2, 3), np.float32), NDArray[np.float32])
    assert_type(comm.empty(3, np.dtype(np.int64)), NDArray[np.int64])
    assert_type(comm.empty(3, "float32"), Any)
    assert_type(comm.empty(3), NDArray[np.float64])
    assert_type(comm.shared((2, 3), np.float32), rr.SharedArray[np.float32])
    assert_type(comm.shared(3, np.float32).array, NDArray[np.float32])
    assert_type(comm.shared(3, np.float32).read(), NDArray[np.float32])
    assert_type(comm.shared(3, "float32"), rr.SharedArray[Any])
    assert_type(comm.split(0), rr.Communicator | None)
    assert_type(comm.explain(1 << 20), Choice)
    assert_type(comm.explain(1 << 20, measured=True), Choice)
    assert_type(rr.init(), rr.Communicator)
    with rr.init(nodes=(2, 2), config=rr.Config(kept_plans=8)) as same:
        assert_type(same, rr.Communicator)


def program(comm: rr.Communicator, factor: int, name: str) -> tuple[str, float]:
    return name, float(comm.all_reduce(np.float64(factor)))


def threads() -> None:
    assert_type(rr.spawn(program, 2, 3, "x"), list[tuple[str, float]])
    assert_type(rr.spawn(lambda comm: comm.rank, 3), list[int])


def training(comm: rr.Communicator) -> None:
    assert_type(rr.train.shard(10, comm, epoch=0), NDArray[np.intp])
    assert_type(rr.train.train(comm, rr.train.load_split(), rr.train.Settings()).accuracy, float)
