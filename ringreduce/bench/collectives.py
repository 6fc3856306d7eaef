"""The collectives that can be measured: their buffers, who carries them out, what must come out.

For each there are contenders, ours and the peers', in place or not; each has buffers of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from mpi4py import MPI

from ringreduce import Communicator
from ringreduce.bench.inputs import Inputs

OUT_OF_PLACE, IN_PLACE = "out of place", "in place"

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
    """One way to carry the collective out."""

    name: str
    place: str
    call: Callable[[], Any]
    source: np.ndarray
    """Rewritten before every call."""
    result: np.ndarray | None
    """Where the result is after it; None on a rank that gets none."""
    wanted: Callable[[np.ndarray], np.ndarray] = field(default=lambda whole: whole)
    """What of the whole array's result must be there."""


@dataclass(frozen=True)
class Setting:
    """What all contenders of one size have in common."""

    comm: Communicator
    world: MPI.Intracomm
    count: int
    op: str
    dtype: Any
    algorithm: str

    @property
    def how(self) -> dict[str, Any]:
        """What our calls are told besides arrays: no more than one would tell them."""
        return {} if self.algorithm == "auto" else {"algorithm": self.algorithm}

    @property
    def part(self) -> int:
        """A rank's share of the elements, where they are divided."""
        return self.count // self.comm.size

    @property
    def mine(self) -> slice:
        """Which share is this rank's."""
        return slice(self.comm.rank * self.part, (self.comm.rank + 1) * self.part)

    def buffer(self, divided: bool = False) -> np.ndarray:
        """Memory that has been touched."""
        return np.zeros(self.part if divided else self.count, self.dtype)

    @property
    def mpi_op(self) -> MPI.Op | None:
        """What MPI calls the op; None where it has no such, or not for the dtype.

        That is asked with one element and one rank.
        """
        names = _MPI_LOGICAL if np.dtype(self.dtype).kind == "b" else _MPI_OPS
        op, one = names.get(self.op), np.zeros(1, self.dtype)
        if op is None:
            return None
        try:
            MPI.COMM_SELF.Allreduce(one, one.copy(), op)
        except (BufferError, KeyError, TypeError, ValueError, MPI.Exception):
            return None
        return op


@dataclass(frozen=True)
class Collective:
    """One that can be measured."""

    make: Callable[[Setting], Sequence[Contender]]
    busbw: Callable[[int], float]
    """ranks -> bus bandwidth as a multiple of size / time."""
    divided: bool = False
    """Whether every rank has a share: the length is a multiple of the ranks."""
    reduces: bool = True
    moves: bool = True
    """Whether there are data, so that sizes make a difference."""


def _all_reduce(at: Setting) -> list[Contender]:
    x, y, out = at.buffer(), at.buffer(), at.buffer()
    how: dict[str, Any] = {"op": at.op, **at.how}
    contenders = [
        Contender(
            "ringreduce", OUT_OF_PLACE, lambda: at.comm.all_reduce(x, out=out, **how), x, out
        ),
        Contender("ringreduce", IN_PLACE, lambda: at.comm.all_reduce(y, out=y, **how), y, y),
    ]
    if (op := at.mpi_op) is not None:
        a, b, into = at.buffer(), at.buffer(), at.buffer()
        contenders += [
            Contender("MPI", OUT_OF_PLACE, lambda: at.world.Allreduce(a, into, op), a, into),
            Contender("MPI", IN_PLACE, lambda: at.world.Allreduce(MPI.IN_PLACE, b, op), b, b),
        ]
    return contenders


def _reduce(at: Setting) -> list[Contender]:
    root = at.comm.rank == 0
    x, y, out = at.buffer(), at.buffer(), at.buffer()
    how: dict[str, Any] = {"op": at.op, **at.how}
    target, own = (out, y) if root else (None, None)
    contenders = [
        Contender(
            "ringreduce", OUT_OF_PLACE, lambda: at.comm.reduce(x, out=target, **how), x, target
        ),
        Contender("ringreduce", IN_PLACE, lambda: at.comm.reduce(y, out=own, **how), y, own),
    ]
    if (op := at.mpi_op) is not None:
        a, b, into = at.buffer(), at.buffer(), at.buffer()

        def in_place() -> None:
            if root:
                at.world.Reduce(MPI.IN_PLACE, b, op)
            else:
                at.world.Reduce(b, None, op)

        contenders += [
            Contender(
                "MPI",
                OUT_OF_PLACE,
                lambda: at.world.Reduce(a, into if root else None, op),
                a,
                into if root else None,
            ),
            Contender("MPI", IN_PLACE, in_place, b, b if root else None),
        ]
    return contenders


def _reduce_scatter(at: Setting) -> list[Contender]:
    x, out = at.buffer(), at.buffer(divided=True)
    how: dict[str, Any] = {"op": at.op, **at.how}

    def mine(whole: np.ndarray) -> np.ndarray:
        return whole[at.mine]

    contenders = [
        Contender(
            "ringreduce",
            OUT_OF_PLACE,
            lambda: at.comm.reduce_scatter(x, out=out, **how),
            x,
            out,
            mine,
        )
    ]
    if (op := at.mpi_op) is not None:
        a, into = at.buffer(), at.buffer(divided=True)
        contenders.append(
            Contender(
                "MPI",
                OUT_OF_PLACE,
                lambda: at.world.Reduce_scatter_block(a, into, op),
                a,
                into,
                mine,
            )
        )
    return contenders


def _all_gather(at: Setting) -> list[Contender]:
    x, a = at.buffer(divided=True), at.buffer(divided=True)
    out, into = at.buffer(), at.buffer()
    counts = [at.part] * at.comm.size
    sent, came = [a.view(np.uint8), MPI.BYTE], [into.view(np.uint8), MPI.BYTE]
    return [
        Contender(
            "ringreduce",
            OUT_OF_PLACE,
            lambda: at.comm.all_gather(x, out=out, counts=counts, **at.how),
            x,
            out,
        ),
        Contender("MPI", OUT_OF_PLACE, lambda: at.world.Allgather(sent, came), a, into),
    ]


def _broadcast(at: Setting) -> list[Contender]:
    x, a = at.buffer(), at.buffer()
    both = [a.view(np.uint8), MPI.BYTE]
    return [
        Contender(
            "ringreduce",
            IN_PLACE,
            lambda: at.comm.broadcast(x, out=x, **at.how),
            x,
            x,
        ),
        Contender("MPI", IN_PLACE, lambda: at.world.Bcast(both), a, a),
    ]


def _all_to_all(at: Setting) -> list[Contender]:
    x, a, out, into = (at.buffer() for _ in range(4))
    sent, came = [a.view(np.uint8), MPI.BYTE], [into.view(np.uint8), MPI.BYTE]
    return [
        Contender(
            "ringreduce",
            OUT_OF_PLACE,
            lambda: at.comm.all_to_all(x, out=out, **at.how),
            x,
            out,
        ),
        Contender("MPI", OUT_OF_PLACE, lambda: at.world.Alltoall(sent, came), a, into),
    ]


def _barrier(at: Setting) -> list[Contender]:
    x, a = at.buffer(), at.buffer()
    return [
        Contender("ringreduce", OUT_OF_PLACE, at.comm.barrier, x, None),
        Contender("MPI", OUT_OF_PLACE, at.world.Barrier, a, None),
    ]


COLLECTIVES = {
    "all_reduce": Collective(_all_reduce, lambda n: 2 * (n - 1) / n),
    "reduce_scatter": Collective(_reduce_scatter, lambda n: (n - 1) / n, divided=True),
    "all_gather": Collective(_all_gather, lambda n: (n - 1) / n, divided=True, reduces=False),
    "broadcast": Collective(_broadcast, lambda n: 1.0, reduces=False),
    "reduce": Collective(_reduce, lambda n: 1.0),
    "all_to_all": Collective(_all_to_all, lambda n: (n - 1) / n, divided=True, reduces=False),
    "barrier": Collective(_barrier, lambda n: 0.0, reduces=False, moves=False),
}
"""The factors of busbw are those of nccl-tests' PERFORMANCE.md."""


def wanted(collective: str, inputs: Inputs, at: Setting, iteration: int) -> np.ndarray:
    """The whole array's result, of which each rank gets its part."""
    if COLLECTIVES[collective].reduces:
        return inputs.result(iteration)
    if collective == "broadcast":
        whole = at.buffer()
        inputs.fill(whole, 0, iteration)
        return whole
    parts = []
    for source in range(at.comm.size):
        given = np.empty(at.part if collective == "all_gather" else at.count, at.dtype)
        inputs.fill(given, source, iteration)
        parts.append(given if collective == "all_gather" else given[at.mine])
    return np.concatenate(parts)
