"""Instructions for shared memory, as records.  `shm_instructions` derives them from plans."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

SLOT = 3
"""A buffer besides INPUT, OUTPUT and SCRATCH: a rank's data of the current round."""

MESSAGE = 4
"""One more buffer: memory for messages between hosts that begin with the header of the call."""

PAGE_BYTES = 4 << 10
"""Bytes of a page: the kernel reads and writes other processes' memory by pages."""


class Operand(NamedTuple):
    """Bytes of a buffer from an offset on."""

    rank: int
    buffer: int
    """INPUT, OUTPUT, SCRATCH, SLOT or MESSAGE."""
    offset: int

    def after(self, nbytes: int) -> Operand:
        return self._replace(offset=self.offset + nbytes) if nbytes else self


class FreeSlot(NamedTuple):
    """Wait until the slot of a round may be written, and reserve memory for the round's data."""

    round: int
    """Number of the round in the program, from 1."""
    nbytes: int = 0
    unless_shared: int | None = None
    """INPUT or OUTPUT: reserve nothing if this buffer of the rank is shared memory."""


class Post(NamedTuple):
    """Publish this rank's part of a round."""

    round: int
    exposes: Operand | None = None
    """Memory that peers read in place of the slot, if this buffer of the rank is shared memory."""


class Wait(NamedTuple):
    """Wait until a peer has posted a round."""

    peer: int
    round: int
    reads: bool
    """Whether the rank reads data of the round, and so compares the header.

    Otherwise it waits until the peer has completed the round before; the peer may be further on.
    """


class CopyBytes(NamedTuple):
    """``into = source``; a rank may write to OUTPUT of a peer."""

    into: Operand
    source: Operand
    nbytes: int
    unless_shared: int | None = None
    """INPUT or OUTPUT: copy nothing if this buffer of the rank is shared memory."""


class Reduce(NamedTuple):
    """``into`` = the sources, reduced from left to right."""

    into: Operand
    sources: tuple[Operand, ...]
    """Two or more."""
    nbytes: int
    finishes: bool
    """Whether the result has all contributions; a mean is divided then."""
    direct: tuple[Operand, ...] = ()
    """Places in OUTPUT of peers: the result is written to those that are shared memory."""
    writes_private: bool = False
    """Whether the result is written to the other ones of these places, too."""
    staged: Operand | None = None
    """Place in this rank's slot for the result, unless all readers were written directly."""
    readers: int = 0
    """Number of ranks that read the result; 0 if it is single-copy."""


class Pause(NamedTuple):
    """Return to Python: signal handlers run, and the call counts as making progress."""


class Start(NamedTuple):
    """Start a message to or from another host."""

    message: int
    """Index in `Instructions.messages`."""


class Complete(NamedTuple):
    """Wait until a message is complete, and compare the header if it has been received with one."""

    message: int


Instruction = FreeSlot | Post | Wait | CopyBytes | Reduce | Pause | Start | Complete


class HostMessage(NamedTuple):
    """A message to or from a rank of another host."""

    step: int
    peer: int
    receives: bool
    place: Operand
    """The data.  If the message is `signed`, they are in MESSAGE, behind the header."""
    nbytes: int
    """Bytes of the data that are sent, or the most that are received."""
    signed: bool
    """Whether the message begins with the header of the call."""
    data_bytes: int | None
    """Bytes of the data; None: the message is the header alone, and data follow in another one."""


class Instructions(NamedTuple):
    instructions: tuple[Instruction, ...]
    rounds: tuple[int, ...]
    """Number of rounds of each slice, the same on all ranks of a host."""
    slot_bytes: int
    """The most bytes that any rank stages in a round."""
    scratch: int
    """Elements of SCRATCH that the rank needs."""
    single_copy: bool
    """Whether peers read the data in place, in the rank's own memory."""
    waits_for_readers: bool
    """Whether the last round of a slice only waits for the readers of the last step."""
    publishes: bool
    """Whether ranks publish the locations of the data of a round and of OUTPUT."""
    notes: tuple[tuple[tuple[int, str, int, int], ...], ...]
    """(step, "send" or "recv", peer, bytes of data) of each slice: for the message log."""
    messages: tuple[HostMessage, ...] = ()
    """The messages to and from ranks of other hosts."""
    message_bytes: int = 0
    """Bytes of MESSAGE."""
    round_steps: tuple[int, ...] = ()
    """The step of each round, if some steps have messages between hosts alone; else empty."""

    def step_of(self, number: int) -> int:
        if self.round_steps:
            return self.round_steps[max(number, 1) - 1]
        for rounds in self.rounds:
            if number <= rounds:
                break
            number -= rounds
        return max(min(number, rounds - self.waits_for_readers) - 1, 0)


def pushed_bytes(nbytes: int, part: float) -> int:
    """Return how many bytes of a message its sender writes: whole pages, if not all bytes."""
    return nbytes if part >= 1 else int(nbytes * part) // PAGE_BYTES * PAGE_BYTES


def join(slices: Sequence[Instructions], slices_without_pause: int) -> Instructions:
    """Join the instructions of one rank for all slices of a plan, all or none of them single-copy.

    A pause follows each `slices_without_pause` slices.
    """
    if len(slices) == 1:
        return slices[0]
    joined: list[Instruction] = []
    rounds = 0
    for index, each in enumerate(slices):
        if index and index % slices_without_pause == 0:
            joined.append(Pause())
        for instr in each.instructions:
            if isinstance(instr, FreeSlot | Post | Wait):
                instr = instr._replace(round=rounds + instr.round)
            joined.append(instr)
        rounds += sum(each.rounds)
    return Instructions(
        tuple(joined),
        tuple(count for each in slices for count in each.rounds),
        max(each.slot_bytes for each in slices),
        max(each.scratch for each in slices),
        slices[0].single_copy,
        slices[0].waits_for_readers,
        any(each.publishes for each in slices),
        tuple(notes for each in slices for notes in each.notes),
    )
