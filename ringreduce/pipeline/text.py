"""Draw a pipeline as text: a lane for each rank, with its actions over time.

>>> from ringreduce.pipeline.registry import schedule
>>> print(draw(schedule("1f1b", ranks=2, splits=3)))
1f1b of 2 ranks and 3 microbatches: time 12, 25 % idle
rank 0  F0 F1       B0─── F2 B1───    B2───   25 % idle
rank 1     F0 B0─── F1 B1─── F2 B2───         25 % idle
F: forward; B: backward; behind it the microbatch
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

from ringreduce.pipeline.actions import KINDS, Action
from ringreduce.pipeline.definition import PipelineSchedule
from ringreduce.pipeline.timing import Timeline, timeline
from ringreduce.schedules.draw import aligned, left_out, window

_MOST_RANKS, _MOST_ACTIONS = 8, 12
"""The most ranks that are drawn around an error, and the most actions of each."""


def draw(pipeline: PipelineSchedule | Timeline, width: int | None = None) -> str:
    """Return a lane for each rank, in which an action is as long as its time, and a legend.

    If a rank has one stage, the names of actions leave out the stage.

    Args:
        pipeline: a schedule, whose times are those of `Costs()`, or the times of one.
        width: the most letters of a lane; a longer lane is cut.  None: lanes are whole.

    Returns:
        The drawing, of several lines.

    Raises:
        ScheduleError: the schedule is wrong, or cannot finish.

    Example:
        >>> print(rr.pipeline.draw(rr.pipeline.schedule("sequential", ranks=2, splits=1)))
        sequential of 2 ranks and 1 microbatch: time 6, 50 % idle
        rank 0  F0          B0───   50 % idle
        rank 1     F0 B0───         50 % idle
        F: forward; B: backward; behind it the microbatch
    """
    times = pipeline if isinstance(pipeline, Timeline) else timeline(pipeline)
    schedule = times.schedule
    acts = [schedule.acts(rank) for rank in range(schedule.ranks)]
    lanes = _lanes(times, acts)
    table = [
        [f"rank {rank}", _cut(lane, width), f"{percent(idle)} idle"]
        for rank, (lane, idle) in enumerate(zip(lanes, times.idle, strict=True))
    ]
    return "\n".join([heading(times), *aligned(table), legend(schedule, acts)])


def heading(times: Timeline) -> str:
    return f"{times.schedule}: time {times.time:.6g}, {percent(idle_share(times))} idle"


def idle_share(times: Timeline) -> float:
    return sum(times.idle) / len(times.idle)


def label(schedule: PipelineSchedule, action: Action) -> str:
    """Return text such as F5, or 2F5 where a rank has several stages."""
    return str(action) if schedule.virtual > 1 else f"{action.kind}{action.microbatch}"


def legend(schedule: PipelineSchedule, acts: Iterable[Iterable[Action]]) -> str:
    used = {action.kind for actions in acts for action in actions}
    kinds = [f"{kind}: {meaning}" for kind, meaning in KINDS.items() if kind in used]
    stage = ", before it the stage" if schedule.virtual > 1 else ""
    return "; ".join([*kinds, f"behind it the microbatch{stage}"])


def _lanes(times: Timeline, acts: Sequence[Sequence[Action]]) -> list[str]:
    """Return the lane of each rank; the scale leaves room for every name and a space."""
    bars = [
        [
            (label(times.schedule, action), begin, end)
            for action, begin, end in zip(actions, begins, ends, strict=True)
        ]
        for actions, begins, ends in zip(acts, times.begins, times.ends, strict=True)
    ]
    letters = max(
        (
            (len(name) + 1) / (end - begin)
            for lane in bars
            for name, begin, end in lane
            if end > begin
        ),
        default=0.0,
    )
    lanes = []
    for lane in bars:
        line = ""
        for name, begin, end in lane:
            first, after = round(begin * letters), round(end * letters)
            line = line.ljust(first) + name.ljust(after - first - 1, "─")[: after - first] + " "
        lanes.append(line.ljust(round(times.time * letters)))
    return lanes


def _cut(lane: str, width: int | None) -> str:
    return lane if width is None or len(lane) <= width else lane[: width - 1] + "…"


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def draw_failed(
    schedule: PipelineSchedule, acts: Sequence[Sequence[Action]], failed: Mapping[int, int]
) -> str:
    """Return the actions of each rank, with `failed[rank]` marked by ``!``.

    Of a large schedule the ranks and actions nearest to the failed ones are drawn.
    """
    ranks = window(len(acts), sorted(failed), _MOST_RANKS)
    most = max(map(len, acts), default=0)
    columns = window(most, sorted(failed.values()), _MOST_ACTIONS)
    table = [
        [f"rank {rank}", *_row(schedule, acts[rank], columns, failed.get(rank))] for rank in ranks
    ]
    names = [
        f"{acts[rank][index]} on rank {rank}"
        for rank, index in sorted(failed.items())
        if index < len(acts[rank])
    ]
    lines = [
        *aligned(table),
        *left_out(len(ranks), len(acts), "ranks"),
        *left_out(len(columns), most, "actions"),
    ]
    return "\n".join([*lines, f"! {', '.join(names)}"] if names else lines)


def _row(
    schedule: PipelineSchedule,
    actions: Sequence[Action],
    columns: Sequence[int],
    failed: int | None,
) -> Iterator[str]:
    """Yield the cells of a lane, with an ellipsis where actions are left out."""
    for before, index in pairwise([-1, *columns]):
        if index > before + 1:
            yield "…"
        name = str(actions[index]) if index < len(actions) else ""
        yield f"{'!' if index == failed else ' '}{name}"
