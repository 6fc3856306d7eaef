"""Slices that ranks of one host carry out through memory that they share: a compiled call each.

Which slices, and how their data go, follows from the call and from what all ranks can do, so that
all decide alike.  Everything else about such a call is as with messages.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ringreduce.config import Config
from ringreduce.control.agreement import HEADER_BYTES
from ringreduce.devices import compiled
from ringreduce.devices.base import Device
from ringreduce.messages.binding import BoundStep, Compiled, Flow
from ringreduce.planning.operations import INPUT, OUTPUT, SCRATCH
from ringreduce.planning.plan import Plan
from ringreduce.planning.shm_instructions import (
    SLOT,
    Await,
    CopyBytes,
    MakeRoom,
    Place,
    Put,
    Reduce,
    Row,
    Rows,
    rows_of,
)
from ringreduce.shm import functions, layout
from ringreduce.shm.layout import WORD
from ringreduce.shm.segments import Segments

_PIECE = 256 << 10
"""Bytes of each array that are folded at a time: what is read from other processes stays near."""
_WANTED_WORDS = 4
_MOST_RANKS = 64
"""Every rank plans for all."""
_ALONE, _CROWDED = (1000, 2), (20, 4)
"""How often a program looks, and how often it then yields, before it lets others look too: where
every rank has a core of its own, and where not.  It holds the interpreter the while, which other
threads of its rank may be waiting for."""
_REGISTERS = {
    INPUT: layout.PEER_INPUT,
    OUTPUT: layout.PEER_OUTPUT,
    SLOT: layout.PEER_SLOT,
}


class Exchange:
    """One communicator's shared memory, and the programs that use it."""

    def __init__(
        self,
        memory: Segments,
        rank: int,
        config: Config,
        foreign: Callable[[int, bytes], None],
    ) -> None:
        assert config.memory is not None
        enter, run = functions.python_function("enter"), functions.address("run")
        assert enter is not None
        assert run is not None
        self._run = run
        self._enter, self._memory, self._rank, self._foreign = enter, memory, rank, foreign
        self._config = config
        size = len(memory.addresses)
        self._peers = [peer for peer in range(size) if peer != rank]
        self._pulled = np.empty(_PIECE * len(self._peers), np.uint8)
        self._acc = np.empty(compiled.FOLD_BYTES, np.uint8)
        self._sources = np.zeros(size, np.int64)
        self._together = np.empty(layout.TOGETHER_BYTES * (size + 1), np.uint8)
        words = np.zeros(layout.COMMON_WORDS + layout.PEER_WORDS * len(self._peers), np.int64)
        words[[layout.SPINS, layout.YIELDS]] = _CROWDED if config.memory.crowded else _ALONE
        words[[layout.PEERS, layout.MY_BLOCK]] = len(self._peers), memory.addresses[rank]
        words[layout.MY_BYTES] = memory.nbytes
        words[[layout.PULLED, layout.PULL_BYTES]] = _address(self._pulled), _PIECE
        words[[layout.ACC, layout.SOURCES]] = _address(self._acc), _address(self._sources)
        words[layout.TOGETHER] = _address(self._together)
        self._of_peers = words[layout.COMMON_WORDS :].reshape(-1, layout.PEER_WORDS)
        for place, peer in enumerate(self._peers):
            self._of_peers[place, layout.BLOCK] = memory.addresses[peer]
            self._of_peers[place, layout.PROCESS] = memory.processes[peer]
        self._words = words
        self._numbers = [
            [memory.word(owner, slot * layout.SLOT_BYTES + layout.NUMBER) for slot in range(2)]
            for owner in range(size)
        ]
        """Of each rank's two slots."""

    # --- which slices ---

    def rows(
        self, plan: Plan, index: int, device: Device, op: str | None, dtype: Any
    ) -> Rows | None:
        """This rank's rows of a slice; None, on all ranks, if it is to be done by messages."""
        if device.stream is not None or len(self._peers) >= _MOST_RANKS:
            return None
        if op is not None and compiled.fold(op, dtype) is None:
            return None
        size = len(self._peers) + 1
        every = [plan.of(rank).slice(index) for rank in range(size)]
        pulls = self._config.pulls(plan.count * plan.itemsize)
        for way in (True, False) if pulls else (False,):
            rows = rows_of(every, self._rank, plan.itemsize, way, plan.in_place)
            if rows is not None and rows.slot_bytes <= layout.MOST_STAGED:
                return rows
        return None

    # --- programs ---

    def flow(
        self,
        rows: Rows,
        memory: tuple[Any, Any, Any],
        device: Device,
        op: str | None,
        index: int,
        slot: int,
        sizes: tuple[int, int],
        in_place: bool,
    ) -> Flow:
        """A flow that carries out a slice in `memory`: INPUT, OUTPUT and SCRATCH.

        Or in others that it is told of later; `sizes` are the bytes of INPUT and OUTPUT then,
        and `in_place` is whether they may be the same.
        """
        program = self._program(rows, memory, device, op)
        program[[layout.INPUT_BYTES, layout.OUTPUT_BYTES]] = sizes
        program[layout.IN_PLACE] = in_place
        flow, step = Flow(index, slot), BoundStep(0)
        header = program[layout.OWN_HEADER : layout.OWN_HEADER + HEADER_BYTES // WORD]
        flow.own_signatures.append(memoryview(header).cast("B"))
        flow.steps.append(step)
        address, enter = _address(program), self._enter

        def done() -> bool:
            came = enter(address, -1)
            if came == layout.FOREIGN:
                self._meet_foreign(program)
            return bool(came == layout.FINISHED)

        def where() -> tuple[int, list[int]]:
            return self._where(program, rows)

        def reset() -> None:
            program[layout.ROW] = 0

        flow.memory = memory
        flow.compiled = Compiled(enter, address, done)
        step.tests, step.where, step.reset = [done], where, reset
        step.notes = list(rows.notes)
        return flow

    def _program(
        self, rows: Rows, memory: tuple[Any, Any, Any], device: Device, op: str | None
    ) -> Any:
        lists = [row for row in rows.rows if isinstance(row, Reduce)]
        size = layout.PROGRAM_WORDS + layout.ROW_WORDS * (len(rows.rows) + 1)
        places = sum(len(row.sources) + len(row.wanted) for row in lists)
        program = np.zeros(size + 2 * places + _WANTED_WORDS * len(lists), np.int64)
        dtype = memory[SCRATCH].dtype
        fold = (0 if op is None else compiled.fold(op, dtype)) or 0
        program[[layout.COMMON, layout.START]] = _address(self._words), layout.PROGRAM_WORDS
        program[layout.RUN] = self._run
        tells = layout.TELLS_DATA if rows.tells else layout.TELLS_NOTHING
        tells = layout.TELLS_ARRAYS if rows.pulls else tells
        program[[layout.EXCHANGES, layout.TELLS]] = rows.exchanges, tells
        parts = dtype.itemsize // (2 if dtype.kind == "c" else 1)
        program[[layout.ITEM_BYTES, layout.FOLD]] = parts, fold
        program[layout.DIVISOR] = len(self._peers) + 1 if op == "mean" else 0
        own = self._memory.addresses[self._rank]
        for buffer, register, place in (
            (INPUT, layout.INPUT, layout.INPUT_PLACE),
            (OUTPUT, layout.OUTPUT, layout.OUTPUT_PLACE),
            (SCRATCH, layout.SCRATCH, None),
        ):
            address = program[register] = device.address(memory[buffer])
            if place is not None:
                shared = own <= address < own + self._memory.nbytes
                program[[place, place + 1]] = (address - own, 1) if shared else (address, 0)
        table = program[layout.PROGRAM_WORDS : size].reshape(-1, layout.ROW_WORDS)
        free = size
        for words, row in zip(table, rows.rows, strict=False):
            values = self._row(program, row, free)
            words[: len(values)] = values
            if isinstance(row, Reduce):
                listed = self._listed(program, row)
                program[free : free + len(listed)] = listed
                free += len(listed)
        table[-1, 0] = layout.END
        return program

    def _row(self, program: Any, row: Row, free: int) -> list[int]:
        if isinstance(row, MakeRoom):
            unless = 0 if row.unless is None else self._is_shared(program, row.unless)
            return [layout.MAKE_ROOM, row.exchange, row.nbytes, unless]
        if isinstance(row, Put) and row.lends is not None:
            lends = self._is_shared(program, row.lends.buffer)
            return [layout.PUT, row.exchange, lends, *self._operand(program, row.lends)]
        if isinstance(row, Put):
            return [layout.PUT, row.exchange]
        if isinstance(row, Await):
            return [layout.AWAIT, row.exchange, self._peers.index(row.peer), row.listens]
        into = self._operand(program, row.into)
        if isinstance(row, CopyBytes):
            unless = 0 if row.unless is None else self._is_shared(program, row.unless)
            source = self._operand(program, row.source)
            staged = row.into.buffer == SLOT and row.nbytes >= layout.STAGED_FROM
            return [layout.COPY, *into, *source, row.nbytes, staged, unless]
        listed = _address(program) + free * WORD
        sized = row.nbytes, len(row.sources), listed, _PIECE, row.finishes
        return [layout.REDUCE, *into, *sized]

    def _listed(self, program: Any, row: Reduce) -> list[int]:
        """What stands in a list of its own: sources, and who wants the result."""
        words = [word for source in row.sources for word in self._operand(program, source)]
        offset = 0 if row.staged is None else row.staged.offset
        words += [len(row.wanted), row.readers, offset, 0]
        return words + [word for place in row.wanted for word in self._operand(program, place)]

    def _is_shared(self, program: Any, buffer: int) -> int:
        """The address of the word that says whether this rank's INPUT or OUTPUT is."""
        place = {INPUT: layout.INPUT_PLACE, OUTPUT: layout.OUTPUT_PLACE}[buffer]
        return _address(program) + (place + 1) * WORD

    def _operand(self, program: Any, place: Place) -> tuple[int, int]:
        """The address of a register, and the offset."""
        if place.rank != self._rank:
            row = layout.COMMON_WORDS + self._peers.index(place.rank) * layout.PEER_WORDS
            register = _address(self._words) + (row + _REGISTERS[place.buffer]) * WORD
        elif place.buffer == SLOT:
            register = _address(self._words) + layout.MY_SLOT * WORD
        else:
            own = {INPUT: layout.INPUT, OUTPUT: layout.OUTPUT, SCRATCH: layout.SCRATCH}
            register = _address(program) + own[place.buffer] * WORD
        return register, place.offset

    # --- when a call breaks off ---

    def _meet_foreign(self, program: Any) -> None:
        peer = self._peers[program[layout.MET]]
        number = self._awaited(program)
        slot = (number & 1) * layout.SLOT_BYTES
        header = [self._memory.word(peer, slot + layout.HEADER + WORD * i) for i in range(3)]
        self._foreign(peer, b"".join(word.tobytes() for word in header))

    def _awaited(self, program: Any) -> int:
        """The exchange that a program waits for."""
        at = (int(program[layout.ROW]) - _address(program)) // WORD
        kind, exchange = map(int, program[at : at + 2])
        return int(program[layout.BASE]) + exchange - (kind == layout.MAKE_ROOM)

    def _where(self, program: Any, rows: Rows) -> tuple[int, list[int]]:
        """The step that a program is at, and the peers that it waits for."""
        if program[layout.ROW] == 0:
            return 0, []
        at = (int(program[layout.ROW]) - _address(program)) // WORD
        if program[at] not in (layout.AWAIT, layout.MAKE_ROOM):  # a process that cannot be read
            return 0, list(self._peers)
        number = self._awaited(program)
        missing = [p for p in self._peers if max(int(n[0]) for n in self._numbers[p]) < number]
        step = min(number - int(program[layout.BASE]), rows.exchanges - rows.pulls)
        return max(step - 1, 0), missing

    @property
    def count(self) -> int:
        """Exchanges ever begun."""
        return int(self._words[layout.COUNT])

    def go_on_from(self, count: int) -> None:
        """Forget the call under way; all ranks do, and go on counting from the same number."""
        self._words[layout.COUNT] = count
        self._of_peers[:, layout.SEEN] = 0
        self._of_peers[:, layout.COMPARED] = count
        mine = self._numbers[self._rank]
        if count:
            mine[(count - 1) & 1][0] = count - 1
        mine[count & 1][0] = count


def _address(words: Any) -> int:
    return int(words.ctypes.data)
