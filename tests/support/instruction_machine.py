"""Run the instructions of all ranks in Python, one at a time, in any order that they allow."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from ringreduce.planning.instructions import (
    MESSAGE,
    SLOT,
    Complete,
    CopyBytes,
    FreeSlot,
    HostMessage,
    Instruction,
    Operand,
    Pause,
    Post,
    Reduce,
    Start,
    Wait,
)
from ringreduce.planning.operations import INPUT, OUTPUT, SCRATCH

ITEMSIZE = 8
_SLOT_ELEMENTS = 1 << 14
_MESSAGE_ELEMENTS = 1 << 15
_PIECES = 3
"""Copies and reductions are cut in so many, with instructions of other ranks in between."""


class InstructionMachine:
    """The ranks, their memory, and how far each has come."""

    def __init__(
        self,
        programs: Sequence[Sequence[Instruction]],
        inputs: Sequence[np.ndarray],
        outputs: Sequence[np.ndarray],
        shared: Sequence[tuple[bool, bool]],
        hosts: Sequence[Sequence[int]] | None = None,
        messages: Sequence[Sequence[HostMessage]] = (),
    ) -> None:
        """`hosts`: the ranks of each; None: one.  `messages`: those between hosts, by rank."""
        self.programs, self.shared = programs, shared
        self.hosts = [range(len(programs))] if hosts is None else hosts
        self.messages = messages
        self.sent: dict[tuple[int, int], list[int]] = {}
        """(sender, receiver) -> the sender's messages that are not received yet, by index."""
        self.wanted: dict[tuple[int, int], list[int]] = {}
        """(sender, receiver) -> the receiver's messages that are not received yet, by index."""
        self.at = [0] * len(programs)
        self.piece = [0] * len(programs)
        self.memory = [
            {
                INPUT: x,
                OUTPUT: y,
                SCRATCH: np.full(_SLOT_ELEMENTS, -7, np.int64),
                MESSAGE: np.full(_MESSAGE_ELEMENTS, -8, np.int64),
            }
            for x, y in zip(inputs, outputs, strict=True)
        ]
        sizes = [instr.nbytes for own in programs for instr in own if isinstance(instr, FreeSlot)]
        self.most = max(sizes, default=0) // ITEMSIZE
        self.rings = [np.full(3 * self.most, -9, np.int64) for _ in programs]
        self.numbers = [[0, 0] for _ in programs]
        self.data: list[dict[int, tuple[np.ndarray, int]]] = [{} for _ in programs]
        """For each rank, by round: the array that peers read, and the first element."""
        self.taken = [0] * len(programs)
        self.buffers: list[dict[int, tuple[np.ndarray, int]]] = [{} for _ in programs]
        """For each rank, by rank: the array with the data of the round, and the first element."""
        self.left: list[tuple[np.ndarray, np.ndarray]] = list(zip(inputs, outputs, strict=True))
        """INPUT and OUTPUT as each left them."""

    def run(self, choice: random.Random) -> None:
        """Until all have come to their end.  Raises AssertionError if nobody can go on."""
        while any(at < len(programs) for at, programs in zip(self.at, self.programs, strict=True)):
            rank, turns = choice.randrange(len(self.programs)), choice.randint(1, 12)
            if not any([self.step(rank) for _ in range(turns)]):  # noqa: C419 - all of them
                moved = [self.step(other) for other in range(len(self.programs))]
                assert any(moved), f"nobody can go on: {self.at}"

    def step(self, rank: int) -> bool:
        """Let a rank do a part of its next instruction; False if it waits, or is at its end."""
        if self.at[rank] == len(self.programs[rank]):
            return False
        instr = self.programs[rank][self.at[rank]]
        if isinstance(instr, FreeSlot):
            others = set(next(host for host in self.hosts if rank in host)) - {rank}
            if any(self.latest(peer) < instr.round - 1 for peer in others):
                return False
            if instr.nbytes and (
                instr.unless_shared is None or not self.shared[rank][instr.unless_shared]
            ):
                self._take(rank, instr.nbytes // ITEMSIZE)
        elif isinstance(instr, Post):
            self.data[rank][instr.round] = self.buffers[rank].get(rank, (self.rings[rank], 0))
            if instr.exposes is not None and self.shared[rank][instr.exposes.buffer]:
                exposed = self.memory[rank][instr.exposes.buffer], instr.exposes.offset // ITEMSIZE
                self.data[rank][instr.round] = exposed
            self.numbers[rank][instr.round & 1] = instr.round
        elif isinstance(instr, Wait):
            if self.latest(instr.peer) < instr.round:
                return False
            if instr.reads:
                assert self.numbers[instr.peer][instr.round & 1] == instr.round
                self.buffers[rank][instr.peer] = self.data[instr.peer][instr.round]
        elif isinstance(instr, Start):
            message = self.messages[rank][instr.message]
            pair = (message.peer, rank) if message.receives else (rank, message.peer)
            queue = self.wanted if message.receives else self.sent
            queue.setdefault(pair, []).append(instr.message)
        elif isinstance(instr, Complete):
            if not self._is_over(rank, instr.message):
                return False
        elif not isinstance(instr, Pause) and not self._work(rank, instr):
            return True
        self.at[rank] += 1
        if self.at[rank] == len(self.programs[rank]):
            self._leave(rank)
        return True

    def _is_over(self, rank: int, index: int) -> bool:
        """Whether a message is received; a receive takes the data when it is asked for."""
        message = self.messages[rank][index]
        if not message.receives:
            return index not in self.sent[rank, message.peer]
        pair = message.peer, rank
        while index in self.wanted[pair]:
            if not self.sent.get(pair):
                return False
            into = self.messages[rank][self.wanted[pair].pop(0)]
            source = self.messages[message.peer][self.sent[pair].pop(0)]
            assert source.nbytes <= into.nbytes
            assert source.signed == into.signed
            count = source.nbytes // ITEMSIZE
            self._at(rank, into.place, count)[:] = self._at(rank, source.place, count)
        return True

    def _leave(self, rank: int) -> None:
        """The call is over: its arrays are the caller's again, who writes something else there."""
        arrays = self.memory[rank][INPUT], self.memory[rank][OUTPUT]
        self.left[rank] = arrays[0].copy(), arrays[1].copy()
        for array in arrays:
            array[...] = -5

    def _take(self, rank: int, count: int) -> None:
        """As `shm.executor` does, of a ring three times as long as the most that is taken."""
        begin = sum(self.buffers[rank].get(rank, (None, 0))[1:]) + self.taken[rank]
        if begin + count > (2 if 2 * count <= self.most else 3) * self.most:
            begin = 0
        self.buffers[rank][rank], self.taken[rank] = (self.rings[rank], begin), count

    def latest(self, rank: int) -> int:
        return max(self.numbers[rank])

    def _work(self, rank: int, instr: CopyBytes | Reduce) -> bool:
        """A piece of a copy or a fold; whether it was the last."""
        if (
            isinstance(instr, CopyBytes)
            and instr.unless_shared is not None
            and self.shared[rank][instr.unless_shared]
        ):
            return True
        count = instr.nbytes // ITEMSIZE
        begin, end = (count * (self.piece[rank] + i) // _PIECES for i in range(2))
        sources = instr.sources if isinstance(instr, Reduce) else (instr.source,)
        values = sum(self._at(rank, place, count)[begin:end] for place in sources)
        places = [instr.into]
        if isinstance(instr, Reduce):
            every = instr.writes_private
            places += [p for p in instr.direct if every or self.shared[p.rank][p.buffer]]
        if isinstance(instr, Reduce) and instr.staged is not None and len(places) <= instr.readers:
            places.append(instr.staged)
        for place in places:
            self._at(rank, place, count)[begin:end] = values
        self.piece[rank] = (self.piece[rank] + 1) % _PIECES
        return self.piece[rank] == 0

    def _at(self, rank: int, place: Operand, count: int) -> np.ndarray:
        memory, first = self.memory[place.rank].get(place.buffer), 0
        if place.buffer == SLOT:
            memory, first = self.buffers[rank][place.rank]
        assert memory is not None
        start = first + place.offset // ITEMSIZE
        return memory[start : start + count]
