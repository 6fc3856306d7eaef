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
    return check_replicas(comm, parameters, 0)


def check_replicas(comm: rr.Communicator, parameters: Any, group: int) -> str:
    """Prove, as `check_equal`, that the ranks of each `group` have bitwise the same parameters.

    Collective.  All ranks raise DriftError if the parameters of a group differ.
    """
    digest = hashlib.sha256(on_host(parameters).data).digest()
    mine = np.frombuffer(digest + group.to_bytes(8, "little"), np.uint8).reshape(1, -1)
    gathered = [row.tobytes() for row in comm.all_gather(mine)]
    for each in dict.fromkeys(row[32:] for row in gathered):
        _check_group({r: row[:32].hex() for r, row in enumerate(gathered) if row[32:] == each})
    return digest.hex()


def _check_group(digests: dict[int, str]) -> None:
    """Raise DriftError unless the digests of these ranks are the same."""
    # most_common keeps the order of first appearance among equals: the lowest rank wins a tie.
    agreed, votes = Counter(digests.values()).most_common(1)[0]
    if votes == len(digests):
        return
    drifted = [f"{rank} ({d[:8]}…)" for rank, d in digests.items() if d != agreed]
    raise DriftError(
        f"check_equal: the parameters of rank {', '.join(drifted)} differ from those of the other "
        f"{votes} of {len(digests)} ranks ({agreed[:8]}…); every rank must start from the same "
        "parameters and make the same steps"
    )


def on_host(array: Any) -> np.ndarray:
    """Return a NumPy or CuPy array as a contiguous NumPy array."""
    on_gpu = type(array).__module__.startswith("cupy")
    return np.ascontiguousarray(array.get() if on_gpu else array)
