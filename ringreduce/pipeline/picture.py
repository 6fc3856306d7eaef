"""Draw a pipeline as SVG or PNG: a lane for each rank, bars for actions, arrows for messages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ringreduce.errors import counted
from ringreduce.picture.lanes import Lane, LaneArrow, LaneBar, LaneChart, Sample, draw_lanes
from ringreduce.picture.output import to_pixels
from ringreduce.picture.style import BLUE, ORANGE, TINTS
from ringreduce.pipeline.actions import KINDS, Action, held_after
from ringreduce.pipeline.definition import PipelineSchedule
from ringreduce.pipeline.lowering import FORWARD, input_of, result_of
from ringreduce.pipeline.text import idle_share, percent
from ringreduce.pipeline.timing import Timeline, timeline

_FILLS: Mapping[str, str] = dict(zip("FBWI", TINTS, strict=True))
"""Kind of an action -> the colour of its bar."""


def to_svg(*pipelines: PipelineSchedule | Timeline) -> str:
    """Return a picture of one or several pipelines as an SVG document, light or dark as its page.

    A lane is a rank, a bar an action, and an arrow a message.  Among more than two ranks, a message
    between the first and the last one leaves the lanes at one edge and returns at the other.  Gaps
    are idle time, with their share of the time of the pipeline.  Several pipelines are below each
    other, on one scale of time.

    Args:
        *pipelines: schedules, whose times are those of `Costs()`, or the times of some.

    Returns:
        The document.

    Raises:
        ScheduleError: a schedule is wrong, or cannot finish.
        ValueError: there is no pipeline.

    Example:
        >>> svg = rr.pipeline.to_svg(rr.pipeline.schedule("1f1b", ranks=2, splits=3))
        >>> svg.count('class="bar"'), svg.count('class="message"')
        (12, 6)
    """
    if not pipelines:
        raise ValueError("to_svg: got no pipeline; pass a schedule, or its times")
    times = [each if isinstance(each, Timeline) else timeline(each) for each in pipelines]
    used = {action.kind for each in times for _, action, _, _ in _actions(each)}
    fills = [Sample(_FILLS[kind], words) for kind, words in KINDS.items() if kind in used]
    arrows = [
        Sample(BLUE, "output of a stage"),
        Sample(ORANGE, "gradient of an output", upward=True),
    ]
    several = any(each.schedule.ranks > 1 for each in times)
    return draw_lanes([*map(_chart, times)], fills, arrows if several else [])


def to_png(*pipelines: PipelineSchedule | Timeline) -> bytes:
    """Return a picture of one or several pipelines as a PNG file in light colours.

    A unit of the SVG becomes two pixels; the longer side has at most 8192.

    Args:
        *pipelines: schedules, whose times are those of `Costs()`, or the times of some.

    Returns:
        The file.

    Raises:
        ScheduleError: a schedule is wrong, or cannot finish.
        ValueError: there is no pipeline.
        ImportError: the ``plot`` extra is not installed.

    Example:
        >>> png = rr.pipeline.to_png(rr.pipeline.schedule("1f1b", ranks=2, splits=3))
        >>> png[1:4]
        b'PNG'
    """
    return to_pixels(to_svg(*pipelines))


def _chart(times: Timeline) -> LaneChart:
    schedule = times.schedule
    return LaneChart(
        title=f"{schedule.name}: {percent(idle_share(times))} idle",
        facts=" · ".join(_facts(times)),
        lanes=[Lane(f"rank {rank}", bars) for rank, bars in enumerate(_bars(times))],
        arrows=[*_arrows(times)] if schedule.ranks > 1 else [],
    )


def _facts(times: Timeline) -> Iterator[str]:
    schedule = times.schedule
    yield counted(schedule.ranks, "rank")
    if schedule.virtual > 1:
        yield f"{schedule.virtual} stages a rank, numbered in the second line"
    yield counted(schedule.splits, "microbatch")
    yield f"time {times.time:.6g}"
    held = [
        max(held_after(schedule.acts(rank)), default=0) / schedule.virtual
        for rank in range(schedule.ranks)
    ]
    least, most = f"{min(held):.3g}", f"{max(held):.3g}"
    words = "activation" if most == "1" else "activations"
    words += " of all its layers" if schedule.virtual > 1 else ""
    yield (
        f"a rank holds {most} {words}"
        if least == most
        else f"a rank holds {least} to {most} {words}"
    )


def _actions(times: Timeline) -> Iterator[tuple[int, Action, float, float]]:
    for rank, (begins, ends) in enumerate(zip(times.begins, times.ends, strict=True)):
        for action, begin, end in zip(times.schedule.acts(rank), begins, ends, strict=True):
            yield rank, action, begin, end


def _bars(times: Timeline) -> list[list[LaneBar]]:
    bars: list[list[LaneBar]] = [[] for _ in range(times.schedule.ranks)]
    for rank, action, begin, end in _actions(times):
        words = (
            f"{action}: stage {action.stage}, {KINDS[action.kind]}, microbatch "
            f"{action.microbatch}, from {begin:.6g} to {end:.6g}"
        )
        name = f"{action.kind}{action.microbatch}"
        name += f"\n{action.stage}" if times.schedule.virtual > 1 else ""
        bars[rank].append(LaneBar(begin, end, name, _FILLS[action.kind], words))
    return bars


def _arrows(times: Timeline) -> Iterator[LaneArrow]:
    """Yield an arrow from the end of each action to the action that needs its result."""
    stages = times.schedule.stages
    receivers = {
        input_of(action, stages): (rank, begin) for rank, action, begin, _ in _actions(times)
    }
    for rank, action, _, end in _actions(times):
        payload = result_of(action, stages)
        if payload is not None:
            colour = BLUE if payload.flow == FORWARD else ORANGE
            words = f"{payload}, from rank {rank} to rank {receivers[payload][0]}"
            yield LaneArrow((rank, end), receivers[payload], colour, words)
