"""What a plan is made of: spans of memory, the messages between them, folds and copies.

It speaks of elements in three buffers: the caller's INPUT, the OUTPUT, and SCRATCH.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

INPUT, OUTPUT, SCRATCH = range(3)


class Span(NamedTuple):
    """Elements ``start`` to ``stop`` of one of the three buffers."""

    buffer: int
    start: int
    stop: int


INSIDE, BESIDE = "inside", "beside"
INSIDE_BYTES = 4096
"""Up to this size a message carries the call's signature inside; above, in a message before it.

So the first message that a peer sends in a flow is never longer than this and the signature.
"""


class Message(NamedTuple):
    """One message.  The first of its ordered pair in a slice carries the call's signature."""

    peer: int
    span: Span
    signature: str | None
    """INSIDE, BESIDE or None."""


class Fold(NamedTuple):
    """``into`` = the sources, two or more, folded from left to right.

    `finishes` says that all contributions are in afterwards.
    """

    sources: tuple[Span, ...]
    into: Span
    finishes: bool


class Copy(NamedTuple):
    """``into = source``."""

    source: Span
    into: Span


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """A step of the schedule, or a part of one, with its memory: pack, exchange, fold.

    Long messages that are folded come in parts, each folded while it is in the cache: the first
    part starts all sends, and the last one awaits them.
    """

    index: int
    packs: tuple[Copy, ...]
    recvs: tuple[Message, ...]
    sends: tuple[Message, ...]
    folds: tuple[Fold, ...]
    goes_on: bool = False
    """Whether another part of the same step follows."""


class PlannedSlice(NamedTuple):
    """One slice's way through the schedule, and the copies that settle its result at the end."""

    steps: tuple[PlannedStep, ...]
    settles: tuple[Copy, ...]
    scratch: int
    """Elements of scratch that it needs."""


@dataclass(frozen=True, slots=True)
class Placed:
    """Where one chunk of one slice lies in INPUT and OUTPUT, and how many elements it has."""

    before: int
    after: int
    count: int
