"""All settings in one frozen object, and the variables that the launcher sets for its ranks."""

import math
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from numbers import Rational
from pathlib import Path
from threading import Lock
from typing import Any, Self

from ringreduce.errors import shown
from ringreduce.schedules.cost import Profile
from ringreduce.system.place import RANK_VARIABLES


@dataclass(frozen=True)
class Memory:
    """Facts about the ranks of one host that share memory."""

    single_copy: bool
    """Whether every rank can read the other ranks' private arrays directly (single-copy)."""
    crowded: bool
    """Whether there are more ranks than cores."""
    writes: bool = False
    """Whether every rank can also write the other ranks' private arrays directly."""
    quick: bool = False
    """Whether the kernel reads and writes about as fast as a rank copies from shared memory."""


@dataclass(frozen=True)
class Config:
    """How calls are executed: pass it to `init` or `spawn`.

    All ranks must pass the same slice_bytes, segment_bytes, most_slices, in_flight, profile and
    pull_bytes, since these decide which messages are sent, and agree on shared_memory.  Otherwise
    `init` raises MismatchError.  The other settings may differ between ranks.

    Raises:
        ValueError: a setting has another type, or is out of its range.

    Example:
        >>> config = rr.Config(slice_bytes=1 << 20, log_messages=True)
        >>> rr.spawn(lambda comm: comm.all_reduce(np.ones(3)), 2, config=config)[0]
        array([2., 2., 2.])
    """

    __module__ = "ringreduce"

    slice_bytes: int | None = None
    """Length of a slice, in bytes; every slice goes through the schedule on its own.

    None: 512 KiB across nodes, so that one slice crosses the network while nodes reduce others;
    64 MiB on one node, where there is nothing to overlap; 64 KiB to 4 MiB if copied through shared
    memory, so that slices stay in the caches.
    """
    segment_bytes: int | None = None
    """Longer messages are sent in segments of this size, in bytes, to be reduced in the cache.

    None: 1 MiB on one node; 60 KiB across nodes, which MPIs send without a handshake.
    """
    most_slices: int = 1024
    """The most slices of a call.  Larger arrays have longer slices."""
    in_flight: int | None = None
    """Slices in flight at once.  None: 1 on one node, 2 across nodes."""
    staged_bytes: int | None = None
    """Arrays up to this size, in bytes, are copied to memory whose messages are set up once.

    None: 16 KiB on one node, 128 KiB across nodes.
    """
    kept_messages: int = 16384
    """Messages of larger arrays that stay set up for the next call on the same arrays."""
    kept_plans: int = 64
    """Plans that are cached; the least recently used plan is dropped first."""
    profile: Profile = field(default_factory=Profile)
    """Speed of links and cores: decides the algorithm."""
    synchronous_sends: bool = False
    """Complete every send over MPI only when it is received: finds schedules that need buffers."""
    shared_memory: bool | None = None
    """Whether ranks of one host exchange data through shared memory, if the host allows it.

    None: yes with `init`, no with `spawn`.  A communicator of `init` has the decision.
    """
    pull_bytes: int | None = None
    """Arrays from this size on, in bytes, are read directly from the other ranks' private memory.

    Smaller arrays are copied in and out of shared memory.  Applies to ranks that share memory, if
    the system lets them read each other's memory.  None: 4 MiB, and 8 MiB with more ranks than
    cores; other lengths for the algorithms that "auto" takes, such as 16 and 32 MiB for an
    all-reduce by "two_shot", and less where the kernel copies quickly: see `planning.select`.
    """
    memory: Memory | None = None
    """Set by the communicator if its ranks share memory; leave it out."""
    node_memory: Memory | None = None
    """Set by the communicator if the ranks of each of several nodes share memory; leave it out."""
    log_messages: bool = False
    """Record every message in ``Communicator.message_log``."""

    def __post_init__(self) -> None:
        for name in (*_COUNTS, *_SWITCHES):
            value, wanted = getattr(self, name), "True or False"
            right = isinstance(value, bool)
            if name in _COUNTS:
                wanted = f"an int of at least {_COUNTS[name]}"
                right = isinstance(value, int) and value >= _COUNTS[name]
            is_default = value is None and getattr(Config, name) is None
            if not (right or is_default):
                raise ValueError(f"Config: {name} is {shown(value)}; pass {wanted}")
        if not isinstance(self.profile, Profile):
            raise ValueError(
                f"Config: profile is {shown(self.profile)}; "
                "pass a ringreduce.schedules.cost.Profile"
            )

    @property
    def single_copy_from(self) -> int | None:
        """The least bytes of an array that peers read directly; None if they read none.

        `planning.select.is_single_copy` has some exceptions.

        :meta private:
        """
        if self.memory is None or not self.memory.single_copy:
            return None
        usual = _SINGLE_COPY_IF_CROWDED if self.memory.crowded else _SINGLE_COPY
        return self.pull_bytes or usual

    @property
    def of_all_ranks(self) -> tuple[tuple[str, str], ...]:
        """The settings that decide which messages are sent, as text, to compare between ranks.

        The sizes of caches may differ between ranks.  `memory` needs no comparison: all ranks
        derive it together.

        :meta private:
        """
        return tuple((name, repr(getattr(self, name))) for name in _OF_ALL_RANKS)


_SINGLE_COPY, _SINGLE_COPY_IF_CROWDED = 4 << 20, 8 << 20
"""Bytes from which on a direct read was measured to be faster than a copy in and out."""
_COUNTS = {
    "slice_bytes": 1,
    "segment_bytes": 1,
    "most_slices": 1,
    "in_flight": 1,
    "kept_messages": 1,
    "kept_plans": 1,
    "pull_bytes": 1,
    "staged_bytes": 0,
}
"""The settings that are whole numbers, with the least value of each."""
_OF_ALL_RANKS = (
    "slice_bytes",
    "segment_bytes",
    "most_slices",
    "in_flight",
    "profile",
    "pull_bytes",
)
_SWITCHES = ("synchronous_sends", "shared_memory", "log_messages")
DEFAULT_TIMEOUT_S = 600.0
"""Seconds without progress until a call raises PeerTimeoutError."""
LONGEST_S = 1e9
"""Seconds of the longest timeout, 30 years: more does not fit into the clocks of locks."""
TRANSPORTS = ("auto", "mpi", "sockets", "shm")
"""How ranks may exchange data, as `ringreduce.init` names it."""


@dataclass(frozen=True)
class Environment:
    """The variables that the launcher sets for its ranks; None for one that is not set."""

    expected_size: int | None = None
    """Ranks that were asked for."""
    timeout_s: float | None = None
    """Seconds without progress."""
    transport: str | None = None
    """As for `init`."""
    nodes: tuple[int, ...] | None = None
    """Ranks of each node."""
    trace: Path | None = None
    """The file that shows what ranks do over time: .json, .svg or .png."""
    interface: str | None = None
    """The network interface by which ranks of other hosts reach this one."""
    port: int | None = None
    """Where ranks without MPI meet.  The ports above it are for data: one for each local rank."""
    secret: str | None = field(default=None, repr=False)
    """What a process has to know to take part in a job without MPI."""
    launched: bool = False
    """Whether a process manager of an MPI started this process."""

    @property
    def secret_key(self) -> bytes:
        """Return a key for hashes; empty if there is no secret."""
        return (
            blake2b(self.secret.encode("utf-8", "surrogateescape")).digest() if self.secret else b""
        )

    @classmethod
    def read(cls, variables: Mapping[str, str] = os.environ) -> Self:
        """Read the variables; an empty one counts as not set.

        Raises ValueError naming the variable that cannot be parsed.
        """
        values: dict[str, Any] = {"launched": any(name in variables for name in RANK_VARIABLES)}
        for field_name, (parse, wanted) in _VARIABLES.items():
            name = f"RINGREDUCE_{field_name.upper()}"
            if text := variables.get(name):
                try:
                    values[field_name] = parse(text)
                except ValueError:
                    raise ValueError(
                        f"environment variable {name} is {text!r}; wanted {wanted}"
                    ) from None
        return cls(**values)


COMPILING: list[Lock] = []
"""The lock that is held while this process compiles: its ranks that are threads wait longer."""


def as_seconds(where: str, timeout_s: Any) -> Any:
    """Return a timeout, a number of any type, as a float of at most `LONGEST_S`; None stays None.

    Raises ValueError, in the name of the call `where`, unless it is above 0.
    """
    if timeout_s is None:
        return None
    kind = getattr(getattr(timeout_s, "dtype", None), "kind", "f")
    seconds = math.nan
    if hasattr(timeout_s, "__float__") and not isinstance(timeout_s, bool) and kind in "iufV":
        with suppress(TypeError, ValueError, OverflowError):
            whole = isinstance(timeout_s, Rational)  # may be too large for a float
            seconds = float(min(timeout_s, LONGEST_S) if whole else timeout_s)
    if not seconds > 0:
        raise ValueError(f"{where}: timeout_s is {timeout_s!r:.99}; pass seconds, above 0")
    return min(seconds, LONGEST_S)


def _seconds(text: str) -> float:
    return float(as_seconds("", float(text)))


def _transport(text: str) -> str:
    if text not in TRANSPORTS:
        raise ValueError(text)
    return text


def _node_sizes(text: str) -> tuple[int, ...]:
    return tuple(int(size) for size in text.split(","))


_LAST_PORT = 65534


def _port(text: str) -> int:
    port = int(text)
    if not 1 <= port <= _LAST_PORT:
        raise ValueError(text)
    return port


def trace_file(text: str) -> Path:
    """Return the path of a trace.  Raises ValueError for another suffix."""
    path = Path(text).resolve()
    if path.suffix not in (".json", ".svg", ".png"):
        raise ValueError(f"--trace is {text!r}; wanted a name that ends in .json, .svg or .png")
    return path


_VARIABLES: dict[str, tuple[Callable[[str], Any], str]] = {
    "expected_size": (int, "a whole number"),
    "timeout_s": (_seconds, "seconds, above 0"),
    "transport": (_transport, "auto, mpi, sockets or shm"),
    "nodes": (_node_sizes, "the ranks of each node, such as 3,1,2"),
    "trace": (trace_file, "a name that ends in .json, .svg or .png"),
    "interface": (str, "the name of a network interface"),
    "port": (_port, f"a port from 1 to {_LAST_PORT}"),
    "secret": (str, "a text"),
}
"""The parser of each variable, and the text of the wanted value."""
