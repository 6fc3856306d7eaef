"""The compiled executor of programs: instructions that wait, post, copy and reduce.

A program is a plan, made for shared memory by `planning.shm_instructions`.  Records of memory are
in `shm.layout`, and the protocol of slots is in `shm.protocol`.
"""

from __future__ import annotations

from ringreduce.compiler.memory import call_fold, claim, fence, store, yield_core
from ringreduce.compiler.records import (
    Address,
    address_of,
    compilable,
    load_acquire,
    size_of,
)
from ringreduce.shm.copies import copy_bytes, push, read
from ringreduce.shm.host_messages import begin_messages, complete, progress, start
from ringreduce.shm.iovec import contiguous, gathered, scatter, writable_at
from ringreduce.shm.layout import (
    COMPLETE,
    COPY,
    DONE,
    FREE_SLOT,
    GATHER_BYTES,
    INSTRUCTION_BYTES,
    IOVEC,
    PAUSE,
    PENDING,
    POST,
    PUSH,
    REDUCE,
    START,
    WAIT,
    WORD,
    Buffer,
    CopyRecord,
    Destinations,
    DirectWrite,
    FreeSlotRecord,
    HostMessageRecord,
    InstructionRecord,
    Location,
    MessageRecord,
    OperandRecord,
    Peer,
    PostRecord,
    Program,
    PushRecord,
    ReduceRecord,
    Team,
    WaitRecord,
)
from ringreduce.shm.protocol import (
    free_slot,
    has_left,
    post,
    slot_of,
    wait,
    write_begins,
    write_ends,
)
from ringreduce.shm.stores import begin_timing, end_timing, is_timed, next_phase, write

_PROGRAM_BYTES, _OPERAND_BYTES = size_of(Program), size_of(OperandRecord)
_DIRECT_WRITE_BYTES = size_of(DirectWrite)
_CACHED_BYTES = 16 << 10
"""Bytes that are reduced before they are written to peers: they stay in L1."""
_PUSHED_BYTES = 1 << 20
"""Bytes of a PUSH before it looks again whether the peer has left."""


@compilable
def source_of(instruction: ReduceRecord, index: int) -> OperandRecord:
    return OperandRecord(instruction.sources + index * _OPERAND_BYTES)


@compilable
def distribute(team: Team, wanted: Destinations, source: Address, begin: int, nbytes: int) -> bool:
    """Write a part of data to OUTPUT of peers; to the slot too if an OUTPUT is not written.

    Returns False if a peer has left the call or does not answer.
    """
    written = 0
    for i in range(wanted.direct_count):
        direct = DirectWrite(wanted.direct + i * _DIRECT_WRITE_BYTES)
        peer = Peer(direct.peer)
        if peer.output_is_shared | wanted.writes_private:
            if written == 0:
                write_begins(team)
            written += 1
            into = peer.output.address + direct.offset + begin
            if has_left(peer) or not push(team, peer.output.process, into, source, nbytes):
                write_ends(team)
                return False
    if written:
        write_ends(team)
    if written < wanted.readers:
        into = team.slot.address + wanted.slot_offset + begin
        write(team, into, source, nbytes)
    return True


@compilable
def reads_processes(instruction: ReduceRecord) -> bool:
    found = False
    for i in range(instruction.source_count):
        found |= Buffer(source_of(instruction, i).buffer).process > 0
    return found


@compilable
def reducible(instruction: ReduceRecord, begin: int, most: int) -> int:
    """Return how many bytes to reduce at a time from `begin` on: `most` or fewer."""
    target = instruction.target
    length = contiguous(Buffer(target.buffer), target.offset + begin, most)
    for i in range(instruction.source_count):
        source = source_of(instruction, i)
        length = contiguous(Buffer(source.buffer), source.offset + begin, length)
    return length


@compilable
def find_sources(team: Team, instruction: ReduceRecord, begin: int, length: int) -> bool:
    """Write each source's address to `team.sources`; False if a process does not answer."""
    into, memory = team.read_buffer, team.gather_buffer
    for i in range(instruction.source_count):
        operand = source_of(instruction, i)
        buffer, offset = Buffer(operand.buffer), operand.offset + begin
        if buffer.process > 0:
            if not read(team, into, buffer.process, buffer.address + offset, length):
                return False
            address = into
            into += team.read_bytes
        else:
            address = gathered(buffer, offset, length, memory + (i + 1) * GATHER_BYTES)
        store(team.sources + i * WORD, address)
    return True


@compilable
def reduce(program: Program, team: Team, instruction: ReduceRecord) -> bool:
    """Execute a REDUCE, in parts that stay in the cache; return False as `distribute`.

    After False the next run skips the parts that are reduced: their sources may be overwritten
    already.
    """
    target, into = Buffer(instruction.target.buffer), instruction.target.offset
    wanted, memory = Destinations(instruction.destinations), team.gather_buffer
    distributes, most = wanted.direct_count | wanted.readers, team.read_bytes
    if distributes and not reads_processes(instruction):
        most = min(most, _CACHED_BYTES)
    begin, is_reduced = program.done_bytes, program.done_bytes < 0
    if is_reduced:
        begin = ~begin
    while begin < instruction.nbytes:
        length = reducible(instruction, begin, min(most, instruction.nbytes - begin))
        place = writable_at(target, into + begin, length, memory)
        if not is_reduced:
            if not find_sources(team, instruction, begin, length):
                program.done_bytes = begin
                return False
            call_fold(
                program.fold,
                place,
                team.sources,
                instruction.source_count,
                length // program.item_bytes,
                program.divisor if instruction.divides else 0,
                team.fold_scratch,
            )
        if distributes and not distribute(team, wanted, place, begin, length):
            program.done_bytes = ~begin
            return False
        is_reduced = False
        scatter(target, into + begin, length, memory, place)
        begin += length
    if distributes:
        fence()
    program.done_bytes = 0
    return True


@compilable
def deliver(program: Program, team: Team, instruction: PushRecord) -> bool:
    """Execute a PUSH; return False as `distribute`.  The next run goes on with the same piece."""
    source = Buffer(instruction.source.buffer).address + instruction.source.offset
    wanted, begin = Destinations(instruction.destinations), program.done_bytes
    while begin < instruction.nbytes:
        length = min(_PUSHED_BYTES, instruction.nbytes - begin)
        if not distribute(team, wanted, source + begin, begin, length):
            program.done_bytes = begin
            return False
        begin += length
    program.done_bytes = 0
    return True


@compilable
def delay(team: Team) -> None:
    """Wait for a random time, so that tests see rare orders of execution."""
    drawn = team.delay_seed * 6364136223846793005 + 1442695040888963407
    team.delay_seed = drawn | 1
    for _ in range((drawn >> 40) & 0xFFF if (drawn >> 60) & 3 == 0 else 0):
        load_acquire(team, "delay_seed")
    if (drawn >> 56) & 0xF == 0:
        yield_core()


@compilable
def bind(team: Team, buffer: Buffer, location: Location, address: Address) -> None:
    """Point a buffer of a program at an array, or at an iovec, and write its location."""
    if address < 0:
        buffer.address, buffer.process = -address, IOVEC
        location.address, location.in_segment = 0, 0
        return
    buffer.address, buffer.process = address, 0
    offset = address - team.segment
    if 0 <= offset < team.segment_bytes:
        location.address, location.in_segment = offset, 1
    else:
        location.address, location.in_segment = address, 0


@compilable
def run(address: Address, number: int, source: Address, target: Address) -> int:
    """Run the program at `address`; return DONE, PENDING (it waits or pauses), MISMATCH or FAILED.

    `number` is that of the call, or -1 if the header is complete.  `source` and `target` are
    the addresses of INPUT and OUTPUT; 0: the same as before; negative: the negated address of
    an `Iovec`.  After PENDING, the next run continues with the instruction that waits, or after
    the PAUSE.
    """
    program = Program(address)
    team = Team(program.team)
    if source:
        bind(team, program.input, program.input_location, source)
        bind(team, program.output, program.output_location, target)
    if number >= 0:
        program.header.call_number = number
    at = program.instruction
    if at == 0:
        at = address + _PROGRAM_BYTES
        if team.rounds >= team.trial.phase_end:
            next_phase(team)
        program.base = team.rounds
        team.rounds += program.rounds
        program.done_bytes = 0
        begin_messages(program)
    base, result, timed = program.base, DONE, is_timed(team)
    while True:
        if team.delay_seed:
            delay(team)
        instruction = InstructionRecord(at)
        opcode = instruction.opcode
        if opcode == WAIT:
            result = wait(program, team, WaitRecord(at), base + instruction.round)
        elif opcode == REDUCE:
            begin = begin_timing(team, ReduceRecord(at).nbytes) if timed else 0
            result = DONE if reduce(program, team, ReduceRecord(at)) else PENDING
            if begin:
                end_timing(team, begin, ReduceRecord(at).nbytes)
        elif opcode == COPY:
            begin = begin_timing(team, CopyRecord(at).nbytes) if timed else 0
            result = DONE if copy_bytes(team, CopyRecord(at)) else PENDING
            if begin:
                end_timing(team, begin, CopyRecord(at).nbytes)
        elif opcode == PUSH:
            result = DONE if deliver(program, team, PushRecord(at)) else PENDING
        elif opcode == POST:
            post(program, team, PostRecord(at), base + instruction.round)
        elif opcode == FREE_SLOT:
            result = free_slot(program, team, FreeSlotRecord(at), base + instruction.round)
        elif opcode == START:
            result = start(program, team, HostMessageRecord(MessageRecord(at).message))
        elif opcode == COMPLETE:
            result = complete(program, team, HostMessageRecord(MessageRecord(at).message))
        elif opcode == PAUSE:
            at += INSTRUCTION_BYTES
            result = PENDING
        else:
            break
        if result == PENDING:
            result = progress(program, team)
        if result != DONE:
            program.instruction = at
            return result
        at += INSTRUCTION_BYTES
    program.instruction = 0
    program.runs += 1
    claim(address_of(slot_of(team.segment, team.rounds + 1)))
    return DONE
