"""Arrays in a memory file, each with two slots, so that a kill never tears them.

A process writes the slots that are not committed, and commits them all by one store of eight bytes.
If it is killed before that store, the file has the arrays of the last commit.  Another process that
has the descriptor of the file reads them.

The file begins with `_MAGIC` and a head of whole numbers, in the order of `_Head`.  Two tables of
one number for each array follow: which slot is committed.  The table of an even step is the first.
A description in JSON follows, and then the slots, each at a multiple of 64 bytes.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
import time
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from enum import IntEnum, auto
from typing import Any

import ml_dtypes  # noqa: F401  NumPy knows its dtypes by name from then on
import numpy as np

from ringreduce.system.memory_files import allocate, map_file, new_file

_MAGIC = b"ringreduce slots"
_FORMAT = 1
_WORD = 8
_ALIGNMENT = 64
NEVER = 2**63 - 1
"""A step that is not reached."""


class _Head(IntEnum):
    """Places of the numbers in the head."""

    MAGIC_LOW = 0
    MAGIC_HIGH = auto()
    FORMAT = auto()
    NBYTES = auto()
    """Bytes of the file."""
    GENERATION = auto()
    """The generation whose ranks write the file; 0: none may write it."""
    STEP = auto()
    """Number of commits since the first step of the run.  Its store is the commit."""
    COMMITTED_AT = auto()
    """When the last commit was made: nanoseconds of the monotonic clock; 0: never."""
    PAUSE_AT = auto()
    """The rank asks the supervisor after this step and all later ones; `NEVER`: it does not."""
    ARRAYS = auto()
    TEXT_BYTES = auto()


_WORDS = len(_Head)
# As whole numbers, for the code of every step: an enumeration takes several times as long.
_GENERATION, _STEP, _COMMITTED_AT, _PAUSE_AT = map(
    int, (_Head.GENERATION, _Head.STEP, _Head.COMMITTED_AT, _Head.PAUSE_AT)
)


@dataclass(frozen=True)
class Entry:
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    """The place of its first element in the whole array."""
    whole: tuple[int, ...]
    """The shape of the whole array, of which this is a shard; `shape` if it is no shard."""
    at: tuple[int, int]
    """The places of its slots in the file."""

    @property
    def nbytes(self) -> int:
        return int(np.dtype(self.dtype).itemsize) * math.prod(self.shape)


class Slots:
    """The arrays of the memory file with descriptor `file`; `entries`: name -> description."""

    def __init__(self, file: int, memory: np.ndarray) -> None:
        self.file, self._memory = file, memory
        self._closing = weakref.finalize(self, os.close, file)
        self._head = memory[: _WORDS * _WORD].data.cast("q")
        count, text_bytes = self._head[_Head.ARRAYS], self._head[_Head.TEXT_BYTES]
        begin, end = _WORDS * _WORD, (_WORDS + 2 * count) * _WORD
        tables = memory[begin:end].data.cast("q")
        self._tables = tables[:count], tables[count:]
        text = memory[end : end + text_bytes].tobytes()
        found = [Entry(**_tuples(fields)) for fields in json.loads(text)]
        self.entries: dict[str, Entry] = {entry.name: entry for entry in found}
        self._numbers = {entry.name: number for number, entry in enumerate(found)}
        self._written = [self._both(entry) for entry in found]
        self._read = [self._both(entry) for entry in found]
        for first, second in self._read:
            first.flags.writeable = second.flags.writeable = False

    @classmethod
    def new(cls, arrays: Mapping[str, np.ndarray], step: int = 0, generation: int = 1) -> Slots:
        """Make a file with these arrays committed.  Raises OSError if there is no memory."""
        entries = _entries(arrays)
        text = _text(entries)
        nbytes = entries[-1].at[1] + entries[-1].nbytes
        try:
            file = new_file()
        except (AttributeError, OSError):  # no such call, or it is forbidden
            with tempfile.TemporaryFile() as unnamed:
                file = os.dup(unnamed.fileno())
        try:
            allocate(file, nbytes)
            memory = map_file(file, nbytes)
        except BaseException:
            os.close(file)
            raise
        head = memory[: _WORDS * _WORD].view(np.int64)
        times = 0, NEVER
        head[_Head.FORMAT :] = _FORMAT, nbytes, generation, step, *times, len(entries), len(text)
        begin = (_WORDS + 2 * len(entries)) * _WORD
        memory[begin : begin + len(text)] = np.frombuffer(text, np.uint8)
        slots = cls(file, memory)
        for entry, (first, _) in zip(entries, slots._written, strict=True):
            first[...] = arrays[entry.name]
        memory[: len(_MAGIC)] = np.frombuffer(_MAGIC, np.uint8)  # the file is whole from here on
        return slots

    @classmethod
    def from_file(cls, file: int) -> Slots:
        """Open the file with this descriptor, and own it from then on.

        Raises ValueError if it is no such file, or was not finished.
        """
        nbytes = os.fstat(file).st_size
        if nbytes < _WORDS * _WORD:
            raise ValueError(f"a file of {nbytes} bytes is too short for arrays of a training step")
        memory = map_file(file, nbytes)
        if memory[: len(_MAGIC)].tobytes() != _MAGIC:
            raise ValueError(
                f"a file of something else: it does not begin with {_MAGIC.decode()!r}"
            )
        head = memory[: _WORDS * _WORD].view(np.int64)
        if head[_Head.FORMAT] != _FORMAT or head[_Head.NBYTES] != nbytes:
            raise ValueError(
                f"a file of format {head[_Head.FORMAT]} and {nbytes} bytes; wanted format "
                f"{_FORMAT} and {head[_Head.NBYTES]} bytes"
            )
        return cls(file, memory)

    @property
    def step(self) -> int:
        return self._head[_STEP]

    @property
    def generation(self) -> int:
        """The generation whose ranks write the file; 0: none may write it."""
        return self._head[_GENERATION]

    @property
    def committed_at(self) -> float:
        """When the last commit was made, in seconds of the monotonic clock; 0: never."""
        return self._head[_COMMITTED_AT] / 1e9

    def pause_at(self, step: int) -> None:
        """Have the rank ask the supervisor after this step; `NEVER`: it does not ask."""
        self._head[_PAUSE_AT] = step

    def revoke(self) -> None:
        """Let no rank write the file any more: each looks at the generation before it commits."""
        self._head[_GENERATION] = 0

    def begin_generation(self, generation: int) -> None:
        """Let the ranks of a generation write the file."""
        self._head[_GENERATION] = generation

    def restore(self, arrays: Mapping[str, np.ndarray], step: int) -> None:
        """Overwrite the committed arrays of a file that nobody uses; a kill leaves a mixture."""
        table = self._tables[self.step % 2]
        for name, array in arrays.items():
            number = self._numbers[name]
            committed = self._written[number][table[number]]
            committed.flags.writeable = True
            committed[...] = array
            committed.flags.writeable = False
        self._tables[step % 2][:] = table
        self._head[_STEP] = step

    def committed(self, name: str) -> np.ndarray:
        """Return the committed array; after the next commit `writable` returns this memory."""
        number = self._numbers[name]
        return self._read[number][self._tables[self._head[_STEP] % 2][number]]

    def writable(self, name: str) -> np.ndarray:
        """Return the slot of an array that is not committed."""
        number = self._numbers[name]
        return self._written[number][1 - self._tables[self._head[_STEP] % 2][number]]

    def commit(self, names: Iterable[str]) -> bool:
        """Commit the slots of `names`; return whether the rank asks the supervisor now."""
        step, numbers = self._head[_STEP], self._numbers
        before, table = self._tables[step % 2], self._tables[(step + 1) % 2]
        table[:] = before
        for name in names:
            number = numbers[name]
            table[number] = 1 - before[number]
        self._head[_COMMITTED_AT] = time.monotonic_ns()
        self._head[_STEP] = step + 1  # one store: a kill comes before it or after it
        return step + 1 >= self._head[_PAUSE_AT]

    def close(self) -> None:
        self._closing()

    def _both(self, entry: Entry) -> tuple[np.ndarray, np.ndarray]:
        first, second = (self._memory[at : at + entry.nbytes].view(entry.dtype) for at in entry.at)
        return first.reshape(entry.shape), second.reshape(entry.shape)


def is_storable(dtype: np.dtype[Any]) -> bool:
    """Return whether arrays of this dtype can be in a file: numbers in this machine's byte order.

    >>> is_storable(np.dtype("bfloat16")), is_storable(np.dtype("O")), is_storable(np.dtype(">f8"))
    (True, False, False)
    """
    try:
        known = np.dtype(dtype.name) == dtype
    except TypeError:
        return False
    return known and not dtype.hasobject and dtype.kind not in "SUMm"


def _entries(arrays: Mapping[str, np.ndarray]) -> list[Entry]:
    at = [(0, 0)] * len(arrays)
    while True:
        entries = [
            Entry(name, array.dtype.name, array.shape, (0,) * array.ndim, array.shape, places)
            for (name, array), places in zip(arrays.items(), at, strict=True)
        ]
        end, found = (_WORDS + 2 * len(entries)) * _WORD + len(_text(entries)), []
        for entry in entries:
            first = _aligned(end)
            second = _aligned(first + entry.nbytes)
            end = second + entry.nbytes
            found.append((first, second))
        if found == at:
            return entries
        at = found  # their text may be longer now, and move them once more


def _text(entries: Iterable[Entry]) -> bytes:
    """Return the description, of a length that is a multiple of 1 KiB."""
    text = json.dumps([asdict(entry) for entry in entries]).encode()
    return text.ljust(-(-len(text) // 1024) * 1024)


def _tuples(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(v) if isinstance(v, list) else v for name, v in fields.items()}


def _aligned(at: int) -> int:
    return -(-at // _ALIGNMENT) * _ALIGNMENT
