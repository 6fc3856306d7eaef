"""Facts about single algorithms besides correctness: names, shapes, orders, plans."""

from __future__ import annotations

import doctest
import importlib
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringreduce.algorithms import ALGORITHMS, build, parse
from ringreduce.algorithms.hierarchical import hierarchical
from ringreduce.algorithms.ring import ring_all_reduce
from ringreduce.schedules.check import check
from ringreduce.schedules.matching import match
from ringreduce.schedules.schedule import Claim, Schedule, Step, chunk_of
from tests.planning.test_plan import assert_follows, parts, whole
from tests.support.each import each
from tests.support.strategies import (
    EVERY_ALGORITHM,
    HIERARCHICAL,
    PART_BY_PART,
    ROOTED,
    block_layout,
    layouts,
    steps_of,
)

# --- names and parameters -------------------------------------------------------------------------


@pytest.mark.parametrize("collective", ALGORITHMS)
def test_an_unknown_algorithm_is_answered_with_the_known_ones(collective: str) -> None:
    with pytest.raises(ValueError, match=rf"^{collective}: unknown algorithm 'rong'; ") as error:
        build(collective, "rong", [[0]])
    assert all(repr(name) in str(error.value) for name in ("auto", *ALGORITHMS[collective]))


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        ("ring(3)", "'ring' takes no parameters, but 'ring(3)' has some"),
        ("ring ", "unknown algorithm 'ring '"),
        ("star()", r"unknown parameters in 'star()'; write 'star(k)', with k servers, at least 1"),
        ("star(0)", "write 'star(k)'"),
        ("star(-1)", "write 'star(k)'"),
        ("star(2", "write 'star(k)'"),
        ("star(2)x", "write 'star(k)'"),
        ("star(two)", "write 'star(k)'"),
        ("hierarchical(ring)", "write 'hierarchical(a, b)', where a, in the node, is one of"),
        ("hierarchical(ring, ring, ring)", "write 'hierarchical(a, b)'"),
        (
            "hierarchical(tree, ring)",
            "one of 'ring', 'halving_doubling', 'two_shot', 'leader'",
        ),
        ("hierarchical(leader)", "write 'hierarchical(a, b)', where a, in the node, is one of"),
        ("leader", "unknown algorithm 'leader'"),
        ("hierarchical(ring, hierarchical)", "write 'hierarchical(a, b)'"),
        ("hierarchical(ring, star(0))", "write 'hierarchical(a, b)'"),
    ],
)
def test_a_wrong_parameter_is_answered_with_what_was_wanted(algorithm: str, message: str) -> None:
    with pytest.raises(ValueError, match=r"^all_reduce: ") as error:
        build("all_reduce", algorithm, [[0, 1]])
    assert message in str(error.value)


@pytest.mark.parametrize("collective", [name for name in ALGORITHMS if name != "all_reduce"])
def test_only_all_reduce_takes_parameters(collective: str) -> None:
    with pytest.raises(ValueError, match=rf"^{collective}: "):
        parse(collective, "star(2)")


@pytest.mark.parametrize(("collective", "algorithm"), EVERY_ALGORITHM)
def test_a_schedule_bears_its_names(collective: str, algorithm: str) -> None:
    schedule = build(collective, algorithm, [[0, 1], [2, 3]])
    assert schedule.collective == collective
    assert schedule.algorithm.startswith(algorithm)


@pytest.mark.parametrize(
    "module", ["ringreduce.algorithms", "ringreduce.algorithms.non_power_of_two"]
)
def test_the_example_in_the_docstring_is_true(module: str) -> None:
    assert doctest.testmod(importlib.import_module(module)).failed == 0


# --- holders of chunks ----------------------------------------------------------------------------


@pytest.mark.parametrize(("collective", "algorithm"), ROOTED)
@given(nodes=layouts(max_nodes=3, max_ranks=9), draws=st.data())
@settings(max_examples=10)
def test_the_root_alone_holds_what_the_others_do_not(
    collective: str, algorithm: str, nodes: list[list[int]], draws: st.DataObject
) -> None:
    size = sum(map(len, nodes))
    root = draws.draw(st.integers(0, size - 1))
    schedule = build(collective, algorithm, nodes, root)
    every = tuple(range(len(schedule.weights)))
    before, after = {
        "broadcast": ("root", "all"),
        "reduce": ("all", "root"),
        "gather": ("own", "root"),
        "scatter": ("root", "own"),
    }[collective]
    for rank in range(size):
        held = {"all": every, "own": (rank,), "root": every if rank == root else ()}
        assert schedule.holds_before(rank) == held[before]
        assert schedule.holds_after(rank) == held[after]


@pytest.mark.parametrize("algorithm", ALGORITHMS["all_to_all"])
@pytest.mark.parametrize("size", range(1, 6))
def test_all_to_all_takes_chunks_from_senders_in_order(algorithm: str, size: int) -> None:
    schedule = build("all_to_all", algorithm, block_layout(size))
    for rank in range(size):
        assert schedule.holds_before(rank) == tuple(rank * size + j for j in range(size))
        assert schedule.holds_after(rank) == tuple(i * size + rank for i in range(size))


# --- claims for any number of ranks ---------------------------------------------------------------


def counted(steps: list[Step]) -> Claim:
    return Claim(
        steps=len(steps),
        sent=sum(len(send.chunks) for step in steps for send in step.sends),
        received=sum(len(recv.chunks) for step in steps for recv in step.recvs),
    )


@each("size", [100, 127, 257])
@pytest.mark.parametrize(("collective", "algorithm"), EVERY_ALGORITHM)
def test_claims_hold_beyond_the_sizes_that_are_proven(
    collective: str, algorithm: str, size: int
) -> None:
    schedule = build(collective, algorithm, block_layout(size), root=size // 3)
    for rank in (0, 1, size // 3, size // 2, size - 2, size - 1):
        assert counted(list(schedule.steps(rank))) == schedule.claim(rank)


def test_what_the_ranks_of_a_rail_claim_is_computed_once() -> None:
    asked = []

    def claims(group: Sequence[int], sizes: Sequence[int]) -> list[Claim]:
        asked.append(group)
        return ring_all_reduce.claims(group, sizes)

    rails = replace(ring_all_reduce, claims=claims)
    schedule = hierarchical("counted", "ring", rails)(block_layout(*[4] * 30), 0)
    assert {schedule.claim(rank).steps for rank in range(120)} == {2 * 29 + 6}
    assert len(asked) == 4


Formula = Callable[[int, int], float]
"""Of k and p = 2^k."""


@each("p", [1, 2, 4, 8, 16, 32, 64])
@pytest.mark.parametrize(
    ("collective", "algorithm", "steps", "shares"),
    [
        ("all_reduce", "halving_doubling", lambda k, p: 2 * k, lambda k, p: 2 * (p - 1) / p),
        ("all_reduce", "doubling", lambda k, p: k, lambda k, p: k),
        ("all_reduce", "one_shot", lambda k, p: p > 1, lambda k, p: p - 1),
        ("all_reduce", "allgather_reduce", lambda k, p: k, lambda k, p: p - 1),
        ("all_reduce", "two_shot", lambda k, p: 2 * (p > 1), lambda k, p: 2 * (p - 1) / p),
        ("reduce_scatter", "halving_doubling", lambda k, p: k, lambda k, p: (p - 1) / p),
        ("all_gather", "halving_doubling", lambda k, p: k, lambda k, p: (p - 1) / p),
        ("all_gather", "bruck", lambda k, p: k, lambda k, p: (p - 1) / p),
        ("all_to_all", "bruck", lambda k, p: k, lambda k, p: k / 2 / p),
    ],
)
def test_powers_of_two_take_the_published_steps_and_shares(
    collective: str, algorithm: str, steps: Formula, shares: Formula, p: int
) -> None:
    """`shares`: the data that each rank sends and receives, in multiples of the array."""
    schedule, k = build(collective, algorithm, block_layout(p)), p.bit_length() - 1
    for rank in range(p):
        claim, chunks = schedule.claim(rank), len(schedule.weights)
        assert claim.steps == steps(k, p)
        assert claim.sent == claim.received == shares(k, p) * chunks


@each("size", range(2, 65))
@pytest.mark.parametrize(
    ("collective", "algorithm", "busiest"),
    [
        ("broadcast", "double_tree", 1),
        ("broadcast", "scatter_all_gather", 1),
        ("reduce", "double_tree", 1),
        ("reduce", "reduce_scatter_gather", 1),
        ("all_reduce", "double_tree", 2),
        ("all_reduce", "torus", 2),
        ("all_reduce", "two_shot", 2),
    ],
)
def test_nobody_moves_the_data_more_often(
    collective: str, algorithm: str, busiest: int, size: int
) -> None:
    schedule = build(collective, algorithm, block_layout(size))
    most = busiest * len(schedule.weights)
    claims = [schedule.claim(rank) for rank in range(size)]
    assert max(claim.sent for claim in claims) <= most
    assert max(claim.received for claim in claims) <= most


# --- orders of addition ---------------------------------------------------------------------------


def result(algorithm: str, size: int, collective: str = "all_reduce") -> object:
    return check(build(collective, algorithm, block_layout(size))).results[0]


@pytest.mark.parametrize(
    ("algorithm", "size", "expression"),
    [
        ("doubling", 4, ((0, 1), (2, 3))),
        ("doubling", 6, (((0, 1), (2, 3)), (4, 5))),
        ("one_shot", 5, (0, 1, 2, 3, 4)),
        ("allgather_reduce", 5, (0, 1, 2, 3, 4)),
        ("two_shot", 5, (0, 1, 2, 3, 4)),
        ("star", 5, (0, 1, 2, 3, 4)),
        ("tree", 4, ((0, 1), (2, 3))),
        ("double_tree", 3, (0, 1, 2)),
        ("halving_doubling", 4, ((0, 1), (2, 3))),
    ],
)
def test_who_is_added_to_whom(algorithm: str, size: int, expression: object) -> None:
    assert result(algorithm, size) == expression


@pytest.mark.parametrize("nodes", [[[3, 0], [2, 1]], [[5, 2, 0], [1, 4, 3]]])
def test_doubling_adds_alike_wherever_the_ranks_are(nodes: list[list[int]]) -> None:
    scattered = check(build("all_reduce", "doubling", nodes)).results
    assert (
        scattered
        == check(build("all_reduce", "doubling", block_layout(sum(map(len, nodes))))).results
    )


# --- facts about single algorithms ----------------------------------------------------------------


def same_steps(one: Schedule, other: Schedule) -> bool:
    """Tell whether two schedules have the same messages in each step, in any order."""
    return all(
        [(set(a.sends), set(a.recvs)) for a in one.steps(rank)]
        == [(set(b.sends), set(b.recvs)) for b in other.steps(rank)]
        for rank in range(one.size)
    )


@pytest.mark.parametrize("size", [2, 3, 5, 7, 13, 31])
def test_a_torus_of_a_prime_number_of_ranks_is_the_ring_and_says_so(size: int) -> None:
    torus, ring = (build("all_reduce", name, block_layout(size)) for name in ("torus", "ring"))
    assert torus.algorithm == f"torus of 1 x {size}, which is the ring"
    assert same_steps(torus, ring)


@pytest.mark.parametrize(("size", "shape"), [(4, (2, 2)), (12, (3, 4)), (14, (2, 7)), (64, (8, 8))])
def test_a_torus_is_as_square_as_it_goes(size: int, shape: tuple[int, int]) -> None:
    rows, columns = shape
    torus = build("all_reduce", "torus", block_layout(size))
    assert torus.algorithm == f"torus of {rows} x {columns}"
    assert torus.claim(0).steps == 2 * (rows - 1) + 2 * (columns - 1)


@pytest.mark.parametrize("columns", [2, 3, 5])
def test_a_square_torus_of_whole_nodes_is_hierarchical(columns: int) -> None:
    nodes = block_layout(*[columns] * columns)
    torus, hierarchical = (build("all_reduce", name, nodes) for name in ("torus", "hierarchical"))
    assert same_steps(torus, hierarchical)


@given(nodes=layouts(max_ranks=20))
@settings(max_examples=30)
def test_hierarchical_without_parameters_uses_rings(nodes: list[list[int]]) -> None:
    plain = build("all_reduce", "hierarchical", nodes)
    assert same_steps(plain, build("all_reduce", "hierarchical(ring, ring)", nodes))


@pytest.mark.parametrize(("collective", "algorithm"), HIERARCHICAL)
def test_only_the_rails_of_hierarchical_cross_the_network(collective: str, algorithm: str) -> None:
    """The first of two nodes sends the data across the network exactly once."""
    schedule = build(collective, algorithm, block_layout(4, 4))
    total = sum(schedule.weights)
    crossing = [
        sum(schedule.weights[chunk_of(chunk)] for chunk in message.chunks)
        for message in match(steps_of(schedule))
        if (message.sender.rank < 4) and (message.receiver.rank >= 4)
    ]
    assert sum(crossing) == total


@pytest.mark.parametrize("size", range(1, 8))
@pytest.mark.parametrize("servers", [7, 8, 100])
def test_a_star_of_servers_alone_is_two_shot(size: int, servers: int) -> None:
    star = build("all_reduce", f"star({servers})", block_layout(size))
    assert same_steps(star, build("all_reduce", "two_shot", block_layout(size)))


@pytest.mark.parametrize("servers", [1, 2, 3, 6])
def test_the_servers_of_a_star_are_spread_over_the_ranks(servers: int) -> None:
    schedule = build("all_reduce", f"star({servers})", block_layout(12))
    busy = [rank for rank in range(12) if schedule.claim(rank).received > servers]
    assert busy == [12 // servers * i for i in range(servers)]


@each("size", range(2, 65))
def test_nobody_is_inside_in_both_of_the_two_trees(size: int) -> None:
    schedule = build("all_reduce", "double_tree", block_layout(size))
    for rank in range(size):
        folded = {
            chunk
            for step in schedule.steps(rank)
            for r in step.recvs
            if r.reduce
            for chunk in r.chunks
        }
        assert len(folded) <= 1


@pytest.mark.parametrize("nodes", [[[0, 2, 4], [1, 3, 5]], [[3, 0], [5], [1, 4, 2]]])
@pytest.mark.parametrize("collective", ["all_reduce", "reduce_scatter", "all_gather"])
def test_a_ring_enters_each_node_once(collective: str, nodes: list[list[int]]) -> None:
    node_of = {rank: i for i, node in enumerate(nodes) for rank in node}
    schedule = build(collective, "ring", nodes)
    ways = {(m.sender.rank, m.receiver.rank) for m in match(steps_of(schedule))}
    entered = [node_of[b] for a, b in ways if node_of[a] != node_of[b]]
    assert sorted(entered) == list(range(len(nodes)))


def test_the_longest_messages_of_halving_doubling_go_to_the_nearest_ranks() -> None:
    schedule = build("all_reduce", "halving_doubling", block_layout(8))
    sent = [(send.peer, len(send.chunks)) for step in schedule.steps(0) for send in step.sends]
    assert sent == [(1, 4), (2, 2), (4, 1), (4, 1), (2, 2), (1, 4)]


@pytest.mark.parametrize(("collective", "algorithm"), EVERY_ALGORITHM)
@each("size", [2, 5, 8])
def test_all_ranks_take_the_same_number_of_steps(
    collective: str, algorithm: str, size: int
) -> None:
    schedule = build(collective, algorithm, block_layout(size))
    assert len({schedule.claim(rank).steps for rank in range(size)}) == 1


# --- plans ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("collective", "algorithm"), PART_BY_PART)
@given(
    nodes=layouts(max_nodes=3, max_ranks=7),
    itemsize=st.sampled_from([1, 8, 700, 5000]),
    slices=st.integers(1, 3),
    segment=st.sampled_from([1, 16, 5000, 1 << 20]),
    draws=st.data(),
)
@settings(max_examples=40)
def test_parts_of_any_length_arrive_where_they_belong(
    collective: str,
    algorithm: str,
    nodes: list[list[int]],
    itemsize: int,
    slices: int,
    segment: int,
    draws: st.DataObject,
) -> None:
    size = sum(map(len, nodes))
    schedule = build(collective, algorithm, nodes, draws.draw(st.integers(0, size - 1)))
    chunks = len(schedule.weights)
    counts = draws.draw(st.lists(st.integers(0, 9), min_size=chunks, max_size=chunks))
    plans = parts(schedule, counts, itemsize, slices, segment)
    assert_follows(schedule, plans, counts, in_place=False)


@pytest.mark.parametrize("in_place", [False, True])
@each("size", range(2, 10))
@pytest.mark.parametrize("algorithm", ALGORITHMS["reduce"])
def test_the_root_divides_the_mean_once(algorithm: str, size: int, in_place: bool) -> None:
    """`assert_follows` marks divisions where the collective is one that every rank can divide."""
    schedule = build("reduce", algorithm, block_layout(size), root=size // 2)
    schedule = replace(schedule, collective="all_reduce")
    assert_follows(schedule, whole(schedule, 3 * size + 1, 8, 2), None, in_place)
