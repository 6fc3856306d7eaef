"""Record what this rank does over time, for ``--trace`` and RINGREDUCE_TRACE.

The events of a rank are in a file that its process maps, the *part*: they outlive a killed rank.
`trace.traces` makes one file of the parts of all ranks.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import cycle
from pathlib import Path
from time import perf_counter_ns

import numpy as np

from ringreduce.compiler.records import address_of, array_address, size_of
from ringreduce.trace.ring import WORDS_BYTES, EventRing, words_of

TRACE = "RINGREDUCE_TRACE"
SPAN, WAIT, CALL, ASYNC, MESSAGE = b"span", b"wait", b"call", b"async", b"message"
"""Kinds of events: a block of code, a wait for a Work, a collective for which the thread waits, a
collective of the progress thread, a message."""
MOST = 100_000
"""The most events of a part that Python records, and the most of compiled code: the last ones."""
HEADER = struct.Struct("<qdd")
"""Number of the rank; seconds to add to its times; their error in seconds."""
EVENT = struct.Struct(f"<qq{WORDS_BYTES}sq")
"""Begin in ns, bytes, `ring.WORDS`, end.  The end is written last: an event that a kill has torn
ends before it begins."""
_pack_into = EVENT.pack_into
PART_BYTES = HEADER.size + 2 * MOST * EVENT.size
"""Size of a part: the events of Python, then those of compiled code."""


class Recorder:
    """Records the events of a rank in a part beside the file `path`."""

    def __init__(self, path: Path, rank: int) -> None:
        self.part = path.with_name(f"{path.name}.{rank}.{os.getpid()}.part")
        with open(self.part, "w+b") as file:
            os.posix_fallocate(file.fileno(), 0, PART_BYTES)
            self.memory = mmap.mmap(file.fileno(), 0)
        HEADER.pack_into(self.memory, 0, rank, 0.0, 0.0)
        self.places = cycle(range(HEADER.size, HEADER.size + MOST * EVENT.size, EVENT.size))
        self._ring = np.zeros(size_of(EventRing) // 8, np.int64)
        ring = EventRing(array_address(self._ring))
        events = np.frombuffer(self.memory, np.uint8)[HEADER.size + MOST * EVENT.size :]
        ring.events, ring.most = array_address(events), MOST
        self.ring = address_of(ring)
        """The address of the `EventRing` for compiled code."""
        self.write: Callable[[], None] = lambda: None
        """Makes one file of all parts; does nothing if the launcher makes it."""

    def add(self, kind: bytes, name: str, begin_ns: int, nbytes: int = 0, how: str = "") -> None:
        """Record an event that ends now; `begin_ns` is on the clock of `time.perf_counter_ns`.

        `how`: the algorithm of a call; ``"to 1"`` or ``"from 1"`` of a message.
        """
        words, end_ns = words_of(kind, name, how), perf_counter_ns()
        _pack_into(self.memory, next(self.places), begin_ns, nbytes, words, end_ns)


RECORDERS: list[Recorder] = []
"""The recorder of this process; empty: nothing is recorded."""


def finish() -> None:
    """Call `Recorder.write`, if this process records."""
    for recorder in RECORDERS:
        recorder.write()


class _Span:
    """Records its ``with`` block."""

    __slots__ = ("_begin_ns", "_words")

    def __init__(self, words: bytes) -> None:
        self._words = words

    def __enter__(self) -> None:
        self._begin_ns = perf_counter_ns()

    def __exit__(self, *_: object) -> None:
        end_ns = perf_counter_ns()
        for recorder in RECORDERS:
            place = next(recorder.places)
            _pack_into(recorder.memory, place, self._begin_ns, 0, self._words, end_ns)


_NOTHING = nullcontext()


def waiting(name: str = "wait") -> AbstractContextManager[None]:
    """Return a context manager that records its block as a wait."""
    return _Span(words_of(WAIT, name)) if RECORDERS else _NOTHING


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
    return _Span(words_of(SPAN, name)) if RECORDERS else _NOTHING
