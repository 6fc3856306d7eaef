"""Plans, without any transport: executed on symbols, they give the schedule's results."""

from __future__ import annotations

import doctest
import importlib
from dataclasses import replace
from itertools import accumulate
from operator import attrgetter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringreduce.algorithms import build
from ringreduce.planning.operations import (
    BESIDE,
    INSIDE,
    INSIDE_BYTES,
    OUTPUT,
    SCRATCH,
    ChunkOffsets,
)
from ringreduce.planning.plan import Plan, plan_parts, plan_whole, shard_counts
from ringreduce.schedules.check import check
from ringreduce.schedules.schedule import Schedule
from tests.support.lockstep import DIVIDED, Memory, chunk_trees, run_plans
from tests.support.schedules import any_schedule, one_shot, two_shot
from tests.support.strategies import EVERY_ALGORITHM, block_layout, layouts, written

REDUCING = ("all_reduce", "reduce_scatter")
ITEMSIZES = st.sampled_from([1, 8, 700, 5000])
"""With the largest, a few elements do not fit into a message with the signature inside."""
SEGMENTS = st.sampled_from([1, 16, 5000, 1 << 20])
CUT = (8, 1, 1 << 20)

QUICK = settings(max_examples=60)


def whole(schedule: Schedule, count: int, *cut: int) -> list[Plan]:
    """`cut`: bytes an element, slices, bytes a segment."""
    cut = (*cut, *CUT[len(cut) :])
    return [plan_whole(schedule, r, count, *cut) for r in range(schedule.size)]


def parts(schedule: Schedule, counts, *cut: int) -> list[Plan]:
    cut = (*cut, *CUT[len(cut) :])
    return [plan_parts(schedule, r, counts, *cut) for r in range(schedule.size)]


@st.composite
def calls(draw):
    """Draw any call: its schedule, the plans of all ranks, and the chunks' counts or None."""
    collective, algorithm = draw(st.sampled_from(EVERY_ALGORITHM))
    nodes = draw(layouts(max_nodes=4, max_ranks=7))
    size = sum(map(len, nodes))
    schedule = build(collective, algorithm, nodes, draw(st.integers(0, size - 1)))
    cut = draw(ITEMSIZES), draw(st.integers(1, 4)), draw(SEGMENTS)
    count = draw(st.integers(0, 40))
    if collective in ("all_gather", "gather", "scatter", "all_to_all"):
        chunks = len(schedule.weights)
        counts = draw(st.lists(st.integers(0, 9), min_size=chunks, max_size=chunks))
        return schedule, parts(schedule, counts, *cut), counts
    if collective == "reduce_scatter":
        counts = shard_counts(count, size)
        return schedule, parts(schedule, counts, *cut), counts
    count = 0 if collective == "barrier" else count
    return schedule, whole(schedule, count, *cut), None


# --- a plan gives the results of its schedule -----------------------------------------------------


def assert_follows(schedule: Schedule, plans: list[Plan], counts, in_place: bool) -> None:
    """Execute the plans, and compare every element of every result with the schedule's tree."""
    memories = []
    for rank, plan in enumerate(plans):
        held = elements_of(schedule.holds_before(rank), plan.input_count, counts)
        memories.append(Memory([(i, rank) for i in held], plan.output_count, in_place))
    inputs = [list(memory.source) for memory in memories]
    divides = schedule.collective in REDUCING and schedule.size > 1
    run_plans(plans, memories, divides)
    trees = chunk_trees(schedule)
    for rank, (plan, memory) in enumerate(zip(plans, memories, strict=True)):
        assert in_place or memory.source == inputs[rank]
        elements = elements_of(schedule.holds_after(rank), plan.output_count, counts)
        for offsets in map(plan.chunk_offsets, range(plan.slices)):
            for chunk in schedule.holds_after(rank):
                low = offsets[chunk].output
                high = low + offsets[chunk].count
                tree = (DIVIDED, trees[rank][chunk]) if divides else trees[rank][chunk]
                assert memory.buffers[OUTPUT][low:high] == [(i, tree) for i in elements[low:high]]


def elements_of(chunks, total: int, counts) -> list[int]:
    """Return the elements of a buffer that holds these chunks, as indices into the whole array."""
    if counts is None:
        return list(range(total))
    starts = [0, *accumulate(counts)]
    return [i for chunk in chunks for i in range(starts[chunk], starts[chunk + 1])]


@given(call=calls(), in_place=st.booleans())
@settings(max_examples=200)
def test_every_rank_gets_what_the_schedule_says(call, in_place):
    schedule, plans, counts = call
    assert_follows(schedule, plans, counts, in_place and counts is None)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("size", [2, 3, 5, 8])
@pytest.mark.parametrize("schedule_of", [one_shot, two_shot])
def test_many_contributions_in_one_step_are_folded_in_rank_order(schedule_of, size, in_place):
    schedule = schedule_of(size)
    assert_follows(schedule, whole(schedule, 3 * size + 1, 8, 2), None, in_place)
    assert chunk_trees(schedule)[0][0] == tuple(range(size))


# A step may send chunks whose values are not contiguous; the planner packs them.
PACKED = """
rank 0
  >1:0 <1:1+
  >1:0,1,2 <1:3
rank 1
  <0:0+ >0:1
  <0:0,1,2 >0:3
"""
SWAPPED = """
rank 0
  >1:2,0 <1:3,1
rank 1
  <0:2,0 >0:3,1
"""


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("text", [PACKED, SWAPPED])
def test_messages_of_chunks_that_are_not_contiguous(text, in_place):
    schedule = written(text, chunks=4, collective="moves")
    assert_follows(schedule, whole(schedule, 22, 8, 2), None, in_place)


def test_chunks_that_follow_each_other_travel_as_one_message():
    schedule = written(
        """
        rank 0
          >1:0,1,2
        rank 1
          <0:0,1,2
        """,
        chunks=4,
        collective="moves",
    )
    for plan in whole(schedule, 16):
        (step,) = plan.slice(0).steps
        assert [m.span.stop - m.span.start for m in (*step.sends, *step.recvs)] == [12]


@given(
    schedule=any_schedule(),
    count=st.integers(0, 30),
    itemsize=ITEMSIZES,
    slices=st.integers(1, 3),
    segment=SEGMENTS,
    in_place=st.booleans(),
)
@settings(max_examples=300)
def test_any_schedule_is_planned_correctly(schedule, count, itemsize, slices, segment, in_place):
    assert_follows(schedule, whole(schedule, count, itemsize, slices, segment), None, in_place)


def test_a_plan_that_folds_in_another_order_is_noticed():
    schedule = build("all_reduce", "ring", block_layout(3))
    plans = whole(schedule, 9)
    planned = plans[0].slice(0)
    first = planned.steps[0]
    (fold,) = first.folds
    turned = replace(first, folds=(fold._replace(sources=fold.sources[::-1]),))
    plans[0]._slices[0] = planned._replace(steps=(turned, *planned.steps[1:]))
    with pytest.raises(AssertionError):
        assert_follows(schedule, plans, None, in_place=False)


# --- signatures -----------------------------------------------------------------------------------


@given(call=calls())
@QUICK
def test_the_first_message_of_each_pair_in_a_slice_carries_the_signature(call):
    schedule, plans, _ = call
    for rank, plan in enumerate(plans):
        peers = {send.peer for step in schedule.steps(rank) for send in step.sends}
        for index in range(plan.slices):
            sends = [m for step in plan.slice(index).steps for m in step.sends]
            first = {message.peer: message for message in reversed(sends)}
            assert set(first) == peers
            for message in sends:
                nbytes = (message.span.stop - message.span.start) * plan.itemsize
                fits = INSIDE if nbytes <= INSIDE_BYTES else BESIDE
                assert message.signature == (fits if message is first[message.peer] else None)


def test_what_fits_beside_the_signature_is_measured_in_bytes():
    schedule = build("broadcast", "ring", block_layout(2))
    for itemsize in (1, 8):
        for nbytes, wanted in ((INSIDE_BYTES, INSIDE), (INSIDE_BYTES + itemsize, BESIDE)):
            plan = plan_whole(schedule, 0, nbytes // itemsize, itemsize, 1)
            assert plan.slice(0).steps[0].sends[0].signature == wanted


# --- offsets --------------------------------------------------------------------------------------


@given(call=calls())
@QUICK
def test_slices_and_chunks_cover_every_element_once(call):
    schedule, plans, _ = call
    for rank, plan in enumerate(plans):
        for held, total, start in (
            (schedule.holds_before(rank), plan.input_count, attrgetter("input")),
            (schedule.holds_after(rank), plan.output_count, attrgetter("output")),
        ):
            covered = [
                i
                for offsets in map(plan.chunk_offsets, range(plan.slices))
                for chunk in held
                for i in range(start(offsets[chunk]), start(offsets[chunk]) + offsets[chunk].count)
            ]
            wanted = list(range(total)) if held and schedule.weights else []
            assert sorted(covered) == wanted


def test_the_example_in_the_docstring_is_true():
    tested = doctest.testmod(importlib.import_module("ringreduce.planning.plan"))
    assert tested.attempted > 0
    assert tested.failed == 0


@given(count=st.integers(0, 10_000), pieces=st.integers(1, 50))
@QUICK
def test_shards_are_those_of_array_split(count, pieces):
    split = np.array_split(np.arange(count), pieces)
    assert shard_counts(count, pieces) == [len(shard) for shard in split]


@given(call=calls(), again=st.randoms())
@QUICK
def test_equal_arguments_give_equal_plans(call, again):
    _, plans, _ = call
    order = list(range(plans[0].slices))
    again.shuffle(order)
    for plan in plans:
        twin = replace(plan, _slices={}, _steps=None)
        asked_in_another_order = {index: twin.slice(index) for index in order}
        assert all(plan.slice(index) == asked_in_another_order[index] for index in order)


def test_a_slice_is_planned_without_the_others(monkeypatch):
    """Otherwise the first call with so many slices would spend seconds on planning."""
    made = []
    monkeypatch.setattr(
        "ringreduce.planning.plan.ChunkOffsets",
        lambda *offsets: made.append(offsets) or ChunkOffsets(*offsets),
    )
    size, slices = 4, 1000
    cut = 10**6, 8, slices
    in_parts = build("all_to_all", "direct", block_layout(size))
    plans = [
        plan_whole(build("all_reduce", "ring", block_layout(size)), 0, *cut),
        plan_parts(in_parts, 0, [10**6] * size**2, *cut[1:]),
    ]
    for plan in plans:
        for rank in range(size):
            plan.of(rank).slice(slices // 2)
        assert plan.slices == slices
    assert len(made) == size * (size + size**2)


# --- how much scratch -----------------------------------------------------------------------------


@pytest.mark.parametrize("slices", [1, 3])
@pytest.mark.parametrize("size", [2, 3, 4, 7, 9])
def test_ring_all_reduce_needs_one_chunk_of_scratch(size, slices):
    count = 1009
    for plan in whole(build("all_reduce", "ring", block_layout(size)), count, 8, slices):
        chunk = -(-count // slices // size) + 1
        assert all(0 < plan.slice(i).scratch <= chunk for i in range(slices))


@pytest.mark.parametrize("slices", [1, 3])
@pytest.mark.parametrize("size", [2, 3, 4, 7, 9])
def test_ring_reduce_scatter_needs_two_pieces_of_scratch(size, slices):
    schedule = build("reduce_scatter", "ring", block_layout(size))
    for plan in parts(schedule, [252] * size, 8, slices):
        assert all(0 < plan.slice(i).scratch <= 2 * 252 // slices for i in range(slices))


@pytest.mark.parametrize("size", [2, 3, 4, 7, 9])
def test_pieces_that_differ_in_length_need_three_at_most(size):
    counts = shard_counts(1009, size)
    for plan in parts(build("reduce_scatter", "ring", block_layout(size)), counts):
        assert plan.slice(0).scratch <= 3 * counts[0]


@given(nodes=layouts(max_nodes=4, max_ranks=9), count=st.integers(0, 200))
@QUICK
def test_hierarchical_needs_scratch_for_the_messages_of_one_step(nodes, count):
    for plan in whole(build("all_reduce", "hierarchical", nodes), count):
        received = [
            sum(m.span.stop - m.span.start for m in step.recvs if m.span.buffer == SCRATCH)
            for step in plan.slice(0).steps
        ]
        assert plan.slice(0).scratch == max(received, default=0)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_long_messages_are_folded_in_parts_that_share_scratch(size):
    segment = 100
    for plan in whole(build("all_reduce", "ring", block_layout(size)), 1009 * size, 8, 1, 800):
        planned = plan.slice(0)
        assert planned.scratch == segment
        parts = [step for step in planned.steps if step.folds]
        assert len(parts) == (size - 1) * 11
        assert sum(not part.more_parts for part in parts) == size - 1
        messages = [m for step in planned.steps for m in (*step.recvs, *step.sends)]
        assert max(m.span.stop - m.span.start for m in messages) == segment


@pytest.mark.parametrize("collective", ["all_gather", "broadcast"])
def test_a_collective_without_reduction_needs_no_scratch(collective):
    schedule = build(collective, "ring", block_layout(5))
    plans = parts(schedule, [3, 0, 2, 5, 1]) if collective == "all_gather" else whole(schedule, 11)
    assert [plan.slice(0).scratch for plan in plans] == [0] * 5


@pytest.mark.parametrize("ranks", [2, 3, 4, 5])
@pytest.mark.parametrize(
    ("collective", "algorithm"),
    [name for name in EVERY_ALGORITHM if name[0] in ("all_reduce", "reduce")],
)
def test_a_mean_is_divided_where_the_sum_is_complete(collective, algorithm, ranks):
    schedule = build(collective, algorithm, [list(range(ranks))])
    count = 3 * len(schedule.weights)
    divided = set()
    for rank in range(ranks):
        steps = plan_whole(schedule, rank, count, 4, 1).of(rank).slice(0).steps
        divided |= {(rank, s.index) for s in steps if any(fold.finishes for fold in s.folds)}
    assert divided == {(rank, step) for rank, step, _ in check(schedule).completed}
