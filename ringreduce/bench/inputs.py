"""Inputs that differ by rank, element and iteration, and whose results are exact by construction.

Sums, products and means of them are whole numbers that every dtype can hold, whatever the order in
which they are added: a wrong element is wrong beyond doubt.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Ufunc = Callable[..., Any]

OPS: dict[str, Ufunc] = {
    "sum": np.add,
    "mean": np.add,
    "prod": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}
_BLOCK = 5 * 4096
"""Elements written at once: a whole number of periods."""


class Inputs:
    """The inputs of all ranks for one length, op and dtype.

    Each repeats five values.  Five is prime to the lengths of chunks and slices, so that a
    misplaced chunk is seen.
    """

    def __init__(self, ranks: int, count: int, op: str, dtype: Any) -> None:
        self.ranks, self.count, self.op, self.dtype = ranks, count, op, np.dtype(dtype)
        self._values = np.array(_VALUES.get(op, _VALUES["sum"])).astype(self.dtype)

    def fill(self, array: np.ndarray, rank: int, iteration: int) -> None:
        _repeat(self._of(rank, iteration), array)

    def result(self, iteration: int) -> np.ndarray:
        total = self._of(0, iteration)
        for rank in range(1, self.ranks):
            total = OPS[self.op](total, self._of(rank, iteration)).astype(self.dtype)
        if self.op == "mean":
            total = (total / self.ranks).astype(self.dtype)
        result = np.empty(self.count, self.dtype)
        _repeat(total, result)
        return result

    def _of(self, rank: int, iteration: int) -> np.ndarray:
        if self.op != "mean":
            return np.roll(self._values, iteration + 2 * rank)
        # A mean is whole if what ranks have besides the same values adds up to nothing.
        paired = rank < self.ranks // 2 * 2
        besides = (1 - 2 * (rank % 2)) * (1 + rank // 2 % 2) if paired else 0
        return (np.roll(self._values, iteration) + besides).astype(self.dtype)


_VALUES = {"sum": (0, 1, 2, 3, 1), "mean": (0, 1, 2, 0, 1), "prod": (1, 1, 2, 1, 1)}
"""Small enough for bfloat16 to hold the sum of 85 ranks; for bools, any value but 0 is true."""


def _repeat(values: np.ndarray, array: np.ndarray) -> None:
    block = np.resize(values, _BLOCK)
    whole = array.size // _BLOCK * _BLOCK
    array[:whole].reshape(-1, _BLOCK)[...] = block
    array[whole:] = block[: array.size - whole]


def refusal(op: str, dtype: np.dtype) -> str:
    if dtype.kind not in "biufcV" or dtype.hasobject:
        return f"-d {dtype.name} cannot be sent"
    bits, numbers = ("and", "or", "xor"), ("sum", "prod", "mean")
    if op in bits and dtype.kind not in "biu":
        return f"-o {op} wants integers or bool, not {dtype.name}"
    if op in numbers and dtype.kind == "b":
        return f"-o {op} does not go with bool"
    if op == "mean" and dtype.kind in "iu":
        return f"-o mean does not go with {dtype.name}"
    if op in ("min", "max") and dtype.kind == "c":
        return f"-o {op} does not go with {dtype.name}"
    return ""
