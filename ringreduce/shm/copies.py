"""Copies between buffers, to memory that peers read, and out of other processes.

Memory that another core has read is in that core's cache.  To write a cache line of such memory
takes 2 to 9 ns if the two cores share a cache, and 28 ns if they share none.  A streaming store
bypasses all caches: it takes 2 ns a line, and 2 to 4 ns more to read the line.  `process_vm_readv`
takes 5 to 9 ns a line.  On a virtual machine the cores that share a cache can change.  So stores
are timed, and the faster kind of store is used for a while.
"""

from __future__ import annotations

from ringreduce.compiler.memory import copy, fence, load, nanoseconds, read_process, stream_line
from ringreduce.compiler.records import Address, address_of, compilable
from ringreduce.shm import iovec
from ringreduce.shm.layout import STAGED_FROM_BYTES, Buffer, Copy, StoreState, Team

_READ_LIMIT_BYTES = 1 << 30
"""Bytes of one read: the kernel reads less than 2 GiB at a time."""
_TRIAL_BYTES = 2 << 10
"""Bytes of the first trial of ordinary stores."""
_CHECKED_BYTES = 32 << 10
"""Bytes of each later trial, and bytes of ordinary stores that are not timed after a trial."""
_FAR_TIMES = 16
"""Reads by way of `read_buffer` after a direct read was slow."""
_FAST_READ_BYTES = 4 << 20
"""Bytes of a direct read after one that was fast: a call of the kernel takes 3 µs besides them."""
_STREAM_BYTES = _FAR_TIMES * _CHECKED_BYTES
"""Bytes to stream after ordinary stores were slow."""
STAGED_LINE_NS, DIRECT_LINE_NS, READ_LINE_NS = 16, 10, 20
"""Limits in ns a line of 64 bytes, above which accesses are slow: stores to this rank's slot and
ring, stores to OUTPUT of peers, and reads from processes to memory that peers may have read."""


@compilable
def read(team: Team, into: Address, process: int, source: Address, nbytes: int) -> bool:
    """Read another process's memory; return False if the process does not answer or has ended."""
    while nbytes > 0:
        length = min(nbytes, _READ_LIMIT_BYTES)
        team.local.address, team.local.nbytes = into, length
        team.remote.address, team.remote.nbytes = source, length
        done = read_process(process, address_of(team.local))
        if done <= 0:
            return False
        into += done
        source += done
        nbytes -= done
    return True


@compilable
def stream(into: Address, source: Address, nbytes: int) -> None:
    """Copy by streaming stores; the caller must `fence` before it publishes the bytes."""
    before = min(-into & 31, nbytes)
    if before:
        copy(into, source, before)
        into += before
        source += before
        nbytes -= before
    lines = nbytes >> 6
    for _ in range(lines):
        stream_line(into, source)
        into += 64
        source += 64
    if nbytes & 63:
        copy(into, source, nbytes & 63)


@compilable
def write(
    team: Team, state: StoreState, line_ns: int, into: Address, source: Address, nbytes: int
) -> None:
    """Write memory that peers read, by ordinary stores, or by streaming stores if those are slow.

    Starts with ordinary stores and times them.  If a cache line takes longer than `line_ns`, the
    rest, and the next `_STREAM_BYTES`, use streaming stores.  Otherwise the next `_CHECKED_BYTES`
    are not timed.  `state` counts either kind down.
    """
    if nbytes < STAGED_FROM_BYTES:
        copy(into, source, nbytes)
        return
    counted = min(nbytes, _CHECKED_BYTES)
    if state.stream_remaining > 0:
        state.stream_remaining = max(state.stream_remaining - counted, 0)
        stream(into, source, nbytes)
        return
    if state.unchecked_remaining > counted:
        state.unchecked_remaining -= counted
        copy(into, source, nbytes)
        return
    state.unchecked_remaining = 0
    clock = address_of(team.clock)
    done, length = 0, _TRIAL_BYTES
    before = nanoseconds(clock)
    while done < nbytes:
        copy(into + done, source + done, length)
        done += length
        now = nanoseconds(clock)
        if now - before > line_ns * (length >> 6):
            state.stream_remaining = _STREAM_BYTES
            stream(into + done, source + done, nbytes - done)
            return
        before, length = now, min(_CHECKED_BYTES, nbytes - done)
    state.unchecked_remaining = _CHECKED_BYTES


@compilable
def pull(team: Team, into: Address, process: int, source: Address, nbytes: int) -> bool:
    """Read another process's memory to memory that peers may have read; return False as `read`.

    After a slow direct read, the next `_FAR_TIMES` reads go to `read_buffer`, which no peer reads,
    and streaming stores copy the data from there.  After a fast one, longer reads follow.
    """
    clock = address_of(team.clock)
    done, most = 0, team.read_bytes
    while done < nbytes:
        length = min(most, nbytes - done)
        if team.indirect_reads > 0:
            length = min(length, team.read_bytes)
            team.indirect_reads -= 1
            if not read(team, team.read_buffer, process, source + done, length):
                return False
            stream(into + done, team.read_buffer, length)
        else:
            before = nanoseconds(clock)
            if not read(team, into + done, process, source + done, length):
                return False
            if nanoseconds(clock) - before > READ_LINE_NS * (length >> 6):
                team.indirect_reads = _FAR_TIMES
            else:
                most = _FAST_READ_BYTES
        done += length
    fence()
    return True


@compilable
def copy_bytes(team: Team, instruction: Copy) -> bool:
    """Execute a COPY; return False if the process of the source does not answer."""
    if instruction.shared_flag and load(instruction.shared_flag):
        return True
    target, into = Buffer(instruction.target.buffer), instruction.target.offset
    buffer, source = Buffer(instruction.source.buffer), instruction.source.offset
    nbytes, staged = instruction.nbytes, instruction.staged
    if buffer.process > 0:
        begin = target.address + into
        return pull(team, begin, buffer.process, buffer.address + source, nbytes)
    memory, done = team.gather_buffer, 0
    while done < nbytes:
        length = iovec.contiguous(target, into + done, nbytes - done)
        length = iovec.contiguous(buffer, source + done, length)
        place = iovec.writable_at(target, into + done, length, memory)
        data = iovec.gathered(buffer, source + done, length, memory)
        if staged:
            write(team, team.staged, STAGED_LINE_NS, place, data, length)
        elif place != data:
            copy(place, data, length)
        iovec.scatter(target, into + done, length, memory, place)
        done += length
    if staged:
        fence()
    return True
