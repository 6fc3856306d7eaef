"""Give programs that ask torch for Gloo this backend, without a change of the program."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from threading import Event
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
        A context manager.  This replacement ends with its block.  Groups that exist stay, and so do
        other replacements, such as that of ``--instead-of-gloo``.

    Raises:
        ValueError: another backend.

    Example:
        >>> with ringreduce.torch.instead_of("gloo"):  # doctest: +SKIP
        ...     torch.distributed.init_process_group("gloo")
    """
    if backend != "gloo":
        raise ValueError(f"instead_of: backend is {backend!r}; only 'gloo' can be replaced")
    before = c10d._new_process_group_helper
    has_ended = Event()
    c10d._new_process_group_helper = ours = _with_ours(before, has_ended)
    _log.info("process groups of Gloo for the CPU are groups of ringreduce from now on")

    def end_replacement() -> None:
        has_ended.set()  # a replacement that began later may still call `ours`
        if c10d._new_process_group_helper is ours:
            c10d._new_process_group_helper = before

    end = ExitStack()
    end.callback(end_replacement)
    return end


def _with_ours(make: Callable[..., Any], has_ended: Event) -> Callable[..., Any]:
    """Wrap the function of torch that makes all process groups, until `has_ended` is set."""

    @wraps(make)
    def made(
        group_size: Any, group_rank: Any, members: Any, backend: Any, *others: Any, **named: Any
    ) -> Any:
        if has_ended.is_set() or not _is_gloo(str(backend).lower()):
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
