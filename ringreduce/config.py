"""All settings, in one frozen object; the launcher's environment variables."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ringreduce.schedules.cost import Profile


@dataclass(frozen=True)
class Memory:
    """What the ranks of a communicator can do with the memory they share."""

    pulls: bool
    """Whether all ranks can read all other ranks' memory, shared or not."""
    crowded: bool
    """Whether there are more ranks than cores."""


@dataclass(frozen=True)
class Config:
    """How calls are executed.

    All ranks must pass the same values of the settings that decide which messages are sent: `init`
    raises MismatchError if they differ.
    """

    slice_bytes: int | None = None
    """Bytes of a slice: a part of the array that goes through the schedule on its own.

    None: 1 MiB across nodes, so that the network is busy while nodes reduce; 64 MiB on one node,
    where slices overlap with nothing; 4 MiB where data are staged in shared memory.
    """
    segment_bytes: int = 1 << 20
    """Bytes of a segment.  A longer message is received in segments, so that each segment is still
    in the cache when it is reduced."""
    most_slices: int = 1024
    """Slices of a call at most; larger arrays have larger slices."""
    in_flight: int | None = None
    """Slices under way at once.  None: 1 on one node, 4 across nodes."""
    staged_bytes: int = 16 << 10
    """Bytes up to which an array is copied to memory of the library, whose messages stay bound."""
    kept_messages: int = 16384
    """Messages of larger arrays that stay bound for the next call on the same arrays."""
    kept_plans: int = 64
    """Plans that are kept for later calls; the least recently used is dropped first."""
    profile: Profile = field(default_factory=Profile)
    """What links cost: decides the algorithm."""
    synchronous_sends: bool = False
    """Whether every send over MPI waits for its receive: finds schedules that need buffering."""
    shared_memory: bool | None = None
    """Whether ranks of one host exchange data through shared memory, where possible.

    None: ranks of `init` do, ranks of `spawn` do not.  A communicator of `init` has the decision.
    """
    pull_bytes: int | None = None
    """Bytes from which on, with shared memory, peers read an array directly, if the system allows.

    None: 4 MiB; 8 MiB where there are more ranks than cores.
    """
    memory: Memory | None = None
    """What the ranks can do with shared memory; None without.  Set by the library, not by users."""
    log_messages: bool = False
    """Whether ``Communicator.message_log`` keeps a record of every message."""

    def __post_init__(self) -> None:
        for name in _COUNTS:
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                if value is None and name in _MAY_BE_NONE:
                    continue
                raise ValueError(f"Config: {name} is {value!r}; pass an int of at least 1")

    def pulls(self, nbytes: int) -> bool:
        """Return whether peers read an array of `nbytes` directly, through shared memory."""
        return self.pulled_from is not None and nbytes >= self.pulled_from

    @property
    def pulled_from(self) -> int | None:
        """Bytes from which on peers read arrays directly; None if they read none directly."""
        if self.memory is None or not self.memory.pulls:
            return None
        usual = _PULLED_IF_CROWDED if self.memory.crowded else _PULLED
        return self.pull_bytes or usual

    def plan_text(self) -> str:
        """Return the settings that decide which messages are sent, and must not differ.

        The counts of kept plans and messages may differ between ranks: they change what stays
        bound, not what is sent.  `memory` is the same on all ranks, which find it out together.
        """
        return repr(
            (
                *(self.slice_bytes, self.segment_bytes, self.most_slices, self.in_flight),
                *(self.profile, self.pull_bytes),
            )
        )


_PULLED, _PULLED_IF_CROWDED = 4 << 20, 8 << 20
"""Bytes from which on a direct read was measured to be quicker than staging."""
_MAY_BE_NONE = ("slice_bytes", "in_flight", "pull_bytes")
_COUNTS = (
    *_MAY_BE_NONE,
    "segment_bytes",
    "most_slices",
    "kept_messages",
    "kept_plans",
)
_RANK_VARIABLES = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK")


@dataclass(frozen=True)
class Environment:
    """The variables that the launcher sets for its ranks.  None: not set."""

    expected_size: int | None = None
    timeout_s: float | None = None
    transport: str | None = None
    nodes: tuple[int, ...] | None = None
    launched: bool = False
    """Whether the process manager of an MPI started this process."""

    @classmethod
    def read(cls, variables: Mapping[str, str] = os.environ) -> Environment:
        """Read the variables.  Raises ValueError naming a variable that cannot be read."""
        parsers: dict[str, Callable[[str], Any]] = {
            "expected_size": int,
            "timeout_s": float,
            "transport": str,
            "nodes": lambda text: tuple(int(size) for size in text.split(",")),
        }
        values: dict[str, Any] = {"launched": any(name in variables for name in _RANK_VARIABLES)}
        for field_name, parse in parsers.items():
            name = f"RINGREDUCE_{field_name.upper()}"
            if name in variables:
                try:
                    values[field_name] = parse(variables[name])
                except ValueError:
                    raise ValueError(
                        f"environment variable {name} is {variables[name]!r}; "
                        "wanted a number (for nodes: the ranks of each node, such as 3,1,2)"
                    ) from None
        return cls(**values)
