"""The contenders of a collective, ours and MPI's, with their buffers and the results to verify.

A collective has contenders in place, out of place, or both.  Each contender has buffers of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from ringreduce import Communicator
from ringreduce.bench.collectives import COLLECTIVES, IN_PLACE, OURS, OUT_OF_PLACE
from ringreduce.bench.inputs import Inputs
from ringreduce.bench.world import HAS_MPI, MPI

_MPI_OPS = {
    "sum": MPI.SUM,
    "prod": MPI.PROD,
    "min": MPI.MIN,
    "max": MPI.MAX,
    "and": MPI.BAND,
    "or": MPI.BOR,
    "xor": MPI.BXOR,
}
_MPI_LOGICAL = {"and": MPI.LAND, "or": MPI.LOR, "xor": MPI.LXOR, "max": MPI.LOR, "min": MPI.LAND}


@dataclass
class Contender:
    name: str
    place: str
    call: Callable[[], Any]
    source: np.ndarray
    """The input, rewritten before every call."""
    result: np.ndarray | None
    """The array with the result after a call; None on a rank that gets no result."""
    wanted: Callable[[np.ndarray], np.ndarray] = field(default=lambda whole: whole)
    """The part of the whole array's result that must be in `result`."""


@dataclass(frozen=True)
class BenchArguments:
    """The arguments that all contenders of one size share."""

    comm: Communicator
    world: MPI.Intracomm
    count: int
    op: str
    dtype: Any
    algorithm: str

    def ours(self, collective: str, **arguments: Any) -> Callable[..., Any]:
        """Our call, as a user would write it: without keywords that have their default."""
        if self.algorithm != "auto":
            arguments["algorithm"] = self.algorithm
        if arguments.get("op") == "sum":
            del arguments["op"]
        call: Callable[..., Any] = getattr(self.comm, collective)
        return partial(call, **arguments) if arguments else call

    @property
    def part(self) -> int:
        return self.count // self.comm.size

    @property
    def counts(self) -> tuple[int, ...]:
        return (self.part,) * self.comm.size

    @property
    def mine(self) -> slice:
        return slice(self.comm.rank * self.part, (self.comm.rank + 1) * self.part)

    def mine_of(self, whole: np.ndarray) -> np.ndarray:
        return whole[self.mine]

    def buffer(self, divided: bool = False) -> np.ndarray:
        return np.zeros(self.part if divided else self.count, self.dtype)

    @property
    def mpi_op(self) -> MPI.Op | None:
        """MPI's name of the op; None if an all-reduce of one element shows that MPI has none."""
        names = _MPI_LOGICAL if np.dtype(self.dtype).kind == "b" else _MPI_OPS
        op, one = names.get(self.op), np.zeros(1, self.dtype)
        if op is None or not HAS_MPI:
            return None
        try:
            MPI.COMM_SELF.Allreduce(one, one.copy(), op)
        except (BufferError, KeyError, TypeError, ValueError, MPI.Exception):
            return None
        return op


def _all_reduce(at: BenchArguments) -> list[Contender]:
    x, y, out = at.buffer(), at.buffer(), at.buffer()
    all_reduce = at.ours("all_reduce", op=at.op)
    contenders = [
        Contender(OURS, OUT_OF_PLACE, lambda: all_reduce(x, out=out), x, out),
        Contender(OURS, IN_PLACE, lambda: all_reduce(y, out=y), y, y),
    ]
    if (op := at.mpi_op) is not None:
        a, b, into, of_mpi = at.buffer(), at.buffer(), at.buffer(), at.world.Allreduce
        contenders += [
            Contender("MPI", OUT_OF_PLACE, lambda: of_mpi(a, into, op), a, into),
            Contender("MPI", IN_PLACE, lambda: of_mpi(MPI.IN_PLACE, b, op), b, b),
        ]
    return contenders


def _reduce(at: BenchArguments) -> list[Contender]:
    root = at.comm.rank == 0
    x, y, out = at.buffer(), at.buffer(), at.buffer()
    target, own = (out, y) if root else (None, None)
    reduce = at.ours("reduce", op=at.op)
    contenders = [
        Contender(OURS, OUT_OF_PLACE, lambda: reduce(x, out=target), x, target),
        Contender(OURS, IN_PLACE, lambda: reduce(y, out=own), y, own),
    ]
    if (op := at.mpi_op) is not None:
        a, b, of_mpi = at.buffer(), at.buffer(), at.world.Reduce
        into = at.buffer() if root else None
        sent, came = (MPI.IN_PLACE, b) if root else (b, None)
        contenders += [
            Contender("MPI", OUT_OF_PLACE, lambda: of_mpi(a, into, op), a, into),
            Contender("MPI", IN_PLACE, lambda: of_mpi(sent, came, op), b, came),
        ]
    return contenders


def _reduce_scatter(at: BenchArguments) -> list[Contender]:
    x, out = at.buffer(), at.buffer(divided=True)
    reduce_scatter = at.ours("reduce_scatter", op=at.op)
    contenders = [
        Contender(OURS, OUT_OF_PLACE, lambda: reduce_scatter(x, out=out), x, out, at.mine_of)
    ]
    if (op := at.mpi_op) is not None:
        a, into, of_mpi = at.buffer(), at.buffer(divided=True), at.world.Reduce_scatter_block
        contenders.append(
            Contender("MPI", OUT_OF_PLACE, lambda: of_mpi(a, into, op), a, into, at.mine_of)
        )
    return contenders


def _all_gather(at: BenchArguments) -> list[Contender]:
    x, a = at.buffer(divided=True), at.buffer(divided=True)
    out, into = at.buffer(), at.buffer()
    all_gather, of_mpi = at.ours("all_gather"), at.world.Allgather
    counts, sent, came = at.counts, _as_bytes(a), _as_bytes(into)
    return [
        Contender(OURS, OUT_OF_PLACE, lambda: all_gather(x, out=out, counts=counts), x, out),
        Contender("MPI", OUT_OF_PLACE, lambda: of_mpi(sent, came), a, into),
    ]


def _gather(at: BenchArguments) -> list[Contender]:
    root = at.comm.rank == 0
    x, a = at.buffer(divided=True), at.buffer(divided=True)
    out, into = (at.buffer(), at.buffer()) if root else (None, None)
    gather, of_mpi = at.ours("gather"), at.world.Gather
    counts, sent, came = at.counts, _as_bytes(a), None if into is None else _as_bytes(into)
    return [
        Contender(OURS, OUT_OF_PLACE, lambda: gather(x, out=out, counts=counts), x, out),
        Contender("MPI", OUT_OF_PLACE, lambda: of_mpi(sent, came), a, into),
    ]


def _scatter(at: BenchArguments) -> list[Contender]:
    root = at.comm.rank == 0
    x, a = at.buffer(), at.buffer()
    out, into = at.buffer(divided=True), at.buffer(divided=True)
    scatter, of_mpi, given = at.ours("scatter"), at.world.Scatter, x if root else None
    counts, sent, came = at.counts, _as_bytes(a) if root else None, _as_bytes(into)

    def call() -> Any:
        return scatter(given, out=out, counts=counts)

    return [
        Contender(OURS, OUT_OF_PLACE, call, x, out, at.mine_of),
        Contender("MPI", OUT_OF_PLACE, lambda: of_mpi(sent, came), a, into, at.mine_of),
    ]


def _broadcast(at: BenchArguments) -> list[Contender]:
    x, a = at.buffer(), at.buffer()
    broadcast, of_mpi, both = at.ours("broadcast"), at.world.Bcast, _as_bytes(a)
    return [
        Contender(OURS, IN_PLACE, lambda: broadcast(x, out=x), x, x),
        Contender("MPI", IN_PLACE, lambda: of_mpi(both), a, a),
    ]


def _all_to_all(at: BenchArguments) -> list[Contender]:
    x, a, out, into = (at.buffer() for _ in range(4))
    all_to_all, of_mpi = at.ours("all_to_all"), at.world.Alltoall
    sent, came = _as_bytes(a), _as_bytes(into)
    return [
        Contender(OURS, OUT_OF_PLACE, lambda: all_to_all(x, out=out), x, out),
        Contender("MPI", OUT_OF_PLACE, lambda: of_mpi(sent, came), a, into),
    ]


def _as_bytes(array: np.ndarray) -> list[Any]:
    """The array as bytes: MPI takes any dtype so, and mpi4py reads this form fastest."""
    return [array.view(np.uint8), MPI.BYTE]


def _barrier(at: BenchArguments) -> list[Contender]:
    x, a = at.buffer(), at.buffer()
    return [
        Contender(OURS, OUT_OF_PLACE, at.comm.barrier, x, None),
        Contender("MPI", OUT_OF_PLACE, at.world.Barrier, a, None),
    ]


_MAKERS: dict[str, Callable[[BenchArguments], list[Contender]]] = {
    "all_reduce": _all_reduce,
    "reduce_scatter": _reduce_scatter,
    "all_gather": _all_gather,
    "gather": _gather,
    "scatter": _scatter,
    "broadcast": _broadcast,
    "reduce": _reduce,
    "all_to_all": _all_to_all,
    "barrier": _barrier,
}


def contenders_of(collective: str, at: BenchArguments) -> list[Contender]:
    """Return our contenders and MPI's for `collective`; ours alone if MPI lacks the op."""
    return [each for each in _MAKERS[collective](at) if HAS_MPI or each.name != "MPI"]


def wanted(collective: str, inputs: Inputs, at: BenchArguments, iteration: int) -> np.ndarray:
    if COLLECTIVES[collective].reduces:
        return inputs.result(iteration)
    if collective in ("broadcast", "scatter"):
        whole = at.buffer()
        inputs.fill(whole, 0, iteration)
        return whole
    parts = []
    for source in range(at.comm.size):
        gathers = collective in ("all_gather", "gather")
        given = np.empty(at.part if gathers else at.count, at.dtype)
        inputs.fill(given, source, iteration)
        parts.append(given if gathers else given[at.mine])
    return np.concatenate(parts)
