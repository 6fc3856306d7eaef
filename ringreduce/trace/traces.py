"""Make one file of the parts of all ranks: for Chrome and Perfetto, or a picture.

`trace.recorder` says what a part is.  Ranks of one host have one clock.  A rank on another host
compares its own with that of rank 0.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import glob
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import groupby, pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from ringreduce.console.terminal import print_error
from ringreduce.errors import RingReduceError, counted
from ringreduce.picture import output
from ringreduce.picture.lanes import Lane, LaneBar, LaneChart, Sample, draw_lanes
from ringreduce.picture.scales import size_text
from ringreduce.picture.style import TINTS
from ringreduce.trace.recorder import EVENT, HEADER, PART_BYTES, RECORDERS, Recorder, finish
from ringreduce.trace.ring import WORDS

_TAG = (1 << 63) - 1
"""The tag of the messages that compare clocks."""
_ROUNDS = 20
"""Messages to rank 0 and back; the fastest decides the clock of a rank."""
_SHOWN = 24
"""Events of a rank in a picture, if the program records no steps."""
Event = dict[str, Any]
"""An event in the trace-event format; its times are in ns."""
Ranks = Sequence[tuple[int, float, list[Event]]]
"""Rank, error of its clock in µs, and events by their begins; of equal ones the longest first."""


# --- on the ranks ---------------------------------------------------------------------------------


def begin(path: Path, rank: int) -> None:
    """Record from now on, unless this process does so already."""
    if not RECORDERS:
        RECORDERS.append(Recorder(path, rank))
        os.register_at_fork(after_in_child=RECORDERS.clear)  # the part is that of the parent
        if rank == 0:
            atexit.register(finish)  # it runs after `init` has closed the communicator


def join(comm: Any, path: Path, *, all_record: bool, launched: bool) -> None:
    """Compare clocks, and have the trace written.  Collective if `all_record`.

    `launched`: the launcher writes the trace if all ranks are on one host.
    """
    recorder, far = RECORDERS[0], [r for node in comm.nodes if 0 not in node for r in node]
    if all_record and far:
        (rank, *_), (error_s, offset_s) = HEADER.unpack_from(recorder.memory), clock_of(comm, far)
        HEADER.pack_into(recorder.memory, 0, rank, offset_s, error_s)
        comm._ending.before_close = partial(_gather, comm, recorder)
    if far or not launched:
        recorder.write = partial(write, path)


def clock_of(
    comm: Any, far: Sequence[int], clock: Callable[[], float] = time.perf_counter
) -> tuple[float, float]:
    """Compare the clock of each rank of `far` with that of rank 0.

    Returns the error of the result in seconds, and the seconds to add to the clock of this rank.
    """
    theirs, found = np.empty(()), []
    for peer in [*far] * _ROUNDS:
        if comm.rank == 0:
            comm.recv(theirs, peer, _TAG)
            comm.send(clock(), peer, _TAG)
        elif comm.rank == peer:
            sent_s = clock()
            comm.send(0.0, 0, _TAG)
            comm.recv(theirs, 0, _TAG)
            error_s = (clock() - sent_s) / 2
            found.append((error_s, float(theirs) - sent_s - error_s))
    return min(found, default=(0.0, 0.0))


def _gather(comm: Any, recorder: Recorder) -> None:
    """Bring the parts of all ranks to the host of rank 0."""
    with contextlib.suppress(RingReduceError):
        parts = comm.gather(np.frombuffer(recorder.memory, np.uint8))
        recorder.part.unlink(missing_ok=True)
        if parts is not None:
            recorder.part.write_bytes(parts)


# --- the file -------------------------------------------------------------------------------------


def parts_of(path: Path) -> list[Path]:
    return [*path.parent.glob(f"{glob.escape(path.name)}.*.part")]


def prepare(path: Path) -> None:
    """Remove the parts of earlier jobs.  Raises OSError or ImportError if a trace has no place."""
    output.check(path)
    output.check_writable(path)
    for part in parts_of(path):
        part.unlink(missing_ok=True)


def write(path: Path) -> None:
    """Write the trace of all parts to `path`, and remove them; print why if that fails."""
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)  # several ranks may end the job at once
        parts = parts_of(path)
        ranks = [rank for part in parts for rank in read(part.read_bytes())]
        if ranks and path.suffix == ".json":
            path.write_text(as_json(sorted(ranks, key=itemgetter(0))))
        elif ranks:
            output.write(path, draw(sorted(ranks, key=itemgetter(0))))
        for part in parts:
            part.unlink(missing_ok=True)
    except OSError as error:
        print_error(f"ringreduce: there is no trace: {error}")
    finally:
        os.close(folder)


def read(content: bytes) -> Iterator[tuple[int, float, list[Event]]]:
    """Yield a tuple as in `Ranks` for each part in `content`."""
    for at in range(0, len(content), PART_BYTES):
        rank, offset_s, error_s = HEADER.unpack_from(content, at)
        found = EVENT.iter_unpack(content[at + HEADER.size : at + PART_BYTES])
        yield rank, 1e6 * error_s, events_of(rank, found, offset_s)


def events_of(rank: int, found: Iterable[tuple[Any, ...]], offset_s: float = 0.0) -> list[Event]:
    """Return the events of a rank, on their tracks, from the fields of `recorder.EVENT`."""
    events = [_event(rank, offset_s, each) for each in found if 0 < each[0] <= each[-1]]
    events.sort(key=lambda event: (event["ts"], -event["dur"]))
    _choose_tracks(events)
    return events


def _event(rank: int, offset_s: float, fields: tuple[Any, ...]) -> Event:
    (begin, nbytes, words, end), offset = fields, round(1e9 * offset_s)
    kind, name, how = (w.rstrip(b"\0").decode(errors="ignore") for w in WORDS.unpack(words))
    args: dict[str, Any] = {"bytes": nbytes, "algorithm": how}
    if kind == "message":
        args = {"bytes": nbytes, "peer": int(how.split()[1])}
    computes = kind in ("span", "wait")
    name = " ".join(filter(None, (name, size_text(nbytes) * (nbytes > 0), how)))
    event = {"ph": "X", "pid": rank, "tid": 0 if computes else 1, "name": name, "cat": kind}
    return event | {"ts": begin + offset, "dur": end - begin, "args": {} if computes else args}


def _choose_tracks(events: Sequence[Event]) -> None:
    """Give an event that overlaps another of its track, but is not inside it, a further track.

    A viewer would drop it.  The tracks of one kind are 0, 2, …, and 1, 3, ….
    """
    ends: dict[int, list[int]] = {}
    for event in events:
        track, begin, end = event["tid"], event["ts"], event["ts"] + event["dur"]
        while (around := [e for e in ends.get(track, ()) if e > begin]) and around[-1] < end:
            track += 2
        ends[track], event["tid"] = [*around, end], track


def as_json(ranks: Ranks) -> str:
    """Return the trace for Chrome and Perfetto; times begin with the first event."""
    zero = min((events[0]["ts"] for _, _, events in ranks if events), default=0)
    lines: list[Event] = []
    for rank, _, events in ranks:
        names = {("process_name", 0): f"rank {rank}"}
        for track in {0, 1, *(event["tid"] for event in events)}:
            names["thread_name", track] = ("computes", "communicates")[track % 2]
        for (kind, track), name in names.items():
            named = {"ph": "M", "pid": rank, "tid": track, "name": kind}
            lines.append(named | {"args": {"name": name}})
        lines += [e | {"ts": (e["ts"] - zero) / 1e3, "dur": e["dur"] / 1e3} for e in events]
    facts = {"clock_error_us": {f"rank {rank}": error_us for rank, error_us, _ in ranks}}
    text = ",\n".join(map(json.dumps, lines))
    return f'{{"traceEvents": [\n{text}\n],\n"otherData": {json.dumps(facts)}}}\n'


# --- the picture ----------------------------------------------------------------------------------


def draw(ranks: Ranks) -> str:
    """Return two steps from the middle as an SVG document: a lane for each rank."""
    every = [[e for e in events if e["cat"] != "message"] for _, _, events in ranks]
    steps = [[e for e in events if (e["cat"], e["name"]) == ("span", "step")] for events in every]
    most, title = 2, f"Two steps of {max(map(len, steps))}, from the middle"
    if not any(steps):
        steps, most, title = every, _SHOWN, "The middle of the trace"
    middle: list[Event] = []
    for events in steps:
        first = max(0, (len(events) - most) // 2)
        middle += events[first : first + most]
    begin = min((e["ts"] for e in middle), default=0)
    end = max((e["ts"] + e["dur"] for e in middle), default=0)
    named = zip(ranks, every, strict=True)
    lanes = [Lane(f"rank {rank}", [*_bars(events, begin, end)]) for (rank, *_), events in named]
    chart = LaneChart(title, f"{counted(len(ranks), 'rank')} · time in ms", lanes, arrows=[])
    fills = [Sample(TINTS[0], "computes"), Sample(TINTS[1], "communicates")]
    return draw_lanes([chart], fills, arrows=[])


def _bars(events: Sequence[Event], begin: int, end: int) -> Iterator[LaneBar]:
    """Yield the bars of a rank: at each time the block or call that has begun last.

    While a rank waits, or does nothing, its asynchronous call is seen.
    """
    drawn = [(e["ts"], e["ts"] + e["dur"], e) for e in events if e["name"] != "step"]
    drawn = [each for each in drawn if each[0] < end and each[1] > begin]
    borders = {max(begin, min(time, end)) for each in drawn for time in each[:2]}
    pieces: list[tuple[int, int, Event | None]] = []
    for left, right in pairwise(sorted(borders)):
        active = [event for from_, to, event in drawn if from_ <= left and right <= to]
        last = [event for event in active if event["cat"] != "async"][-1:]
        if not last or last[0]["cat"] == "wait":
            last = [event for event in active if event["cat"] == "async"][-1:]
        pieces.append((left, right, last[0] if last else None))
    for event, group in groupby(pieces, itemgetter(2)):
        (from_, _, _), *_, (_, to, _) = [*group] * 2
        if event is not None:
            words = f"{event['name']}: {event['dur'] / 1e6:.3g} ms"
            times = (from_ - begin) / 1e6, (to - begin) / 1e6
            yield LaneBar(*times, event["name"], TINTS[event["cat"] != "span"], words)
