"""Register the backend with torch.  Hardly anything else is imported until it is used.

A process that mpirun or srun has started gets the variables that torch reads, such as RANK.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from ringreduce.system.place import fill

NAME = "ringreduce"
_FRAMES = 5
"""Number of calls above `_create` in which `_asked_for` looks for torch's function."""
INSTEAD_OF_GLOO = "RINGREDUCE_INSTEAD_OF_GLOO"
"""The variable that `ringreduce run --instead-of-gloo` sets to 1."""
SHARE = "RINGREDUCE_TORCH_SHARE"
"""If this variable is 0, groups move no tensors to registered memory by themselves."""


def register() -> None:
    """Make ``"ringreduce"`` a backend of torch.distributed for tensors on the CPU.

    torch calls this while it is imported, by the entry point in the group ``torch.backends``.
    """
    import torch.distributed as dist

    fill()
    if dist.is_available() and NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])
        if os.environ.get(INSTEAD_OF_GLOO) == "1":
            from ringreduce.torch.gloo import instead_of

            instead_of("gloo")


def _create(options: Any, _: Any) -> Any:
    """Make the process group of this rank.  torch calls this on the members of a group alone.

    Raises ValueError if the group is to have other backends, too: torch would not make them.
    """
    from ringreduce.torch.group import RingReduceGroup

    asked = _asked_for()
    if set(asked.values()) - {NAME}:
        text = ",".join(f"{device}:{backend}" for device, backend in asked.items())
        raise ValueError(
            f"the group has several backends, {text}; torch makes no other backend in a group of "
            "ringreduce; make a group for each, such as new_group(backend='nccl')"
        )
    return RingReduceGroup(options, NAME, moves=os.environ.get(SHARE) != "0")


def _asked_for() -> dict[str, str]:
    """Return the backends of the group by device, which torch does not pass to `_create`."""
    from torch.distributed.distributed_c10d import BackendConfig

    frame = sys._getframe()
    for _ in range(_FRAMES):
        frame = frame.f_back or frame
        config = frame.f_locals.get("backend_config")
        if isinstance(config, BackendConfig):
            return dict(config.get_device_backend_map())
    return {}
