"""The machine that carries out a program, compiled: rows that copy, fold, tell and wait.

A program is one slice of a plan, made for shared memory by
`ringreduce.planning.shm_instructions`.  How its words and rows are laid out, and what they mean,
stands in `shm.layout`.

Every rank counts exchanges, all alike.  In exchange e it puts what it has to say into slot e mod 2
of its block, and then the number e before it (release); who reads e there (acquire) sees all that
was written before.  By putting e a rank also says that it has done with all exchanges before e.  So
a slot may be written again, for e, when every other rank has put e - 1; who has put that had done
with e - 2.  Most often that is known already: it was awaited.  The same holds for the ring.
"""

from __future__ import annotations

from typing import Any

from ringreduce.compiler.memory import (
    call_fold,
    claim,
    copy,
    fence,
    load,
    nanoseconds,
    read_process,
    store,
    stream_line,
    yield_core,
)
from ringreduce.compiler.records import compilable, load_acquire, store_release
from ringreduce.shm.iovec import at_once, brought, deal_out, room
from ringreduce.shm.layout import (
    ACC,
    AWAIT,
    BASE,
    BLOCK,
    COMMON,
    COMMON_WORDS,
    COMPARED,
    COPY,
    COUNT,
    DATA,
    DELAYS,
    DIVISOR,
    DONE_BYTES,
    EXCHANGES,
    FAR_GIVEN,
    FAR_PULLED,
    FAR_STAGED,
    FINISHED,
    FOLD,
    FOREIGN,
    HEADER,
    IN_PIECES,
    INPUT,
    INPUT_AT,
    INPUT_PLACE,
    ITEM_BYTES,
    MAKE_ROOM,
    MET,
    MY_BLOCK,
    MY_BYTES,
    MY_SLOT,
    OUTPUT,
    OUTPUT_AT,
    OUTPUT_PLACE,
    OWN_HEADER,
    PEER_INPUT,
    PEER_OUTPUT,
    PEER_SLOT,
    PEER_WORDS,
    PEERS,
    PROCESS,
    PULL_BYTES,
    PULLED,
    PUT,
    REDUCE,
    RING,
    RING_AT,
    RING_BYTES,
    RING_LAST,
    RING_TURN,
    ROW,
    ROW_WORDS,
    SEEN,
    SLOT_BYTES,
    SOURCES,
    SPINS,
    STAGED_FROM,
    START,
    TELLS,
    TELLS_ARRAYS,
    TELLS_DATA,
    TIMES_ROUND,
    TOGETHER,
    TOGETHER_BYTES,
    VECTOR,
    WAITS,
    WORD,
    WRITABLE,
    YIELDS,
    Slot,
)

_LONGEST_READ = 1 << 30
_TRIAL_BYTES, _CHECKED_BYTES, _FAR_TIMES = 2 << 10, 32 << 10, 16
_FAR_BYTES = _FAR_TIMES * _CHECKED_BYTES
_STAGED_LINE_NS, _GIVEN_LINE_NS, _PULLED_LINE_NS = 16, 10, 20
"""To write a line that another core has read takes 2 to 9 ns where they share a cache, else 28.
Past the caches it takes 2, and then 2 to 4 more to read.  To be pulled, a line takes 5 to 9."""
_PASSED_ON = 16 << 10
"""Bytes that are folded before they are written to where else they are wanted: they stay in L1."""


@compilable
def _slot(block: Any, number: Any) -> Any:
    return block + (number & 1) * SLOT_BYTES


@compilable
def _has_put(common: Any, peer: Any, number: Any) -> bool:
    """Look, for a while, whether a peer has put a number."""
    place = _slot(load(peer + BLOCK * WORD), number)
    for _ in range(load(common + SPINS * WORD)):
        if load_acquire(Slot(place), "sequence") >= number:
            store(peer + SEEN * WORD, number)
            return True
    for _ in range(load(common + YIELDS * WORD)):
        yield_core()
        if load_acquire(Slot(place), "sequence") >= number:
            store(peer + SEEN * WORD, number)
            return True
    return False


@compilable
def _same_header(slot: Any, header: Any) -> bool:
    different = 0
    for i in range(3):
        different |= load(slot + HEADER + i * WORD) ^ load(header + i * WORD)
    return different == 0


@compilable
def _ring_place(common: Any, nbytes: Any) -> Any:
    """Take so many bytes of the ring."""
    at = load(common + RING_AT * WORD)
    turn = min(TIMES_ROUND * nbytes, RING_TURN)
    if at + nbytes > (turn if load(common + RING_LAST * WORD) >= nbytes else RING_BYTES):
        at = 0
    store(common + RING_LAST * WORD, at)
    store(common + RING_AT * WORD, at + ((nbytes + 63) & -64))
    return load(common + MY_BLOCK * WORD) + RING + at


@compilable
def _make_room(program: Any, common: Any, row: Any, number: Any) -> Any:
    """Wait until a slot may be written to: every peer has put the exchange before.

    So far each has its header of that still there, and so has this rank.  Those that nobody has
    compared yet are now: a rank that only speaks would else never hear that others did, too.
    """
    before, mine = number - 1, load(common + MY_BLOCK * WORD)
    for place in range(load(common + PEERS * WORD)):
        peer = common + (COMMON_WORDS + place * PEER_WORDS) * WORD
        if load(peer + COMPARED * WORD) >= before:
            continue
        if load(peer + SEEN * WORD) < before and not _has_put(common, peer, before):
            store(program + MET * WORD, place)
            return WAITS
        if not _same_header(_slot(load(peer + BLOCK * WORD), before), _slot(mine, before) + HEADER):
            store(program + MET * WORD, place)
            return FOREIGN
        store(peer + COMPARED * WORD, before)
    slot = _slot(mine, number) + DATA
    if load(program + TELLS * WORD) == TELLS_DATA:
        nbytes, unless = load(row + 2 * WORD), load(row + 3 * WORD)
        if nbytes and (not unless or not load(unless)):
            slot = _ring_place(common, nbytes)
    store(common + MY_SLOT * WORD, slot)
    return FINISHED


@compilable
def _put(program: Any, common: Any, row: Any, number: Any) -> None:
    block = load(common + MY_BLOCK * WORD)
    slot = _slot(block, number)
    for i in range(3):
        store(slot + HEADER + i * WORD, load(program + (OWN_HEADER + i) * WORD))
    tells = load(program + TELLS * WORD)
    if tells == TELLS_ARRAYS:
        for i in range(2):
            store(slot + INPUT_AT + i * WORD, load(program + (INPUT_PLACE + i) * WORD))
    if tells == TELLS_DATA:
        lends, data = load(row + 2 * WORD), load(common + MY_SLOT * WORD)
        if lends and load(lends):
            data = load(load(row + 3 * WORD)) + load(row + 4 * WORD)
        store(slot + INPUT_AT, data - block)
    if tells:
        for i in range(2):
            store(slot + OUTPUT_AT + i * WORD, load(program + (OUTPUT_PLACE + i) * WORD))
    store_release(Slot(slot), "sequence", number)


@compilable
def _learn(peer: Any, slot: Any, register: Any, at: Any) -> None:
    """Where one of a peer's arrays lies."""
    address, in_block = load(slot + at), load(slot + at + WORD)
    if in_block:
        store(peer + register * WORD, address + load(peer + BLOCK * WORD))
        store(peer + (register + 1) * WORD, 0)
    else:
        store(peer + register * WORD, address)
        store(peer + (register + 1) * WORD, load(peer + PROCESS * WORD))


@compilable
def _await(program: Any, common: Any, place: Any, number: Any, listens: Any) -> Any:
    peer = common + (COMMON_WORDS + place * PEER_WORDS) * WORD
    if not _has_put(common, peer, number):
        store(program + MET * WORD, place)
        return WAITS
    if not listens:
        return FINISHED
    slot = _slot(load(peer + BLOCK * WORD), number)
    if not _same_header(slot, program + OWN_HEADER * WORD):
        store(program + MET * WORD, place)
        return FOREIGN
    store(peer + COMPARED * WORD, number)
    tells = load(program + TELLS * WORD)
    if tells == TELLS_ARRAYS:
        _learn(peer, slot, PEER_INPUT, INPUT_AT)
    if tells == TELLS_DATA:
        store(peer + PEER_SLOT * WORD, load(peer + BLOCK * WORD) + load(slot + INPUT_AT))
    else:
        store(peer + PEER_SLOT * WORD, slot + DATA)
    if tells:
        _learn(peer, slot, PEER_OUTPUT, OUTPUT_AT)
        store(peer + WRITABLE * WORD, load(slot + OUTPUT_AT + WORD))
    return FINISHED


@compilable
def _read(common: Any, into: Any, process: Any, source: Any, nbytes: Any) -> bool:
    """Read another process's memory; False if it does not answer, as one that is no more."""
    vector = common + VECTOR * WORD
    while nbytes > 0:
        length = min(nbytes, _LONGEST_READ)
        store(vector, into)
        store(vector + WORD, length)
        store(vector + 2 * WORD, source)
        store(vector + 3 * WORD, length)
        done = read_process(process, vector)
        if done <= 0:
            return False
        into += done
        source += done
        nbytes -= done
    return True


@compilable
def _stream(into: Any, source: Any, nbytes: Any) -> None:
    """Copy past the caches: no other core has to be asked for what it holds of `into`."""
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
def _write(common: Any, far: Any, line_ns: Any, into: Any, source: Any, nbytes: Any) -> None:
    """Write what peers read: through the caches, or past them where other cores' are far away.

    It begins through them.  Where that takes longer than so much a line, the rest goes past them,
    and for a while all does; at `far` stands for how many bytes yet.  Where it does not, few bytes
    go on through them unasked; how many have stands there, negative and less one.
    """
    if nbytes < STAGED_FROM:
        copy(into, source, nbytes)
        return
    state, counted = load(far), min(nbytes, _CHECKED_BYTES)
    if state > 0:
        store(far, max(state - counted, 0))
        _stream(into, source, nbytes)
        return
    if state < 0 and counted - state <= _CHECKED_BYTES:
        store(far, state - counted)
        copy(into, source, nbytes)
        return
    clock = common + VECTOR * WORD
    done, length = 0, _TRIAL_BYTES
    before = nanoseconds(clock)
    while done < nbytes:
        copy(into + done, source + done, length)
        done += length
        now = nanoseconds(clock)
        if now - before > line_ns * (length >> 6):
            store(far, _FAR_BYTES)
            _stream(into + done, source + done, nbytes - done)
            return
        before, length = now, min(_CHECKED_BYTES, nbytes - done)
    store(far, -1)


@compilable
def _pull(common: Any, into: Any, process: Any, source: Any, nbytes: Any) -> bool:
    """Read another process's memory to where peers may have read before.

    Where that takes long, some of the next pieces come by way of memory that nobody else reads, and
    go from there past the caches.
    """
    clock, passing = common + VECTOR * WORD, load(common + PULLED * WORD)
    done = 0
    while done < nbytes:
        length = min(load(common + PULL_BYTES * WORD), nbytes - done)
        far = load(common + FAR_PULLED * WORD)
        if far > 0:
            store(common + FAR_PULLED * WORD, far - 1)
            if not _read(common, passing, process, source + done, length):
                return False
            _stream(into + done, passing, length)
        else:
            before = nanoseconds(clock)
            if not _read(common, into + done, process, source + done, length):
                return False
            if nanoseconds(clock) - before > _PULLED_LINE_NS * (length >> 6):
                store(common + FAR_PULLED * WORD, _FAR_TIMES)
        done += length
    fence()
    return True


@compilable
def _copy(program: Any, common: Any, row: Any) -> bool:
    unless = load(row + 7 * WORD)
    if unless and load(unless):
        return True
    target, into = load(row + WORD), load(row + 2 * WORD)
    register, source = load(row + 3 * WORD), load(row + 4 * WORD)
    nbytes, staged = load(row + 5 * WORD), load(row + 6 * WORD)
    process = load(register + WORD)
    if process > 0:
        return _pull(common, load(target) + into, process, load(register) + source, nbytes)
    memory, done = load(common + TOGETHER * WORD), 0
    while done < nbytes:
        length = at_once(target, into + done, nbytes - done)
        length = at_once(register, source + done, length)
        place = room(target, into + done, length, memory)
        there = brought(register, source + done, length, memory)
        if staged:
            _write(common, common + FAR_STAGED * WORD, _STAGED_LINE_NS, place, there, length)
        elif place != there:
            copy(place, there, length)
        deal_out(target, into + done, length, memory, place)
        done += length
    if staged:
        fence()
    return True


@compilable
def _pass_on(common: Any, wanted: Any, source: Any, begin: Any, nbytes: Any) -> None:
    """Write a piece of a result to where peers want it, and to the slot for those who cannot."""
    written = 0
    for i in range(load(wanted)):
        register = load(wanted + (4 + 2 * i) * WORD)
        if load(register + (WRITABLE - PEER_OUTPUT) * WORD):
            offset = load(wanted + (5 + 2 * i) * WORD)
            into = load(register) + offset + begin
            _write(common, common + FAR_GIVEN * WORD, _GIVEN_LINE_NS, into, source, nbytes)
            written += 1
    if written < load(wanted + WORD):
        into = load(common + MY_SLOT * WORD) + load(wanted + 2 * WORD) + begin
        _write(common, common + FAR_STAGED * WORD, _STAGED_LINE_NS, into, source, nbytes)


@compilable
def _reads_processes(listed: Any, n: Any) -> bool:
    processes = False
    for i in range(n):
        processes |= load(load(listed + 2 * i * WORD) + WORD) > 0
    return processes


@compilable
def _folded_at_once(row: Any, begin: Any, most: Any) -> Any:
    """How many bytes of all arrays of a fold to take at once, from `begin` on."""
    length = at_once(load(row + WORD), load(row + 2 * WORD) + begin, most)
    listed = load(row + 5 * WORD)
    for i in range(load(row + 4 * WORD)):
        offset = load(listed + (2 * i + 1) * WORD) + begin
        length = at_once(load(listed + 2 * i * WORD), offset, length)
    return length


@compilable
def _find_sources(common: Any, row: Any, begin: Any, length: Any) -> bool:
    """Say where to read what is folded; False if a process that has some of it does not answer."""
    pulled, memory = load(common + PULLED * WORD), load(common + TOGETHER * WORD)
    addresses, listed = load(common + SOURCES * WORD), load(row + 5 * WORD)
    for i in range(load(row + 4 * WORD)):
        register = load(listed + 2 * i * WORD)
        source = load(listed + (2 * i + 1) * WORD) + begin
        process = load(register + WORD)
        if process > 0:
            if not _read(common, pulled, process, load(register) + source, length):
                return False
            source = pulled
            pulled += load(common + PULL_BYTES * WORD)
        else:
            source = brought(register, source, length, memory + (i + 1) * TOGETHER_BYTES)
        store(addresses + i * WORD, source)
    return True


@compilable
def _reduce(program: Any, common: Any, row: Any) -> bool:
    """Fold in pieces that stay in the cache; what is in another process is read piece by piece."""
    target, into = load(row + WORD), load(row + 2 * WORD)
    nbytes = load(row + 3 * WORD)
    n, listed, most = load(row + 4 * WORD), load(row + 5 * WORD), load(row + 6 * WORD)
    item = load(program + ITEM_BYTES * WORD)
    memory = load(common + TOGETHER * WORD)
    wanted = listed + 2 * n * WORD
    passes_on = load(wanted) | load(wanted + WORD)
    if passes_on and not _reads_processes(listed, n):
        most = min(most, _PASSED_ON)
    begin = load(program + DONE_BYTES * WORD)
    while begin < nbytes:
        length = _folded_at_once(row, begin, min(most, nbytes - begin))
        place = room(target, into + begin, length, memory)
        if not _find_sources(common, row, begin, length):
            store(program + DONE_BYTES * WORD, begin)
            return False
        call_fold(
            load(program + FOLD * WORD),
            place,
            load(common + SOURCES * WORD),
            n,
            length // item,
            load(program + DIVISOR * WORD) if load(row + 7 * WORD) else 0,
            load(common + ACC * WORD),
        )
        if passes_on:
            _pass_on(common, wanted, place, begin, length)
        deal_out(target, into + begin, length, memory, place)
        begin += length
    if passes_on:
        fence()
    store(program + DONE_BYTES * WORD, 0)
    return True


@compilable
def _delay(common: Any) -> None:
    """Let some time pass, a different one each time: to find orders that are seldom."""
    drawn = load(common + DELAYS * WORD) * 6364136223846793005 + 1442695040888963407
    store(common + DELAYS * WORD, drawn | 1)
    for _ in range((drawn >> 40) & 0xFFF if (drawn >> 60) & 3 == 0 else 0):
        load_acquire(Slot(common + DELAYS * WORD), "sequence")
    if (drawn >> 56) & 0xF == 0:
        yield_core()


@compilable
def _bind(program: Any, common: Any, register: Any, place: Any, address: Any) -> None:
    """Let a program work on an array, or on pieces, and say where it lies."""
    if address < 0:
        store(program + register * WORD, -address)
        store(program + (register + 1) * WORD, IN_PIECES)
        store(program + place * WORD, 0)
        store(program + (place + 1) * WORD, 0)
        return
    offset = address - load(common + MY_BLOCK * WORD)
    in_block = 0 <= offset < load(common + MY_BYTES * WORD)
    store(program + register * WORD, address)
    store(program + (register + 1) * WORD, 0)
    store(program + place * WORD, offset if in_block else address)
    store(program + (place + 1) * WORD, 1 if in_block else 0)


@compilable
def run(program: Any, number: Any, source: Any, target: Any) -> Any:
    """Carry a program out as far as it goes: FINISHED, WAITS or FOREIGN.

    The header of its call stands in the program, but for the number, if that is not -1.  Its arrays
    are at `source` and `target`; if these are 0, at the places that it was told last; if one is
    negative, in the pieces of which -`source` or -`target` tells.  One that waits goes on there
    when it is run again.
    """
    common = load(program + COMMON * WORD)
    if source:
        _bind(program, common, INPUT, INPUT_PLACE, source)
        _bind(program, common, OUTPUT, OUTPUT_PLACE, target)
    if number >= 0:
        store(program + (OWN_HEADER + 2) * WORD, number)
    row = load(program + ROW * WORD)
    if row == 0:
        row = program + load(program + START * WORD) * WORD
        base = load(common + COUNT * WORD)
        store(program + BASE * WORD, base)
        store(common + COUNT * WORD, base + load(program + EXCHANGES * WORD))
        store(program + DONE_BYTES * WORD, 0)
    base = load(program + BASE * WORD)
    came = FINISHED
    while True:
        if load(common + DELAYS * WORD):
            _delay(common)
        kind = load(row)
        if kind == AWAIT:
            number, place = base + load(row + WORD), load(row + 2 * WORD)
            came = _await(program, common, place, number, load(row + 3 * WORD))
        elif kind == REDUCE:
            came = FINISHED if _reduce(program, common, row) else WAITS
        elif kind == COPY:
            came = FINISHED if _copy(program, common, row) else WAITS
        elif kind == PUT:
            _put(program, common, row, base + load(row + WORD))
        elif kind == MAKE_ROOM:
            came = _make_room(program, common, row, base + load(row + WORD))
        else:
            break
        if came != FINISHED:
            store(program + ROW * WORD, row)
            return came
        row += ROW_WORDS * WORD
    store(program + ROW * WORD, 0)
    claim(_slot(load(common + MY_BLOCK * WORD), load(common + COUNT * WORD) + 1))
    return FINISHED
