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

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import count, pairwise
from math import inf, isclose

from ringreduce.errors import ScheduleError
from ringreduce.pipeline.actions import KINDS, Action, held_after
from ringreduce.pipeline.claims import PipelineClaim
from ringreduce.pipeline.definition import PipelineSchedule
from ringreduce.pipeline.lowering import Payload, input_of, lower, result_of, vocabulary
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
            raise ValueError(f"prove: {what} is {time!r}; pass a time above 0")
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
        _check_passes(schedule, rank, actions)
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
    for ahead in count():
        try:
            time = simulate(replace(workload, ahead=ahead))
        except ScheduleError:
            continue
        if isclose(time, best):
            return ahead, time
    raise AssertionError("count() does not end")


# --- the actions of one rank ----------------------------------------------------------------------


def _check_passes(schedule: PipelineSchedule, rank: int, actions: Sequence[Action]) -> None:
    """Check that every microbatch passes once through every stage of a rank, in the right order."""
    indices: dict[Action, int] = {}
    for index, action in enumerate(actions):
        _check_place(schedule, rank, index, action)
        if action in indices:
            raise _wrong(rank, index, f"has {action} twice")
        indices[action] = index
    for stage in range(rank, schedule.stages, schedule.ranks):
        for microbatch in range(schedule.splits):
            _check_pass(rank, indices, stage, microbatch)
        _check_sum(rank, [(i, a) for i, a in enumerate(actions) if a.stage == stage])
    if schedule.ranks == 1:
        _check_inputs(schedule, actions)


def _check_place(schedule: PipelineSchedule, rank: int, index: int, action: Action) -> None:
    """Check that an action has a stage of its rank, a known kind, and a microbatch."""
    if action.kind not in KINDS:
        raise _wrong(rank, index, f"has {action}; an action is F, B, I or W")
    if not 0 <= action.stage < schedule.stages:
        raise _wrong(rank, index, f"has {action}; there are stages 0 to {schedule.stages - 1}")
    if schedule.rank_of(action.stage) != rank:
        home = schedule.rank_of(action.stage)
        raise _wrong(rank, index, f"has {action}, but stage {action.stage} is on rank {home}")
    if not 0 <= action.microbatch < schedule.splits:
        last = schedule.splits - 1
        raise _wrong(rank, index, f"has {action}; there are microbatches 0 to {last}")


def _check_pass(rank: int, indices: dict[Action, int], stage: int, microbatch: int) -> None:
    """Check that a microbatch passes forward through a stage and then backward."""
    forward, whole, inner, weights = (
        Action(stage, kind, microbatch) for kind in ("F", "B", "I", "W")
    )
    halves = [half for half in (inner, weights) if half in indices]
    if halves and whole in indices:
        raise _wrong(
            rank, indices[halves[0]], f"has {whole} and {halves[0]}; a backward is B, or I and W"
        )
    wanted = (forward, inner, weights) if halves else (forward, whole)
    for action in wanted:
        if action not in indices:
            raise ScheduleError(f"rank {rank} lacks {action}")
    for first, then in pairwise(wanted):
        if indices[then] < indices[first]:
            raise _wrong(rank, indices[then], f"has {then} before {first}")


def _check_sum(rank: int, actions: Iterable[tuple[int, Action]]) -> None:
    """Check the order in which the gradients of a stage's weights are added."""
    adding = [(index, action) for index, action in actions if action.kind in "BW"]
    for (_, before), (index, after) in pairwise(adding):
        if after.microbatch < before.microbatch:
            raise _wrong(
                rank,
                index,
                f"has {after} after {before}, but the gradients of microbatches are added in "
                "ascending order",
            )


def _check_inputs(schedule: PipelineSchedule, actions: Iterable[Action]) -> None:
    """Check that the only rank has the input of each action: it receives no messages."""
    made: set[Payload | None] = {None}
    for index, action in enumerate(actions):
        needed = input_of(action, schedule.stages)
        if needed not in made:
            raise _wrong(0, index, f"has {action} before {needed}")
        made.add(result_of(action, schedule.stages))


def _wrong(rank: int, index: int, what: str) -> ScheduleError:
    """Return the error of an action: `what` says what the rank does wrong there."""
    return ScheduleError(f"rank {rank} {what}", [(rank, index)])


# --- claims ---------------------------------------------------------------------------------------


def _check_held(proof: PipelineProof, claim: PipelineClaim, acts: Acts) -> None:
    for rank, (held, claimed) in enumerate(zip(proof.held, claim.held, strict=True)):
        if held != claimed:
            places = [(rank, i) for i, now in enumerate(held_after(acts[rank])) if now > claimed][
                :1
            ]
            raise ScheduleError(
                f"rank {rank} holds {held} activations; claimed are {claimed}", places
            )


def _check_ahead(
    proof: PipelineProof, claim: PipelineClaim, check_progress: Callable[[int], None]
) -> None:
    found, claimed = proof.posted_ahead, claim.posted_ahead
    if found == claimed:
        return
    text = f"receives have to be posted {_counted(found)} ahead; claimed is {_counted(claimed)}"
    try:
        check_progress(claimed)
    except ScheduleError as error:
        raise ScheduleError(f"{text}: {error}", error.places) from None
    raise ScheduleError(text)


def _check_time(proof: PipelineProof, claimed: float) -> None:
    if not isclose(proof.time, claimed):
        raise ScheduleError(f"the ranks take {proof.time:.6g}; claimed are {claimed:.6g}")


def _counted(steps: int) -> str:
    return f"{steps} step{'s' * (steps != 1)}"
