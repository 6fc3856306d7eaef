"""Two-dimensional torus: rings along the rows, then along the columns, then along the rows again.

Source: Mikami et al., "Massively distributed SGD: ImageNet/ResNet-50 training in a flash",
arXiv:1811.05233, 2018.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isqrt

from ringreduce.algorithms.definition import Sizes, algorithm
from ringreduce.algorithms.ring import ring_all_gather, ring_all_reduce, ring_reduce_scatter
from ringreduce.schedules.schedule import Chunks, Claim, Steps, joined


def torus_shape(n: int) -> tuple[int, int]:
    """Return rows <= columns of n ranks, as square as possible; one row for a prime number."""
    rows = next(rows for rows in range(isqrt(n), 0, -1) if n % rows == 0)
    return rows, n // rows


def torus_name(n: int) -> str:
    rows, columns = torus_shape(n)
    return f" of {rows} x {columns}" + (", which is the ring" if rows == 1 else "")


def all_reduce_claims(group: Sequence[int], sizes: Sizes) -> list[Claim]:
    rows, columns = torus_shape(len(group))
    moved = 2 * (len(group) - 1)
    return [Claim(2 * (columns - 1) + 2 * (rows - 1), moved, moved)] * len(group)


@algorithm("all_reduce", "torus", all_reduce_claims, shape=torus_name)
def torus_all_reduce(group: Sequence[int], me: int, chunks: Sequence[Chunks]) -> Steps:
    """Ring reduce-scatter in the row, all-reduce in the column, all-gather in the row.

    2(c-1) + 2(r-1) steps, with r rows and c columns; each rank sends 2(n-1)/n of the data.  With a
    prime number of ranks it is the ring.  ``chunks`` are n parts: r for the first column, then r
    for the second, and so on.
    """
    rows, columns = torus_shape(len(group))
    row, column = divmod(me, columns)
    my_row, my_column = group[row * columns : (row + 1) * columns], group[column::columns]
    by_column = [chunks[i * rows : (i + 1) * rows] for i in range(columns)]
    parts = [joined(mine) for mine in by_column]

    yield from ring_reduce_scatter.steps(my_row, column, parts)
    yield from ring_all_reduce.steps(my_column, row, by_column[column])
    yield from ring_all_gather.steps(my_row, column, parts)
