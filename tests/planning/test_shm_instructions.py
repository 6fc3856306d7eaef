"""Rows for shared memory: whatever the order in which ranks get on, the result is right."""

from __future__ import annotations

import random
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringreduce.algorithms import ALGORITHMS, build
from ringreduce.planning.operations import INPUT, OUTPUT
from ringreduce.planning.plan import plan_parts, plan_whole
from ringreduce.planning.shm_instructions import Await, CopyBytes, MakeRoom, Put, Reduce, rows_of
from ringreduce.schedules.schedule import Recv, Send, Step
from tests.support.row_machine import ITEMSIZE, RowMachine
from tests.support.schedules import any_schedule, by_hand

COUNT = 37
SCHEDULES = [
    (collective, algorithm)
    for collective in ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce")
    for algorithm in ALGORITHMS[collective]
]
DIRECT = [
    ("all_reduce", "one_shot"),
    ("all_reduce", "two_shot"),
    ("reduce_scatter", "direct"),
    ("all_gather", "direct"),
    ("broadcast", "star"),
    ("reduce", "star"),
]


def plans(collective, algorithm, ranks, count=COUNT):
    schedule = build(collective, algorithm, [list(range(ranks))])
    if collective in ("all_reduce", "broadcast", "reduce"):
        return [plan_whole(schedule, r, count, ITEMSIZE, 1).of(r) for r in range(ranks)]
    counts = [count // ranks + (r < count % ranks) for r in range(ranks)]
    return [plan_parts(schedule, r, counts, ITEMSIZE, 1).of(r) for r in range(ranks)]


def rows_of_all(collective, algorithm, ranks, pulls, count=COUNT):
    """The plans, and the rows of each rank; None where there are none."""
    made = plans(collective, algorithm, ranks, count)
    slices = [plan.slice(0) for plan in made]
    in_place = made[0].in_place
    rows = [rows_of(slices, rank, ITEMSIZE, pulls, in_place) for rank in range(ranks)]
    assert len({each is None for each in rows}) == 1
    return made, None if rows[0] is None else [each.rows for each in rows]


def carried_out(made, rows, seed, in_place=()):
    """Inputs and outputs of all ranks after their rows; OUTPUT is INPUT on ranks `in_place`.

    Which of them are shared memory is drawn.
    """
    rng = np.random.default_rng(seed)
    inputs = [rng.integers(1, 1000, plan.input_count) for plan in made]
    before = [x.copy() for x in inputs]
    outputs = [
        x if rank in in_place else np.full(plan.output_count, -1)
        for rank, (x, plan) in enumerate(zip(inputs, made, strict=True))
    ]
    choice = random.Random(seed)
    shared = [(choice.random() < 0.6, choice.random() < 0.6) for _ in made]
    shared = [(a, a) if rank in in_place else (a, b) for rank, (a, b) in enumerate(shared)]
    machine = RowMachine(rows, inputs, outputs, shared)
    machine.run(choice)
    return before, *zip(*machine.left, strict=True)


def wanted(collective, before, rank):
    if collective == "broadcast":
        return before[0]
    if collective == "all_gather":
        return np.concatenate(before)
    total = sum(before)
    if collective == "reduce_scatter":
        return np.array_split(total, len(before))[rank]
    return total if collective == "all_reduce" or rank == 0 else total[:0]


@pytest.fixture(params=["staged", "lent", "pulled", "pulled or written"])
def pulls(request, monkeypatch):
    """Each way on which data go; lent and written to peers whatever their length."""
    direct = request.param in ("lent", "pulled or written")
    monkeypatch.setattr(
        "ringreduce.planning.shm_instructions.DIRECT_BYTES", 1 if direct else 1 << 20
    )
    return request.param.startswith("pulled")


@pytest.mark.parametrize("ranks", [2, 3, 4, 5])
@pytest.mark.parametrize(("collective", "algorithm"), SCHEDULES)
def test_any_order_gives_the_same(collective, algorithm, ranks, pulls):
    made, rows = rows_of_all(collective, algorithm, ranks, pulls)
    if rows is None:
        return
    for seed in range(10):
        here = {r for r in range(ranks) if made[0].in_place and seed >> r & 1}
        here = {r for r in here if made[r].output_count}
        before, inputs, outputs = carried_out(made, rows, seed, in_place=here)
        for rank, out in enumerate(outputs):
            assert np.array_equal(out, wanted(collective, before, rank)), (rank, seed)
            if rank not in here:
                assert np.array_equal(inputs[rank], before[rank])


@pytest.mark.parametrize(("collective", "algorithm"), DIRECT)
def test_direct_schedules_can_be_carried_out(collective, algorithm):
    for ranks in (2, 3, 4):
        assert rows_of_all(collective, algorithm, ranks, pulls=False)[1] is not None


def test_what_can_be_pulled():
    for ranks in (2, 3, 8):
        assert rows_of_all("all_reduce", "two_shot", ranks, pulls=True)[1] is not None
        assert rows_of_all("all_reduce", "one_shot", ranks, pulls=True)[1] is None


def test_what_is_lent_and_what_is_written_to_peers(monkeypatch):
    """Of a two-shot the parts to be folded are lent, and the results go to all at once."""
    monkeypatch.setattr("ringreduce.planning.shm_instructions.DIRECT_BYTES", 1)
    for ranks in (2, 3, 4):
        _, rows = rows_of_all("all_reduce", "two_shot", ranks, pulls=False)
        for rank, own in enumerate(rows):
            first, last = (row for row in own if isinstance(row, Put))
            (fold,) = (row for row in own if isinstance(row, Reduce))
            assert (first.lends.buffer, last.lends) == (INPUT, None)
            assert {(place.rank, place.buffer) for place in fold.wanted} == {
                (peer, OUTPUT) for peer in range(ranks) if peer != rank
            }
            assert fold.readers == ranks - 1
            copies = [row for row in own if isinstance(row, CopyBytes)]
            assert {row.unless for row in copies} == {INPUT, OUTPUT}


def test_what_is_not_lent(monkeypatch):
    """What all others need in the last exchange, nobody waits for."""
    monkeypatch.setattr("ringreduce.planning.shm_instructions.DIRECT_BYTES", 1)
    for collective, algorithm in (("all_reduce", "one_shot"), ("broadcast", "star")):
        _, rows = rows_of_all(collective, algorithm, 3, pulls=False)
        assert all(row.lends is None for own in rows for row in own if isinstance(row, Put))


@pytest.mark.parametrize("pulls", [False, True])
def test_what_others_may_still_read_is_not_written_to(monkeypatch, pulls):
    """Rank 0's array is read by both others while rank 1 already has the result for it."""
    monkeypatch.setattr("ringreduce.planning.shm_instructions.DIRECT_BYTES", 1)

    def steps(rank):
        if rank == 0:
            yield Step(sends=(Send(1, (0,)), Send(2, (0,))))
            yield Step(recvs=(Recv(1, (0,)),))
        else:
            yield Step(recvs=(Recv(0, (0,), reduce=True),))
            yield Step(sends=(Send(0, (0,)),) if rank == 1 else ())

    schedule = by_hand("moves", 3, (1,), steps)
    slices = [plan_whole(schedule, r, COUNT, ITEMSIZE, 1).of(r).slice(0) for r in range(3)]
    for in_place, wanted_by in ((True, []), (False, [0])):
        rows = rows_of(slices, 1, ITEMSIZE, pulls, in_place).rows
        (fold,) = (row for row in rows if isinstance(row, Reduce))
        assert [place.rank for place in fold.wanted] == wanted_by


@given(schedule=any_schedule(), count=st.integers(0, 40), seed=st.integers(0, 1 << 16))
@settings(max_examples=300)
def test_any_schedule_at_all_gives_the_same_on_every_way(schedule, count, seed):
    """Steps that send the same memory to several ranks, fold it and pass it on, in any mixture."""
    made = [plan_whole(schedule, r, count, ITEMSIZE, 1).of(r) for r in range(schedule.size)]
    slices = [plan.slice(0) for plan in made]
    found = []
    ways = (("staged", 1 << 20), ("lent", 1), ("pulled", 1 << 20), ("pulled", 1))
    for way, direct_bytes in ways:
        with patch("ringreduce.planning.shm_instructions.DIRECT_BYTES", direct_bytes):
            rows = [rows_of(slices, r, ITEMSIZE, way == "pulled", True) for r in range(len(made))]
        if None not in rows:
            for draw, in_place in enumerate((set(), set(range(len(made))))):
                outputs = carried_out(made, [each.rows for each in rows], seed + draw, in_place)[2]
                held = [held_after(plan, out) for plan, out in zip(made, outputs, strict=True)]
                found.append((way, held, in_place))
    # What is drawn for the inputs goes by the seed.
    for draw in range(2):
        same = [held for index, (_, held, _) in enumerate(found) if index % 2 == draw]
        assert all(held == same[0] for held in same), found


def held_after(plan, output):
    """Return the chunks of a rank's output that it holds by the schedule."""
    chunks = [plan.chunk_offsets(0)[chunk] for chunk in plan.schedule.holds_after(plan.rank)]
    return [output[c.output : c.output + c.count].tolist() for c in chunks] if output.size else []


def results(rows, made, seed):
    try:
        return [out.tolist() for out in carried_out(made, rows, seed)[2]]
    except ValueError:  # beyond the end of an array
        return None


def test_rows_decide_what_comes_out(pulls):
    """The table is all that there is: rows elsewhere, or in another order, give something else."""
    made, rows = rows_of_all("all_reduce", "two_shot", 3, pulls)
    seeds = range(4)
    right = [results(rows, made, seed) for seed in seeds]
    for index, row in enumerate(rows[1]):
        if isinstance(row, CopyBytes):
            moved = row._replace(source=row.source._replace(offset=row.source.offset + ITEMSIZE))
        elif isinstance(row, Reduce):
            moved = row._replace(sources=row.sources[:2])
        else:
            continue
        changed = [rows[0], (*rows[1][:index], moved, *rows[1][index + 1 :]), rows[2]]
        assert [results(changed, made, seed) for seed in seeds] != right
    folds = [row for row in rows[1] if isinstance(row, Reduce)]
    swapped = tuple(row for row in rows[1] if not isinstance(row, Reduce)) + tuple(folds)
    assert [results([rows[0], swapped, rows[2]], made, seed) for seed in seeds] != right


def test_rows_without_a_wait_are_found_out():
    """Else the machine that runs them would prove nothing."""
    made, rows = rows_of_all("all_reduce", "two_shot", 3, pulls=True)
    hasty = [tuple(row for row in each if not isinstance(row, Await)) for each in rows]
    assert any(results(rows, made, seed) != results(hasty, made, seed) for seed in range(10))


def test_every_rank_puts_every_exchange_in_order():
    for collective, algorithm in SCHEDULES:
        rows = rows_of_all(collective, algorithm, 5, pulls=False)[1]
        if rows is not None:
            put = [[row.exchange for row in each if isinstance(row, Put)] for each in rows]
            room = [[row.exchange for row in each if isinstance(row, MakeRoom)] for each in rows]
            assert put == room == [list(range(1, len(put[0]) + 1))] * 5


def test_a_message_of_another_step_cannot_be_carried_out():
    made = plans("all_reduce", "two_shot", 2)
    slices = [plan.slice(0) for plan in made]
    first, second = slices[1].steps
    later = slices[1]._replace(steps=(first, replace(second, index=5)))
    assert rows_of([slices[0], later], 0, ITEMSIZE, False, True) is None
