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


def cells(ranks: range) -> list[Cell]:
    """Every cell there is.  Layouts that are the same on few ranks count once."""
    return [
        Cell(collective, algorithm, op, dtype, layout, size, n)
        for collective, algorithms in ALGORITHMS.items()
        for algorithm, op, dtype, layout, size, n in product(
            algorithms,
            OPS if collective in REDUCTIONS else ("-",),
            DTYPES,
            LAYOUTS,
            SIZES,
            ranks,
        )
        if (op != "mean" or dtype in FLOATS)
        and not (n == 1 and (layout != "one" or size == "few"))
        and not (n == 2 and layout in ("uneven", "dealt"))
    ]


@st.composite
def cases_in(draw: st.DrawFn, cell: Cell) -> Case:
    """A case of this cell."""
    itemsize = np.dtype(cell.dtype).itemsize
    least, most = size_range(cell.size, cell.ranks, itemsize)
    count = draw(st.integers(least, most), label="elements")
    return Case(
        collective=cell.collective,
        algorithm=draw(st.sampled_from([cell.algorithm, "auto"]))
        if len(ALGORITHMS[cell.collective]) == 1
        else cell.algorithm,
        op="sum" if cell.op == "-" else cell.op,
        dtype=cell.dtype,
        ranks=cell.ranks,
        layout=cell.layout,
        shape=draw(_shapes(count)),
        view=draw(st.sampled_from(VIEWS)),
        out=draw(st.sampled_from(OUTS)),
        root=draw(st.integers(0, cell.ranks - 1)),
        seed=draw(st.integers(0, 2**32 - 1)),
    )


def cases(ranks: range) -> st.SearchStrategy[Case]:
    """Any case on any of these numbers of ranks."""
    return st.sampled_from(cells(ranks)).flatmap(cases_in)


@st.composite
def _shapes(draw: st.DrawFn, count: int) -> tuple[int, ...]:
    """A shape of `count` elements: one-dimensional, two-dimensional, or 0-d for one element."""
    if count == 1 and draw(st.booleans()):
        return ()
    divisors = [d for d in (1, 2, 3, 4, 5, 7) if count % d == 0]
    columns = draw(st.sampled_from(divisors))
    if draw(st.booleans()):
        return (count,)
    return (count // columns, columns)
