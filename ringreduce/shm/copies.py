"""Copies between buffers, to memory that peers read, and out of other processes.

A read by `process_vm_readv` takes longer if this rank overwrites lines that a core with another
cache has read.  So direct reads are timed.
"""

from __future__ import annotations

from ringreduce.compiler.memory import copy, fence, load, nanoseconds, read_process, write_process
from ringreduce.compiler.records import Address, address_of, compilable
from ringreduce.shm import iovec
from ringreduce.shm.layout import STREAMED, Buffer, CopyRecord, Team
from ringreduce.shm.stores import stream, write

_KERNELS_LIMIT_BYTES = 1 << 30
"""Bytes of one call: the kernel reads and writes less than 2 GiB at a time."""
_FAR_TIMES = 16
"""Reads by way of `read_buffer` after a direct read was slow."""
_FAST_READ_BYTES = 4 << 20
"""Bytes of a direct read after one that was fast: a call of the kernel takes 3 µs besides them."""
_READ_LINE_NS = 20
"""Nanoseconds a line of 64 bytes above which a direct read is slow."""


@compilable
def read(team: Team, into: Address, process: int, source: Address, nbytes: int) -> bool:
    """Read another process's memory; return False if the process does not answer or has ended."""
    return _move(team, process, into, source, nbytes, writes=False)


@compilable
def push(team: Team, process: int, into: Address, source: Address, nbytes: int) -> bool:
    """Write memory of another process, or mapped memory if `process` is 0; return False as `read`.

    The caller must `fence` before it publishes the bytes.
    """
    if process == 0:
        write(team, into, source, nbytes)
        return True
    return _move(team, process, source, into, nbytes, writes=True)


@compilable
def _move(
    team: Team, process: int, here: Address, there: Address, nbytes: int, writes: bool
) -> bool:
    while nbytes > 0:
        length = min(nbytes, _KERNELS_LIMIT_BYTES)
        team.local.address, team.local.nbytes = here, length
        team.remote.address, team.remote.nbytes = there, length
        vectors = address_of(team.local)
        done = write_process(process, vectors) if writes else read_process(process, vectors)
        if done <= 0:
            return False
        here += done
        there += done
        nbytes -= done
    return True


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
            if nanoseconds(clock) - before > _READ_LINE_NS * (length >> 6):
                team.indirect_reads = _FAR_TIMES
            else:
                most = _FAST_READ_BYTES
        done += length
    fence()
    return True


@compilable
def copy_bytes(team: Team, instruction: CopyRecord) -> bool:
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
        if staged == STREAMED and place != data:
            stream(place, data, length)
        elif staged and place != data:
            write(team, place, data, length)
        elif place != data:
            copy(place, data, length)
        iovec.scatter(target, into + done, length, memory, place)
        done += length
    if staged:
        fence()
    return True
