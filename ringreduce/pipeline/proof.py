"""Prove a pipeline schedule: combine the actions of all ranks.

`prove` proves, with the matching and the progress analysis that prove collectives:

- every microbatch passes once through every stage forward, and once backward, in that order;
- every output and every gradient meets one input, first in, first out within its flow;
- the ranks cannot deadlock, even if a send completes only once its receive is posted;
- on every stage the gradients of microbatches are added in ascending order, as one process does;
- the activations held, the receives posted ahead and the time equal the schedule's claims.

The time is that of the strictest ranks: they begin an action when all messages of the step before
it are complete, the sends too.  Messages take no time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf, isclose

from ringreduce.errors import ScheduleError, counted, shown
from ringreduce.pipeline.actions import Action, held_after
from ringreduce.pipeline.definition import PipelineClaim, PipelineSchedule
from ringreduce.pipeline.lowering import lower, vocabulary
from ringreduce.pipeline.passes import check_passes
from ringreduce.pipeline.text import draw_failed
from ringreduce.pipeline.timing import Costs, workload_of
from ringreduce.schedules.matching import match, posts, progress
from ringreduce.schedules.simulation import Workload, simulate

Acts = Sequence[Sequence[Action]]
"""Rank -> its actions."""


@dataclass(frozen=True)
class PipelineProof:
    """The figures of a proven pipeline schedule.

    Example:
        >>> rr.pipeline.prove(rr.pipeline.schedule("1f1b", ranks=2, splits=3))
        PipelineProof(held=(2, 1), posted_ahead=0, time=12.0, idle=0.25)
    """

    __module__ = "ringreduce.pipeline"

    held: tuple[int, ...]
    """Rank -> the most activations that it holds at once, each of one stage and one microbatch."""
    posted_ahead: int
    """The fewest steps by which receives have to be posted ahead.

    With fewer steps the ranks wait for each other for ever, or longer than if all receives are
    posted at the start.
    """
    time: float
    """The time of all ranks, in the unit of the times of forward and backward."""
    idle: float
    """The idle time of all ranks, as a share of their time."""


def prove(schedule: PipelineSchedule, forward: float = 1.0, backward: float = 2.0) -> PipelineProof:
    """Prove that a pipeline computes what one process computes, and cannot deadlock.

    Args:
        schedule: the schedule of all ranks.
        forward: time of the forward of one microbatch through all layers of a rank.
        backward: time of the backward, alike.  The gradients of the input and of the weights take
            half of it each.

    Returns:
        The figures of the schedule.  They are equal to its claim, if it has one.

    Raises:
        ScheduleError: the schedule is wrong.  The text names ranks and actions, and below it is a
            drawing in which these actions are marked with ``!``.
        ValueError: a time is not above 0.

    Example:
        >>> schedule = rr.pipeline.schedule("zero_bubble", ranks=4, splits=8)
        >>> rr.pipeline.prove(schedule).held
        (4, 4, 4, 4)
    """
    for what, time in (("forward", forward), ("backward", backward)):
        if not 0 < time < inf:
            raise ValueError(f"prove: {what} is {shown(time)}; pass a time above 0")
    acts = [schedule.acts(rank) for rank in range(schedule.ranks)]
    try:
        return _prove(schedule, acts, forward, backward)
    except ScheduleError as error:
        text = f"pipeline {schedule}: {error}"
        if error.places:
            text += f"\n{draw_failed(schedule, acts, dict(error.places))}"
        raise ScheduleError(text, error.places) from None


def _prove(
    schedule: PipelineSchedule, acts: Acts, forward: float, backward: float
) -> PipelineProof:
    for rank, actions in enumerate(acts):
        check_passes(schedule, rank, actions)
    words = vocabulary(acts)
    steps = [lower(schedule, rank) for rank in range(schedule.ranks)]
    messages = match(steps, words)

    def check_progress(ahead: int) -> None:
        for _ in progress(steps, posts(messages), ahead, words):
            pass

    all_ahead = max(map(len, steps))
    check_progress(all_ahead)
    workload = workload_of(schedule, acts, messages, Costs(forward, backward))
    workload = replace(workload, waits_for_sends=True)
    ahead, time = _least_ahead(workload, all_ahead)
    proof = PipelineProof(
        held=tuple(max(held_after(actions), default=0) for actions in acts),
        posted_ahead=ahead,
        time=time,
        idle=1 - sum(map(sum, workload.work_s)) / (schedule.ranks * time),
    )
    if schedule.claim is not None:
        _check_held(proof, schedule.claim, acts)
        _check_ahead(proof, schedule.claim, check_progress)
        _check_time(proof, schedule.claim.time(forward, backward))
    return proof


def _least_ahead(workload: Workload, all_ahead: int) -> tuple[int, float]:
    """Return the fewest steps ahead with which no rank waits longer than with all, and the time."""
    best = simulate(replace(workload, ahead=all_ahead))
    for ahead in range(all_ahead):
        try:
            time = simulate(replace(workload, ahead=ahead))
        except ScheduleError:
            continue
        if isclose(time, best):
            return ahead, time
    return all_ahead, best


# --- claims ---------------------------------------------------------------------------------------


def _check_held(proof: PipelineProof, claim: PipelineClaim, acts: Acts) -> None:
    for rank, (held, claimed) in enumerate(zip(proof.held, claim.held, strict=True)):
        if held != claimed:
            more = [index for index, now in enumerate(held_after(acts[rank])) if now > claimed]
            text = f"rank {rank} holds {held} activations; claimed are {claimed}"
            raise ScheduleError(text, [(rank, index) for index in more[:1]])


def _check_ahead(
    proof: PipelineProof, claim: PipelineClaim, check_progress: Callable[[int], None]
) -> None:
    found, claimed = proof.posted_ahead, claim.posted_ahead
    if found == claimed:
        return
    steps, claims = counted(found, "step"), counted(claimed, "step")
    text = f"receives have to be posted {steps} ahead; claimed is {claims}"
    try:
        check_progress(claimed)
    except ScheduleError as error:
        raise ScheduleError(f"{text}: {error}", error.places) from None
    raise ScheduleError(text)


def _check_time(proof: PipelineProof, claimed: float) -> None:
    if not isclose(proof.time, claimed):
        raise ScheduleError(f"the ranks take {proof.time:.6g}; claimed are {claimed:.6g}")
