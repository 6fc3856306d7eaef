"""What torch reads of a process group, under all the names that it has for it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d


class NamedGroup(dist.ProcessGroup):  # type: ignore[misc]  # torch has no types here
    """A process group with a rank, a size, a name and a description.

    torch's functional collectives look for the group by the name that the methods here return.
    """

    supports_splitting = supports_coalescing = supports_time_estimate = supports_shrinking = False

    def __init__(self, rank: int, size: int, backend: str, name: str) -> None:
        super().__init__(rank, size)
        self._rank, self._size, self._backend = rank, size, backend
        self._name, self._description = name, "undefined"
        self.sequence_number = 0
        """How many collectives this rank has made, or begun."""

    def getBackendName(self) -> str:  # noqa: N802 - torch's names
        return self._backend

    def getRank(self) -> int:  # noqa: N802
        return int(self._rank)

    def getSize(self) -> int:  # noqa: N802
        return int(self._size)

    def getGroupName(self) -> str:  # noqa: N802
        return str(self._name)

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._name = name

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._description

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        self._description = description

    def _get_backend(self, device: Any) -> Any:
        if device.type != "cpu":
            raise RuntimeError(f"the group has no backend for {device}: it is for the CPU")
        return self

    def _set_sequence_number_for_group(self) -> None:
        self.sequence_number = 0

    def _get_sequence_number_for_group(self) -> int:
        return self.sequence_number

    def supports_tensor_alloc(self, device: Any) -> bool:
        return False

    @property
    def _device_types(self) -> list[Any]:
        # When torch 2.15 makes a group that has devices, it attaches a recorder of calls.  The
        # recorder works only for groups in C++.  So the group has no device until it is made.
        return [torch.device("cpu")] if self in c10d._world.pg_map else []

    def rank(self) -> int:
        return int(self._rank)

    def size(self) -> int:
        return int(self._size)

    def name(self) -> str:
        return self._backend

    @property
    def group_name(self) -> str:
        return str(self._name)

    @property
    def group_desc(self) -> str:
        return self._description

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, description: str) -> None:
        self._description = description
