"""The checker proves every algorithm, and rejects every broken schedule for the right reason."""

from __future__ import annotations

import doctest
import importlib
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ringreduce.algorithms import build
from ringreduce.errors import ScheduleError
from ringreduce.schedules.check import Expression, check
from ringreduce.schedules.matching import RankStep, match
from ringreduce.schedules.schedule import Claim, Recv, Schedule, Send, Step
from tests.support.each import each
from tests.support.strategies import (
    EVERY_ALGORITHM,
    HIERARCHICAL,
    ROOTED,
    Ranks,
    block_layout,
    layouts,
    steps_of,
    with_steps,
    written,
)

# --- every algorithm is right ---------------------------------------------------------------------


ALWAYS_PROVEN = {*range(1, 18), 24, 31, 32, 33, 48}
SIZES = {"many": sorted(ALWAYS_PROVEN), "all": range(1, 65)}


@pytest.mark.parametrize("which", ["many", pytest.param("all", marks=pytest.mark.long)])
@pytest.mark.parametrize(("collective", "algorithm"), EVERY_ALGORITHM)
def test_it_is_right_on_one_node(collective: str, algorithm: str, which: str) -> None:
    for size in SIZES[which]:
        check(build(collective, algorithm, block_layout(size)))


@each(
    ("size", "root"),
    [(size, root) for size in range(1, 10) for root in range(size)]
    + [(size, root) for size in (16, 33) for root in (1, size // 2, size - 1)],
)
@pytest.mark.parametrize(("collective", "algorithm"), ROOTED)
def test_it_is_right_for_every_root(collective: str, algorithm: str, size: int, root: int) -> None:
    check(build(collective, algorithm, block_layout(size), root))


@pytest.mark.parametrize(("collective", "algorithm"), EVERY_ALGORITHM)
@given(nodes=layouts(max_ranks=16))
@settings(max_examples=15)
def test_it_is_right_on_small_layouts(
    collective: str, algorithm: str, nodes: list[list[int]]
) -> None:
    check(build(collective, algorithm, nodes))


@pytest.mark.parametrize(("collective", "algorithm"), ROOTED)
@given(nodes=layouts(max_ranks=16), draws=st.data())
@settings(max_examples=10)
def test_it_is_right_for_any_root_on_small_layouts(
    collective: str, algorithm: str, nodes: list[list[int]], draws: st.DataObject
) -> None:
    root = draws.draw(st.integers(0, sum(map(len, nodes)) - 1))
    check(build(collective, algorithm, nodes, root))


@pytest.mark.slow
@given(nodes=layouts(), names=st.sampled_from(HIERARCHICAL))
@settings(max_examples=20)
def test_hierarchical_is_right_on_any_layout(
    nodes: list[list[int]], names: tuple[str, str]
) -> None:
    check(build(*names, nodes))


@pytest.mark.few(40)
@pytest.mark.parametrize("sizes", [(3, 1, 2), (1, 1, 1, 1), (2, 2), (8,) * 8, (1, 2, 3, 5, 7, 11)])
@pytest.mark.parametrize(("collective", "algorithm"), HIERARCHICAL)
def test_hierarchical_is_right_on_blocks(
    collective: str, algorithm: str, sizes: tuple[int, ...]
) -> None:
    check(build(collective, algorithm, block_layout(*sizes)))


# --- the contents of a proof ----------------------------------------------------------------------


def test_the_example_in_the_docstring_is_true() -> None:
    assert doctest.testmod(importlib.import_module("ringreduce.schedules.check")).failed == 0


@pytest.mark.parametrize("size", range(1, 10))
def test_a_proof_counts_what_a_ring_moves(size: int) -> None:
    proof = check(build("all_reduce", "ring", block_layout(size)))
    moved = 2 * (size - 1) * size
    assert (proof.steps, proof.messages, proof.chunks) == (2 * (size - 1), moved, moved)


def contributions(expression: Expression) -> list[int]:
    if isinstance(expression, int):
        return [expression]
    return [rank for term in expression for rank in contributions(term)]


@given(nodes=layouts(max_ranks=16))
@settings(max_examples=30)
def test_a_proven_sum_names_every_rank_once(nodes: list[list[int]]) -> None:
    size = sum(map(len, nodes))
    results = check(build("all_reduce", "hierarchical", nodes)).results
    for expression in results.values():
        assert sorted(contributions(expression)) == list(range(size))


def test_a_fold_is_in_ascending_rank_order_wherever_the_message_stands() -> None:
    schedule = written(
        """
        rank 0
          >1:0 >2:0 <2:0+ <1:0+
        rank 1
          >2:0 >0:0 <0:0+ <2:0+
        rank 2
          >0:0 >1:0 <1:0+ <0:0+
        """
    )
    assert check(schedule).results == {0: (0, 1, 2)}


def test_a_send_reads_the_value_from_before_its_step() -> None:
    exchange = written("rank 0\n >1:0 <1:0+\nrank 1\n >0:0 <0:0+")
    assert check(exchange).results == {0: (0, 1)}


def test_ranks_may_be_at_different_steps_of_their_own() -> None:
    late = written("rank 0\n - \n - \n >1:0 \n <1:0 \nrank 1\n <0:0+ \n >0:0 \n -")
    assert check(late).results == {0: (0, 1)}


def test_messages_of_one_pair_match_first_in_first_out() -> None:
    ranks = steps_of(written("rank 0\n >1:0 \n >1:1 \nrank 1\n <0:0 <0:1 \n", chunks=2))
    assert [(m.sender, m.receiver, m.chunks) for m in match(ranks)] == [
        ((0, 0), (1, 0), (0,)),
        ((0, 1), (1, 0), (1,)),
    ]


# --- broken schedules are rejected ----------------------------------------------------------------


def message_of(schedule: Schedule) -> str:
    """Return the checker's error for a broken schedule."""
    with pytest.raises(ScheduleError) as error:
        check(schedule)
    return str(error.value)


def ring(size: int = 3) -> tuple[Schedule, Ranks]:
    schedule = build("all_reduce", "ring", block_layout(size))
    return schedule, steps_of(schedule)


def test_the_message_names_the_schedule() -> None:
    schedule, ranks = ring()
    ranks[0] = []
    assert message_of(with_steps(schedule, ranks)).startswith("all_reduce ring of 3 ranks: ")


def test_a_wrong_peer_is_rejected() -> None:
    schedule, ranks = ring()
    ranks[0][0] = replace(ranks[0][0], sends=(Send(2, (2,)),))
    assert "step 1: rank 0 sends chunk 1 to rank 1, whose receive in step 0 wants chunk 2" in (
        message_of(with_steps(schedule, ranks))
    )


def test_a_missing_step_is_rejected() -> None:
    schedule, ranks = ring()
    del ranks[1][1]
    assert "step 1: rank 0 sends chunk 1 to rank 1, whose receive in step 1 wants chunk 0" in (
        message_of(with_steps(schedule, ranks))
    )


def test_a_missing_last_step_is_rejected() -> None:
    schedule, ranks = ring()
    del ranks[1][-1]
    assert "step 3: rank 0 sends chunk 2 to rank 1, which has no receive left for it" in (
        message_of(with_steps(schedule, ranks))
    )


def test_a_doubled_step_is_rejected() -> None:
    schedule, ranks = ring(2)
    ranks[0].append(ranks[0][-1])
    assert "step 2: rank 0 sends chunk 0 to rank 1, which has no receive left for it" in (
        message_of(with_steps(schedule, ranks))
    )


def test_a_doubled_step_on_every_rank_is_rejected() -> None:
    schedule, ranks = ring(2)
    message = message_of(with_steps(schedule, [[steps[0], *steps] for steps in ranks]))
    assert "step 1: rank 1 folds chunk 1 of ranks 0, 1 and counts the contribution of" in message


def test_a_swapped_chunk_is_rejected() -> None:
    schedule, ranks = ring()
    first, second = ranks[0][:2]
    ranks[0][:2] = [replace(first, sends=second.sends), replace(second, sends=first.sends)]
    assert "step 0: rank 0 sends chunk 1 to rank 1, whose receive in step 0 wants chunk 2" in (
        message_of(with_steps(schedule, ranks))
    )


def test_a_ring_that_passes_whole_arrays_is_rejected() -> None:
    schedule, size = ring()[0], 3
    whole = tuple(range(size))
    ranks = [
        [Step((Send((me + 1) % size, whole),), (Recv((me - 1) % size, whole, reduce=True),))] * 2
        for me in range(size)
    ]
    assert "step 1: rank 1 folds chunk 0 of ranks 0, 1 and counts the contribution of rank 0" in (
        message_of(with_steps(schedule, ranks))
    )


@each(
    ("text", "reason"),
    [
        (
            "rank 0\n >1:0 \n <1:0+ \nrank 1\n >0:0 \n <0:0+",
            "deadlock: rank 0 in step 0 waits for rank 1 to receive chunk 0, which it does in step "
            "1; rank 1 in step 0 waits for rank 0 to receive chunk 0, which it does in step 1",
        ),
        (
            "rank 0\n <1:0+ \n >1:0 \nrank 1\n <0:0+ \n >0:0",
            "rank 0 in step 0 waits for rank 1 to send chunk 0, which it does in step 1",
        ),
        (
            "rank 0\n >1:0 <1:0 \nrank 1\n >0:0 <0:0",
            "step 0: rank 0 overwrites chunk 0 and sends it in the same step",
        ),
        (
            "rank 0\n <1:0 <2:0+ \nrank 1\n >0:0 \nrank 2\n >0:0",
            "step 0: rank 0 overwrites chunk 0 and reduces into it in the same step",
        ),
        *(
            (
                f"rank 0\n {receives} \nrank 1\n - \nrank 2\n -",
                "step 0: rank 0 overwrites chunk 0 and overwrites it again in the same step",
            )
            for receives in ("<1:0 <2:0", "<1:0,0")
        ),
        ("rank 0\n - \n >0:0 \nrank 1\n -", "step 1: rank 0 has a message with itself"),
        ("rank 0\n - \n <0:0+ \nrank 1\n -", "step 1: rank 0 has a message with itself"),
        ("rank 0\n - \nrank 1\n >-1:0", "step 0: rank 1 has a message with rank -1, of 2"),
        ("rank 0\n - \nrank 1\n >2:0", "step 0: rank 1 has a message with rank 2, of 2"),
        (
            "rank 0\n >1:0 \n <1:0 \n >1: \nrank 1\n <0:0+ \n >0:0",
            "step 2: rank 0 sends no chunks to rank 1, which has no receive left for it",
        ),
        (
            "rank 0\n >1:0 \n <1:0 \n <1:0 \nrank 1\n <0:0+ \n >0:0",
            "step 2: rank 0 receives chunk 0 from rank 1, which has no send left for it",
        ),
        (
            "rank 0\n >1:0 \n >1:0 \nrank 1\n <0:0+ \n <0:0+",
            "step 1: rank 1 folds chunk 0 of ranks 0, 1 and counts the contribution of rank 0",
        ),
        (
            "rank 0\n - \nrank 1\n - \nrank 2\n -",
            "at the end chunk 0 on rank 0 lacks the contribution of ranks 1, 2",
        ),
    ],
)
def test_what_is_wrong_is_named(text: str, reason: str) -> None:
    assert reason in message_of(written(text))


def test_a_circle_of_waiting_sends_is_rejected() -> None:
    schedule = written(
        "rank 0\n >1:0 \n <2:0 \nrank 1\n >2:0 \n <0:0 \nrank 2\n >0:0 \n <1:0 \nrank 3\n - "
    )
    message = message_of(schedule)
    assert (
        "rank 2 in step 0 waits for rank 0 to receive chunk 0, which it does in step 1" in message
    )
    assert "rank 3" not in message


def test_who_only_waits_behind_a_deadlock_is_not_blamed() -> None:
    schedule = written(
        "rank 0\n <1:0+ \nrank 1\n >2:0 \n <2:0 \n >0:0 \nrank 2\n >1:0 \n <1:0",
    )
    message = message_of(schedule)
    assert "deadlock: rank 1 in step 0 waits for rank 2" in message
    assert "rank 0" not in message


def sums_on_two_ranks(text: str) -> Schedule:
    """Return the schedule of a text in which ranks 0 and 1 alone form the sum."""
    two = written(text, collective="sums on two ranks")
    return replace(two, holds_after=lambda rank: (0,) if rank < 2 else ())


def test_an_order_of_addition_that_differs_by_rank_is_rejected() -> None:
    schedule = sums_on_two_ranks(
        """
        rank 0
          >1:0 <2:0+
          <1:0+
        rank 1
          >0:0 <0:0+
          <2:0+
        rank 2
          >0:0 >1:0
        """
    )
    assert message_of(schedule).endswith(
        "at the end chunk 0 is ((0+2)+1) on rank 0 but ((0+1)+2) on rank 1; the order of addition "
        "must be the same on every rank"
    )


def test_one_fold_is_not_two_because_16_bit_floats_round_at_each() -> None:
    schedule = sums_on_two_ranks(
        """
        rank 0
          >1:0 <1:0+ <2:0+
        rank 1
          >0:0 <0:0+
          <2:0+
        rank 2
          >0:0 >1:0
        """
    )
    assert "chunk 0 is (0+1+2) on rank 0 but ((0+1)+2) on rank 1" in message_of(schedule)


def test_only_the_outer_folds_of_a_deep_expression_are_printed() -> None:
    others = range(2, 10)
    text = "rank 0\n >1:0 <1:0+\n" + "".join(f" <{rank}:0+\n" for rank in others)
    text += "rank 1\n >0:0 <0:0+\n" + "".join(f" <{rank}:0+\n" for rank in reversed(others))
    text += "".join(f"rank {rank}\n >0:0 >1:0\n" for rank in others)
    assert "chunk 0 is (((((((…)+4)+5)+6)+7)+8)+9) on rank 0 but (((((((…)+7)+6)+5)+4)+3)+2)" in (
        message_of(sums_on_two_ranks(text))
    )


@pytest.mark.parametrize("chunk", [-1, 3])
@pytest.mark.parametrize("way", ["<", ">"])
def test_a_chunk_that_is_not_there_is_rejected(way: str, chunk: int) -> None:
    schedule = written(f"rank 0\n - \nrank 1\n {way}0:0,{chunk}", chunks=3)
    assert f"step 0: rank 1 has a message with chunk {chunk}, of 3" in message_of(schedule)


@pytest.mark.parametrize(
    "wrong", [Claim(5, 4, 4), Claim(4, 5, 4), Claim(4, 4, 5)], ids=["steps", "sent", "received"]
)
def test_a_wrong_claim_is_rejected(wrong: Claim) -> None:
    schedule, _ = ring()
    lying = replace(schedule, claim=lambda rank: wrong if rank == 2 else schedule.claim(rank))
    assert message_of(lying).endswith(
        "rank 2 takes 4 steps, sends 4 chunks and receives 4; claimed are "
        f"{wrong.steps} steps, {wrong.sent} sent and {wrong.received} received"
    )


def test_messages_of_one_pair_in_the_wrong_order_are_rejected() -> None:
    schedule = written("rank 0\n >1:0 >1:1 \nrank 1\n <0:1+ <0:0+", chunks=2)
    assert "step 0: rank 0 sends chunk 0 to rank 1, whose receive in step 0 wants chunk 1" in (
        message_of(schedule)
    )


def test_a_contribution_that_is_overwritten_is_rejected() -> None:
    schedule, ranks = ring()
    ranks[1][0] = replace(ranks[1][0], recvs=(replace(ranks[1][0].recvs[0], reduce=False),))
    assert "at the end chunk 2 on rank 0 lacks the contribution of rank 1" in (
        message_of(with_steps(schedule, ranks))
    )


def test_sending_what_one_does_not_hold_is_rejected() -> None:
    schedule = build("broadcast", "ring", block_layout(3), root=1)
    other_root = replace(schedule, holds_before=lambda rank: (0,) if rank == 2 else ())
    assert "step 0: rank 1 sends chunk 0 to rank 2, but holds no value of it" in (
        message_of(other_root)
    )


def test_reducing_into_what_one_does_not_hold_is_rejected() -> None:
    schedule = build("broadcast", "ring", block_layout(2))
    ranks = steps_of(schedule)
    ranks[1] = [Step(recvs=(Recv(0, (0,), reduce=True),))]
    assert "step 0: rank 1 reduces chunk 0 from rank 0, but holds no value of it" in (
        message_of(with_steps(schedule, ranks))
    )


def test_a_result_that_never_arrives_is_rejected() -> None:
    schedule = build("broadcast", "ring", block_layout(2))
    assert "at the end rank 1 holds no value of chunk 0" in (
        message_of(with_steps(schedule, [[Step()], [Step()]]))
    )


def test_a_schedule_that_holds_less_than_its_collective_promises_is_rejected() -> None:
    schedule = replace(ring()[0], holds_after=lambda rank: (rank,))
    assert "chunk 0 is held after by 1 of 3 ranks; all_reduce wants it held by every rank" in (
        message_of(schedule)
    )


def test_a_chunk_that_two_ranks_broadcast_is_rejected() -> None:
    schedule = replace(build("broadcast", "ring", block_layout(3)), holds_before=lambda rank: (0,))
    assert "chunk 0 is held before by 3 of 3 ranks; broadcast wants it held by one rank" in (
        message_of(schedule)
    )


def test_holding_a_chunk_that_is_not_there_is_rejected() -> None:
    schedule = replace(ring()[0], holds_before=lambda rank: (0, 1, 2, 3))
    assert "chunk 3 held before, of 3" in message_of(schedule)


@pytest.mark.parametrize("size", range(2, 10))
def test_a_barrier_that_lacks_its_last_step_is_rejected(size: int) -> None:
    schedule = build("barrier", "dissemination", block_layout(size))
    short = with_steps(schedule, [steps[:-1] for steps in steps_of(schedule)])
    assert "at the end rank 0 has not heard from rank" in message_of(short)


def test_what_a_rank_hears_in_a_step_it_cannot_pass_on_in_that_step() -> None:
    round_trip = "rank 0\n >1: <2: \nrank 1\n >2: <0: \nrank 2\n >0: <1:"
    assert message_of(written(round_trip, chunks=0, collective="barrier")).endswith(
        "at the end rank 0 has not heard from rank 1"
    )


# --- every single mutation is found ---------------------------------------------------------------


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """A right schedule of any algorithm, on at most 9 ranks."""
    collective, algorithm = draw(st.sampled_from(EVERY_ALGORITHM))
    return build(collective, algorithm, draw(layouts(max_nodes=4, max_ranks=9)))


def edited(ranks: Ranks, place: RankStep, old: Send | Recv, new: Send | Recv | None) -> Ranks:
    """The ranks with the message `old` of one step replaced, or dropped."""
    step = ranks[place.rank][place.step]
    messages = [new if message == old else message for message in (*step.sends, *step.recvs)]
    copy = [list(steps) for steps in ranks]
    copy[place.rank][place.step] = Step(
        sends=tuple(message for message in messages if isinstance(message, Send)),
        recvs=tuple(message for message in messages if isinstance(message, Recv)),
    )
    return copy


def another_peer(draw: st.DrawFn, schedule: Schedule, end: Send | Recv) -> Send | Recv:
    peers = st.integers(-1, schedule.size).filter(lambda peer: peer != end.peer)
    return replace(end, peer=draw(peers))


def another_chunk(draw: st.DrawFn, schedule: Schedule, end: Send | Recv) -> Send | Recv:
    chunks = st.integers(-1, len(schedule.weights))
    if not end.chunks:
        return replace(end, chunks=(draw(chunks),))
    at = draw(st.integers(0, len(end.chunks) - 1))
    new = draw(chunks.filter(lambda chunk: chunk != end.chunks[at]))
    return replace(end, chunks=(*end.chunks[:at], new, *end.chunks[at + 1 :]))


@st.composite
def mutants_of_one_end(draw: st.DrawFn) -> Schedule:
    """A right schedule, but one rank drops, misdirects or mistakes one message."""
    schedule = draw(schedules())
    ranks = steps_of(schedule)
    ends = [
        (RankStep(rank, number), end)
        for rank, steps in enumerate(ranks)
        for number, step in enumerate(steps)
        for end in (*step.sends, *step.recvs)
    ]
    assume(ends)
    place, end = draw(st.sampled_from(ends))
    new = draw(
        st.sampled_from(
            [
                None,
                another_peer(draw, schedule, end),
                another_chunk(draw, schedule, end),
            ]
        )
    )
    return with_steps(schedule, edited(ranks, place, end, new))


@given(mutants_of_one_end())
@settings(max_examples=150)
def test_a_mutation_of_one_end_of_a_message_is_rejected(mutant: Schedule) -> None:
    message_of(mutant)


@st.composite
def mutants_of_both_ends(draw: st.DrawFn) -> Schedule:
    """A right schedule, but both its ranks leave out one message, or mistake the same chunk of it.

    An empty message means something in a barrier only.  There each is needed: with k steps, the
    news of the rank 2^(k-1) - 1 places back, or 2^(k-1) back, comes by one path alone.
    """
    schedule = draw(schedules())
    ranks = steps_of(schedule)
    messages = [m for m in match(ranks) if m.chunks or schedule.collective == "barrier"]
    assume(messages)
    message = draw(st.sampled_from(messages))
    send = Send(message.receiver.rank, message.chunks)
    recv = Recv(message.sender.rank, message.chunks, message.reduce)
    new = draw(st.sampled_from([None, another_chunk(draw, schedule, send)]))
    ranks = edited(ranks, message.sender, send, new)
    return with_steps(
        schedule,
        edited(ranks, message.receiver, recv, new and replace(recv, chunks=new.chunks)),
    )


@given(mutants_of_both_ends())
@settings(max_examples=150)
def test_a_mutation_of_both_ends_of_a_message_is_rejected(mutant: Schedule) -> None:
    message_of(mutant)


@st.composite
def flipped(draw: st.DrawFn) -> Schedule:
    """A right schedule, but one receive of at least one chunk reduces, or fails to."""
    schedule = draw(schedules())
    ranks = steps_of(schedule)
    messages = [message for message in match(ranks) if message.chunks]
    assume(messages)
    message = draw(st.sampled_from(messages))
    recv = Recv(message.sender.rank, message.chunks, message.reduce)
    return with_steps(
        schedule, edited(ranks, message.receiver, recv, replace(recv, reduce=not recv.reduce))
    )


@given(flipped())
@settings(max_examples=100)
def test_a_flipped_reduce_is_rejected(mutant: Schedule) -> None:
    message_of(mutant)


@st.composite
def mutants_of_a_step(draw: st.DrawFn) -> Schedule:
    """A right schedule, but one rank leaves out one step, or takes it twice."""
    schedule = draw(schedules())
    ranks = steps_of(schedule)
    places = [(rank, number) for rank, steps in enumerate(ranks) for number in range(len(steps))]
    assume(places)
    rank, number = draw(st.sampled_from(places))
    times = draw(st.sampled_from([0, 2]))
    ranks[rank][number : number + 1] = [ranks[rank][number]] * times
    return with_steps(schedule, ranks)


@pytest.mark.slow
@given(mutants_of_a_step())
@settings(max_examples=100)
def test_a_step_left_out_or_doubled_is_rejected(mutant: Schedule) -> None:
    message_of(mutant)


# --- copies ---------------------------------------------------------------------------------------

COPIES = """
rank 0
  >1:0@0 <1:0@1 =0
rank 1
  >0:0@1 <0:0@0 =0
"""


def test_copies_are_folded_in_ascending_rank_order() -> None:
    assert check(written(COPIES)).results == {0: (0, 1)}


def test_a_copy_is_what_its_rank_held_when_it_sent_it() -> None:
    schedule = written(
        """
        rank 0
          <1:0+
          >2:0@0 <2:0@2 =0
        rank 1
          >0:0
          <2:0
        rank 2
          -
          >0:0@2 <0:0@0 =0
          >1:0
        """
    )
    assert check(schedule).results == {0: ((0, 1), 2)}


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        (" =0\nrank 1", "\nrank 1", "chunk 0 on rank 0 lacks the contribution of rank 1"),
        ("<1:0@1 =0", "<1:0@1 =0,0", "step 0: rank 0 folds chunk 0 and folds it again in the same"),
        ("<1:0@1 =0", "<1:0@1 =1", "step 0: rank 0 folds chunk 1, of 1"),
        ("<1:0@1 =0", "<1:0@1 =0@1", "step 0: rank 0 folds chunk 0@1, of 1"),
        ("<1:0@1 =0", "<1:0@1\n  =0", "step 1: rank 0 folds chunk 0 but receives nothing"),
        ("<1:0@1 =0", "<1:0@1+ =0", "step 0: rank 0 reduces into a copy, chunk 0@1"),
        (
            ">0:0@1",
            ">0:0",
            "rank 1 sends chunk 0 to rank 0, whose receive in step 0 wants chunk 0@1",
        ),
        (">0:0@1", ">0:0@2", "step 0: rank 1 has a message with chunk 0@2, of 1"),
        (">0:0@1", ">0:3@1", "step 0: rank 1 has a message with chunk 3@1, of 1"),
        ("<1:0@1 =0", "<1:0@1 <1:0 =0", "step 0: rank 0 folds chunk 0 and receives it in the same"),
    ],
)
def test_a_wrong_use_of_copies_is_rejected(old: str, new: str, reason: str) -> None:
    assert COPIES.count(old) == 1
    assert reason in message_of(written(COPIES.replace(old, new)))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("rank 0\n >1:0@1 \nrank 1\n <0:0@1", "step 0: rank 1 receives its own copy, chunk 0@1"),
        (
            "rank 0\n >1:0@2 \nrank 1\n <0:0@2\nrank 2\n -",
            "step 0: rank 0 sends chunk 0@2 to rank 1, but holds no value of it",
        ),
        (
            "rank 0\n >1:0@0 <1:0\nrank 1\n <0:0@0 >0:0",
            "step 0: rank 0 overwrites chunk 0 and sends it in the same step",
        ),
        (
            "rank 0\n >1: <1: =0\nrank 1\n <0: >0:",
            "step 0: rank 0 folds the copies of chunk 0, but holds no copy of it",
        ),
        (
            "rank 0\n >1:0@0 <1:0@1 =0\n >1:0@0 <1:0@1 =0\n"
            "rank 1\n >0:0@1 <0:0@0 =0\n >0:0@1 <0:0@0 =0",
            "folds chunk 0 of ranks 0, 1 and counts the contribution of ranks 0, 1 twice",
        ),
    ],
)
def test_copies_that_are_not_there_or_come_twice_are_rejected(text: str, reason: str) -> None:
    assert reason in message_of(written(text))


# --- where sums are complete ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("collective", "algorithm"),
    [name for name in EVERY_ALGORITHM if name[0] in ("all_reduce", "reduce", "reduce_scatter")],
)
@given(nodes=layouts(max_ranks=16))
@settings(max_examples=15)
def test_our_sums_are_complete_where_a_rank_folds_all_values_or_last_changes_what_it_keeps(
    collective: str, algorithm: str, nodes: list[list[int]]
) -> None:
    """So the planner can divide a mean there without the other ranks' steps."""
    schedule = build(collective, algorithm, nodes)
    assume(schedule.size > 1)
    last = set()
    for rank, steps in enumerate(steps_of(schedule)):
        changes = {}
        for number, step in enumerate(steps):
            changes |= {c: (number, r.reduce) for r in step.recvs for c in r.chunks}
            changes |= dict.fromkeys(step.folds, (number, True))
            values = Counter(c for r in step.recvs if r.reduce for c in r.chunks)
            last |= {(rank, number, c) for c, n in values.items() if n == schedule.size - 1}
        kept = set(schedule.holds_after(rank)) & changes.keys()
        last |= {(rank, changes[c][0], c) for c in kept if changes[c][1]}
    assert check(schedule).completed == last
