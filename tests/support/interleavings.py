"""Walk every interleaving of ranks that run the functions of `ringreduce.shm.protocol` itself.

The functions run uncompiled, one access to shared memory a step: a poll, a header, a location, a
word of data, a sequence number.  What a rank does between two accesses concerns itself alone.
A function that is not over is run again from its beginning: it is given what it read before.  All
ranks see memory in the order in which it was written, as release and acquire order make it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np

from ringreduce.compiler.memory import load, store
from ringreduce.compiler.records import address_of, load_acquire, size_of, store_release
from ringreduce.shm import protocol
from ringreduce.shm.layout import (
    DATA_OFFSET,
    DONE,
    MISMATCH,
    PUBLISHES_DATA,
    PUBLISHES_NOTHING,
    FreeSlotRecord,
    Peer,
    PostRecord,
    Program,
    Slot,
    Team,
    WaitRecord,
)

_SLOT_BYTES = 64
_DATA_BYTES = 64
_RING_OFFSET, _RING_BYTES = 2 * _SLOT_BYTES, 3 * _DATA_BYTES
_SEGMENT_BYTES = _RING_OFFSET + _RING_BYTES
SMALL = {
    "SLOT_BYTES": _SLOT_BYTES,
    "RING_OFFSET": _RING_OFFSET,
    "RING_BYTES": _RING_BYTES,
    "RING_TURN_BYTES": 2 * _DATA_BYTES,
}
"""Constants of the protocol for segments of a few words."""

_POST, _HEADER = protocol.post, protocol.copy_header
_LOCATION = protocol.copy_location


class TornError(AssertionError):
    """A rank has read data, or a header, of another round than it meant."""


class Rank(NamedTuple):
    """Where a rank is."""

    action: int
    """Index of the action it is in."""
    log: tuple[Any, ...]
    """The values that the accesses of that action have read so far; None for those that wrote."""
    memory: bytes
    """The rank's own records when the action began."""


class State(NamedTuple):
    """Where all ranks are, and the segments that they share."""

    ranks: tuple[Rank, ...]
    shared: bytes


def zero(kind: Any) -> Any:
    """A record in memory of its own, of zeros."""
    return kind.from_buffer(bytearray(size_of(kind)))


class PauseError(Exception):
    """The rank has made its one access, and would make another."""


class Walk:
    """Ranks that each post `rounds` rounds, and read those of all others or of rank 0 alone."""

    def __init__(
        self, ranks: int, rounds: int, from_root: bool = False, in_ring: bool = False
    ) -> None:
        self.shared = np.zeros(ranks * _SEGMENT_BYTES, np.uint8)
        self.segments = [self.shared.ctypes.data + r * _SEGMENT_BYTES for r in range(ranks)]
        private = size_of(Team) + (ranks - 1) * size_of(Peer) + size_of(Program)
        self.memory = np.zeros((ranks, private), np.uint8)
        self.actions = [self._prepare(r, rounds, from_root, in_ring) for r in range(ranks)]
        self.me = 0
        self._log: list[Any] = []
        self._at, self._moved = 0, False

    # --- what a rank does ---

    def _prepare(
        self, me: int, rounds: int, from_root: bool, in_ring: bool
    ) -> list[Callable[[], int]]:
        """Write the records of a rank; its actions."""
        program = Program(self.memory[me].ctypes.data)
        team = Team(address_of(program) + size_of(Program))
        peers = [rank for rank in range(len(self.segments)) if rank != me]
        team.spins, team.peer_count, team.segment = 1, len(peers), self.segments[me]
        for index, rank in enumerate(peers):
            protocol.peer_of(team, index).segment = self.segments[rank]
        program.publishes = PUBLISHES_DATA if in_ring else PUBLISHES_NOTHING
        writes = me == 0 or not from_root
        reads = [index for index, rank in enumerate(peers) if rank == 0 or not from_root]
        return [
            action
            for number in range(1, rounds + 1)
            for action in self._round(program, team, number, writes, reads)
        ]

    def _round(
        self, program: Program, team: Team, number: int, writes: bool, reads: Sequence[int]
    ) -> Iterator[Callable[[], int]]:
        """The actions of a rank in a round, which is a call of its own."""

        def free() -> int:
            program.header.call_number = number
            instruction = zero(FreeSlotRecord)
            instruction.nbytes = _DATA_BYTES
            return protocol.free_slot(program, team, instruction, number)

        def write() -> int:
            address = team.slot.address
            self.access(lambda: store(address, number))
            return DONE

        def post() -> int:
            protocol.post(program, team, zero(PostRecord), number)
            return DONE

        yield free
        if writes:
            yield write
        yield post
        for index in reads:
            yield lambda index=index: self._wait(program, team, index, number)
            yield lambda index=index: self._read(protocol.peer_of(team, index), number)

    def _wait(self, program: Program, team: Team, index: int, number: int) -> int:
        instruction = zero(WaitRecord)
        instruction.peer, instruction.reads = index, 1
        return protocol.wait(program, team, instruction, number)

    def _read(self, peer: Peer, number: int) -> int:
        address = peer.slot.address
        if self.access(lambda: load(address)) != number:
            raise TornError(f"rank {self.me} reads other data in round {number}")
        return DONE

    # --- one access a step ---

    def access(self, make: Callable[[], Any]) -> Any:
        """Make an access to shared memory; or give what it gave when it was made before."""
        if self._at < len(self._log):
            self._at += 1
            return self._log[self._at - 1]
        if self._moved:
            raise PauseError
        self._moved = True
        self._log.append(make())
        self._at += 1
        return self._log[-1]

    def owns(self, address: int) -> bool:
        """Whether an address is in the segment of the rank that moves."""
        return 0 <= address - self.segments[self.me] < _SEGMENT_BYTES

    def start(self) -> State:
        """The state before the first step."""
        ranks = tuple(Rank(0, (), memory.tobytes()) for memory in self.memory)
        return State(ranks, self.shared.tobytes())

    def after(self, state: State) -> Iterator[State]:
        """All states that one step of one rank leads to.  Raises TornError."""
        for me, rank in enumerate(state.ranks):
            if rank.action < len(self.actions[me]):
                self.shared[:] = np.frombuffer(state.shared, np.uint8)
                moved = self._step(me, rank)
                if moved != rank:
                    ranks = (*state.ranks[:me], moved, *state.ranks[me + 1 :])
                    yield State(ranks, self.shared.tobytes())

    def _step(self, me: int, rank: Rank) -> Rank:
        """Let a rank make one access, and go on up to the next one."""
        self.me, self._moved, memory = me, False, self.memory[me]
        while rank.action < len(self.actions[me]):
            memory[:] = np.frombuffer(rank.memory, np.uint8)
            self._log, self._at = list(rank.log), 0
            try:
                result = self.actions[me][rank.action]()
            except PauseError:
                return rank._replace(log=tuple(self._log))
            if result == MISMATCH:
                raise TornError(f"rank {me} reads another header in action {rank.action}")
            rank = Rank(rank.action + (result == DONE), (), memory.tobytes())
            if result != DONE:
                return rank
        return rank

    def finished(self, state: State) -> bool:
        """Whether all ranks have done all."""
        pairs = zip(state.ranks, self.actions, strict=True)
        return all(rank.action == len(actions) for rank, actions in pairs)


@contextmanager
def stepped(walk: Walk) -> Iterator[None]:
    """Let the protocol make its accesses to shared memory through a walk."""

    class SteppedLocation:
        """A location in a rank's own slot."""

        def __init__(self, address: int) -> None:
            self.__dict__["address_of"] = address

        def __setattr__(self, name: str, value: int) -> None:
            location = Slot(self.__dict__["address_of"]).input
            walk.access(lambda: setattr(location, name, value))

    class SteppedSlot(Slot):
        """A slot; fields of a peer's are read in one step each."""

        def _part(self, name: str) -> Any:
            part = getattr(super(), name)
            if walk.owns(address_of(self)):
                return part
            names = [field[0] for field in part._fields_]
            values = walk.access(lambda: tuple(getattr(part, each) for each in names))
            return SimpleNamespace(**dict(zip(names, values, strict=True)))

        @property
        def header(self) -> Any:
            return self._part("header")

        @property
        def input(self) -> Any:
            if walk.owns(address_of(self)):
                return SteppedLocation(address_of(self))
            return self._part("input")

        @property
        def output(self) -> Any:
            return self._part("output")

    stepping = {
        "Slot": SteppedSlot,
        "load_acquire": lambda *given: walk.access(lambda: load_acquire(*given)),
        "store_release": lambda *given: walk.access(lambda: store_release(*given)),
        "copy_header": lambda *given: walk.access(lambda: _HEADER(*given)),
        "copy_location": lambda *given: walk.access(lambda: _LOCATION(*given)),
    }
    with patch.multiple(protocol, **stepping, **SMALL):
        yield


def explore(walk: Walk) -> int:
    """Walk every interleaving; how many states there are.

    Raises TornError for a wrong read, AssertionError where no rank can go on.  States are kept by
    their hashes of 64 bits.
    """
    with stepped(walk):
        start = walk.start()
        seen, waiting = {hash(start)}, [start]
        while waiting:
            state = waiting.pop()
            following = list(walk.after(state))
            assert following or walk.finished(state), "no rank can go on"
            for each in following:
                if hash(each) not in seen:
                    seen.add(hash(each))
                    waiting.append(each)
    return len(seen)


# --- mistakes -------------------------------------------------------------------------------------


def one_slot(segment: int, sequence: int) -> Any:
    """`slot_of`, were there one slot."""
    return protocol.Slot(segment)


def sequence_first(program: Program, team: Team, instruction: PostRecord, sequence: int) -> None:
    """`post`, were the sequence number published before the header."""
    protocol.store_release(protocol.slot_of(team.segment, sequence), "sequence", sequence)
    _POST(program, team, instruction, sequence)


def no_wait(program: Program, team: Team, instruction: FreeSlotRecord, sequence: int) -> int:
    """`free_slot`, did it not wait."""
    slot = protocol.slot_of(team.segment, sequence)
    team.slot.address = address_of(slot) + DATA_OFFSET
    return DONE


MISTAKES: dict[str, Callable[..., Any]] = {
    "slot_of": one_slot,
    "post": sequence_first,
    "free_slot": no_wait,
}
"""By the function of the protocol that they replace."""
