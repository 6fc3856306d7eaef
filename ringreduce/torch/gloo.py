"""Give programs that ask torch for Gloo this backend, without a change of the program."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from typing import Any

from torch.distributed import distributed_c10d as c10d

_GLOO, _OURS, _NONE = ("gloo", "cpu:gloo"), "ringreduce", "undefined"
_log = logging.getLogger("ringreduce.torch")


def instead_of(backend: str) -> ExitStack:
    """Make groups of ringreduce from now on where torch would make groups of Gloo for the CPU.

    torch makes such a group if a program asks for Gloo, or if a program names no backend and the
    host has no GPU.  ``dist.get_backend`` still returns the name that the program has
    passed.  So calls that ask for Gloo by name, such as ``dist.monitored_barrier``, work.
    ``type(dist.group.WORLD)`` tells what the group is.  Mixtures such as ``"cpu:gloo,cuda:nccl"``
    stay as they are.

    Args:
        backend: ``"gloo"``.

    Returns:
        A context manager.  At its end torch makes groups of Gloo again.  Groups that exist stay.

    Raises:
        ValueError: another backend.

    Example:
        >>> with ringreduce.torch.instead_of("gloo"):  # doctest: +SKIP
        ...     torch.distributed.init_process_group("gloo")
    """
    if backend != "gloo":
        raise ValueError(f"instead_of: backend is {backend!r}; only 'gloo' can be replaced")
    before = c10d._new_process_group_helper
    c10d._new_process_group_helper = _with_ours(before)
    _log.info("process groups of Gloo for the CPU are groups of ringreduce from now on")
    end = ExitStack()
    end.callback(setattr, c10d, "_new_process_group_helper", before)
    return end


def _with_ours(make: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the function of torch that makes all process groups."""

    @wraps(make)
    def made(
        group_size: Any, group_rank: Any, members: Any, backend: Any, *others: Any, **named: Any
    ) -> Any:
        if not _is_gloo(str(backend).lower()):
            return make(group_size, group_rank, members, backend, *others, **named)
        group, store = make(group_size, group_rank, members, c10d.Backend(_OURS), *others, **named)
        if group in c10d._world.pg_map:  # this rank is a member
            shown = _NONE if str(backend).lower() == _NONE else "gloo"
            c10d._world.pg_map[group] = (c10d.Backend(shown), c10d._world.pg_map[group][1])
        return group, store

    return made


def _is_gloo(backend: str) -> bool:
    """Return whether torch makes groups of Gloo for the CPU alone if it is asked for `backend`."""
    if backend != _NONE:
        return backend in _GLOO
    chosen = c10d.BackendConfig(c10d.Backend(_NONE)).get_device_backend_map()
    return bool(chosen == {"cpu": "gloo"})
