"""Hypothesis draws cases: freely, or inside one cell of the table of everything."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from itertools import product

import numpy as np
from hypothesis import strategies as st

from tests.support.cases import (
    ALGORITHMS,
    DTYPES,
    LAYOUTS,
    OPS,
    OUTS,
    REDUCTIONS,
    SIZES,
    VIEWS,
    Case,
    size_range,
)

_FINENESS = 1 << 16
_COLUMNS = (1, 2, 3, 4, 5, 7)


@dataclass(frozen=True)
class Cell:
    """One cell of the histogram of all cases: what is counted, so that none stays empty."""

    collective: str
    algorithm: str
    op: str
    dtype: str
    layout: str
    size: str
    ranks: int


@dataclass(frozen=True)
class Draw:
    """What is left of a case to draw once its cell is known; the same in every cell."""

    size: int
    """Where between the least and the most elements of the cell, of `_FINENESS`."""
    shape: str
    view: str
    columns: int
    out: str
    root: int
    synchronous: bool
    seed: int


draws = st.builds(
    Draw,
    size=st.integers(0, _FINENESS),
    shape=st.sampled_from(["flat", "0-d or flat", "rows"]),
    view=st.sampled_from(VIEWS),
    columns=st.sampled_from(_COLUMNS),
    out=st.sampled_from(OUTS),
    root=st.integers(0, 59),
    synchronous=st.booleans(),
    seed=st.integers(0, 2**20 - 1),
)


@functools.cache
def cells(ranks: range) -> list[Cell]:
    """Every cell there is.

    Layouts that are the same count once: on few ranks, and for algorithms that look at nodes only
    for the order of their ranks.
    """
    return [
        Cell(collective, algorithm, op, dtype, layout, size, n)
        for collective, algorithms in ALGORITHMS.items()
        for algorithm, dtype, size, n in product(algorithms, DTYPES, SIZES, ranks)
        for layout in (LAYOUTS if algorithm.startswith("hierarchical") else LAYOUTS[:1])
        for op in (OPS[dtype] if collective in REDUCTIONS else ("-",))
        if not (n == 1 and (layout != "one" or size == "few"))
        and not (n == 2 and layout in ("uneven", "dealt"))
    ]


def case_in(cell: Cell, draw: Draw) -> Case:
    """The case of this cell that the draw describes."""
    least, most = size_range(cell.size, cell.ranks, np.dtype(cell.dtype).itemsize)
    count = least + (most - least) * draw.size // _FINENESS
    return Case(
        collective=cell.collective,
        algorithm=cell.algorithm,
        op="sum" if cell.op == "-" else cell.op,
        dtype=cell.dtype,
        ranks=cell.ranks,
        layout=cell.layout,
        shape=_shape(cell, least, count, draw),
        view=draw.view,
        out=draw.out,
        root=draw.root % cell.ranks,
        synchronous=draw.synchronous,
        seed=draw.seed,
    )


def cases(ranks: range) -> st.SearchStrategy[Case]:
    """Any case on any of these numbers of ranks."""
    return st.builds(case_in, st.sampled_from(cells(ranks)), draws)


def _shape(cell: Cell, least: int, count: int, draw: Draw) -> tuple[int, ...]:
    """A shape of about `count` elements: one-dimensional, rows, or 0-d for one element."""
    split = cell.collective in ("scatter", "all_to_all")
    if count == 1 and draw.shape == "0-d or flat" and not split:
        return ()
    rows = count // draw.columns
    shape = (rows, draw.columns) if draw.shape == "rows" and rows * draw.columns >= least else None
    first, *rest = shape or (count,)
    return (first - first % cell.ranks if cell.collective == "all_to_all" else first, *rest)
