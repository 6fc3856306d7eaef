"""Schedules of one step have the same plans as from the planners of any schedule."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringreduce.algorithms import build
from ringreduce.planning.instructions import CopyBytes, Instructions
from ringreduce.planning.one_step import OneStep, one_step
from ringreduce.planning.plan import plan_parts
from ringreduce.planning.shm_instructions import instructions_of
from ringreduce.schedules.schedule import Recv, Schedule, Send, Step
from tests.support.each import each
from tests.support.strategies import EVERY_ALGORITHM, block_layout, layouts

QUICK = settings(max_examples=100)
SIZES = st.sampled_from([0, 1, 2, 7, 100, 3000])
"""Elements of a chunk: many empty chunks, and some longer than a message with its signature."""


@st.composite
def plans(draw):
    """Draw counts; return the plans of all ranks by the general planner, and by `one_step`."""
    nodes = draw(layouts(max_nodes=3, max_ranks=7).filter(lambda nodes: sum(map(len, nodes)) > 1))
    size = sum(map(len, nodes))
    schedule = build("all_to_all", "direct", nodes)
    counts = draw(st.lists(SIZES, min_size=size**2, max_size=size**2))
    itemsize, slices = draw(st.sampled_from([1, 4, 16])), draw(st.integers(1, 3))
    how = counts, itemsize, slices, draw(st.sampled_from([64, 5000, 1 << 20]))
    general = [plan_parts(schedule, rank, *how) for rank in range(size)]
    return general, [
        plan_parts(schedule, rank, *how, one_step=one_step(schedule)) for rank in range(size)
    ]


@given(plans=plans())
@QUICK
def test_the_messages_are_those_of_the_general_planner(plans):
    for general, plan in zip(*plans, strict=True):
        assert plan.moves is not None
        for index in range(plan.slices):
            assert plan.slice(index) == general.slice(index)


@given(plans=plans(), single_copy=st.booleans(), pushed=st.sampled_from([0.0, 0.3, 1.0]))
@QUICK
def test_the_instructions_are_those_of_the_general_planner(plans, single_copy, pushed):
    general, planned = plans
    for index in range(general[0].slices):
        every = [general[0].of(rank).slice(index) for rank in range(len(general))]
        for plan in planned:
            pushed *= single_copy
            how = plan.rank, plan.itemsize, single_copy, plan.in_place, False, pushed
            found = without_empty_copies(plan.moves.instructions(index, single_copy, pushed))
            assert found == instructions_of(every, *how)


def without_empty_copies(found: Instructions) -> Instructions:
    """Leave out the copies without bytes, which the general planner does not make."""
    made = [i for i in found.instructions if not isinstance(i, CopyBytes) or i.nbytes]
    return found._replace(instructions=tuple(made))


def test_a_wrong_place_of_a_chunk_is_noticed():
    """The comparison can fail: with two messages of a rank in the other order it does."""
    schedule, counts = build("all_to_all", "direct", block_layout(3)), [*range(1, 10)]
    right = one_step(schedule)
    assert right is not None
    swapped = replace(right, sends=[row[::-1] for row in right.sends])
    plan = plan_parts(schedule, 0, counts, 4, 1)
    assert plan_parts(schedule, 0, counts, 4, 1, one_step=right).slice(0) == plan.slice(0)
    assert plan_parts(schedule, 0, counts, 4, 1, one_step=swapped).slice(0) != plan.slice(0)


@each("size", [1, 2, 3, 5])
@pytest.mark.parametrize(("collective", "algorithm"), EVERY_ALGORITHM)
def test_other_schedules_are_left_to_the_general_planner(collective, algorithm, size):
    found = one_step(build(collective, algorithm, block_layout(size)))
    if (collective, algorithm) == ("all_to_all", "direct") and size > 1:
        assert isinstance(found, OneStep)
    elif size != 2:  # between two ranks every algorithm that moves data is one such step
        assert found is None


def _with_steps(steps) -> Schedule:
    return replace(build("all_to_all", "direct", block_layout(2)), steps=lambda rank: steps[rank])


NO_ONE_STEP = {
    "two steps": [
        (Step((Send(1, (1,)),)), Step((), (Recv(1, (2,)),))),
        (Step((), (Recv(0, (1,)),)), Step((Send(0, (2,)),))),
    ],
    "a fold": [
        (Step((Send(1, (1,)),), (Recv(1, (2,), reduce=True),)),),
        (Step((Send(0, (2,)),), (Recv(0, (1,)),)),),
    ],
    "a chunk that the rank does not hold": [
        (Step((Send(1, (2,)),), (Recv(1, (2,)),)),),
        (Step((Send(0, (2,)),), (Recv(0, (1,)),)),),
    ],
    "a chunk that is missing": [
        (Step((Send(1, (1,)),), ()),),
        (Step((Send(0, (2,)),), (Recv(0, (1,)),)),),
    ],
    "a chunk that nobody receives": [
        (Step((Send(1, (0,)),), (Recv(1, (2,)),)),),
        (Step((Send(0, (2,)),), (Recv(0, (1,)),)),),
    ],
}


@pytest.mark.parametrize("what", NO_ONE_STEP)
def test_a_schedule_that_is_no_single_step_of_moves_is_refused(what):
    assert one_step(_with_steps(NO_ONE_STEP[what])) is None
