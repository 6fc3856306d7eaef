"""Record what this rank does over time, for ``--trace`` and RINGREDUCE_TRACE.

The events of a rank are in a file that its process maps, the *part*: they outlive a killed rank.
`trace.traces` makes one file of the parts of all ranks.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import count
from pathlib import Path

TRACE = "RINGREDUCE_TRACE"
SPAN, WAIT, CALL, ASYNC, MESSAGE = b"span", b"wait", b"call", b"async", b"message"
"""Kinds of events: a block of code, a wait for a Work, a collective for which the thread waits, a
collective of the progress thread, a message."""
MOST = 100_000
"""The most events of a part: the last ones."""
HEADER = struct.Struct("<qdd")
"""Number of the rank; seconds to add to its times; their error in seconds."""
EVENT = struct.Struct("<dq8s64s32sd")
"""Begin in seconds, bytes, kind, name, algorithm or peer, end.  The end is written last: an event
that a kill has torn ends before it begins."""


class Recorder:
    """Records the events of a rank in a part beside the file `path`."""

    def __init__(self, path: Path, rank: int) -> None:
        self.part = path.with_name(f"{path.name}.{rank}.{os.getpid()}.part")
        with open(self.part, "w+b") as file:
            os.posix_fallocate(file.fileno(), 0, HEADER.size + MOST * EVENT.size)
            self.memory = mmap.mmap(file.fileno(), 0)
        HEADER.pack_into(self.memory, 0, rank, 0.0, 0.0)
        self._count = count()
        self.write: Callable[[], None] = lambda: None
        """Makes one file of all parts; does nothing if the launcher makes it."""

    def add(self, kind: bytes, name: str, begin_s: float, nbytes: int = 0, how: str = "") -> None:
        """Record an event that ends now; `begin_s` is on the clock of `time.perf_counter`.

        `how`: the algorithm of a call; ``"to 1"`` or ``"from 1"`` of a message.
        """
        at = HEADER.size + next(self._count) % MOST * EVENT.size
        words = kind, name.encode(errors="replace"), how.encode()
        EVENT.pack_into(self.memory, at, begin_s, nbytes, *words, time.perf_counter())


RECORDERS: list[Recorder] = []
"""The recorder of this process; empty: nothing is recorded."""


def finish() -> None:
    """Call `Recorder.write`, if this process records."""
    for recorder in RECORDERS:
        recorder.write()


class _Span:
    """Records its ``with`` block."""

    def __init__(self, name: str, kind: bytes) -> None:
        self._name, self._kind = name, kind

    def __enter__(self) -> None:
        self._begin_s = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        for recorder in RECORDERS:
            recorder.add(self._kind, self._name, self._begin_s)


_NOTHING = nullcontext()


def waiting(name: str = "wait") -> AbstractContextManager[None]:
    """Return a context manager that records its block as a wait."""
    return _Span(name, WAIT) if RECORDERS else _NOTHING


def span(name: str) -> AbstractContextManager[None]:
    """Return a context manager that records its ``with`` block in the trace.

    ``ringreduce run --trace FILE`` writes a trace.  Without it a span takes less than 1 µs.

    Args:
        name: the name of the block; more than 64 bytes are cut off.

    Returns:
        The context manager.

    Raises:
        TypeError: `name` is no str.

    Example:
        >>> with rr.span("square"):
        ...     x = np.arange(3) ** 2
    """
    if not isinstance(name, str):
        raise TypeError(f"span: name is of type {type(name).__name__}; pass a str")
    return _Span(name, SPAN) if RECORDERS else _NOTHING
