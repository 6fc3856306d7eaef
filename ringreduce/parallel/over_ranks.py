"""The norm of gradients, and the equality of parameters, over all ranks.

The norm is the root of the sum of the squares of all numbers, in float64.  Each rank computes the
norm of the numbers that it counts, and that of the norms of all ranks.  So all ranks get bitwise
the same norm, and clip alike.  Parameters are equal if the hash of their bytes is.

Source of clipping: Pascanu, Mikolov & Bengio, "On the difficulty of training recurrent neural
networks", ICML 2013.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

import ringreduce as rr
from ringreduce.errors import shown
from ringreduce.parallel.arrays import by_name, check_comm, scale, wide

_BLOCK = 1 << 14
"""Elements that are squared at once, so that the squares stay in the cache."""
_SMALL = 2.0**-900
"""A sum of squares from here on has lost nothing that counts by underflow."""
Arrays = Mapping[str, Any] | Iterable[Any]


def global_norm(counted: Arrays, comm: rr.Communicator | None = None) -> float:
    """Return the norm of a gradient of which each rank counts a part.

    Every number of the gradient is counted by exactly one rank: of a parameter that several ranks
    hold, one rank passes the gradient, or each rank a part of it.

    Args:
        counted: arrays that this rank counts: a list, or a mapping from names.
        comm: the communicator of all ranks that count a part; all must then make this call.  None:
            this rank counts all.

    Returns:
        The norm, bitwise the same on every rank.

    Raises:
        TypeError: something is no array of numbers.
        MismatchError: ranks make another call.

    Example:
        >>> def program(comm):
        ...     shared, own = np.array([2.0]), np.array([4.0, 5.0, 6.0]) * comm.rank
        ...     return rr.train.global_norm([own] if comm.rank else [own, shared], comm)
        >>> rr.spawn(program, 2)
        [9.0, 9.0]
    """
    if comm is not None:
        check_comm("global_norm", comm)
    arrays = by_name("global_norm", counted).values()
    own = _norm(np.array([_norm(block) for array in arrays for block in _blocks(array)]))
    return own if comm is None else _norm(comm.all_gather(np.array([own])))


def clip(gradients: Arrays, norm: float, longest: float) -> float:
    """Scale gradients in place so that their norm is at most `longest`.

    Args:
        gradients: all arrays of floats that this rank holds: a list, or a mapping from names.
        norm: their norm over all ranks: the result of `global_norm`.
        longest: the largest norm that is left as it is, at least 0.

    Returns:
        The factor: 1 if the norm is at most `longest`, and also if it is infinite or no number.

    Raises:
        ValueError: a gradient cannot be written to, or a norm is negative.
        TypeError: a gradient is no array of floats, or a norm is no number.

    Example:
        >>> gradient = np.array([3.0, 4.0])
        >>> rr.train.clip([gradient], rr.train.global_norm([gradient]), 0.5), gradient
        (0.1, array([0.3, 0.4]))
    """
    for what, value in (("norm", norm), ("longest", longest)):
        if not isinstance(value, (Real, np.ndarray)) or isinstance(value, bool) or np.ndim(value):
            raise TypeError(f"clip: {what} is {shown(value)}; wanted a number")
        if value < 0 or (what == "longest" and math.isnan(value)):
            raise ValueError(f"clip: {what} is {value}; wanted at least 0")
    arrays = by_name("clip", gradients, changed=True)
    if not longest < norm < math.inf:
        return 1.0
    factor = longest / norm
    # A subnormal factor has lost digits: its two roots have not.
    root = math.sqrt(norm)
    factors = (factor,) if factor >= sys.float_info.min else (1 / root, longest / root)
    for array, each in itertools.product(arrays.values(), factors):
        scale(array, each, out=array)
    return factor


def _blocks(array: Any) -> Iterator[Any]:
    """Yield the numbers of an array in the wide dtype; of complex numbers both parts."""
    flat = array.reshape(-1)
    step = _BLOCK if isinstance(flat, np.ndarray) else max(1, flat.size)
    for start in range(0, flat.size, step):
        block = flat[start : start + step].astype(wide(flat.dtype))
        yield block.view(block.real.dtype) if block.dtype.kind == "c" else block


def _norm(numbers: Any) -> float:
    """Return the norm of real numbers, which are scaled if their squares overflow or get lost."""
    with np.errstate(over="ignore", under="ignore"):
        total = float(np.square(numbers).sum())
    if _SMALL <= total < math.inf or math.isnan(total) or not numbers.size:
        return math.sqrt(total)
    largest = float(abs(numbers).max())
    if not 0 < largest < math.inf:
        return largest
    exponent = math.frexp(largest)[1]
    return float(np.ldexp(_norm(np.ldexp(numbers, -exponent)), exponent))


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
    """Prove, as `check_equal`, that the ranks of each `group` have the same parameters."""
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
