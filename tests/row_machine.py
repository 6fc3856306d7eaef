"""Carries out the rows of all ranks in Python, one at a time, in any order that they allow."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from ringreduce.planned import INPUT, OUTPUT, SCRATCH
from ringreduce.rows import SLOT, Await, CopyBytes, MakeRoom, Place, Put, Reduce, Row

ITEMSIZE = 8
_SLOT_ELEMENTS = 1 << 12
_PIECES = 3
"""Copies and folds are cut in so many, with other ranks' rows in between."""


class RowMachine:
    """The ranks, their memory, and how far each has come."""

    def __init__(self, rows: Sequence[Sequence[Row]], inputs: Sequence[np.ndarray], outputs):
        self.rows = rows
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
        self.slots = [[np.full(_SLOT_ELEMENTS, -9, np.int64) for _ in range(2)] for _ in rows]
        self.numbers = [[0, 0] for _ in rows]
        self.exchange = [0] * len(rows)

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
            self.exchange[rank] = row.exchange
        elif isinstance(row, Put):
            self.numbers[rank][row.exchange & 1] = row.exchange
        elif isinstance(row, Await):
            if self.latest(row.peer) < row.exchange:
                return False
            if row.listens:
                assert self.numbers[row.peer][row.exchange & 1] == row.exchange
        elif not self._work(rank, row):
            return True
        self.at[rank] += 1
        return True

    def latest(self, rank: int) -> int:
        return max(self.numbers[rank])

    def _work(self, rank: int, row: CopyBytes | Reduce) -> bool:
        """A piece of a copy or a fold; whether it was the last."""
        count = row.nbytes // ITEMSIZE
        begin, end = (count * (self.piece[rank] + i) // _PIECES for i in range(2))
        sources = row.sources if isinstance(row, Reduce) else (row.source,)
        values = [self._at(rank, place, count)[begin:end] for place in sources]
        self._at(rank, row.into, count)[begin:end] = sum(values)
        self.piece[rank] = (self.piece[rank] + 1) % _PIECES
        return self.piece[rank] == 0

    def _at(self, rank: int, place: Place, count: int) -> np.ndarray:
        start = place.offset // ITEMSIZE
        if place.buffer == SLOT:
            return self.slots[place.rank][self.exchange[rank] & 1][start : start + count]
        return self.memory[place.rank][place.buffer][start : start + count]
