"""Programs: plans that ranks of one host execute through shared memory.

All ranks of a host run the same plans through shared memory, and choose the same way for the data.
Both depend only on the call and on what all ranks can do.  Headers, errors and results are the same
as with messages.  Ranks of other hosts may run the same plan by messages alone.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, takewhile
from typing import Any

import numpy as np

from ringreduce.compiler.records import (
    Address,
    address_of,
    array_address,
    load_acquire,
    offset_of,
    size_of,
)
from ringreduce.config import Config
from ringreduce.control.executable import Note
from ringreduce.control.signature import HEADER_BYTES
from ringreduce.devices import compiled
from ringreduce.devices.base import Device
from ringreduce.planning.instructions import (
    MESSAGE,
    SLOT,
    Complete,
    CopyBytes,
    FreeSlot,
    HostMessage,
    Instruction,
    Instructions,
    Operand,
    Pause,
    Post,
    Reduce,
    Start,
    Wait,
    join,
)
from ringreduce.planning.operations import INPUT, OUTPUT, SCRATCH
from ringreduce.planning.plan import Plan
from ringreduce.planning.select import pushed_part
from ringreduce.planning.shm_instructions import IN_SLOT_BYTES, instructions_of
from ringreduce.shm import functions, layout
from ringreduce.shm.host_messages import messages_of, place_of
from ringreduce.shm.layout import (
    WORD,
    Buffer,
    HostMessageRecord,
    Location,
    Mpi,
    OperandRecord,
    Peer,
    Program,
    Slot,
    Team,
)
from ringreduce.shm.protocol import slot_of
from ringreduce.shm.segments import Segments
from ringreduce.trace import recorder
from ringreduce.trace.ring import kept_words
from ringreduce.transports.base import NativeMessages

_READ_BYTES = (256 << 10, 128 << 10)
"""Bytes of each array to reduce at a time: data read from other processes stay in the cache.

The second number is for a kernel that copies quickly, where longer pieces were slower.
"""
_PAUSE_BYTES = 64 << 20
"""Bytes of a call after which a program pauses, at the end of a slice."""
_STREAMED_BYTES = 4 << 20
"""The least bytes of its own part that a rank with a core copies by streaming stores."""
_MAX_RANKS = 64
"""The most ranks of a host, since every rank plans for all of them."""
_STATUS_BYTES = 128
"""More than an MPI_Status of any MPI takes."""
_ROUNDS_BEFORE_TRIALS = 16
"""Rounds before stores are timed first: the first stores to memory wait for its pages."""
_SPINS_AND_YIELDS, _CROWDED_SPINS_AND_YIELDS = (5000, 2), (20, 32)
"""(polls of a slot, further polls after a yield of the core each) until a program returns PENDING.

The first pair is for ranks with a core each: most peers post within 5,000 polls, and a return to
Python takes longer.  The second is for ranks that share cores.  A program that polls keeps its core
busy, and other threads of the rank may wait for that core.  Each yield lets another rank run there.
An all-reduce of 64 bytes on eight ranks and two cores takes 12 us; with 4 yields it takes 42.
"""
_BETWEEN_HOSTS = 200, 200
"""The same for ranks of several hosts: a message takes longer than a few yields.

On four hosts with eight ranks and two cores, 8 bytes take 153 us; with 5,000 and 2 they take 222.
"""


_TARGET = (offset_of(layout.CopyRecord, "target") + offset_of(OperandRecord, "buffer")) // WORD
_TARGET_OFFSET = (
    offset_of(layout.CopyRecord, "target") + offset_of(OperandRecord, "offset")
) // WORD
_SOURCE_OFFSET = (
    offset_of(layout.CopyRecord, "source") + offset_of(OperandRecord, "offset")
) // WORD
_SOURCE = (offset_of(layout.CopyRecord, "source") + offset_of(OperandRecord, "buffer")) // WORD
_COPY_BYTES = offset_of(layout.CopyRecord, "nbytes") // WORD
_STAGED = offset_of(layout.CopyRecord, "staged") // WORD
"""Words of a COPY."""


class PlanProgram:
    """The compiled program of a plan, and its memory."""

    def __init__(
        self, shared_memory: SharedMemory, words: Any, instructions: Instructions, scratch: Any
    ) -> None:
        self._shared_memory = shared_memory
        self._instructions = instructions._replace(instructions=())  # they are in `words` now
        self._memory = words, scratch
        self._program = program = Program(array_address(words))
        self.messages = messages_of(program)
        """The messages to and from other hosts."""
        self.address = array_address(words)
        header = words.view(np.uint8)[offset_of(Program, "header") :][:HEADER_BYTES]
        self.header = memoryview(header)
        self.moved = False
        """Whether the latest `enter` left the program at another instruction."""

    @property
    def mpi(self) -> Mpi:
        return self._shared_memory.team.mpi

    @property
    def notes(self) -> Sequence[Sequence[Note]]:
        return self._instructions.notes

    def bind(self, source: int, target: int) -> None:
        """Bind the program to the addresses of input and output; `enter` then needs none."""
        self._shared_memory.bind(self._program, source, target)

    def enter(self, source: int = 0, target: int = 0) -> bool:
        """Execute instructions until one waits or the program pauses; return whether it is over.

        `source`, `target`: input and output of a new run, as `shm.executor.run` takes them;
        0: as before.
        """
        before = self._program.instruction
        state = self._shared_memory.enter(self.address, -1, source, target)
        self.moved = self._program.instruction != before
        if state == layout.MISMATCH:
            self._shared_memory.report_mismatch(self._program)
        if state == layout.FAILED:
            self._shared_memory.raise_error()
        return bool(state == layout.DONE)

    @property
    def is_under_way(self) -> bool:
        return self._program.instruction != 0

    def take_runs(self) -> int:
        """Return the complete runs since the latest call of this method."""
        runs, self._program.runs = self._program.runs, 0
        return runs

    def rewrite(self, plan: Plan) -> bool:
        """Rewrite the idle program for a plan of other counts; False if that is impossible."""
        words, _ = self._memory
        made = self._shared_memory.rewrite(words, self._instructions, plan)
        if made is not None:
            self._instructions = made
        return made is not None

    def where(self) -> tuple[int, list[int]]:
        return self._shared_memory.where(self._program, self._instructions)

    def reset(self) -> None:
        """Abandon the run: the next run begins with the first instruction."""
        self._program.instruction = 0


class SharedMemory:
    """One communicator's shared memory, for which it makes programs."""

    def __init__(
        self,
        memory: Segments,
        rank: int,
        config: Config,
        on_mismatch: Callable[[int, bytes], None],
        native: NativeMessages | None = None,
    ) -> None:
        """Make programs of calls on ranks of one host, or with `native` messages of several."""
        facts = config.memory or config.node_memory
        assert facts is not None
        enter, run = functions.python_function("enter"), functions.address("run")
        assert enter is not None
        assert run is not None
        self._run = run
        self._scratch_bytes: Any = None
        self.enter, self._memory, self._rank, self._on_mismatch = enter, memory, rank, on_mismatch
        self._config = config
        size = self._size = len(memory.addresses)
        self._mates = memory.mates
        self._status = np.zeros(_STATUS_BYTES // WORD, np.int64)
        peers = self._peers = [peer for peer in memory.mates if peer != rank]
        self._native = native
        self._team_words = np.zeros((size_of(Team) + size_of(Peer) * len(peers)) // WORD, np.int64)
        read_bytes = _READ_BYTES[facts.quick]
        self._read_buffer = np.empty(read_bytes * len(peers), np.uint8)
        self._fold_scratch = np.empty(compiled.FOLD_BYTES, np.uint8)
        self._sources = np.zeros(size, np.int64)
        self._gather_buffer = np.empty(layout.GATHER_BYTES * (size + 1), np.uint8)
        team = self.team = Team(array_address(self._team_words))
        crowded, self._writes = facts.crowded, facts.writes
        self._has_core = not crowded and size > 1
        team.spins, team.yields = _CROWDED_SPINS_AND_YIELDS if crowded else _SPINS_AND_YIELDS
        if native is not None:
            team.spins, team.yields = _BETWEEN_HOSTS
        team.peer_count = len(peers)
        team.segment, team.segment_bytes = memory.addresses[rank], memory.nbytes
        team.read_buffer, team.read_bytes = array_address(self._read_buffer), read_bytes
        team.fold_scratch = array_address(self._fold_scratch)
        team.sources = array_address(self._sources)
        team.gather_buffer = array_address(self._gather_buffer)
        if native is not None:
            mpi = team.mpi
            mpi.isend, mpi.irecv, mpi.test = native.isend, native.irecv, native.test
            mpi.comm, mpi.byte = native.comm, native.byte
            mpi.status = array_address(self._status)
        for each in recorder.RECORDERS:
            team.events = each.ring
        self._event_words: dict[tuple[int, bool], np.ndarray] = {}
        """The words of messages in a trace, by peer, and whether they are received."""
        self._begin_trials(0)
        first = address_of(team) + size_of(Team)
        self._peer_records = [Peer(first + i * size_of(Peer)) for i in range(len(peers))]
        for record, peer in zip(self._peer_records, peers, strict=True):
            record.segment, record.process = memory.addresses[peer], memory.processes[peer]

    def _begin_trials(self, rounds: int) -> None:
        """Take ordinary stores, and time both kinds a while after round number `rounds`."""
        trial = self.team.trial
        trial.streams, trial.phase, trial.usual_ns = 0, layout.KEEP, 0
        trial.phase_end = rounds + _ROUNDS_BEFORE_TRIALS
        trial.latest, trial.interval = rounds, 0

    def _slot(self, owner: int, sequence: int) -> Slot:
        return slot_of(self._memory.addresses[owner], sequence)

    # --- instructions ---

    def instructions(self, plan: Plan, op: str | None, dtype: Any) -> Instructions | None:
        """Return this rank's instructions for a plan; None if messages run it.

        None on all ranks of this host.
        """
        if len(self._peers) >= _MAX_RANKS:
            return None
        if op is not None and compiled.fold(op, dtype) is None:
            return None
        nbytes = plan.count * plan.itemsize
        # The other way is for slices too long to be staged, and for data that are overwritten.
        for way in (plan.single_copy, not plan.single_copy):
            possible = not way or self._config.single_copy_from is not None
            slices = self._slices(plan, way) if possible else None
            if slices is not None:
                return join(slices, max(1, _PAUSE_BYTES * plan.slices // max(nbytes, 1)))
        return None

    def _slices(self, plan: Plan, single_copy: bool) -> list[Instructions] | None:
        """Return this rank's instructions for each slice of a plan; None if a slice has none."""
        moves = None if self._native is not None else plan.moves
        plans = {} if moves is not None else {rank: plan.of(rank) for rank in self._mates}
        pushed = self._pushed(plan, single_copy)
        slices = []
        for index in range(plan.slices):
            instructions: Instructions | None
            if moves is not None:
                instructions = moves.instructions(index, single_copy, pushed)
            else:
                every = {rank: each.slice(index) for rank, each in plans.items()}
                how = plan.itemsize, single_copy, plan.in_place, self._writes, pushed
                instructions = instructions_of(every, self._rank, *how, plan.segment_bytes)
            if instructions is None or instructions.slot_bytes > layout.MAX_STAGED_BYTES:
                return None
            slices.append(instructions)
        return slices

    def _pushed(self, plan: Plan, single_copy: bool) -> float:
        nbytes = plan.count * plan.itemsize
        return pushed_part(plan.schedule, nbytes, self._config) if single_copy else 0.0

    # --- programs ---

    def program(
        self, instructions: Instructions, plan: Plan, device: Device, op: str | None, dtype: Any
    ) -> PlanProgram:
        scratch = self._scratch(device, instructions.scratch, dtype)
        words = self._program(instructions, scratch, device, op)
        program = Program(array_address(words))
        program.input_bytes = plan.input_count * plan.itemsize
        program.output_bytes = plan.output_count * plan.itemsize
        program.in_place = plan.in_place
        return PlanProgram(self, words, instructions, scratch)

    def rewrite(self, words: Any, instructions: Instructions, plan: Plan) -> Instructions | None:
        """Rewrite the idle program of a direct all-to-all of one host for the counts of `plan`.

        `words` and `instructions` are those of the program.  Returns the new instructions,
        or None (on all ranks alike) if a new program is needed.
        """
        moves, single_copy = plan.moves, plan.single_copy
        how = plan.slices, single_copy
        if moves is None or how != (len(instructions.rounds), instructions.single_copy):
            return None
        slices, pushed = range(plan.slices), self._pushed(plan, single_copy)
        copies = [moves.copies(index, single_copy, pushed) for index in slices]
        most = max(max(each.staged_bytes) for each in copies)
        if most > layout.MAX_STAGED_BYTES:
            return None
        program, publishes = Program(array_address(words)), most > IN_SLOT_BYTES
        if not single_copy:
            program.publishes = layout.PUBLISHES_DATA if publishes else layout.PUBLISHES_NOTHING
        program.input_bytes = plan.input_count * plan.itemsize
        program.output_bytes = plan.output_count * plan.itemsize
        numbers = chain.from_iterable(each.numbers for each in copies)
        self._write_numbers(words, numbers, [each.staged_bytes[self._rank] for each in copies])
        logs = self._config.log_messages
        notes = tuple(tuple(moves.notes(index)) for index in slices) if logs else ()
        return instructions._replace(slot_bytes=most, publishes=publishes, notes=notes)

    def _write_numbers(
        self, memory: Any, numbers: Iterable[tuple[int, int, int]], staged_bytes: Sequence[int]
    ) -> None:
        """Write (offset of the target, offset of the source, bytes) to all copies of a program.

        The first FREE_SLOT of each slice gets the bytes that the rank stages.
        """
        words, program = memory.data, Program(array_address(memory))
        opcodes = range(size_of(Program) // WORD, len(words), layout.INSTRUCTION_BYTES // WORD)
        made = [*takewhile(lambda at: words[at] != layout.END, opcodes)]  # lists follow the end
        slots = [at for at in made if words[at] == layout.FREE_SLOT]
        firsts = slots[:: len(slots) // len(staged_bytes)]
        for at, nbytes in zip(firsts, staged_bytes, strict=True):
            layout.FreeSlotRecord(array_address(memory) + at * WORD).nbytes = nbytes
        copies = (at for at in made if words[at] in (layout.COPY, layout.PUSH))
        for at, (target, source, nbytes) in zip(copies, numbers, strict=True):
            if words[at] == layout.PUSH:
                push = layout.PushRecord(array_address(memory) + at * WORD)
                push.source.offset, push.nbytes = source, nbytes
                direct = layout.Destinations(push.destinations).direct
                layout.DirectWrite(direct).offset = target
                continue
            words[at + _TARGET_OFFSET], words[at + _SOURCE_OFFSET] = target, source
            words[at + _COPY_BYTES] = nbytes
            words[at + _STAGED] = self._stores(
                program, words[at + _TARGET], words[at + _SOURCE], nbytes
            )

    def bind(self, program: Program, source: int, target: int) -> None:
        program.input.address, program.input.process = source, 0
        program.output.address, program.output.process = target, 0
        self._locate(program.input, program.input_location)
        self._locate(program.output, program.output_location)

    def _scratch(self, device: Device, count: int, dtype: Any) -> Any:
        """Return scratch memory that all programs share, since one program runs at a time.

        If it is too short, new memory of at least twice the size replaces it for later
        programs.
        """
        nbytes, kept = count * dtype.itemsize, self._scratch_bytes
        if kept is None or kept.nbytes < nbytes:
            larger = nbytes if kept is None else max(nbytes, 2 * kept.nbytes)
            kept = self._scratch_bytes = device.scratch(larger)
        return kept[:nbytes].view(dtype)

    def _program(
        self, instructions: Instructions, scratch: Any, device: Device, op: str | None
    ) -> Any:
        """Write a program and its instructions; return their memory, as words."""
        size = size_of(Program) + layout.INSTRUCTION_BYTES * (len(instructions.instructions) + 1)
        messages = size + sum(map(self._list_bytes, instructions.instructions))
        bytes_of_messages = messages + size_of(HostMessageRecord) * len(instructions.messages)
        words = np.zeros((bytes_of_messages + instructions.message_bytes) // WORD, np.int64)
        program = Program(array_address(words))
        program.message.address = address_of(program) + bytes_of_messages
        program.messages = address_of(program) + messages
        program.message_count = len(instructions.messages)
        for index in range(program.message_count):
            self._write_message(program, index, instructions.messages[index])
        program.team, program.run = address_of(self.team), self._run
        program.rounds = sum(instructions.rounds)
        if instructions.single_copy:
            program.publishes = layout.PUBLISHES_ARRAYS
        elif instructions.publishes:
            program.publishes = layout.PUBLISHES_DATA
        dtype = scratch.dtype
        program.item_bytes = dtype.itemsize // (2 if dtype.kind == "c" else 1)
        program.fold = (0 if op is None else compiled.fold(op, dtype)) or 0
        program.divisor = self._size if op == "mean" else 0
        program.scratch.address = device.address(scratch)
        at = address_of(program) + size_of(Program)
        free = address_of(program) + size
        for instr in instructions.instructions:
            if isinstance(instr, Reduce):
                free = self._write_reduce(program, layout.ReduceRecord(at), instr, free)
            elif isinstance(instr, CopyBytes) and instr.into.rank != self._rank:
                free = self._write_push(program, layout.PushRecord(at), instr, free)
            elif isinstance(instr, Start | Complete):
                record = layout.MessageRecord(at)
                record.opcode = layout.START if isinstance(instr, Start) else layout.COMPLETE
                record.message = program.messages + instr.message * size_of(HostMessageRecord)
            else:
                self._write(program, at, instr)
            at += layout.INSTRUCTION_BYTES
        layout.InstructionRecord(at).opcode = layout.END
        return words

    def _write_message(self, program: Program, index: int, message: HostMessage) -> None:
        header = HEADER_BYTES if message.signed else 0
        record = HostMessageRecord(program.messages + index * size_of(HostMessageRecord))
        self._point(program, record.place, message.place.after(-header))
        record.nbytes, record.peer = message.nbytes + header, message.peer
        record.receives, record.signed = message.receives, message.signed
        if self.team.events and message.data_bytes is not None:
            kind = message.peer, message.receives
            if kind not in self._event_words:
                words = ("recv", f"from {kind[0]}") if kind[1] else ("send", f"to {kind[0]}")
                self._event_words[kind] = kept_words(recorder.MESSAGE, *words)
            record.words = array_address(self._event_words[kind])
            record.data_bytes = message.data_bytes

    def _locate(self, buffer: Buffer, location: Location) -> None:
        """Write the location of a buffer of this rank, as peers resolve it."""
        offset = buffer.address - self.team.segment
        location.in_segment = 0 <= offset < self.team.segment_bytes
        location.address = offset if location.in_segment else buffer.address

    def _write(
        self, program: Program, at: Address, instr: FreeSlot | Post | Wait | CopyBytes | Pause
    ) -> None:
        if isinstance(instr, FreeSlot):
            free_slot = layout.FreeSlotRecord(at)
            free_slot.opcode, free_slot.round = layout.FREE_SLOT, instr.round
            free_slot.nbytes = instr.nbytes
            free_slot.shared_flag = _shared_flag(program, instr.unless_shared)
        elif isinstance(instr, Post):
            post = layout.PostRecord(at)
            post.opcode, post.round = layout.POST, instr.round
            if instr.exposes is not None:
                post.shared_flag = _shared_flag(program, instr.exposes.buffer)
                self._point(program, post.exposed, instr.exposes)
        elif isinstance(instr, Wait):
            wait = layout.WaitRecord(at)
            wait.opcode, wait.round = layout.WAIT, instr.round
            wait.peer, wait.reads = self._peers.index(instr.peer), instr.reads
        elif isinstance(instr, Pause):
            layout.InstructionRecord(at).opcode = layout.PAUSE
        else:
            copy = layout.CopyRecord(at)
            copy.opcode, copy.nbytes = layout.COPY, instr.nbytes
            self._point(program, copy.target, instr.into)
            self._point(program, copy.source, instr.source)
            both = copy.target.buffer, copy.source.buffer
            copy.staged = self._stores(program, *both, instr.nbytes)
            copy.shared_flag = _shared_flag(program, instr.unless_shared)

    def _stores(self, program: Program, target: Address, source: Address, nbytes: int) -> int:
        """Return `Copy.staged` of a copy between the buffers at two addresses."""
        if target == address_of(self.team.slot):
            return int(nbytes >= layout.STAGED_FROM_BYTES)
        is_own = (target, source) == (address_of(program.output), address_of(program.input))
        streams = is_own and nbytes >= _STREAMED_BYTES and not program.fold and self._has_core
        return layout.STREAMED if streams else 0

    def _write_reduce(
        self, program: Program, reduce: layout.ReduceRecord, instr: Reduce, free: Address
    ) -> Address:
        """Write a REDUCE, and its lists from `free` on; return the address behind the lists."""
        reduce.opcode, reduce.nbytes, reduce.divides = layout.REDUCE, instr.nbytes, instr.finishes
        self._point(program, reduce.target, instr.into)
        reduce.source_count, reduce.sources = len(instr.sources), free
        for source in instr.sources:
            self._point(program, layout.OperandRecord(free), source)
            free += size_of(layout.OperandRecord)
        reduce.destinations, wanted = free, layout.Destinations(free)
        wanted.readers, wanted.writes_private = instr.readers, instr.writes_private
        wanted.slot_offset = 0 if instr.staged is None else instr.staged.offset
        return self._write_direct(wanted, instr.direct)

    def _write_push(
        self, program: Program, push: layout.PushRecord, instr: CopyBytes, free: Address
    ) -> Address:
        """Write a PUSH, and its lists from `free` on; return the address behind the lists."""
        push.opcode, push.nbytes, push.destinations = layout.PUSH, instr.nbytes, free
        self._point(program, push.source, instr.source)
        wanted = layout.Destinations(free)
        wanted.writes_private = True
        return self._write_direct(wanted, (instr.into,))

    def _write_direct(self, wanted: layout.Destinations, places: Sequence[Operand]) -> Address:
        free = address_of(wanted) + size_of(layout.Destinations)
        wanted.direct_count, wanted.direct = len(places), free
        for place in places:
            direct = layout.DirectWrite(free)
            direct.peer, direct.offset = address_of(self._peer(place.rank)), place.offset
            free += size_of(layout.DirectWrite)
        return free

    def _list_bytes(self, instr: Instruction) -> int:
        """Return the bytes of the lists of a REDUCE or PUSH; 0 for other instructions."""
        direct, operands = 0, 0
        if isinstance(instr, Reduce):
            direct, operands = len(instr.direct), size_of(OperandRecord) * len(instr.sources)
        elif isinstance(instr, CopyBytes) and instr.into.rank != self._rank:
            direct = 1
        else:
            return 0
        lists = operands + size_of(layout.Destinations)
        return lists + direct * size_of(layout.DirectWrite)

    def _point(self, program: Program, operand: OperandRecord, place: Operand) -> None:
        operand.buffer = address_of(self._buffer(program, place.rank, place.buffer))
        operand.offset = place.offset

    def _buffer(self, program: Program, rank: int, buffer: int) -> Buffer:
        if rank != self._rank:
            peer = self._peer(rank)
            return {INPUT: peer.input, OUTPUT: peer.output, SLOT: peer.slot}[buffer]
        if buffer == SLOT:
            return self.team.slot
        if buffer == MESSAGE:
            return program.message
        return {INPUT: program.input, OUTPUT: program.output, SCRATCH: program.scratch}[buffer]

    def _peer(self, rank: int) -> Peer:
        return self._peer_records[self._peers.index(rank)]

    # --- after an error ---

    def report_mismatch(self, program: Program) -> None:
        instruction = layout.InstructionRecord(program.instruction)
        if instruction.opcode == layout.COMPLETE:
            message = HostMessageRecord(layout.MessageRecord(program.instruction).message)
            peer, header = message.peer, place_of(message)
        else:
            peer = self._peers[program.blamed]
            header = address_of(self._slot(peer, self._sequence_waited_for(program)).header)
        self._on_mismatch(peer, ctypes.string_at(header, HEADER_BYTES))

    def raise_error(self) -> None:
        """Raise MPI's latest error."""
        assert self._native is not None
        raise self._native.error(self.team.mpi.error)

    def _sequence_waited_for(self, program: Program) -> int:
        instruction = layout.InstructionRecord(program.instruction)
        frees = instruction.opcode == layout.FREE_SLOT
        return program.base + instruction.round - frees

    def where(self, program: Program, instructions: Instructions) -> tuple[int, list[int]]:
        """Return the step that a program is at, and the peers that it waits for."""
        if program.instruction == 0:
            return 0, []
        opcode = layout.InstructionRecord(program.instruction).opcode
        if opcode in (layout.START, layout.COMPLETE):
            address = layout.MessageRecord(program.instruction).message
            index = (address - program.messages) // size_of(HostMessageRecord)
            message = instructions.messages[index]
            not_over = layout.NOT_STARTED, layout.WANTED, layout.UNDER_WAY
            same_step = zip(instructions.messages, messages_of(program), strict=True)
            return message.step, sorted(
                {
                    m.peer
                    for m, record in same_step
                    if m.step == message.step and record.state in not_over
                }
            )
        if opcode not in (layout.WAIT, layout.FREE_SLOT):  # a peer's process does not answer reads
            return 0, list(self._peers)
        sequence = self._sequence_waited_for(program)
        missing = [peer for peer in self._peers if self._latest(peer) < sequence]
        return instructions.step_of(sequence - program.base), missing

    def _latest(self, rank: int) -> int:
        return max(load_acquire(self._slot(rank, parity), "sequence") for parity in range(2))

    def leave(self) -> None:
        """Let no peer write to this rank's arrays any more: the communicator is broken.

        Returns when none does, or after 50 ms: then a peer is stopped while it writes.
        """
        self.enter(address_of(self.team))

    @property
    def rounds(self) -> int:
        return self.team.rounds

    def go_on_from(self, count: int) -> None:
        """Forget the call under way, and count rounds from `count` on, as all ranks do."""
        self.team.rounds = count
        # The ranks were perhaps in different phases.
        self._begin_trials(count)
        for peer in self._peer_records:
            peer.seen, peer.compared = 0, count
        if count:
            self._slot(self._rank, count - 1).sequence = count - 1
        self._slot(self._rank, count).sequence = count


def _shared_flag(program: Program, buffer: int | None) -> Address:
    """Return the address of a word: 1 if INPUT or OUTPUT is shared.  0 if `buffer` is None."""
    if buffer is None:
        return 0
    locations = {INPUT: program.input_location, OUTPUT: program.output_location}
    return address_of(locations[buffer]) + offset_of(Location, "in_segment")
