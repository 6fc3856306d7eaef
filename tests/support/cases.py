"""One call of one collective as plain data, and what must come of it: the same for every transport.

Ranks never draw: whoever runs the test draws a Case, and each rank makes its own part of the input
from the case's seed, so each can also compute what all ranks together must get.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, reduce
from typing import Any

import ml_dtypes
import numpy as np

import ringreduce as rr
from ringreduce.algorithms import ALGORITHMS as TABLE

INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
SHORT = ("float16", "bfloat16")
FLOATS = ("float32", "float64", "longdouble", *SHORT)
COMPLEX = ("complex64", "complex128")
DTYPES = (*INTEGERS, *FLOATS, *COMPLEX, "bool")
BITWISE = ("and", "or", "xor")
OPS = {
    **dict.fromkeys(INTEGERS, ("sum", "min", "max", "prod", *BITWISE)),
    **dict.fromkeys(FLOATS, ("sum", "mean", "min", "max", "prod")),
    **dict.fromkeys(COMPLEX, ("sum", "mean", "prod")),
    "bool": ("min", "max", *BITWISE),
}
"""dtype -> what it can be reduced by."""
VIEWS = ("plain", "strided", "negative", "fortran")
OUTS = ("new", "given", "in_place")
LAYOUTS = ("one", "two", "uneven", "dealt")
SIZES = ("empty", "few", "inside", "staged", "beside", "sliced")
ALGORITHMS = {
    **{name: tuple(known) for name, known in TABLE.items() if name != "barrier"},
    "all_reduce": (
        *TABLE["all_reduce"],
        *("star(2)", "hierarchical(two_shot, halving_doubling)", "hierarchical(ring, one_shot)"),
        *("hierarchical(leader, doubling)", "hierarchical(leader, ring)"),
    ),
}
CONFIG = rr.Config(slice_bytes=1 << 15, segment_bytes=6000, staged_bytes=1 << 14, in_flight=3)
"""Slices and staging small enough that every way through the executor is short."""

assert np.dtype("bfloat16") == ml_dtypes.bfloat16, "ml_dtypes has not named its dtypes"

SYNCHRONOUS_CONFIG = replace(CONFIG, synchronous_sends=True)

_FOLDS = {
    "sum": np.add,
    "mean": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "prod": np.multiply,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}
REDUCTIONS = ("all_reduce", "reduce_scatter", "reduce")
GATHERS = ("all_gather", "gather")


@dataclass(frozen=True)
class Case:
    """One call.  `shape` is that of rank 0; a gather's ranks have `rank` more rows each.

    In an all-to-all or a scatter of counts some ranks have no rows at all.
    """

    collective: str
    algorithm: str
    op: str
    dtype: str
    ranks: int
    layout: str
    shape: tuple[int, ...]
    view: str
    out: str
    root: int
    synchronous: bool
    """Whether every send over MPI waits for its receive, as every send of a thread does."""
    seed: int

    def to_json(self) -> dict[str, Any]:
        return dict(vars(self))

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Case:
        return cls(**{**values, "shape": tuple(values["shape"])})


def nodes_of(layout: str, ranks: int) -> tuple[tuple[int, ...], ...]:
    """The ranks of each node under a named layout."""
    every = tuple(range(ranks))
    if ranks == 1 or layout == "one":
        return (every,)
    if layout == "two":
        return every[: ranks // 2], every[ranks // 2 :]
    if layout == "uneven":
        return every[:1], every[1:]
    return every[::2], every[1::2]


def size_range(size: str, ranks: int, itemsize: int) -> tuple[int, int]:
    """The least and the largest number of elements of a size class."""
    inside, staged, sliced = 4096 // itemsize, CONFIG.staged_bytes, CONFIG.slice_bytes
    return {
        "empty": (0, 0),
        "few": (1, max(1, ranks - 1)),
        "inside": (ranks, inside),
        "staged": (inside + 1, staged // itemsize),
        "beside": (staged // itemsize + 1, sliced // itemsize),
        "sliced": (sliced // itemsize + 1, 6 * sliced // itemsize),
    }[size]


def values_of(case: Case, rank: int) -> np.ndarray:
    """The input of `rank`, C-ordered: integers small enough that float sums are exact."""
    shape = case.shape
    if case.collective in GATHERS and shape:
        shape = (shape[0] + rank, *shape[1:])
    if (matrix := counts_of(case)) is not None:
        shape = (int(matrix[rank].sum()), *shape[1:])
    pool, count = _pool(case.dtype, case.op), int(np.prod(shape))
    start = (case.seed + rank * _BETWEEN_RANKS) % (pool.size - count + 1)
    return pool[start : start + count].reshape(shape)


def counts_of(case: Case) -> np.ndarray | None:
    """The counts of an all-to-all, by sender; None for equal pieces, as for other collectives.

    Some counts are 0, and so are all of some ranks.
    """
    if case.collective != "all_to_all" or case.seed % 3 == 0:
        return None
    rng = np.random.default_rng(case.seed)
    some = rng.random((case.ranks, case.ranks)) * (rng.random((case.ranks, case.ranks)) < 0.7)
    rows = [case.shape[0] * int(rng.random() < 0.8 and weights.any()) for weights in some]
    shares = [weights / (weights.sum() or 1) for weights in some]
    return np.array(
        [rng.multinomial(n, p) if n else 0 * p for n, p in zip(rows, shares, strict=True)], np.int64
    )


def parts_of(case: Case) -> list[int]:
    """The rows of each rank's part in a scatter: those of ``np.array_split``, unless it counts."""
    rows, rng = case.shape[0], np.random.default_rng(case.seed)
    if not _knows_counts(case):
        return [len(part) for part in np.array_split(np.empty(rows), case.ranks)]
    weights = rng.random(case.ranks) * (rng.random(case.ranks) < 0.7)
    weights[case.root] += not weights.any()
    return [int(count) for count in rng.multinomial(rows, weights / weights.sum())]


_POOL = 1 << 18
_BETWEEN_RANKS = 17_389


@cache
def _pool(dtype: str, op: str) -> np.ndarray:
    """Random numbers from which inputs are cut: far quicker than drawing them for each case."""
    rng = np.random.default_rng(1)
    kind = np.dtype(dtype)
    if kind.kind in "iu":
        info = np.iinfo(kind)
        pool = rng.integers(info.min, info.max, _POOL, kind, endpoint=True)
    elif kind.kind == "b":
        pool = rng.random(_POOL) < 0.5
    elif kind.kind == "c":
        pool = rng.choice([-1, 1, 1j, -1j, 1 + 1j, 2], _POOL).astype(kind)
    elif op == "prod":
        pool = rng.choice([-2.0, -1.0, 0.5, 1.0, 2.0], _POOL).astype(kind)
    else:
        most = 20 if kind.itemsize == 2 else 1000  # sums of 16-bit floats are exact up to 256
        pool = rng.integers(-most, most, _POOL).astype(kind)
    pool.flags.writeable = False
    return pool


def expected(case: Case, rank: int) -> np.ndarray | None:
    """What `rank` must get, computed from everybody's input; None where that is nothing."""
    inputs = [values_of(case, other) for other in range(case.ranks)]
    if case.collective in ("reduce", "gather") and rank != case.root:
        return None
    if case.collective == "broadcast":
        return inputs[case.root]
    if case.collective in GATHERS:
        return np.concatenate([np.atleast_1d(values) for values in inputs])
    if case.collective == "scatter":
        return np.split(inputs[case.root], np.cumsum(parts_of(case))[:-1])[rank]
    if case.collective == "all_to_all":
        pieces = np.full((case.ranks, case.ranks), case.shape[0] // case.ranks)
        if (matrix := counts_of(case)) is not None:
            pieces = matrix
        cut = [np.split(x, np.cumsum(row)[:-1]) for x, row in zip(inputs, pieces, strict=True)]
        return np.concatenate([each[rank] for each in cut])
    # Wrapping integers and exact floats: the order of folding does not matter.
    with np.errstate(over="ignore"):
        total = np.asarray(reduce(_FOLDS[case.op], inputs))
    if case.op == "mean":
        total = _divided(total, case.ranks)
    if case.collective == "reduce_scatter":
        return np.array_split(total.reshape(-1), case.ranks)[rank]
    return total


def _divided(total: np.ndarray, by: int) -> np.ndarray:
    """Once rounded: 16-bit floats in float32, complex numbers by their parts."""
    if total.dtype.itemsize == 2:
        return np.asarray(total.astype(np.float32) / np.float32(by)).astype(total.dtype)
    if total.dtype.kind == "c":
        parts = np.ascontiguousarray(total).reshape(-1).view(total.real.dtype)
        return (parts / by).view(total.dtype).reshape(total.shape)
    return np.asarray(total / np.asarray(by, total.dtype))


def run_case(comm: rr.Communicator, case: Case) -> None:
    """Make the call and check everything about it that one rank can see."""
    wanted = expected(case, comm.rank)
    before = values_of(case, comm.rank)
    x = _as_view(before, case.view)
    out = None
    if wanted is not None and (case.out != "new" or needs_out(case, comm.rank)):
        in_place = case.out == "in_place" and case.collective in IN_PLACE
        out = x if in_place else _as_view(np.zeros(wanted.shape, wanted.dtype), case.view)
        if case.out == "in_place" and _can_be_part(case):
            x, out = _part_of_the_other(case, comm.rank, x, out)
    result = call(comm, case, x, out)

    if out is None or not np.shares_memory(x, out):
        assert np.array_equal(x, before), "the input was changed"
    if wanted is None:
        assert result is None
        return
    assert result.dtype == wanted.dtype
    assert result.shape == wanted.shape
    assert np.array_equal(result, wanted), f"rank {comm.rank}: {case}"
    if out is None:
        assert result.flags.c_contiguous
        assert not np.shares_memory(result, x)
    else:
        assert result is out
        if case.collective == "reduce_scatter" and np.shares_memory(x, out):
            part = np.arange(out.size) + _part_begin(case, comm.rank)
            rest, kept = (np.delete(each.reshape(-1), part) for each in (x, before))
            assert np.array_equal(rest, kept), "more than its part of the input was changed"
    if case.view == "strided" and out is not None and out.ndim:
        assert not out.base[..., 1::2].any(), "memory between the elements of out was changed"


IN_PLACE = ("all_reduce", "reduce", "broadcast")
"""Collectives that may write to their input."""


def _can_be_part(case: Case) -> bool:
    """Whether one of input and result may be this rank's part of the other."""
    gathers = case.collective in GATHERS and case.shape and _knows_counts(case)
    counted = case.collective == "scatter" and _knows_counts(case)
    parts = counted or case.collective == "reduce_scatter"
    return case.view == "plain" and bool(gathers or parts)


def needs_out(case: Case, rank: int) -> bool:
    return case.collective == "scatter" and _knows_counts(case) and rank != case.root


def _part_of_the_other(
    case: Case, rank: int, x: np.ndarray, out: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The same input and result, the smaller of which is this rank's part of the other."""
    whole, part = (out, x) if case.collective in GATHERS else (x, out)
    begin = _part_begin(case, rank)
    inside = whole.reshape(-1)[begin : begin + part.size].reshape(part.shape)
    if part is x:
        inside[...] = x
        return inside, whole
    return whole, inside


def _part_begin(case: Case, rank: int) -> int:
    """The first element of this rank's part of the larger one of input and result."""
    sizes = [values_of(case, other).size for other in range(case.ranks)]
    if case.collective == "reduce_scatter":
        sizes = [part.size for part in np.array_split(np.arange(sizes[0]), case.ranks)]
    if case.collective == "scatter":
        sizes = [count * int(np.prod(case.shape[1:])) for count in parts_of(case)]
    return sum(sizes[:rank])


def _knows_counts(case: Case) -> bool:
    return case.seed % 2 == 1 and bool(case.shape)


def call(comm: rr.Communicator, case: Case, x: Any, out: Any) -> Any:
    """The call itself, on arrays wherever they live."""
    options: dict[str, Any] = {"out": out, "algorithm": case.algorithm}
    if case.collective in GATHERS and _knows_counts(case):
        options["counts"] = [case.shape[0] + rank for rank in range(case.ranks)]
    if (matrix := counts_of(case)) is not None:
        options["counts"] = matrix if case.seed % 3 == 1 else matrix[comm.rank].tolist()
    if case.collective in ("broadcast", "gather", "scatter", "reduce"):
        options["root"] = case.root
    if case.collective == "scatter" and _knows_counts(case):
        options["counts"] = parts_of(case)
    if case.collective == "scatter" and comm.rank != case.root:
        return comm.scatter(None, **options)
    if case.collective in REDUCTIONS:
        options["op"] = case.op
    return getattr(comm, case.collective)(x, **options)


def _as_view(values: np.ndarray, view: str) -> np.ndarray:
    """The same values in memory of their own, of another order."""
    if values.ndim == 0 or view == "plain":
        return values.copy()
    if view == "fortran":
        return values.copy(order="F")
    if view == "strided":
        wide = np.zeros((*values.shape[:-1], 2 * values.shape[-1]), values.dtype)
        strided = wide[..., ::2]
        strided[...] = values
        return strided
    backwards = values[::-1].copy()
    return backwards[::-1]
