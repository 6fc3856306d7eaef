"""Prove that all ranks have bitwise the same parameters, by the hash of their bytes."""

from __future__ import annotations

import hashlib
from collections import Counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

import ringreduce as rr
from ringreduce.parallel.arrays import by_name, check_comm


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
        parameters: an array of numbers, of NumPy or CuPy; or several, in a list or by name in a
            mapping, in the same order on all ranks.

    Returns:
        The SHA-256 of the parameters' bytes, in hexadecimal.

    Raises:
        TypeError: something is no array of numbers.
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
    check_comm("check_equal", comm)
    arrays = by_name("check_equal", parameters)
    kinds = [f"{name}: {array.dtype}{array.shape}" for name, array in arrays.items()]
    state = hashlib.sha256()
    for array in arrays.values():
        state.update(bytes_of(array).data)
    digest = state.digest()
    # What is compared has the names, shapes and dtypes, too.
    whole = hashlib.sha256(digest + repr(kinds).encode(errors="surrogatepass")).digest()
    mine = np.frombuffer(whole + group.to_bytes(8, "little"), np.uint8).reshape(1, -1)
    gathered = [row.tobytes() for row in comm.all_gather(mine)]
    for each in dict.fromkeys(row[32:] for row in gathered):
        _check_group({r: row[:32].hex() for r, row in enumerate(gathered) if row[32:] == each})
    return digest.hex()


def bytes_of(array: Any) -> NDArray[np.uint8]:
    """Return the bytes of an array's numbers, without the padding of longdouble."""
    host = on_host(array).reshape(-1)
    if host.dtype.char == "G":
        host = host.view(np.longdouble)
    rows = host.view(np.uint8).reshape(host.size, host.itemsize)
    has_padding = host.dtype.char == "g" and np.finfo(np.longdouble).nmant == 63
    return np.ascontiguousarray(rows[:, :10] if has_padding else rows)


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
    return np.asarray(array.get() if on_gpu else array, order="C")
