"""IDX files, the format of MNIST and Fashion-MNIST: plain, or packed with gzip.

A file begins with four bytes: two zeros, the type of its numbers (8: unsigned bytes), and the
number of dimensions.  Then follow the dimensions, each a big-endian number of four bytes, and the
numbers.

Source: LeCun, Cortes & Burges, "The MNIST database of handwritten digits", 1998.
"""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ringreduce.errors import counted

_BYTES = 8


def find(folder: Path, name: str) -> Path:
    """Return the path of `name` in `folder`: as it is, with a dot before "idx", or with ".gz"."""
    for base in (name, name.replace("-idx", ".idx")):
        for path in (folder / base, folder / f"{base}.gz"):
            if path.exists():
                return path
    raise FileNotFoundError(f"no {name} or {name}.gz in {folder}")


def read(path: Path, dimensions: int) -> NDArray[np.uint8]:
    """Return the numbers in a file, in its shape, or raise ValueError, which names the file."""
    packed = path.read_bytes()
    try:
        content = gzip.decompress(packed) if packed.startswith(b"\x1f\x8b") else packed
    except (OSError, EOFError, zlib.error):
        raise ValueError(f"{path} is damaged: gzip cannot unpack it") from None
    head = 4 + 4 * dimensions
    if len(content) < head or content[:3] != bytes((0, 0, _BYTES)):
        raise ValueError(f"{path} is no IDX file of bytes")
    if content[3] != dimensions:
        raise ValueError(f"{path} has {counted(content[3], 'dimension')}; wanted {dimensions}")
    shape = tuple(np.frombuffer(content, ">u4", dimensions, 4).tolist())
    if len(content) - head != math.prod(shape):
        raise ValueError(
            f"{path} is damaged: {len(content) - head:,} bytes follow its head, which says "
            f"{' x '.join(map(str, shape))}"
        )
    return np.frombuffer(content, np.uint8, offset=head).reshape(shape)
