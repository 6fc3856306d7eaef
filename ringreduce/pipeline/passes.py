"""Check the actions of one rank: each microbatch passes through a stage forward, then backward."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from ringreduce.errors import ScheduleError
from ringreduce.pipeline.actions import KINDS, Action
from ringreduce.pipeline.definition import PipelineSchedule
from ringreduce.pipeline.lowering import Payload, input_of, result_of


def check_passes(schedule: PipelineSchedule, rank: int, actions: Sequence[Action]) -> None:
    """Check that every microbatch passes once through every stage of a rank, in the right order.

    Raises ScheduleError, with the rank and the index of the action.
    """
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
    return ScheduleError(f"rank {rank} {what}", [(rank, index)])
