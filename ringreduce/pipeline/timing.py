"""Predict when each rank of a pipeline executes which action, by the simulation of collectives.

An action begins when the rank has received its input, and has finished the action before.  The
sends of a rank complete while it works.  The links between ranks are those of
`ringreduce.schedules.cost`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import isfinite

from ringreduce.errors import counted, shown
from ringreduce.pipeline.actions import Action
from ringreduce.pipeline.definition import PipelineSchedule
from ringreduce.pipeline.lowering import Payload, lower, vocabulary
from ringreduce.pipeline.passes import check_passes
from ringreduce.schedules.cost import Link, Links, Profile
from ringreduce.schedules.matching import Message, RankStep, match
from ringreduce.schedules.simulation import Workload, simulate

FREE = Profile(in_node=Link(0.0, 0.0), between_nodes=Link(0.0, 0.0))
"""Links on which messages take no time."""


@dataclass(frozen=True)
class Costs:
    """The times of actions and messages: in seconds, or in any unit if messages take no time.

    Example:
        >>> schedule = rr.pipeline.schedule("1f1b", ranks=2, splits=3)
        >>> slow_end = rr.pipeline.Costs(forward=[1, 2], backward=[2, 4])
        >>> rr.pipeline.price(schedule), rr.pipeline.price(schedule, slow_end)
        (12.0, 21.0)
    """

    __module__ = "ringreduce.pipeline"

    forward: float | Sequence[float] = 1.0
    """The forward of one microbatch: through all layers of a rank, or a list of each stage's."""
    backward: float | Sequence[float] = 2.0
    """The backward, in the same way.  The gradients of input and weights take half of it each."""
    lengths: Sequence[float] | None = None
    """The length of each microbatch, relative to the one whose times are given; None: all 1."""
    nbytes: float | Sequence[float] = 0.0
    """Bytes of a stage's output for a microbatch of length 1: of every stage, or a list."""
    nodes: Sequence[Sequence[int]] | None = None
    """The ranks of each node; None: all ranks are on one node."""
    profile: Profile = FREE
    """The links between the ranks, in seconds; by default messages take no time."""
    posted_ahead: int = 1
    """The number of steps by which ranks post receives ahead."""


@dataclass(frozen=True)
class Timeline:
    """When each rank executes which action, as `timeline` predicts it, or as it was measured.

    Example:
        >>> times = rr.pipeline.timeline(rr.pipeline.schedule("gpipe", ranks=2, splits=2))
        >>> times.begins[1], times.time
        ((1.0, 2.0, 3.0, 5.0), 9.0)
    """

    __module__ = "ringreduce.pipeline"

    schedule: PipelineSchedule
    """What is executed."""
    begins: Sequence[Sequence[float]]
    """Rank -> the times at which its actions begin, from 0."""
    ends: Sequence[Sequence[float]]
    """Rank -> the times at which its actions end."""

    @property
    def time(self) -> float:
        """The time at which the last action ends."""
        return max((ends[-1] for ends in self.ends if ends), default=0.0)

    @property
    def idle(self) -> tuple[float, ...]:
        """Rank -> its idle time, as a share of the time of all ranks."""
        return tuple(
            1 - _busy(begins, ends) / self.time if self.time else 0.0
            for begins, ends in zip(self.begins, self.ends, strict=True)
        )


def _busy(begins: Iterable[float], ends: Iterable[float]) -> float:
    return sum(end - begin for begin, end in zip(begins, ends, strict=True))


def price(schedule: PipelineSchedule, costs: Costs | None = None) -> float:
    """Predict the time until the last rank has finished.

    Args:
        schedule: the schedule of all ranks.
        costs: the times of actions and messages; None: `Costs()`.

    Returns:
        The time, in the unit of the costs.

    Raises:
        ScheduleError: the schedule is wrong, or cannot finish.
        ValueError: a cost is negative, or a list in `costs` has the wrong length.

    Example:
        >>> schedule = rr.pipeline.schedule("1f1b", ranks=4, splits=8)
        >>> rr.pipeline.price(schedule)
        33.0
    """
    return timeline(schedule, costs).time


def timeline(schedule: PipelineSchedule, costs: Costs | None = None) -> Timeline:
    """Predict when each rank executes which action.

    Args:
        schedule: the schedule of all ranks.
        costs: the times of actions and messages; None: `Costs()`.

    Returns:
        The times.

    Raises:
        ScheduleError: the schedule is wrong, or cannot finish.
        ValueError: a cost is negative, or a list in `costs` has the wrong length.

    Example:
        >>> times = rr.pipeline.timeline(rr.pipeline.schedule("1f1b", ranks=2, splits=2))
        >>> [str(action) for action in times.schedule.acts(1)], times.begins[1]
        (['1F0', '1B0', '1F1', '1B1'], (1.0, 2.0, 4.0, 5.0))
    """
    costs = costs or Costs()
    acts = [schedule.acts(rank) for rank in range(schedule.ranks)]
    for rank, actions in enumerate(acts):
        check_passes(schedule, rank, actions)
    steps = [lower(schedule, rank) for rank in range(schedule.ranks)]
    workload = workload_of(schedule, acts, match(steps, vocabulary(acts)), costs)
    begins = [[0.0] * len(work_s) for work_s in workload.work_s]

    def watch(place: RankStep, time_s: float) -> None:
        begins[place.rank][place.step] = time_s

    simulate(workload, watch=watch)
    # Nothing follows the last step.
    return Timeline(
        schedule,
        begins=tuple(tuple(times[:-1]) for times in begins),
        ends=tuple(
            tuple(begin + work for begin, work in zip(times[:-1], work_s, strict=False))
            for times, work_s in zip(begins, workload.work_s, strict=True)
        ),
    )


def workload_of(
    schedule: PipelineSchedule,
    acts: Sequence[Sequence[Action]],
    messages: Iterable[Message],
    costs: Costs,
) -> Workload:
    times = _Times(schedule, costs)
    nodes = costs.nodes if costs.nodes is not None else [range(schedule.ranks)]
    if sorted(rank for node in nodes for rank in node) != list(range(schedule.ranks)):
        raise ValueError(f"Costs: nodes {nodes} do not list ranks 0 to {schedule.ranks - 1} once")
    links = Links(nodes, costs.profile)
    return Workload(
        wires=[links.wire(message, times.nbytes(message.chunks[0])) for message in messages],
        work_s=[[*map(times.duration, actions), 0.0] for actions in acts],
        ahead=costs.posted_ahead,
        waits_for_sends=False,
    )


class _Times:
    def __init__(self, schedule: PipelineSchedule, costs: Costs) -> None:
        stages = schedule.stages
        of_rank = {"forward": costs.forward, "backward": costs.backward}
        self._forward, self._backward = (
            _of_each("stage", what, stages, cost, parts=schedule.virtual)
            for what, cost in of_rank.items()
        )
        self._nbytes = _of_each("stage", "nbytes", stages, costs.nbytes)
        lengths = 1.0 if costs.lengths is None else costs.lengths
        self._lengths = _of_each("microbatch", "lengths", schedule.splits, lengths)

    def duration(self, action: Action) -> float:
        length = self._lengths[action.microbatch]
        if action.kind == "F":
            return length * self._forward[action.stage]
        return length * self._backward[action.stage] / (1 if action.kind == "B" else 2)

    def nbytes(self, chunk: int) -> float:
        payload = Payload.of(chunk)
        return self._lengths[payload.microbatch] * self._nbytes[payload.stage]


def _of_each(
    thing: str, what: str, count: int, cost: float | Sequence[float], parts: int = 1
) -> list[float]:
    """Return the cost of each of `count` things; one number is divided into `parts`."""
    costs = [cost / parts] * count if isinstance(cost, (int, float)) else [*map(float, cost)]
    if len(costs) != count:
        numbers, are = counted(len(costs), "number"), "is" if count == 1 else "are"
        raise ValueError(f"Costs: {what} has {numbers}; there {are} {counted(count, thing)}")
    if not all(isfinite(each) and each >= 0 for each in costs):
        raise ValueError(f"Costs: {what} is {shown(cost)}; pass finite numbers of at least 0")
    return costs
