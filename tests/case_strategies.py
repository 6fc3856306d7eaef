"""Hypothesis draws cases: freely, or inside one cell of the table of everything."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import numpy as np
from hypothesis import strategies as st

from tests.cases import (
    ALGORITHMS,
    DTYPES,
    FLOATS,
    LAYOUTS,
    OPS,
    OUTS,
    SIZES,
    VIEWS,
    Case,
    size_range,
)

REDUCTIONS = ("all_reduce", "reduce_scatter")

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
    view: str
    size: str
    ranks: int


@dataclass(frozen=True)
class Draw:
    """What is left of a case to draw once its cell is known; the same in every cell."""

    size: int
    """Where between the least and the most elements of the cell, of `_FINENESS`."""
    shape: str
    columns: int
    auto: bool
    out: str
    root: int
    synchronous: bool
    seed: int


draws = st.builds(
    Draw,
    size=st.integers(0, _FINENESS),
    shape=st.sampled_from(["flat", "0-d or flat", "rows"]),
    columns=st.sampled_from(_COLUMNS),
    auto=st.booleans(),
    out=st.sampled_from(OUTS),
    root=st.integers(0, 59),
    synchronous=st.booleans(),
    seed=st.integers(0, 2**20 - 1),
)


def cells(ranks: range) -> list[Cell]:
    """Every cell there is.  Layouts that are the same on few ranks count once."""
    return [
        Cell(collective, algorithm, op, dtype, layout, view, size, n)
        for collective, algorithms in ALGORITHMS.items()
        for algorithm, op, dtype, layout, view, size, n in product(
            algorithms,
            OPS if collective in REDUCTIONS else ("-",),
            DTYPES,
            LAYOUTS,
            VIEWS,
            SIZES,
            ranks,
        )
        if (op != "mean" or dtype in FLOATS)
        and not (n == 1 and (layout != "one" or size == "few"))
        and not (n == 2 and layout in ("uneven", "dealt"))
    ]


def case_in(cell: Cell, draw: Draw) -> Case:
    """The case of this cell that the draw describes."""
    least, most = size_range(cell.size, cell.ranks, np.dtype(cell.dtype).itemsize)
    only = len(ALGORITHMS[cell.collective]) == 1
    return Case(
        collective=cell.collective,
        algorithm="auto" if only and draw.auto else cell.algorithm,
        op="sum" if cell.op == "-" else cell.op,
        dtype=cell.dtype,
        ranks=cell.ranks,
        layout=cell.layout,
        shape=_shape(least, least + (most - least) * draw.size // _FINENESS, draw),
        view=cell.view,
        out=draw.out,
        root=draw.root % cell.ranks,
        synchronous=draw.synchronous,
        seed=draw.seed,
    )


def cases(ranks: range) -> st.SearchStrategy[Case]:
    """Any case on any of these numbers of ranks."""
    return st.builds(case_in, st.sampled_from(cells(ranks)), draws)


def _shape(least: int, count: int, draw: Draw) -> tuple[int, ...]:
    """A shape of about `count` elements: one-dimensional, rows, or 0-d for one element."""
    if count == 1 and draw.shape == "0-d or flat":
        return ()
    rows = count // draw.columns
    if draw.shape == "rows" and rows * draw.columns >= least:
        return (rows, draw.columns)
    return (count,)
