"""Ordinary and streaming stores to memory that peers read, and the trials that choose between them.

Memory that another core has read is in that core's cache.  Ordinary stores are the faster kind if
the two cores share a cache.  If they share none, to write and to read a line takes several times as
long.  Streaming stores bypass all caches, and the peer reads the line from memory.

Which cores share a cache is not known, and on a virtual machine it changes from second to second.
So all ranks time both kinds in turns, in the same rounds.  A trial has these phases, one after the
other:

=============  ======================  ============================================================
phase          kind of stores          length in rounds
=============  ======================  ============================================================
`KEEP`         the kind in use         `_KEPT_ROUNDS`, or `_IDLE_ROUNDS` without long data
`TIME_KEPT`    the kind in use, timed  `_TIMED_ROUNDS`
`AWAIT_KEPT`   the kind in use         `_AWAITED_ROUNDS`: by then all peers have reported
`WARM_UP`      the other kind          `_WARM_UP_ROUNDS`: by then the ring was written by this kind
`TIME_OTHER`   the other kind, timed   `_TIMED_ROUNDS`
`AWAIT`        the kind in use         `_AWAITED_ROUNDS`: by then all peers have reported
=============  ======================  ============================================================

At the end every rank adds up the reports of all ranks.  The other kind is taken if it is clearly
faster.  The times of all ranks are added, because readers lose time that the writer does not see.
A report that arrives late only delays a choice of speed: reports need no memory order of their own.

A trial costs some rounds of the slower kind.  So `KEEP` follows on `AWAIT_KEPT`, unless the kind in
use has become slower, or the latest trial ended long ago.  Without long data there is no trial.
"""

from __future__ import annotations

from ringreduce.compiler.memory import copy, nanoseconds, stream_line
from ringreduce.compiler.records import Address, address_of, compilable
from ringreduce.shm.layout import (
    AWAIT,
    AWAIT_KEPT,
    KEEP,
    REPORT_OFFSET,
    STAGED_FROM_BYTES,
    TIME_KEPT,
    TIME_OTHER,
    WARM_UP,
    StoreReport,
    Team,
)
from ringreduce.shm.protocol import peer_of

_KEPT_ROUNDS, _IDLE_ROUNDS = 64, 1024
_TIMED_ROUNDS = 8
_WARM_UP_ROUNDS = 16
_AWAITED_ROUNDS = 3
FIRST_INTERVAL, LAST_INTERVAL = 64, 2 << 10
"""Rounds between two trials: the fewest and the most.  A trial without a change doubles them."""
_SLOWER, _SOON = 2, 256
"""The next trial begins after `_SOON` rounds if the kind in use takes `_SLOWER` times as long."""
_CLEARLY = 5, 4
"""The kind in use is kept unless it takes more than this ratio of the other kind's time."""


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
def write(team: Team, into: Address, source: Address, nbytes: int) -> None:
    """Write memory that peers read, by the chosen stores; `fence` before you publish the bytes."""
    if team.trial.streams and nbytes >= STAGED_FROM_BYTES:
        stream(into, source, nbytes)
    else:
        copy(into, source, nbytes)


@compilable
def report_of(segment: Address) -> StoreReport:
    return StoreReport(segment + REPORT_OFFSET)


@compilable
def is_timed(team: Team) -> bool:
    return team.trial.phase in (TIME_KEPT, TIME_OTHER)


@compilable
def begin_timing(team: Team, nbytes: int) -> int:
    """Read the clock before a COPY or REDUCE of `nbytes`; return 0 if that is too short to time."""
    return nanoseconds(address_of(team.clock)) if nbytes >= STAGED_FROM_BYTES else 0


@compilable
def end_timing(team: Team, begin: int, nbytes: int) -> None:
    duration = nanoseconds(address_of(team.clock)) - begin
    report = report_of(team.segment)
    if team.trial.phase == TIME_KEPT:
        report.kept_ns += duration
        report.kept_bytes += nbytes
    else:
        report.other_ns += duration
        report.other_bytes += nbytes


@compilable
def totals(team: Team) -> tuple[int, int, int, int]:
    """Add up kept_ns, kept_bytes, other_ns and other_bytes of the reports of all ranks."""
    own = report_of(team.segment)
    kept_ns, kept_bytes = own.kept_ns, own.kept_bytes
    other_ns, other_bytes = own.other_ns, own.other_bytes
    for index in range(team.peer_count):
        report = report_of(peer_of(team, index).segment)
        kept_ns += report.kept_ns
        kept_bytes += report.kept_bytes
        other_ns += report.other_ns
        other_bytes += report.other_bytes
    return kept_ns, kept_bytes, other_ns, other_bytes


@compilable
def other_is_faster(team: Team) -> bool:
    """Whether the other kind of stores is clearly faster, by the reports of all ranks."""
    kept_ns, kept_bytes, other_ns, other_bytes = totals(team)
    if other_bytes == 0:
        return False
    more, less = _CLEARLY
    # Floats: the products of times and bytes may be longer than 63 bits.
    kept, other = float(kept_ns) * other_bytes, float(other_ns) * kept_bytes
    return kept * less > other * more


@compilable
def is_due(team: Team) -> bool:
    """Whether the other kind is to be tried now, by the reports on the kind in use."""
    kept_ns, kept_bytes, _, _ = totals(team)
    if kept_bytes == 0:
        return False
    trial, ns = team.trial, int(float(kept_ns) * (1 << 20) / kept_bytes)
    if trial.usual_ns == 0 or ns < trial.usual_ns:
        trial.usual_ns = ns
    interval = trial.interval
    if ns > _SLOWER * trial.usual_ns:
        interval = min(interval, _SOON)
    return team.rounds - trial.latest >= interval


@compilable
def next_phase(team: Team) -> None:
    """Go on to the next phase of the trial, between two programs.  All ranks do so at once."""
    trial, report = team.trial, report_of(team.segment)
    phase, length = trial.phase, _TIMED_ROUNDS
    if phase == KEEP:
        report.kept_ns, report.kept_bytes, report.other_ns, report.other_bytes = 0, 0, 0, 0
        phase = TIME_KEPT
    elif phase == TIME_KEPT:
        phase, length = AWAIT_KEPT, _AWAITED_ROUNDS
    elif phase == AWAIT_KEPT and is_due(team):
        trial.streams = 1 - trial.streams
        phase, length = WARM_UP, _WARM_UP_ROUNDS
    elif phase == AWAIT_KEPT:
        kept_bytes = totals(team)[1]
        phase, length = KEEP, _KEPT_ROUNDS if kept_bytes else _IDLE_ROUNDS
    elif phase == WARM_UP:
        phase = TIME_OTHER
    elif phase == TIME_OTHER:
        trial.streams = 1 - trial.streams
        phase, length = AWAIT, _AWAITED_ROUNDS
    else:
        trial.interval = max(FIRST_INTERVAL, min(2 * trial.interval, LAST_INTERVAL))
        if other_is_faster(team):
            trial.streams, trial.interval = 1 - trial.streams, FIRST_INTERVAL
        trial.latest, trial.usual_ns = team.rounds, 0
        phase, length = KEEP, _KEPT_ROUNDS
    trial.phase, trial.phase_end = phase, team.rounds + length
