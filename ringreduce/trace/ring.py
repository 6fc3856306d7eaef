"""The events that compiled code records: see `trace.recorder`, which has the format of an event."""

from __future__ import annotations

import struct
from functools import lru_cache

import numpy as np

from ringreduce.compiler.memory import copy, nanoseconds, store
from ringreduce.compiler.records import Address, Record, Word, compilable, fetch_and_add, record

WORDS = struct.Struct("<8s64s32s")
"""Kind of an event, its name, and its algorithm or peer."""
_WORD, WORDS_BYTES = 8, 104
_WORDS = 2 * _WORD
_END = _WORDS + WORDS_BYTES
EVENT_BYTES = _END + _WORD


@record
class EventRing(Record):
    """Memory for events of one process, of any thread.  A new event replaces the oldest one."""

    # Address of the memory.
    events: Address
    # Events for which there is space.
    most: Word
    # Events ever recorded.
    count: Word


@lru_cache(maxsize=1024)
def words_of(kind: bytes, name: str, how: str = "") -> bytes:
    """Return the words of an event; `how` is the algorithm, or the direction and the peer."""
    return WORDS.pack(kind, name.encode(errors="replace"), how.encode())


def kept_words(kind: bytes, name: str, how: str) -> np.ndarray:
    """Return the words of an event in memory whose address `record_event` takes."""
    return np.frombuffer(words_of(kind, name, how), np.int64)


@compilable
def record_event(
    ring: EventRing, begin_ns: int, nbytes: int, words: Address, clock: Address
) -> None:
    """Record an event that ends now; `clock` is two words of scratch."""
    event = ring.events + fetch_and_add(ring, "count", 1) % ring.most * EVENT_BYTES
    store(event, begin_ns)
    store(event + _WORD, nbytes)
    copy(event + _WORDS, words, WORDS_BYTES)
    store(event + _END, nanoseconds(clock))
