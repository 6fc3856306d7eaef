"""Inputs that show the order of every operation in their last bits, and all-reduces of them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

import ringreduce as rr
from ringreduce.algorithms import ALGORITHMS
from tests.support.cases import CONFIG, FLOATS, OPS

COUNT = 9_011
LAYOUTS = {"ring": (2, 2), "hierarchical": (2, 3)}
"""Algorithm -> the nodes that it runs on."""
HOSTS = ((2, 2), (3, 1, 2))
TRANSPORTS = ("auto", "mpi", "sockets")
"""Memory and messages of MPI, messages of MPI alone, and memory and messages of sockets."""
BETWEEN_HOSTS = (
    *ALGORITHMS["all_reduce"],
    *("star(2)", "hierarchical(two_shot, halving_doubling)"),
    *("hierarchical(leader, doubling)", "hierarchical(leader, ring)"),
)
"""The algorithms that run on `HOSTS`."""


def awkward(dtype: str, rank: int) -> np.ndarray:
    """Random floats with NaNs of both signs, infinities and zeros of both signs among them."""
    rng = np.random.default_rng([7, rank])
    x = rng.standard_normal(COUNT).astype(dtype)
    for value, places in ((np.nan, 500), (-np.nan, 500), (-0.0, 2000), (0.0, 2000), (np.inf, 100)):
        x[rng.integers(0, x.size, places)] = value
    return x


def digests(
    comm: rr.Communicator, algorithm: str, dtypes: Sequence[str] = FLOATS
) -> dict[str, list[str]]:
    """(op, dtype) -> a digest of the result of each of two equal calls."""
    return {
        f"{op} {dtype}": [_digest(comm, awkward(dtype, comm.rank), op, algorithm) for _ in range(2)]
        for dtype in dtypes
        if dtype != "longdouble"  # whose padding bytes mean nothing
        for op in OPS[dtype]
    }


def _digest(comm: rr.Communicator, x: np.ndarray, op: str, algorithm: str) -> str:
    with np.errstate(all="ignore"):
        return hashlib.sha256(comm.all_reduce(x, op, algorithm=algorithm).tobytes()).hexdigest()


def over_mpi() -> dict[str, Any]:
    """Return the digests of every algorithm on this rank of 5, for two dtypes."""
    from mpi4py import MPI

    world, found = MPI.COMM_WORLD, {}
    for algorithm, nodes in LAYOUTS.items():
        if world.rank < sum(nodes):
            group = world.Get_group().Incl(range(sum(nodes)))
            with rr.init(world.Create_group(group), nodes=nodes, config=CONFIG) as comm:
                found[algorithm] = digests(comm, algorithm, ["float32", "float64"])
    return found


def of_hosts(comm: rr.Communicator) -> dict[str, list[str]]:
    """Algorithm -> digests of equal calls; the later ones repeat what the first has planned."""
    x = awkward("float32", comm.rank)
    x[np.isnan(x)] = np.nan  # NumPy gives either of two NaNs, the last elements another one
    return {
        algorithm: [_digest(comm, x, op, algorithm) for op in ("sum", "mean", "sum")]
        for algorithm in BETWEEN_HOSTS
    }


def between_hosts() -> dict[str, dict[str, list[str]]]:
    """Return `of_hosts` on this rank of 6: by "nodes, transport", where it takes part."""
    from mpi4py import MPI

    world, found = MPI.COMM_WORLD, {}
    for nodes in HOSTS:
        if world.rank < sum(nodes):
            group = world.Create_group(world.Get_group().Incl(range(sum(nodes))))
            for transport in TRANSPORTS:
                with rr.init(group, nodes=nodes, transport=transport) as comm:
                    found[f"{nodes}, {transport}"] = of_hosts(comm)
    return found
