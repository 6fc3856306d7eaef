"""Arrays in host memory, combined by NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np

from ringreduce.devices.base import FoldFunction


def _minimum(left: np.ndarray, right: np.ndarray, into: np.ndarray) -> None:
    np.minimum(left, right, out=into)


def _maximum(left: np.ndarray, right: np.ndarray, into: np.ndarray) -> None:
    np.maximum(left, right, out=into)


OPS: dict[str, FoldFunction] = {
    "sum": np.add,
    "mean": np.add,
    "min": _minimum,
    "max": _maximum,
    "prod": np.multiply,
}
"""Integers wrap; min and max propagate NaN."""


class CpuDevice:
    """NumPy arrays."""

    name = "cpu"

    def empty(self, shape: int | tuple[int, ...], dtype: Any) -> np.ndarray:
        return np.empty(shape, dtype)

    def flat(self, array: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(array).reshape(-1)

    def fold(self, op: str) -> FoldFunction:
        return OPS[op]

    def divide(self, array: np.ndarray, by: int) -> None:
        np.divide(array, by, array)

    def bytes_of(self, array: np.ndarray) -> memoryview:
        return memoryview(array.data).cast("B") if array.size else memoryview(bytearray())

    def overlap(self, a: np.ndarray, b: np.ndarray) -> bool:
        return np.shares_memory(a, b)
