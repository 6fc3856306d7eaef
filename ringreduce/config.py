"""All settings in one frozen object; the only reader of environment variables."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ringreduce.schedules.cost import Profile


@dataclass(frozen=True)
class Memory:
    """What the memory is good for that ranks of one host share."""

    pulls: bool
    """Whether they can read each other's arrays where they lie."""
    crowded: bool
    """Whether they outnumber the cores."""


@dataclass(frozen=True)
class Config:
    """How calls are carried out.

    Ranks that work together agree on what decides what is sent; `init` sees to it.
    """

    slice_bytes: int | None = None
    """Bytes of the array that go through the schedule together.

    None: across nodes 1 MiB, so that the network is busy while nodes reduce; on one node 64 MiB,
    since there it would hide nothing; 4 MiB of what is staged in shared memory.
    """
    segment_bytes: int = 1 << 20
    """Longer messages are cut in such segments, so that folds find in the cache what has come."""
    most_slices: int = 1024
    """At most this many slices a call; larger arrays have larger slices."""
    in_flight: int | None = None
    """Slices under way at once.  None: 1 on one node, 4 across nodes."""
    staged_bytes: int = 16 << 10
    """Arrays up to this size are copied to memory whose messages are set up once and kept."""
    kept_messages: int = 16384
    """Messages of larger arrays that stay set up for the next call on the same arrays."""
    kept_plans: int = 64
    """Plans that are kept for calls to come; the one unused for longest goes first."""
    profile: Profile = field(default_factory=Profile)
    """What links cost: decides the algorithm."""
    synchronous_sends: bool = False
    """Let every send over MPI wait for its receive: finds schedules that rely on buffering."""
    shared_memory: bool | None = None
    """Whether ranks of one host exchange data through memory that they share, where they can.

    None: those of `init` do, and those of `spawn` do not.
    """
    pull_bytes: int | None = None
    """Through shared memory, arrays from this size on are read from where they lie, if allowed.

    None: 4 MiB; 8 MiB where ranks share cores.
    """
    memory: Memory | None = None
    """What was found out about that: not to be given."""
    log_messages: bool = False
    """Keep a record of every message in ``Communicator.message_log``."""

    def __post_init__(self) -> None:
        for name in _COUNTS:
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                if value is None and name in _MAY_BE_NONE:
                    continue
                raise ValueError(f"Config: {name} is {value!r}; pass an int of at least 1")

    def pulls(self, nbytes: int) -> bool:
        """Whether, in shared memory, an array of `nbytes` is read from where it lies."""
        return self.pulled_from is not None and nbytes >= self.pulled_from

    @property
    def pulled_from(self) -> int | None:
        """From how many bytes on arrays are read from where they lie; None where none is."""
        if self.memory is None or not self.memory.pulls:
            return None
        usual = _PULLED_IF_CROWDED if self.memory.crowded else _PULLED
        return self.pull_bytes or usual

    def plan_text(self) -> str:
        """The settings that decide what is sent; ranks that differ in them cannot work together.

        How much is kept is up to each rank: it changes what is set up, not what is sent.  What
        memory is good for all ranks have found out together.
        """
        return repr(
            (
                *(self.slice_bytes, self.segment_bytes, self.most_slices, self.in_flight),
                *(self.profile, self.pull_bytes),
            )
        )


_PULLED, _PULLED_IF_CROWDED = 4 << 20, 8 << 20
"""Bytes from which on pulling was found to be quicker than staging."""
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
    """What the launcher tells its ranks.  None where it says nothing."""

    expected_size: int | None = None
    timeout_s: float | None = None
    transport: str | None = None
    nodes: tuple[int, ...] | None = None
    launched: bool = False
    """Whether a process manager of an MPI started this process."""

    @classmethod
    def read(cls, variables: Mapping[str, str] = os.environ) -> Environment:
        """Raises ValueError naming the variable that cannot be read."""
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
