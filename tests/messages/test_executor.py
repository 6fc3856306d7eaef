"""The executor on threads runs arbitrary schedules, to the last bit."""

from __future__ import annotations

from functools import reduce

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ringreduce as rr
from ringreduce.calls.call import Call
from ringreduce.control.executable import Control
from ringreduce.control.signature import Signature
from ringreduce.messages.binding import BoundStep, Flow
from ringreduce.messages.executor import MessageExecutable
from ringreduce.messages.flows import FlowCache, Task
from ringreduce.messages.unrolled import unrolled
from ringreduce.planning.plan import Plan, plan_whole
from ringreduce.schedules.schedule import Schedule
from tests.support.cases import CONFIG
from tests.support.lockstep import chunk_trees
from tests.support.schedules import any_schedule, one_shot, two_shot
from tests.support.strategies import written

KEPT, BOUND = 700, 5000
"""Elements of an array that is staged, and of one whose messages are bound to its address."""


def run_plan(comm: rr.Communicator, plan: Plan, x: np.ndarray, out: np.ndarray) -> None:
    """Run a plan as a collective does, twice: the second run uses the cached flows."""
    signature, shapes = Signature("by hand", ()), (x.shape, out.shape)
    kinds = out.shape, x.dtype, x.dtype
    call = Call(signature, plan, comm._runner.calls.device, shapes, *kinds, op="sum", in_flight=3)
    untouched = x.copy()
    for _ in range(2):
        x[...] = untouched
        comm._engine.run_now(call, x, out, None)


def assert_carries_out(
    schedule: Schedule, count: int, slices: int, in_place: bool, segment_bytes: int = 1 << 20
) -> None:
    """Check that every chunk a rank holds has the value of the schedule's tree."""
    inputs = [np.random.default_rng([5, r]).standard_normal(count) for r in range(schedule.size)]
    trees = chunk_trees(schedule)

    def evaluate(tree, span):
        if isinstance(tree, int):
            return inputs[tree][span]
        return reduce(np.add, (evaluate(term, span) for term in tree))

    def program(comm):
        plan = plan_whole(schedule, comm.rank, count, 8, slices, segment_bytes)
        x = inputs[comm.rank].copy()
        out = x if in_place and plan.output_count else np.full(plan.output_count, np.nan)
        run_plan(comm, plan, x, out)
        for offsets in map(plan.chunk_offsets, range(plan.slices)):
            for chunk in schedule.holds_after(comm.rank):
                start = offsets[chunk].output
                span = slice(start, start + offsets[chunk].count)
                wanted = evaluate(trees[comm.rank][chunk], span)
                assert np.array_equal(out[span], wanted)

    rr.spawn(program, schedule.size, timeout_s=120, config=CONFIG)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize(("count", "slices"), [(KEPT, 1), (BOUND, 1), (BOUND, 6)])
@pytest.mark.parametrize("size", [2, 3, 6])
@pytest.mark.parametrize("schedule_of", [one_shot, two_shot])
def test_many_contributions_in_one_step(schedule_of, size, count, slices, in_place):
    assert_carries_out(schedule_of(size), count, slices, in_place)


@given(
    schedule=any_schedule(),
    count=st.one_of(st.integers(0, KEPT), st.integers(BOUND, 2 * BOUND)),
    slices=st.integers(1, 3),
    in_place=st.booleans(),
    segment_bytes=st.sampled_from([800, 6000, 1 << 20]),
)
@settings(max_examples=150)
def test_any_schedule_at_all(schedule, count, slices, in_place, segment_bytes):
    assert_carries_out(schedule, count, slices, in_place, segment_bytes)


# Chunk 0 has three values to fold and chunk 1 two, and rank 0 sends both chunks in one message: the
# last folds of both chunks are merged, the first fold of chunk 0 is not.
JOINED_IN_PART = """
rank 0
  >2:0,1
rank 1
  >2:0
rank 2
  <1:0+ <0:0,1+
"""


@pytest.mark.parametrize("count", [4, KEPT, BOUND])
def test_folds_of_one_message_that_are_joined_in_part(count):
    schedule = written(JOINED_IN_PART, chunks=2)
    assert_carries_out(schedule, count, slices=1, in_place=False)


class Posted:
    """Receives posted to one peer, in order; an arriving message matches the first."""

    def __init__(self, *lengths: int) -> None:
        self.open = list(lengths)
        self.coming = [*lengths]

    def withdraw(self, receiver: int) -> bool | None:
        """Cancel a receive as over MPI: a message may arrive before the cancellation is known."""
        if receiver not in self.open:
            return False
        self.open.remove(receiver)
        if self.open and self.coming:
            assert self.open.pop(0) == self.coming.pop(0), "a message meets another's buffer"
        return True


def test_a_message_that_comes_while_receives_are_taken_back_meets_its_own():
    posted = Posted(6000, 4000, 2004)
    cache = FlowCache(posted, CONFIG)
    executable = MessageExecutable(Task(None, None, None, ()), cache, Control(None, None, None))
    flow = Flow(0, 0, [BoundStep(0, recvs=[(1, n) for n in posted.open])])
    executable._under_way.append(flow)
    assert executable.withdraw()
    executable.tally()
    assert (cache.sent[1], cache.received[1]) == (0, 1)


class Unspoken:
    """Records operations, and has no text of its own."""

    def __init__(self, events: list[str]) -> None:
        self.events = events

    def __call__(self, *arguments: object) -> bool:
        self.events.append("called")
        return True

    def __setitem__(self, place: object, header: bytes) -> None:
        self.events.append("signed")

    def __eq__(self, other: object) -> bool:
        return True

    def __str__(self) -> str:
        raise AssertionError("is spelt out")

    __repr__ = __format__ = __str__
    __hash__ = None


def test_nothing_of_a_flow_gets_into_its_code():
    events: list[str] = []
    it = Unspoken(events)
    steps = [
        BoundStep(it, packs=[it], starts=[it, it], tests=[it], signatures=[(it, it)], acts=[it])
    ]
    flow, under_way = Flow(it, it, steps, own_signatures=[it]), []
    unrolled(flow, under_way, Control(it, it, it, log=it), own=(it, it))(b"header", it, it)
    # The copy in, its own signature; then pack, two starts, the log, a test and an act.
    assert events == ["signed", "signed", *["called"] * 6, "signed"]
    assert (flow.at, flow.runs, under_way) == (1, 1, [])
