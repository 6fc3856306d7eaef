"""`ringreduce explain --pipeline`: show a pipeline in words, numbers and a picture."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from ringreduce.console.colours import Colours
from ringreduce.console.sections import columns, print_section, table, wrapped
from ringreduce.errors import ScheduleError, counted
from ringreduce.launch.example_call import PipelineRequest
from ringreduce.picture import output
from ringreduce.pipeline.actions import held_after
from ringreduce.pipeline.definition import PipelineSchedule
from ringreduce.pipeline.generators import SCHEDULES
from ringreduce.pipeline.picture import to_svg
from ringreduce.pipeline.proof import PipelineProof, prove
from ringreduce.pipeline.registry import schedule
from ringreduce.pipeline.text import draw, idle_share, percent
from ringreduce.pipeline.timing import Timeline, timeline

_BESIDE = 24
"""The columns of a terminal beside a lane: the name of the rank, and its idle share."""


def explain(request: PipelineRequest) -> int:
    """Print every section, and write the pictures.  Returns the exit code.

    Raises ScheduleError if the schedule has no times, and the errors of `output.write`.
    """
    shown, colours = request.schedule, Colours.of(sys.stdout)
    proven: list[str] = []
    if request.prove:
        try:
            proven = [*_proven(prove(shown), ", as claimed" * (shown.claim is not None))]
        except ScheduleError as error:
            print(colours.bad(f"NOT proven: {error}"))
            return 1
    times = timeline(shown)
    heading, *drawing = _drawing(times)
    print(wrapped(colours.strong(heading)))
    print_section(*drawing)
    print_section(*_comparison(times, colours))
    if proven:
        print_section(colours.good("proven:"), *(f"  {line}" for line in proven))
    paths = [path for path in (request.svg, request.png) if path]
    picture = to_svg(times) if paths else ""
    for path in paths:
        output.write(path, picture)
        print(f"\nwrote {path}")
    return 0


def _drawing(times: Timeline) -> list[str]:
    lines = draw(times, columns() - _BESIDE).splitlines()
    return lines + ["--svg FILE draws all of it"] * any("…" in line for line in lines)


def _comparison(times: Timeline, colours: Colours) -> list[str]:
    """Tabulate the schedules for these ranks and microbatches, the fastest first."""
    found = [times, *map(timeline, _others(times.schedule))]
    found.sort(key=lambda each: each.time)
    heading, *lines = table(
        [("schedule", "time", "idle", "activations"), *(_row(each) for each in found)]
    )
    marked = [
        colours.good(f"{line}  shown here") if each is times else line
        for line, each in zip(lines, found, strict=True)
    ]
    return [
        heading,
        *marked,
        "times: the layers of a rank take 1 forward and 2 backward, messages take none",
        "activations: of all layers of a rank, on the rank that holds the most",
    ]


def _others(shown: PipelineSchedule) -> Iterator[PipelineSchedule]:
    for name in SCHEDULES:
        if name == "interleaved" and (shown.splits % shown.ranks or shown.ranks == 1):
            continue
        if name != shown.name:
            yield schedule(name, shown.ranks, shown.splits, 2 if name == "interleaved" else 1)


def _row(times: Timeline) -> tuple[str, str, str, str]:
    shown = times.schedule
    several = f", {shown.virtual} stages a rank" * (shown.virtual > 1)
    held = max(max(held_after(shown.acts(rank))) for rank in range(shown.ranks))
    return (
        f"{shown.name}{several}",
        f"{times.time:.6g}",
        percent(idle_share(times)),
        f"{held / shown.virtual:.4g}",
    )


def _proven(proof: PipelineProof, as_claimed: str) -> Iterator[str]:
    ahead = (
        f"{counted(proof.posted_ahead, 'step')} ahead" if proof.posted_ahead else "in their step"
    )
    held = ", ".join(map(str, proof.held))
    yield "every microbatch passes once forward through every stage, then once backward"
    yield "every output of a stage and every gradient meets the one receive that wants it"
    yield "no deadlock, even when every send waits for its receive"
    yield f"receives are posted {ahead}"
    yield "on every stage the gradients of microbatches are added in ascending order"
    yield f"ranks hold up to {counted(held, 'activation')} of a stage{as_claimed}"
    yield f"the time is {proof.time:.6g}{as_claimed}; {percent(proof.idle)} of it is idle"
