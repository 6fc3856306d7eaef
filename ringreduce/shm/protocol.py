"""The slots through which ranks of one host exchange data, and the order of their memory.

All ranks of a host count rounds alike; a round is a step of a schedule.  In round r a rank

- frees its slot r mod 2 (`free_slot`): it waits until every peer has posted round r - 1;
- writes its data, the header of the call, and where its arrays are;
- posts the round (`post`): it writes the sequence number r to the slot, with release order;
- waits for each peer whose data it reads (`wait`): it loads the sequence number of the peer's slot,
  with acquire order, until the peer has posted round r.

To post round r also acknowledges every round before r: the rank reads none of their data any more.

**The memory order.**  Why a reader sees the data of its round, and why memory can be reused:

1. *A reader sees the data.*  The sequence number is stored with release order, after the data, the
   header and the locations; a fence orders streaming stores before it.  A reader goes on only when
   it has loaded r with acquire order.  So it sees all that the writer wrote before.
2. *A reader finds its own round in the slot.*  The sequence number of slot r mod 2 is r - 2 until
   it becomes r.  It becomes r + 2 only after its owner has seen that every peer has posted r + 1,
   and a peer that has posted r + 1 has done with r.  A rank that only waits to know how far a peer
   is accepts a later number.  It does not read the header, which may be that of the next call.
3. *A slot can be reused.*  Slot r mod 2 was last used for round r - 2.  Every peer that has posted
   r - 1 has done with r - 2.  A rank that reads from all peers has waited for these posts anyway; a
   root that reads from none waits in `free_slot`.  There a rank also compares the headers of round
   r - 1 that it has not compared yet, and that are all still there.  So ranks that only send find
   out that their peers are in another call.
4. *The ring can be reused.*  By 3, peers may still read what the ring holds for round r - 1 alone.
   It is long enough for a rank to go back to its beginning without reaching those data.
5. *Exposed and single-copy memory can be written again.*  Peers read it in round r.  The rank, or
   its caller, writes it only when all peers that read it have posted r + 1.
   `planning.shm_instructions` puts such a wait before every instruction that writes there, and at
   the end of each slice, after a round that carries no data if the data are single-copy.
6. *A peer's OUTPUT can be written directly.*  A rank writes it for round r + 1 after it has freed
   its slot for r + 1, so all peers have posted r.  The peer is in step r, or waits for r + 1.
   Nothing that it still reads, writes or exposes in r is there, but for what this rank itself has
   just read.  The peer reads these bytes after it has loaded the sequence number r + 1, as by 1.
   A PUSH in a step r that only moves data is such a write.  The peer reads other bytes of the
   message meanwhile, and returns to its caller when it has loaded r + 1.
7. *Memory that was given back is not written.*  A rank that leaves a call early by an error returns
   its arrays to its caller.  `write_begins` sets the mark of a rank that is about to write to its
   peers' arrays, before the rank looks whether they have left (`has_left`); `leave` announces that
   its rank has left, before it looks at the marks.  A full fence between the two accesses of each
   side makes at least one of them see the other: the writer writes nothing, or the rank that leaves
   waits until the mark is cleared behind the written data.  Before all this the writer has freed
   its slot, so it has compared the headers of all ranks.
8. *After a call that was broken off* all ranks meet before the next call: none is in a program any
   more.  They exchange their counts of rounds, and all go on from the highest.
"""

from __future__ import annotations

from ringreduce.compiler.memory import fence, load, nanoseconds, yield_core
from ringreduce.compiler.records import (
    Address,
    address_of,
    compilable,
    load_acquire,
    size_of,
    store_release,
)
from ringreduce.shm.layout import (
    DATA_OFFSET,
    DEPARTURE_OFFSET,
    DONE,
    MARK_OFFSET,
    MISMATCH,
    PENDING,
    PUBLISHES_ARRAYS,
    PUBLISHES_DATA,
    RING_BYTES,
    RING_OFFSET,
    RING_TURN_BYTES,
    RING_TURN_ROUNDS,
    SLOT_BYTES,
    Buffer,
    Departure,
    FreeSlotRecord,
    Header,
    Location,
    Peer,
    PostRecord,
    Program,
    Slot,
    Team,
    WaitRecord,
    WriteMark,
)

_TEAM_BYTES, _PEER_BYTES = size_of(Team), size_of(Peer)
_LEAVING_NS = 50_000_000
"""Nanoseconds that a rank which leaves a call waits for writes of its peers."""


@compilable
def slot_of(segment: Address, sequence: int) -> Slot:
    return Slot(segment + (sequence & 1) * SLOT_BYTES)


@compilable
def peer_of(team: Team, index: int) -> Peer:
    return Peer(address_of(team) + _TEAM_BYTES + index * _PEER_BYTES)


@compilable
def has_posted(team: Team, peer: Peer, sequence: int) -> bool:
    """Poll for a while until a peer has posted a round; False if it has not."""
    slot = slot_of(peer.segment, sequence)
    for _ in range(team.spins):
        if load_acquire(slot, "sequence") >= sequence:
            peer.seen = sequence
            return True
    for _ in range(team.yields):
        yield_core()
        if load_acquire(slot, "sequence") >= sequence:
            peer.seen = sequence
            return True
    return False


@compilable
def equal(a: Header, b: Header) -> bool:
    difference = (a.digest_low ^ b.digest_low) | (a.digest_high ^ b.digest_high)
    return (difference | (a.call_number ^ b.call_number)) == 0


@compilable
def copy_header(into: Header, source: Header) -> None:
    into.digest_low = source.digest_low
    into.digest_high = source.digest_high
    into.call_number = source.call_number


@compilable
def copy_location(into: Location, source: Location) -> None:
    into.address, into.in_segment = source.address, source.in_segment


@compilable
def reserve_in_ring(team: Team, nbytes: int) -> Address:
    """Reserve bytes of this rank's ring; go back to its beginning when a turn is full."""
    begin = team.ring_end
    turn = min(RING_TURN_ROUNDS * nbytes, RING_TURN_BYTES)
    # Peers may still read the latest data: the beginning is free if they begin behind it.
    if begin + nbytes > (turn if team.ring_begin >= nbytes else RING_BYTES):
        begin = 0
    team.ring_begin = begin
    team.ring_end = begin + ((nbytes + 63) & -64)
    return team.segment + RING_OFFSET + begin


@compilable
def free_slot(program: Program, team: Team, instruction: FreeSlotRecord, sequence: int) -> int:
    """Wait until every peer has posted the round before; then this round's slot may be written.

    Each peer's header of that round is still there.  Those not compared yet are compared here: a
    rank that only sends would otherwise never notice that its peers are in another call.
    """
    previous = sequence - 1
    mine = slot_of(team.segment, previous)
    for index in range(team.peer_count):
        peer = peer_of(team, index)
        if peer.compared >= previous:
            continue
        if peer.seen < previous and not has_posted(team, peer, previous):
            program.blamed = index
            return PENDING
        if not equal(slot_of(peer.segment, previous).header, mine.header):
            program.blamed = index
            return MISMATCH
        peer.compared = previous
    team.slot.address = address_of(slot_of(team.segment, sequence)) + DATA_OFFSET
    nbytes, flag = instruction.nbytes, instruction.shared_flag
    if program.publishes == PUBLISHES_DATA and nbytes and not (flag and load(flag)):
        team.slot.address = reserve_in_ring(team, nbytes)
    return DONE


@compilable
def post(program: Program, team: Team, instruction: PostRecord, sequence: int) -> None:
    """Publish this rank's part of a round; the sequence number goes last, with release order."""
    slot = slot_of(team.segment, sequence)
    copy_header(slot.header, program.header)
    if program.publishes == PUBLISHES_ARRAYS:
        copy_location(slot.input, program.input_location)
    if program.publishes == PUBLISHES_DATA:
        data = team.slot.address
        if instruction.shared_flag and load(instruction.shared_flag):
            exposed = instruction.exposed
            data = Buffer(exposed.buffer).address + exposed.offset
        slot.input.address = data - team.segment
    if program.publishes:
        copy_location(slot.output, program.output_location)
    store_release(slot, "sequence", sequence)


@compilable
def resolve(buffer: Buffer, location: Location, peer: Peer) -> None:
    """Point `buffer` at the array of a peer that is at `location`."""
    if location.in_segment:
        buffer.address, buffer.process = peer.segment + location.address, 0
    else:
        buffer.address, buffer.process = location.address, peer.process


@compilable
def wait(program: Program, team: Team, instruction: WaitRecord, sequence: int) -> int:
    """Wait until a peer has posted a round; if the rank reads it, resolve the peer's buffers."""
    peer = peer_of(team, instruction.peer)
    if not has_posted(team, peer, sequence):
        program.blamed = instruction.peer
        return PENDING
    if not instruction.reads:
        return DONE
    slot = slot_of(peer.segment, sequence)
    if not equal(slot.header, program.header):
        program.blamed = instruction.peer
        return MISMATCH
    peer.compared = sequence
    if program.publishes == PUBLISHES_ARRAYS:
        resolve(peer.input, slot.input, peer)
    if program.publishes == PUBLISHES_DATA:
        peer.slot.address = peer.segment + slot.input.address
    else:
        peer.slot.address = address_of(slot) + DATA_OFFSET
    if program.publishes:
        resolve(peer.output, slot.output, peer)
        peer.output_is_shared = slot.output.in_segment
    return DONE


# --- writes to the arrays of peers ----------------------------------------------------------------


@compilable
def mark_of(segment: Address) -> WriteMark:
    return WriteMark(segment + MARK_OFFSET)


@compilable
def departure_of(segment: Address) -> Departure:
    return Departure(segment + DEPARTURE_OFFSET)


@compilable
def write_begins(team: Team) -> None:
    """Mark this rank as one that writes to arrays of its peers; then it looks at `has_left`."""
    store_release(mark_of(team.segment), "writes", 1)
    fence()


@compilable
def has_left(peer: Peer) -> bool:
    return load_acquire(departure_of(peer.segment), "has_left") != 0


@compilable
def write_ends(team: Team) -> None:
    """Clear the mark behind all that was written, by streaming stores too."""
    fence()
    store_release(mark_of(team.segment), "writes", 0)


@compilable
def leave(team: Team) -> None:
    """Let no peer begin to write to this rank's arrays; wait until none does.

    Waits for `_LEAVING_NS` at most: a peer that is stopped while it writes keeps its mark.
    """
    store_release(departure_of(team.segment), "has_left", 1)
    fence()
    end = nanoseconds(address_of(team.clock)) + _LEAVING_NS
    for index in range(team.peer_count):
        mark = mark_of(peer_of(team, index).segment)
        while load_acquire(mark, "writes") and nanoseconds(address_of(team.clock)) < end:
            yield_core()
