"""Instructions for shared memory: in any order of the ranks the result is right."""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringreduce.algorithms import ALGORITHMS, build
from ringreduce.planning.instructions import (
    CopyBytes,
    FreeSlot,
    Operand,
    Pause,
    Post,
    Reduce,
    Wait,
    join,
)
from ringreduce.planning.operations import INPUT, OUTPUT, SCRATCH
from ringreduce.planning.plan import plan_parts, plan_whole
from ringreduce.planning.shm_instructions import instructions_of
from ringreduce.schedules.schedule import Recv, Send, Step
from tests.support.each import each
from tests.support.instruction_machine import ITEMSIZE, InstructionMachine
from tests.support.schedules import any_schedule, by_hand

THIS = sys.modules[__name__]
COUNT = 37
REDUCING = "all_reduce", "reduce_scatter", "reduce"
SCHEDULES = [
    (collective, algorithm)
    for collective in (*REDUCING, "all_gather", "broadcast", "gather", "scatter", "all_to_all")
    for algorithm in ALGORITHMS[collective]
]
MOVING = [(name, "star") for name in ("broadcast", "gather", "scatter")]
MOVING += [("all_gather", "direct"), ("all_to_all", "direct")]
DIRECT = [
    ("all_reduce", "one_shot"),
    ("all_reduce", "two_shot"),
    ("reduce_scatter", "direct"),
    ("all_gather", "direct"),
    ("broadcast", "star"),
    ("reduce", "star"),
]


def plans(collective, algorithm, ranks, count=COUNT, slices=1, nodes=None):
    schedule = build(collective, algorithm, nodes or [list(range(ranks))])
    if collective in ("all_reduce", "broadcast", "reduce"):
        return [plan_whole(schedule, r, count, ITEMSIZE, slices).of(r) for r in range(ranks)]
    counts = [count // ranks + (r < count % ranks) for r in range(ranks)]
    if collective == "all_to_all":
        counts = [3 * index % 7 for index in range(ranks**2)]
    return [plan_parts(schedule, r, counts, ITEMSIZE, slices).of(r) for r in range(ranks)]


def instructions_of_all(collective, algorithm, ranks, single_copy, count=COUNT):
    """The plans, and the programs of each rank; None where there are none."""
    made = plans(collective, algorithm, ranks, count)
    slices = [plan.slice(0) for plan in made]
    in_place = made[0].in_place
    programs = [
        instructions_of(slices, rank, ITEMSIZE, single_copy, in_place) for rank in range(ranks)
    ]
    assert len({each is None for each in programs}) == 1
    return made, None if programs[0] is None else [each.instructions for each in programs]


def carried_out(made, programs, seed, in_place=(), **between_hosts):
    """Inputs and outputs of all ranks after their programs; OUTPUT is INPUT on ranks `in_place`.

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
    machine = InstructionMachine(programs, inputs, outputs, shared, **between_hosts)
    machine.run(choice)
    return before, *zip(*machine.left, strict=True)


def wanted(collective, before, rank):
    if collective == "broadcast":
        return before[0]
    if collective == "all_gather":
        return np.concatenate(before)
    if collective == "gather":
        return np.concatenate(before)[: None if rank == 0 else 0]
    if collective == "scatter":
        return np.array_split(before[0], len(before))[rank]
    if collective == "all_to_all":
        ends = (3 * np.arange(len(before) ** 2) % 7).reshape(len(before), -1).cumsum(1)
        return np.concatenate([np.split(*pair)[rank] for pair in zip(before, ends, strict=True)])
    total = sum(before)
    if collective == "reduce_scatter":
        return np.array_split(total, len(before))[rank]
    return total if collective == "all_reduce" or rank == 0 else total[:0]


SINGLE_COPY = "", " or direct", " and written", " and half pushed", " and pushed"


@pytest.fixture(params=["staged", "exposed", *(f"single-copy{how}" for how in SINGLE_COPY)])
def single_copy(request, monkeypatch):
    """Each way for data; they are exposed and written directly whatever their length."""
    direct = request.param in ("exposed", "single-copy or direct", "single-copy and written")
    if request.param.endswith("written"):
        monkeypatch.setattr(THIS, "instructions_of", partial(instructions_of, writes=True))
    if request.param.endswith("pushed"):
        part = 0.5 if "half" in request.param else 1.0
        monkeypatch.setattr(THIS, "instructions_of", partial(instructions_of, pushed=part))
        monkeypatch.setattr("ringreduce.planning.instructions.PAGE_BYTES", ITEMSIZE)
    monkeypatch.setattr(
        "ringreduce.planning.shm_instructions.DIRECT_BYTES", 1 if direct else 1 << 20
    )
    return request.param.startswith("single-copy")


@each("ranks", [2, 3, 4, 5])
@pytest.mark.parametrize(("collective", "algorithm"), SCHEDULES)
def test_any_order_gives_the_same(collective, algorithm, ranks, single_copy):
    made, programs = instructions_of_all(collective, algorithm, ranks, single_copy)
    if programs is None:
        return
    for seed in range(10):
        here = {r for r in range(ranks) if made[0].in_place and seed >> r & 1}
        here = {r for r in here if made[r].output_count}
        before, inputs, outputs = carried_out(made, programs, seed, in_place=here)
        for rank, out in enumerate(outputs):
            assert np.array_equal(out, wanted(collective, before, rank)), (rank, seed)
            if rank not in here:
                assert np.array_equal(inputs[rank], before[rank])


HOSTS = (((0, 1), (2, 3)), ((0, 1, 2), (3,), (4, 5)), ((0, 2), (1,)), ((0,), (1,)), ((0, 1), (2,)))


def programs_of_hosts(made, hosts, segment_bytes):
    """The instructions of each rank, given the plans of its host alone."""
    host_of = {rank: host for host in hosts for rank in host}
    return [
        instructions_of(
            {mate: made[mate].slice(0) for mate in host_of[rank]},
            rank,
            ITEMSIZE,
            single_copy=False,
            in_place=made[0].in_place,
            segment_bytes=segment_bytes,
        )
        for rank in range(len(made))
    ]


@pytest.mark.parametrize("hosts", HOSTS, ids=str)
@pytest.mark.parametrize(("collective", "algorithm"), SCHEDULES)
def test_hosts_with_messages_between_them_have_the_result_in_any_order(
    collective, algorithm, hosts
):
    for count, segment_bytes in ((COUNT, 1 << 20), (COUNT, 16), (2000, 1 << 20), (2000, 6000)):
        made = plans(collective, algorithm, sum(map(len, hosts)), count, nodes=hosts)
        programs = programs_of_hosts(made, hosts, segment_bytes)
        for rank, program in enumerate(programs):
            host = next(host for host in hosts if rank in host)
            far = {message.peer for message in program.messages}
            assert not far & set(host)
            in_scratch = [m for m in program.messages if m.place.buffer == SCRATCH]
            ends = [message.place.offset + message.nbytes for message in in_scratch]
            assert max(ends, default=0) <= program.scratch * ITEMSIZE
        for seed in range(4):
            how = [each.instructions for each in programs], seed
            messages = [each.messages for each in programs]
            before, _, outputs = carried_out(made, *how, hosts=hosts, messages=messages)
            for rank, out in enumerate(outputs):
                assert np.array_equal(out, wanted(collective, before, rank)), (rank, seed)


def joined_for(made, rank, single_copy, slices_without_pause):
    """The instructions of a rank for all slices of the plans `made`; None if a slice has none."""
    slices = [
        instructions_of(
            [plan.slice(index) for plan in made], rank, ITEMSIZE, single_copy, made[0].in_place
        )
        for index in range(made[0].slices)
    ]
    return None if None in slices else join(slices, slices_without_pause)


@each("ranks", [2, 3])
@pytest.mark.parametrize(("collective", "algorithm"), SCHEDULES)
def test_slices_that_are_joined_give_the_same_in_any_order(
    collective, algorithm, ranks, single_copy
):
    made = plans(collective, algorithm, ranks, slices=3)
    joined = [joined_for(made, rank, single_copy, 2) for rank in range(ranks)]
    if None in joined:
        assert instructions_of_all(collective, algorithm, ranks, single_copy)[1] is None
        return
    for one in joined:
        assert one.instructions.count(Pause()) == 1
        assert len(one.notes) == len(one.rounds) == 3
    for seed in range(10):
        before, _, outputs = carried_out(made, [one.instructions for one in joined], seed)
        for rank, out in enumerate(outputs):
            assert np.array_equal(out, wanted(collective, before, rank)), (rank, seed)


@pytest.mark.parametrize(
    ("algorithm", "way", "rounds", "steps"),
    [
        ("ring", False, 4, [0, 1, 2, 3]),
        ("two_shot", True, 3, [0, 1, 1]),  # the last round waits for the readers of the last step
    ],
)
def test_a_round_of_joined_slices_is_a_step_of_its_slice(algorithm, way, rounds, steps):
    joined = joined_for(plans("all_reduce", algorithm, 3, slices=2), 0, way, 1)
    assert joined.rounds == (rounds, rounds)
    assert [joined.step_of(number) for number in range(1, 2 * rounds + 1)] == 2 * steps


@pytest.mark.parametrize(("collective", "algorithm"), DIRECT)
def test_direct_schedules_can_be_carried_out(collective, algorithm):
    for ranks in (2, 3, 4):
        assert instructions_of_all(collective, algorithm, ranks, single_copy=False)[1] is not None


def test_what_can_be_single_copy():
    for ranks in (2, 3, 8):
        assert instructions_of_all("all_reduce", "two_shot", ranks, single_copy=True)[1] is not None
        assert instructions_of_all("all_reduce", "one_shot", ranks, single_copy=True)[1] is None


def test_what_is_exposed_and_what_is_written_directly(monkeypatch):
    """A two-shot exposes the parts to reduce, and writes the results directly to all peers."""
    monkeypatch.setattr("ringreduce.planning.shm_instructions.DIRECT_BYTES", 1)
    for ranks in (2, 3, 4):
        _, programs = instructions_of_all("all_reduce", "two_shot", ranks, single_copy=False)
        for rank, own in enumerate(programs):
            first, last = (instr for instr in own if isinstance(instr, Post))
            (reduce,) = (instr for instr in own if isinstance(instr, Reduce))
            assert (first.exposes.buffer, last.exposes) == (INPUT, None)
            assert {(place.rank, place.buffer) for place in reduce.direct} == {
                (peer, OUTPUT) for peer in range(ranks) if peer != rank
            }
            assert reduce.readers == ranks - 1
            copies = [instr for instr in own if isinstance(instr, CopyBytes)]
            assert {instr.unless_shared for instr in copies} == {INPUT, OUTPUT}


@pytest.mark.parametrize(("collective", "algorithm"), SCHEDULES)
def test_no_rank_writes_to_a_peer_before_it_has_compared_the_headers_of_all(
    collective, algorithm, single_copy
):
    """It compares those of a round when it frees its slot for the next one."""
    _, programs = instructions_of_all(collective, algorithm, 4, single_copy)
    for rank, program in enumerate(programs or ()):
        frees = [index for index, each in enumerate(program) if isinstance(each, FreeSlot)]
        writes = [
            index
            for index, each in enumerate(program)
            if (isinstance(each, Reduce) and each.direct)
            or (isinstance(each, CopyBytes) and each.into.rank != rank)
        ]
        assert all(frees[1] < index for index in writes)


@each("ranks", [2, 3, 5])
@pytest.mark.parametrize("pushed", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(("collective", "algorithm"), MOVING)
def test_one_end_of_a_message_copies_a_byte(monkeypatch, collective, algorithm, pushed, ranks):
    """Each byte of a result is written once, by its rank or by the peer that sends it."""
    monkeypatch.setattr("ringreduce.planning.instructions.PAGE_BYTES", ITEMSIZE)
    monkeypatch.setattr(THIS, "instructions_of", partial(instructions_of, pushed=pushed))
    made, programs = instructions_of_all(collective, algorithm, ranks, single_copy=True)
    written = [0] * ranks
    for instr in sum(programs, ()):
        if isinstance(instr, CopyBytes):
            written[instr.into.rank] += instr.nbytes
    assert written == [ITEMSIZE * plan.output_count for plan in made]


def test_what_is_not_exposed(monkeypatch):
    """No rank waits until its peers have read data of the last round."""
    monkeypatch.setattr("ringreduce.planning.shm_instructions.DIRECT_BYTES", 1)
    for collective, algorithm in (("all_reduce", "one_shot"), ("broadcast", "star")):
        _, programs = instructions_of_all(collective, algorithm, 3, single_copy=False)
        assert all(
            instr.exposes is None for own in programs for instr in own if isinstance(instr, Post)
        )


@pytest.mark.parametrize("single_copy", [False, True])
def test_what_others_may_still_read_is_not_written_to(monkeypatch, single_copy):
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
    for in_place, written_by in ((True, []), (False, [0])):
        program = instructions_of(slices, 1, ITEMSIZE, single_copy, in_place).instructions
        (reduce,) = (instr for instr in program if isinstance(instr, Reduce))
        assert [place.rank for place in reduce.direct] == written_by


@pytest.mark.parametrize("single_copy", [False, True])
def test_where_a_rank_still_receives_is_not_written_to(monkeypatch, single_copy):
    """Rank 0 has the result for rank 1 while rank 1 may still receive rank 2's array."""
    monkeypatch.setattr("ringreduce.planning.shm_instructions.DIRECT_BYTES", 1)

    def steps(rank, disturbed):
        if rank == 0:
            yield Step(recvs=(Recv(1, (0,), reduce=True),))
            yield Step(sends=(Send(1, (0,)),))
        elif rank == 1:
            yield Step(sends=(Send(0, (0,)),), recvs=(Recv(2, (0,)),) if disturbed else ())
            yield Step(recvs=(Recv(0, (0,)),))
        elif disturbed:
            yield Step(sends=(Send(1, (0,)),))

    for disturbed, written in ((True, []), (False, [1])):
        schedule = by_hand("moves", 3, (1,), lambda rank, d=disturbed: steps(rank, d))
        slices = [plan_whole(schedule, r, COUNT, ITEMSIZE, 1).of(r).slice(0) for r in range(3)]
        program = instructions_of(slices, 0, ITEMSIZE, single_copy, in_place=False).instructions
        (reduce,) = (instr for instr in program if isinstance(instr, Reduce))
        assert [place.rank for place in reduce.direct] == written


@pytest.mark.parametrize("way", ["staged", "single-copy"])
def test_a_rank_copies_its_own_part_while_it_waits(way):
    """The root's part of a gather is copied after the post, and before the first wait."""
    schedule = build("gather", "star", [[0, 1, 2]])
    made = [plan_parts(schedule, r, [4, 4, 4], ITEMSIZE, 1).of(r).slice(0) for r in range(3)]
    own, other = Operand(0, OUTPUT, 0), Operand(0, INPUT, 0)
    program = instructions_of(made, 0, ITEMSIZE, way == "single-copy", False).instructions
    kinds = [type(instr) for instr in program[:4]]
    assert kinds == [FreeSlot, Post, CopyBytes, Wait]
    assert program[2] == CopyBytes(own, other, 4 * ITEMSIZE)
    assert [instr for instr in program if isinstance(instr, CopyBytes)].count(program[2]) == 1


def test_a_part_that_peers_may_still_read_is_copied_last():
    """The root's OUTPUT may be INPUT, which peers read: its copy comes after they have read it."""
    schedule = build("broadcast", "star", [[0, 1, 2]])
    made = [plan_whole(schedule, r, 4, ITEMSIZE, 1).of(r).slice(0) for r in range(3)]
    program = instructions_of(made, 0, ITEMSIZE, single_copy=True, in_place=True).instructions
    kinds = [type(instr) for instr in program]
    assert kinds == [FreeSlot, Post, FreeSlot, Post, Wait, Wait, CopyBytes]


@pytest.mark.slow
@given(schedule=any_schedule(), count=st.integers(0, 40), seed=st.integers(0, 1 << 16))
@settings(max_examples=100)
def test_any_schedule_at_all_gives_the_same_on_every_way(schedule, count, seed):
    """Steps that send the same memory to several ranks, fold it and pass it on, in any mixture."""
    made = [plan_whole(schedule, r, count, ITEMSIZE, 1).of(r) for r in range(schedule.size)]
    slices = [plan.slice(0) for plan in made]
    found = []
    ways = [("staged", 1 << 20, False), ("exposed", 1, False)]
    ways += [("single-copy", 1 << 20, False), ("single-copy", 1, False), ("single-copy", 1, True)]
    for way, direct_bytes, writes in ways:
        with patch("ringreduce.planning.shm_instructions.DIRECT_BYTES", direct_bytes):
            programs = [
                instructions_of(slices, r, ITEMSIZE, way == "single-copy", True, writes)
                for r in range(len(made))
            ]
        if None not in programs:
            for draw, in_place in enumerate((set(), set(range(len(made))))):
                outputs = carried_out(
                    made, [each.instructions for each in programs], seed + draw, in_place
                )[2]
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


def results(programs, made, seed):
    try:
        return [out.tolist() for out in carried_out(made, programs, seed)[2]]
    except ValueError:  # beyond the end of an array
        return None


def test_instructions_decide_what_comes_out(single_copy):
    """Other places, or another order of the instructions, give another result."""
    made, programs = instructions_of_all("all_reduce", "two_shot", 3, single_copy)
    seeds = range(4)
    right = [results(programs, made, seed) for seed in seeds]
    for index, instr in enumerate(programs[1]):
        if isinstance(instr, CopyBytes):
            moved = instr._replace(
                source=instr.source._replace(offset=instr.source.offset + ITEMSIZE)
            )
        elif isinstance(instr, Reduce):
            moved = instr._replace(sources=instr.sources[:2])
        else:
            continue
        changed = [
            programs[0],
            (*programs[1][:index], moved, *programs[1][index + 1 :]),
            programs[2],
        ]
        assert [results(changed, made, seed) for seed in seeds] != right
    folds = [instr for instr in programs[1] if isinstance(instr, Reduce)]
    swapped = tuple(instr for instr in programs[1] if not isinstance(instr, Reduce)) + tuple(folds)
    assert [results([programs[0], swapped, programs[2]], made, seed) for seed in seeds] != right


def test_instructions_without_a_wait_are_found_out():
    """Else the machine that runs them would prove nothing."""
    made, programs = instructions_of_all("all_reduce", "two_shot", 3, single_copy=True)
    hasty = [tuple(instr for instr in each if not isinstance(instr, Wait)) for each in programs]
    assert any(results(programs, made, seed) != results(hasty, made, seed) for seed in range(10))


def test_every_rank_frees_and_posts_every_round_in_order():
    for collective, algorithm in SCHEDULES:
        programs = instructions_of_all(collective, algorithm, 5, single_copy=False)[1]
        if programs is not None:
            posts = [
                [instr.round for instr in each if isinstance(instr, Post)] for each in programs
            ]
            slots = [
                [instr.round for instr in each if isinstance(instr, FreeSlot)] for each in programs
            ]
            assert posts == slots == [list(range(1, len(posts[0]) + 1))] * 5


def test_a_message_of_another_step_cannot_be_carried_out():
    made = plans("all_reduce", "two_shot", 2)
    slices = [plan.slice(0) for plan in made]
    first, second = slices[1].steps
    later = slices[1]._replace(steps=(first, replace(second, index=5)))
    assert instructions_of([slices[0], later], 0, ITEMSIZE, False, True) is None
