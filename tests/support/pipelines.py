"""What the tests of pipelines share: schedules, broken ones, and a naive simulation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from hypothesis import strategies as st

from ringreduce.pipeline import Action, PipelineSchedule, schedule
from ringreduce.pipeline.definition import REGISTERED
from ringreduce.pipeline.generators import SCHEDULES

Edit = Callable[[list[str]], object]
"""Changes the texts of the actions of a rank."""


def fitting(
    name: str, ranks: int, splits: int, most_virtual: int = 4
) -> Iterator[PipelineSchedule]:
    """Yield the schedules of this name for these numbers, with each number of stages a rank."""
    if name != "interleaved":
        yield schedule(name, ranks, splits)
    elif splits % ranks == 0:
        for virtual in range(1, most_virtual + 1):
            yield schedule(name, ranks, splits, virtual)


@st.composite
def schedules(draw: st.DrawFn, most_ranks: int = 6, most_splits: int = 12) -> PipelineSchedule:
    """Any schedule of the library among a few ranks."""
    name = draw(st.sampled_from([*SCHEDULES]))
    ranks, splits = draw(st.integers(1, most_ranks)), draw(st.integers(1, most_splits))
    if name != "interleaved":
        return schedule(name, ranks, splits)
    return schedule(name, ranks, -(-splits // ranks) * ranks, draw(st.integers(1, 4)))


def forget_own() -> None:
    """Forget the schedules that tests have registered."""
    for name in REGISTERED.keys() - SCHEDULES.keys():
        del REGISTERED[name]


def with_acts(right: PipelineSchedule, acts: Sequence[Sequence[Action | str]]) -> PipelineSchedule:
    """The same schedule, claims included, with these actions in place of its own."""
    return replace(right, generator=lambda ranks, rank, splits, virtual: acts[rank])


def edited(right: PipelineSchedule, rank: int, edit: Edit) -> PipelineSchedule:
    """The same schedule, with the actions of one rank changed."""
    acts = [[*map(str, right.acts(each))] for each in range(right.ranks)]
    edit(acts[rank])
    return with_acts(right, acts)


def swap(first: str, second: str) -> Edit:
    """Swap two actions."""

    def edit(acts: list[str]) -> None:
        i, j = acts.index(first), acts.index(second)
        acts[i], acts[j] = second, first

    return edit


# --- a simulation that is not the library's -------------------------------------------------------


def naive_begins(
    shown: PipelineSchedule,
    duration: Callable[[Action], float],
    ahead: int,
    waits_for_sends: bool,
) -> list[list[float]] | None:
    """Return when each action begins if messages take no time, or None if the ranks deadlock.

    A rank enters step i when its action i - 1 ends.  It begins action i when the input is sent,
    and, if it waits for sends, when the receive of its last result is posted.
    """
    acts = [shown.acts(rank) for rank in range(shown.ranks)]
    makes = {of_result(a, shown): (r, i) for r, each in enumerate(acts) for i, a in enumerate(each)}
    takes = {of_input(a, shown): (r, i) for r, each in enumerate(acts) for i, a in enumerate(each)}
    entered = [[0.0] for _ in acts]
    begun: list[list[float]] = [[] for _ in acts]
    changed = True
    while changed:
        changed = False
        for rank, actions in enumerate(acts):
            while len(begun[rank]) <= len(actions):
                number = len(begun[rank])
                at = [entered[rank][number]]
                after = actions[number - 1] if number else None
                if shown.ranks > 1 and waits_for_sends and after and of_result(after, shown):
                    peer, index = takes[of_result(after, shown)]
                    at.append(_get(entered[peer], max(0, index - ahead)))
                before = actions[number] if number < len(actions) else None
                if shown.ranks > 1 and before and of_input(before, shown):
                    peer, index = makes[of_input(before, shown)]
                    at.append(_get(entered[peer], index + 1))
                if None in at:
                    break
                begun[rank].append(max(at))
                if before:
                    entered[rank].append(max(at) + duration(before))
                changed = True
    done = all(len(times) > len(actions) for times, actions in zip(begun, acts, strict=True))
    return [times[:-1] for times in begun] if done else None


def _get(times: list[float], index: int) -> float | None:
    return times[index] if index < len(times) else None


def of_result(action: Action, shown: PipelineSchedule) -> tuple[str, int, int] | None:
    """What another stage needs of an action: its flow, the receiving stage, and the microbatch."""
    if action.kind == "F" and action.stage + 1 < shown.stages:
        return "F", action.stage + 1, action.microbatch
    if action.kind in "BI" and action.stage > 0:
        return "B", action.stage - 1, action.microbatch
    return None


def of_input(action: Action, shown: PipelineSchedule) -> tuple[str, int, int] | None:
    """What an action needs of another stage."""
    if action.kind == "F" and action.stage > 0:
        return "F", action.stage, action.microbatch
    if action.kind in "BI" and action.stage + 1 < shown.stages:
        return "B", action.stage, action.microbatch
    return None
