"""Ways for ranks to find each other without MPI.

Each rank passes some bytes and receives those of all ranks.  Every way is one function `collect`,
which is called once: by the environment variables of torchrun (`env`), by a file (`files`), by a
store of torch (`stores`), or by a function of the caller.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Mapping
from typing import Any

from ringreduce.rendezvous.definition import Rendezvous
from ringreduce.rendezvous.env import of_environment
from ringreduce.rendezvous.files import of_file
from ringreduce.rendezvous.stores import is_store, of_store
from ringreduce.system import place
from ringreduce.system.place import RANK_VARIABLES

_FORMS = "'env://', 'file://PATH', a store of torch.distributed, or a function"


def default(variables: Mapping[str, str] = os.environ) -> str | None:
    """Return ``"env://"`` if the variables name a job without MPI; None otherwise.

    Ranks of torchrun may also have the variables of an MPI, in whose job torchrun runs.  srun sets
    the variables of an MPI only with ``--mpi``.
    """
    if place.by_torchrun(variables):
        return "env://"
    if any(name in variables for name in RANK_VARIABLES):
        return None
    known = {*variables, *place.of_launcher(variables)}
    return "env://" if "RANK" in known or "WORLD_SIZE" in known else None


def find(rendezvous: Any, rank: Any, size: Any, timeout_s: float) -> Rendezvous:
    """Return the rendezvous that the arguments of `init` name.

    Raises TypeError or ValueError, before anything is sent, if one is wrong or missing.
    """
    if isinstance(rendezvous, Rendezvous):
        return rendezvous
    rank, size = _number("rank", rank), _number("size", size)
    if size is not None and size < 1:
        raise ValueError(f"init: size is {size}; pass the number of ranks, at least 1")
    if rank is not None and (rank < 0 or (size is not None and rank >= size)):
        last = "" if size is None else f" to {size - 1}"
        raise ValueError(f"init: rank is {rank}; ranks count from 0{last}")
    if isinstance(rendezvous, str):
        return _of_text(rendezvous, rank, size, timeout_s)
    if is_store(rendezvous):
        rank, size = _given("a store", rank, size)
        return Rendezvous(of_store(rendezvous, rank, size, timeout_s), rank, size)
    if callable(rendezvous):
        return Rendezvous(rendezvous, rank, size)
    raise TypeError(f"init: rendezvous is {rendezvous!r}; pass {_FORMS}")


def _of_text(text: str, rank: int | None, size: int | None, timeout_s: float) -> Rendezvous:
    if text == "env://":
        return of_environment(rank, size, timeout_s)
    path = text.removeprefix("file://")
    if path != text and path:
        rank, size = _given("a file", rank, size)
        return Rendezvous(of_file(path, rank, size, timeout_s), rank, size)
    raise ValueError(f"init: unknown rendezvous {text!r}; pass {_FORMS}")


def _given(what: str, rank: int | None, size: int | None) -> tuple[int, int]:
    if rank is None or size is None:
        raise ValueError(f"init: a rendezvous by {what} needs rank= and size=")
    return rank, size


def _number(name: str, value: Any) -> int | None:
    if value is None:
        return None
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"init: {name} is {value!r}; pass an int") from None
