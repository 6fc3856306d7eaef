"""Prove that all ranks have bitwise the same parameters, by the hash of their bytes."""

from __future__ import annotations

import hashlib
from collections import Counter
from typing import Any

import numpy as np

import ringreduce as rr


class DriftError(rr.RingReduceError):
    """The ranks have different parameters; all ranks raise it with the same text.

    Example:
        >>> def program(comm):
        ...     try:
        ...         rr.train.check_equal(comm, np.full(3, comm.rank // 2))
        ...     except rr.train.DriftError as error:
        ...         return "rank 2" in str(error)
        >>> rr.spawn(program, 3)
        [True, True, True]
    """

    __module__ = "ringreduce.train"


def check_equal(comm: rr.Communicator, parameters: Any) -> str:
    """Prove that `parameters` are bitwise the same on all ranks.  Every rank must make this call.

    Args:
        comm: the communicator of the ranks.
        parameters: a NumPy or CuPy array of any shape.

    Returns:
        The SHA-256 of the parameters' bytes, in hexadecimal.

    Raises:
        DriftError: parameters differ.  All ranks raise it.  It names the ranks that differ from the
            most frequent parameters; among equally frequent, from those of the lowest rank.

    Example:
        >>> rr.spawn(lambda comm: rr.train.check_equal(comm, np.zeros(3))[:8], 2)
        ['9d908ecf', '9d908ecf']
    """
    digest = hashlib.sha256(on_host(parameters).data).digest()
    gathered = comm.all_gather(np.frombuffer(digest, np.uint8).reshape(1, -1))
    digests: list[str] = [row.tobytes().hex() for row in gathered]
    # most_common keeps the order of first appearance among equals: rank 0 wins a tie.
    agreed, votes = Counter(digests).most_common(1)[0]
    if votes == comm.size:
        return agreed
    drifted = [f"{rank} ({d[:8]}…)" for rank, d in enumerate(digests) if d != agreed]
    raise DriftError(
        f"check_equal: the parameters of rank {', '.join(drifted)} differ from those of the other "
        f"{votes} of {comm.size} ranks ({agreed[:8]}…); every rank must start from the same "
        "parameters and make the same steps"
    )


def on_host(array: Any) -> np.ndarray:
    """Return a NumPy or CuPy array as a contiguous NumPy array."""
    on_gpu = type(array).__module__.startswith("cupy")
    return np.ascontiguousarray(array.get() if on_gpu else array)
