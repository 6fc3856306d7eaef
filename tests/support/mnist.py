"""A small folder like MNIST's."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np


def idx_bytes(array: np.ndarray) -> bytes:
    """Return an IDX file of unsigned bytes, written from the format's description."""
    head = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
    return head + array.astype(np.uint8).tobytes()


def mnist(
    folder: Path, pack: Callable[[bytes], bytes] = bytes, suffix: str = ""
) -> dict[str, np.ndarray]:
    """Write the four files, packed by `pack`, into `folder`; return their arrays by file name.

    They have 30 images of 4 x 3 pixels to train, and 10 held out.
    """
    rng = np.random.default_rng(0)
    arrays = {}
    for part, count in (("train", 30), ("t10k", 10)):
        arrays[f"{part}-images-idx3-ubyte"] = rng.integers(0, 256, (count, 4, 3))
        arrays[f"{part}-labels-idx1-ubyte"] = rng.integers(0, 10, count)
    for name, array in arrays.items():
        (folder / f"{name}{suffix}").write_bytes(pack(idx_bytes(array)))
    return arrays
