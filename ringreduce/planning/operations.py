"""The operations of a plan: messages between spans of memory, folds and copies.

A plan counts in elements, not bytes.  It names three buffers: the caller's INPUT and OUTPUT, and
SCRATCH.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

INPUT, OUTPUT, SCRATCH = range(3)


class Span(NamedTuple):
    """Elements `start` to ``stop - 1`` of INPUT, OUTPUT or SCRATCH."""

    buffer: int
    start: int
    stop: int


INSIDE, BESIDE = "inside", "beside"
INSIDE_BYTES = 4096
"""The longest message, in bytes, that contains the call's signature.

The signature of a longer message is sent before it, as a message of its own.  So the first message
that a peer sends in a slice is at most this long, plus the signature.
"""


class PlannedMessage(NamedTuple):
    """One message.  The first message of an ordered pair in a slice carries the signature."""

    peer: int
    span: Span
    signature: str | None
    """INSIDE the message, BESIDE it in a message of its own, or None."""


class Fold(NamedTuple):
    """``into = sources[0] op sources[1] op ...``, from left to right; at least two sources."""

    sources: tuple[Span, ...]
    into: Span
    finishes: bool
    """Whether `into` now has every contribution; a mean is divided here."""


class Copy(NamedTuple):
    source: Span
    into: Span


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """One step of the schedule, or one part of a step: pack, send and receive, fold.

    A step that folds long messages may be divided into parts, one for each segment: then a segment
    is folded while it is in the cache.  The first part starts all sends of the step, and the last
    part waits for them.
    """

    index: int
    packs: tuple[Copy, ...]
    """Copies to scratch, made before the sends, of chunks that are sent but are not contiguous."""
    recvs: tuple[PlannedMessage, ...]
    sends: tuple[PlannedMessage, ...]
    folds: tuple[Fold, ...]
    more_parts: bool = False
    """Whether another part of the same step follows."""

    @property
    def reads(self) -> list[Span]:
        folded = [source for fold in self.folds for source in fold.sources]
        return [*(m.span for m in self.sends), *folded, *(copy.source for copy in self.packs)]

    @property
    def writes(self) -> list[Span]:
        copied = [copy.into for copy in self.packs]
        return [*copied, *(m.span for m in self.recvs), *(fold.into for fold in self.folds)]


class PlannedSlice(NamedTuple):
    """The steps of one slice, and the copies that complete its result."""

    steps: tuple[PlannedStep, ...]
    final_copies: tuple[Copy, ...]
    """Copies to OUTPUT after the last step, of results that are elsewhere."""
    scratch: int
    """Elements of scratch that the slice needs."""


@dataclass(frozen=True, slots=True)
class ChunkOffsets:
    """The position of one chunk of one slice, in elements."""

    input: int
    """Offset in INPUT; meaningless if the rank does not hold the chunk before."""
    output: int
    """Offset in OUTPUT; meaningless if the rank does not hold the chunk after."""
    count: int
