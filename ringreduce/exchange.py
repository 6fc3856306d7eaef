"""Small calls in which every rank sends all others the same: through memory that they share.

What the schedule says decides: a plan of one step, in which each rank sends one message to every
other and receives one of that length from each.  Such a step is bound to two compiled functions,
one that starts it and one that looks what has come; all else is as with messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from ringreduce.agreement import HEADER_BYTES
from ringreduce.binding import Binder, BoundStep, copy_bytes
from ringreduce.devices import compiling
from ringreduce.devices.blocks import (
    BLOCK,
    CAME,
    INTO,
    MINE,
    NBYTES,
    OUT,
    PEERS,
    PER_PEER,
    SPINS,
    WORDS,
)
from ringreduce.planned import INSIDE, Message, PlannedSlice, PlannedStep

Came = tuple[int, memoryview]
"""(peer, where its message goes)"""


class Exchange:
    """One communicator's shared memory, and the functions that use it."""

    def __init__(self, addresses: Sequence[int], rank: int, spins: int) -> None:
        put, all_came = (compiling.kernel(name) for name in ("put", "all_came"))
        assert put is not None
        assert all_came is not None
        self._put, self._all_came = put, all_came
        self._addresses, self._rank, self._spins = addresses, rank, spins

    def takes(self, planned: PlannedSlice) -> bool:
        """Whether a slice is such a step; the same on all ranks."""
        if len(planned.steps) != 1:
            return False
        (step,) = planned.steps
        peers = sorted(set(range(len(self._addresses))) - {self._rank})
        messages = (*step.recvs, *step.sends)
        return (
            sorted(m.peer for m in step.recvs) == sorted(m.peer for m in step.sends) == peers
            and all(m.signature == INSIDE for m in messages)
            and len({m.span.stop - m.span.start for m in messages}) == 1
            and len({m.span for m in step.sends}) == 1
        )

    def bind(self, step: BoundStep, out: memoryview, came: Sequence[Came]) -> None:
        """Let a step put `out` there, and wait for what comes; all that memory stays in place."""
        words = np.zeros(WORDS + PER_PEER * len(came), np.int64)
        words[[MINE, OUT, NBYTES]] = self._addresses[self._rank], _address(out), len(out)
        words[[SPINS, PEERS]] = self._spins, len(came)
        of_peers = words[WORDS:].reshape(-1, PER_PEER)
        for row, (peer, into) in zip(of_peers, came, strict=True):
            row[[BLOCK, INTO]] = self._addresses[peer], _address(into)
        all_came = partial(self._all_came, words)

        def missing() -> list[int]:
            all_came()
            return [peer for (peer, _), row in zip(came, of_peers, strict=True) if not row[CAME]]

        step.starts, step.tests = [partial(self._put, words)], [all_came]
        step.missing = missing


class ExchangeBinder(Binder):
    """Binds a slice that an Exchange takes."""

    def __init__(self, exchange: Exchange, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._exchange = exchange
        self._out: memoryview | None = None
        self._came: list[Came] = []

    def send(self, message: Message, step: BoundStep) -> None:
        if self._out is None:
            buffer, payload = self._signed(message.span)
            self.flow.own_signatures.append(buffer[:HEADER_BYTES])
            if payload:
                step.packs.append(copy_bytes(payload, self._plain(message.span)))
            self._out = buffer
        step.notes.append(("send", message.peer, self.nbytes(message.span)))

    def add_recv(self, message: Message, buffer: memoryview, step: BoundStep) -> Any:
        self._came.append((message.peer, buffer[: HEADER_BYTES + self.nbytes(message.span)]))

    def wire(self, planned: PlannedStep, bound: list[BoundStep]) -> None:
        (step,) = bound
        assert self._out is not None
        self._exchange.bind(step, self._out, self._came)


def _address(buffer: memoryview) -> int:
    return int(np.frombuffer(buffer, np.uint8).ctypes.data)
