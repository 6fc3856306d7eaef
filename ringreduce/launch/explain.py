"""`ringreduce explain`: show a collective in words, numbers and a picture, without running it.

It prints the messages of each step, the number of steps and bytes of each rank, and the predicted
time of every candidate.  With `--check` it also proves the schedule.  With `--json` it prints the
choice of the algorithm alone.  With `--pipeline` it explains a pipeline (`explain_pipeline`).
"""

from __future__ import annotations

import json
import os
import sys
import textwrap
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

from ringreduce.console.colours import Colours
from ringreduce.console.sections import columns, print_section, table, wrapped
from ringreduce.errors import ScheduleError, counted
from ringreduce.launch import explain_pipeline
from ringreduce.launch.example_call import Case, ExplainRequest, PipelineRequest, VariableError
from ringreduce.picture import output, to_svg
from ringreduce.picture.drawing import nodes_text
from ringreduce.planning.select import predict_messages, priced_bytes, slices_in_flight
from ringreduce.schedules.check import Proof, check
from ringreduce.schedules.draw import draw
from ringreduce.schedules.ranges import range_texts
from ringreduce.schedules.schedule import Schedule, chunk_of
from ringreduce.schedules.simulation import Wire
from ringreduce.trace import traces
from ringreduce.trace.recorder import CALL, MESSAGE
from ringreduce.trace.ring import words_of

_MOST_RANKS = 8
_MOST_ROWS = 16
_LONGEST_EXPRESSION = 60
_LONGEST_RANKS = 24


def main(request: ExplainRequest | PipelineRequest) -> int:
    """Print the explanation and write the pictures.  Returns the exit code, with its reason."""
    try:
        trace = None if isinstance(request, PipelineRequest) else request.trace
        for path in filter(None, (request.svg, request.png, trace)):
            output.check_writable(path)
        code = 0
        if isinstance(request, PipelineRequest):
            code = explain_pipeline.explain(request)
        elif request.json:
            _print_json(Case.of(request))
        else:
            code = _explain(Case.of(request))
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader, for instance `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ScheduleError, ImportError, OSError, VariableError) as error:
        print(f"ringreduce explain: {error}", file=sys.stderr)
        return 1 if isinstance(error, (ScheduleError, ImportError)) else 2


def _explain(case: Case) -> int:
    schedule, colours = case.schedule, Colours.of(sys.stdout)
    print(wrapped(colours.strong(_headline(case))))
    proven: list[str] = []
    if case.request.prove:
        try:
            proven = _proven(schedule, check(schedule))
        except ScheduleError as error:
            failure = colours.bad(f"NOT proven: {error}")
            print_section(*_drawing(schedule, dict(error.places)), "", failure)
            return 1
    print_section(*_drawing(schedule))
    print_section(*_traffic(case))
    print_section(*_prices(case, colours))
    if proven:
        print_section(colours.good("proven:"), *(f"  {line}" for line in proven))
    for path in _written(case):
        print(f"\nwrote {path}")
    return 0


def _print_json(case: Case) -> None:
    """Print the choice alone.  Raises ScheduleError if a proof is asked for, and fails."""
    if case.request.prove:
        check(case.schedule)
    _written(case)
    found = {
        "algorithm": case.algorithm,
        "cheapest": case.choice.cheapest,
        "transport": case.choice.transport,
        "predicted_s": case.predicted_s,
    }
    if case.more_than_s:
        found["more_than_s"] = case.more_than_s
    print(json.dumps(found))


def _written(case: Case) -> list[Path]:
    paths = [path for path in (case.request.svg, case.request.png) if path]
    if paths:
        nodes = case.request.layout if len(case.request.layout) > 1 else None
        picture = to_svg(case.schedule, nodes)
        for path in paths:
            output.write(path, picture)
    if case.request.trace:
        case.request.trace.write_text(_trace(case))
        paths.append(case.request.trace)
    return paths


def _trace(case: Case) -> str:
    """Return the predicted call as a trace: the call on each rank, and the messages inside it."""
    ranks: list[list[tuple[object, ...]]] = [[] for _ in range(case.schedule.size)]

    def add(wire: Wire, begin_s: float, end_s: float) -> None:
        sender, receiver = wire.message.sender.rank, wire.message.receiver.rank
        begin_ns, nbytes, end_ns = _trace_ns(begin_s), round(wire.nbytes), _trace_ns(end_s)
        words = words_of(MESSAGE, "send", f"to {receiver}")
        ranks[sender].append((begin_ns, nbytes, words, end_ns))
        words = words_of(MESSAGE, "recv", f"from {sender}")
        ranks[receiver].append((begin_ns, nbytes, words, end_ns))

    how = case.request.layout, case.request.nbytes, case.config
    end_ns = _trace_ns(predict_messages(case.schedule, *how, add))
    words = words_of(CALL, case.request.collective, case.algorithm)
    call = (_trace_ns(0.0), case.request.nbytes, words, end_ns)
    events = (traces.events_of(rank, [call, *found]) for rank, found in enumerate(ranks))
    return traces.as_json([(rank, 0.0, found) for rank, found in enumerate(events)])


def _trace_ns(seconds: float) -> int:
    return 1 + round(1e9 * seconds)  # a time of 0 is no event


def _headline(case: Case) -> str:
    request, memory = case.request, case.config.memory
    where = nodes_text([len(node) for node in request.layout])
    how = "by messages"
    if memory is not None:
        how = "through shared memory" + ", more ranks than cores" * memory.crowded
        how += ", quick copies by the kernel" * memory.quick
    return " · ".join(
        [
            *(case.schedule.collective, case.schedule.algorithm),
            f"{counted(request.ranks, 'rank')} on {where}",
            *[f"{_bytes_text(request.nbytes)} of {request.dtype}"] * bool(case.schedule.weights),
            how,
        ]
    )


# --- the drawing ----------------------------------------------------------------------------------


def _drawing(schedule: Schedule, failed: Mapping[int, int] | None = None) -> list[str]:
    """Draw the first steps, or the `failed`, of as many ranks as fit side by side."""
    lines: list[str] = []
    # The claims of a schedule that has failed may be wrong: all its steps are drawn from.
    drawn = [schedule.steps(rank) for rank in range(schedule.size)] if failed else schedule
    for ranks in range(min(schedule.size, _MOST_RANKS), 0, -1):
        lines = draw(drawn, failed=failed, max_ranks=ranks).splitlines()
        grid = [line for line in lines if line.startswith(("step", " "))]
        if max(map(len, grid)) <= columns():
            break
    left_out = any(line.endswith("not drawn") for line in lines)
    return lines + ["--svg FILE draws all of it"] * (left_out and not failed)


# --- steps and bytes of each rank -----------------------------------------------------------------


def _traffic(case: Case) -> list[str]:
    """Tabulate steps and bytes, also as multiples of the array's; ranks alike share a row."""
    schedule, nbytes, chunk_bytes = case.schedule, case.request.nbytes, case.chunk_bytes
    same: dict[object, list[int]] = defaultdict(list)
    for rank in range(schedule.size):
        same[rank if case.is_exact else schedule.claim(rank)].append(rank)
    alike: dict[tuple[int, int, int], list[int]] = defaultdict(list)
    for ranks in same.values():
        steps = list(schedule.steps(ranks[0]))
        sends = [chunk for step in steps for send in step.sends for chunk in send.chunks]
        recvs = [chunk for step in steps for recv in step.recvs for chunk in recv.chunks]
        sent, received = (
            round(sum(chunk_bytes[chunk_of(c)] for c in chunks)) for chunks in (sends, recvs)
        )
        alike[len(steps), sent, received] += ranks
    rows = [("ranks", "steps", "sends bytes", "", "receives bytes", "")]
    for (count, sent, received), ranks in list(alike.items())[:_MOST_ROWS]:
        amounts = [(f"{n:,}", f"({n / nbytes:.2f}x)" if nbytes else "") for n in (sent, received)]
        listed = textwrap.shorten(", ".join(range_texts(ranks)), _LONGEST_RANKS, placeholder=" …")
        rows.append((listed.replace(", ", ","), str(count), *amounts[0], *amounts[1]))
    more = len(alike) - _MOST_ROWS
    return [*table(rows), *[f"… {more} more that differ"] * (more > 0)]


# --- how long it takes ----------------------------------------------------------------------------


def _prices(case: Case, colours: Colours) -> list[str]:
    rows = [("candidate", "predicted")]
    rows += [(name, f"{1e6 * seconds:,.1f} µs") for name, seconds in case.predicted_s.items()]
    bounds = case.more_than_s.items()
    rows += [(name, f"more than {1e6 * seconds:,.1f} µs") for name, seconds in bounds]
    heading, *lines = table(rows)
    names = [*case.predicted_s, *case.more_than_s]
    marked = [_marked(line, name, case, colours) for line, name in zip(lines, names, strict=True)]
    nbytes, slices = case.request.nbytes, case.slices
    in_flight = slices_in_flight(case.request.layout, case.config)
    how = f"in {slices} slices, {in_flight} in flight" if slices > 1 else "in one slice"
    priced = priced_bytes(nbytes)
    size = "" if priced == nbytes else f"; the times are those of {_bytes_text(priced)}"
    link = case.request.link
    links = "links as in the default profile"
    if link is not None:
        rate, latency_us = 8e-9 / link.beta_s_per_byte, 1e6 * link.alpha_s
        links = f"{rate:g} Gbit/s and {latency_us:g} µs between nodes, other {links}"
    return [heading, *marked, f"{how}; {links}{size}"]


def _marked(line: str, name: str, case: Case, colours: Colours) -> str:
    """Add to the line of an algorithm whether it is taken, cheapest or shown, and why."""
    choice = case.choice
    taken, cheapest = name == choice.algorithm, name == choice.cheapest
    notes = ["cheapest"] * (cheapest and choice.is_tie)
    notes += [f"auto takes it: {choice.reason}"] * taken
    unpriced = name not in choice.predicted_s and name not in case.more_than_s
    notes += ["auto does not price it"] * unpriced
    notes += ["shown here"] * (name == case.algorithm)
    text = f"{line}  {'; '.join(notes)}".rstrip()
    return colours.good(text) if taken else colours.strong(text) if cheapest else text


# --- why it is right ------------------------------------------------------------------------------


def _proven(schedule: Schedule, proof: Proof) -> list[str]:
    lines = []
    if proof.results:
        chunk, expression = next(iter(proof.results.items()))
        text = textwrap.shorten(str(expression), _LONGEST_EXPRESSION, placeholder=" …")
        lines += [
            "every result holds every contribution exactly once",
            "all ranks form the same expression, hence the same bits",
            f"chunk {chunk} is {text}",
        ]
    lines += [
        f"every send meets one receive of the same chunks: "
        f"{counted(proof.messages, 'message')}, none left",
        "no deadlock, even when every send waits for its receive",
        "no step races with itself",
        f"steps and chunks are as claimed: up to {counted(proof.steps, 'step')}, "
        f"{counted(proof.chunks, 'chunk')} moved",
        f"chunks are held before and after by those whom {schedule.collective} promises them",
    ]
    if schedule.collective == "barrier":
        lines.append("nobody leaves before having heard from everybody")
    return lines


# --- words ----------------------------------------------------------------------------------------


def _bytes_text(nbytes: int) -> str:
    """Write a number of bytes in the largest unit that divides it, such as 64 MiB."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes and nbytes % size == 0:
            return f"{nbytes // size} {unit}"
    return counted(nbytes, "byte")
