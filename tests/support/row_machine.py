"""Carries out the rows of all ranks in Python, one at a time, in any order that they allow."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from ringreduce.planning.operations import INPUT, OUTPUT, SCRATCH
from ringreduce.planning.shm_instructions import (
    SLOT,
    Await,
    CopyBytes,
    MakeRoom,
    Place,
    Put,
    Reduce,
    Row,
)

ITEMSIZE = 8
_SLOT_ELEMENTS = 1 << 12
_PIECES = 3
"""Copies and folds are cut in so many, with other ranks' rows in between."""


class RowMachine:
    """The ranks, their memory, and how far each has come."""

    def __init__(
        self,
        rows: Sequence[Sequence[Row]],
        inputs: Sequence[np.ndarray],
        outputs: Sequence[np.ndarray],
        shared: Sequence[tuple[bool, bool]],
    ) -> None:
        self.rows, self.shared = rows, shared
        self.at = [0] * len(rows)
        self.piece = [0] * len(rows)
        self.memory = [
            {
                INPUT: x,
                OUTPUT: y,
                SCRATCH: np.full(_SLOT_ELEMENTS, -7, np.int64),
            }
            for x, y in zip(inputs, outputs, strict=True)
        ]
        rooms = [row.nbytes for own in rows for row in own if isinstance(row, MakeRoom)]
        self.most = max(rooms, default=0) // ITEMSIZE
        self.rings = [np.full(3 * self.most, -9, np.int64) for _ in rows]
        self.numbers = [[0, 0] for _ in rows]
        self.data: list[dict[int, tuple[np.ndarray, int]]] = [{} for _ in rows]
        """Of each rank, by exchange: what peers read, and from which element on."""
        self.taken = [0] * len(rows)
        self.registers: list[dict[int, tuple[np.ndarray, int]]] = [{} for _ in rows]
        """What each knows of its peers, and of its own slot."""
        self.left: list[tuple[np.ndarray, np.ndarray]] = list(zip(inputs, outputs, strict=True))
        """INPUT and OUTPUT as each left them."""

    def run(self, choice: random.Random) -> None:
        """Until all have come to their end.  Raises AssertionError if nobody can go on."""
        while any(at < len(rows) for at, rows in zip(self.at, self.rows, strict=True)):
            rank, turns = choice.randrange(len(self.rows)), choice.randint(1, 12)
            if not any([self.step(rank) for _ in range(turns)]):  # noqa: C419 - all of them
                moved = [self.step(other) for other in range(len(self.rows))]
                assert any(moved), f"nobody can go on: {self.at}"

    def step(self, rank: int) -> bool:
        """Let a rank do a part of its next row; False if it waits, or has come to its end."""
        if self.at[rank] == len(self.rows[rank]):
            return False
        row = self.rows[rank][self.at[rank]]
        if isinstance(row, MakeRoom):
            others = set(range(len(self.rows))) - {rank}
            if any(self.latest(peer) < row.exchange - 1 for peer in others):
                return False
            if row.nbytes and (row.unless is None or not self.shared[rank][row.unless]):
                self._take(rank, row.nbytes // ITEMSIZE)
        elif isinstance(row, Put):
            self.data[rank][row.exchange] = self.registers[rank].get(rank, (self.rings[rank], 0))
            if row.lends is not None and self.shared[rank][row.lends.buffer]:
                lent = self.memory[rank][row.lends.buffer], row.lends.offset // ITEMSIZE
                self.data[rank][row.exchange] = lent
            self.numbers[rank][row.exchange & 1] = row.exchange
        elif isinstance(row, Await):
            if self.latest(row.peer) < row.exchange:
                return False
            if row.listens:
                assert self.numbers[row.peer][row.exchange & 1] == row.exchange
                self.registers[rank][row.peer] = self.data[row.peer][row.exchange]
        elif not self._work(rank, row):
            return True
        self.at[rank] += 1
        if self.at[rank] == len(self.rows[rank]):
            self._leave(rank)
        return True

    def _leave(self, rank: int) -> None:
        """The call is over: its arrays are the caller's again, who writes something else there."""
        arrays = self.memory[rank][INPUT], self.memory[rank][OUTPUT]
        self.left[rank] = arrays[0].copy(), arrays[1].copy()
        for array in arrays:
            array[...] = -5

    def _take(self, rank: int, count: int) -> None:
        """As `shm.executor` does, of a ring three times as long as the most that is taken."""
        begin = sum(self.registers[rank].get(rank, (None, 0))[1:]) + self.taken[rank]
        if begin + count > (2 if 2 * count <= self.most else 3) * self.most:
            begin = 0
        self.registers[rank][rank], self.taken[rank] = (self.rings[rank], begin), count

    def latest(self, rank: int) -> int:
        return max(self.numbers[rank])

    def _work(self, rank: int, row: CopyBytes | Reduce) -> bool:
        """A piece of a copy or a fold; whether it was the last."""
        if isinstance(row, CopyBytes) and row.unless is not None and self.shared[rank][row.unless]:
            return True
        count = row.nbytes // ITEMSIZE
        begin, end = (count * (self.piece[rank] + i) // _PIECES for i in range(2))
        sources = row.sources if isinstance(row, Reduce) else (row.source,)
        values = sum(self._at(rank, place, count)[begin:end] for place in sources)
        places = [row.into]
        if isinstance(row, Reduce):
            places += [place for place in row.wanted if self.shared[place.rank][place.buffer]]
        if isinstance(row, Reduce) and row.staged is not None and len(places) <= row.readers:
            places.append(row.staged)
        for place in places:
            self._at(rank, place, count)[begin:end] = values
        self.piece[rank] = (self.piece[rank] + 1) % _PIECES
        return self.piece[rank] == 0

    def _at(self, rank: int, place: Place, count: int) -> np.ndarray:
        memory, first = self.memory[place.rank].get(place.buffer), 0
        if place.buffer == SLOT:
            memory, first = self.registers[rank][place.rank]
        assert memory is not None
        start = first + place.offset // ITEMSIZE
        return memory[start : start + count]
