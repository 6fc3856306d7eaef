"""Prices equal the published formulas, and messages share ports as the model states."""

from __future__ import annotations

import doctest
import importlib
from collections.abc import Callable
from dataclasses import replace
from math import ceil, log2

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringreduce.algorithms import build
from ringreduce.errors import ScheduleError
from ringreduce.schedules.cost import Link, Profile, price
from tests.support.each import each
from tests.support.strategies import block_layout, layouts, written

# All of these differ, so that a formula that confuses two of them gives another result.
A, B, G = 3e-6, 2e-10, 5e-11
NET_A, NET_B = 70e-6, 9e-10
PROFILE = Profile(Link(A, B), Link(NET_A, NET_B), G)
NBYTES = 1 << 20
SIZES = [*range(1, 10), 16, 31]
Formula = Callable[[int, float], float]
"""(p or k, n) -> seconds."""


def seconds(text: str, nodes: list[list[int]], nbytes: int = NBYTES, chunks: int = 1) -> float:
    return price(written(text, chunks), nodes, nbytes, PROFILE)


def words(value: object) -> str:
    """Return the names of cases as their ids."""
    return value if isinstance(value, str) else ""


def close(value: float) -> object:
    return pytest.approx(value, rel=1e-9, abs=1e-15)


# --- the published formulas: p ranks, n bytes -----------------------------------------------------


ANY_SIZE: list[tuple[str, str, Formula]] = [
    (
        "all_reduce",
        "ring",
        lambda p, n: 2 * (p - 1) * A + 2 * n * (p - 1) / p * B + n * (p - 1) / p * G,
    ),
    ("all_reduce", "one_shot", lambda p, n: (p > 1) * A + (p - 1) * n * (B + G)),
    (
        "all_reduce",
        "allgather_reduce",
        lambda p, n: ceil(log2(p)) * A + (p - 1) * n * (B + G),
    ),
    (
        "all_reduce",
        "two_shot",
        lambda p, n: 2 * (p > 1) * A + 2 * n * (p - 1) / p * B + n * (p - 1) / p * G,
    ),
    ("all_reduce", "star", lambda p, n: 2 * (p > 1) * A + (p - 1) * n * (2 * B + G)),
    (
        "all_reduce",
        "star(4)",
        lambda p, n: 2 * (p > 1) * A + (p - 1) * n / min(4, p) * (2 * B + G),
    ),
    ("reduce_scatter", "ring", lambda p, n: (p - 1) * A + n * (p - 1) / p * (B + G)),
    ("reduce_scatter", "direct", lambda p, n: (p > 1) * A + n * (p - 1) / p * (B + G)),
    ("all_gather", "ring", lambda p, n: (p - 1) * A + n * (p - 1) / p * B),
    ("all_gather", "direct", lambda p, n: (p > 1) * A + n * (p - 1) / p * B),
    ("all_gather", "bruck", lambda p, n: ceil(log2(p)) * A + n * (p - 1) / p * B),
    ("broadcast", "ring", lambda p, n: (p - 1) * (A + n * B)),
    ("broadcast", "star", lambda p, n: (p > 1) * A + (p - 1) * n * B),
    ("reduce", "ring", lambda p, n: (p - 1) * (A + n * (B + G))),
    ("reduce", "tree", lambda p, n: ceil(log2(p)) * (A + n * (B + G))),
    ("reduce", "star", lambda p, n: (p > 1) * A + (p - 1) * n * (B + G)),
    ("gather", "star", lambda p, n: (p > 1) * A + n * (p - 1) / p * B),
    ("gather", "tree", lambda p, n: ceil(log2(p)) * A + n * (p - 1) / p * B),
    ("scatter", "star", lambda p, n: (p > 1) * A + n * (p - 1) / p * B),
    ("all_to_all", "direct", lambda p, n: (p > 1) * A + n / p * (p - 1) / p * B),
    ("all_to_all", "pairwise", lambda p, n: (p - 1) * A + n / p * (p - 1) / p * B),
    ("barrier", "dissemination", lambda p, n: ceil(log2(p)) * A),
    ("barrier", "direct", lambda p, n: (p > 1) * A),
]
TWO_AND_MORE: list[tuple[str, str, Formula]] = [
    (
        "broadcast",
        "scatter_all_gather",
        lambda p, n: (p - 1) * A + n * B + n * (p - 2) / (p - 1) * B,
    ),
    (
        "reduce",
        "reduce_scatter_gather",
        lambda p, n: (p - 1) * A + n * (B + G) + n * (p - 2) / (p - 1) * (B + G),
    ),
]


@each("p", SIZES)
@pytest.mark.parametrize(
    ("collective", "algorithm", "formula"), [*ANY_SIZE, *TWO_AND_MORE], ids=words
)
def test_one_node(collective: str, algorithm: str, formula: Formula, p: int) -> None:
    schedule = build(collective, algorithm, block_layout(p))
    cost = formula(p, NBYTES) if p > 1 else 0
    assert price(schedule, block_layout(p), NBYTES, PROFILE) == close(cost)


@each("k", range(6))
@pytest.mark.parametrize(
    ("collective", "algorithm", "formula"),
    [
        (
            "all_reduce",
            "halving_doubling",
            lambda k, n: 2 * k * A + n * (1 - 1 / 2**k) * (2 * B + G),
        ),
        ("all_reduce", "doubling", lambda k, n: k * (A + n * (B + G))),
        ("all_reduce", "tree", lambda k, n: k * (2 * A + n * (2 * B + G))),
        (
            "all_reduce",
            "double_tree",
            lambda k, n: 2 * k * A + (k > 0) * (2 * k - 1) * n * (B + G / 2),
        ),
        ("reduce_scatter", "halving_doubling", lambda k, n: k * A + n * (1 - 1 / 2**k) * (B + G)),
        ("all_gather", "halving_doubling", lambda k, n: k * A + n * (1 - 1 / 2**k) * B),
        ("broadcast", "tree", lambda k, n: k * (A + n * B)),
        ("scatter", "tree", lambda k, n: k * A + n * (1 - 1 / 2**k) * B),
        ("all_to_all", "bruck", lambda k, n: k * (A + n / 2**k / 2 * B)),
    ],
    ids=words,
)
def test_one_node_of_two_to_the_k_ranks(
    collective: str, algorithm: str, formula: Formula, k: int
) -> None:
    layout = block_layout(2**k)
    cost = formula(k, NBYTES)
    assert price(build(collective, algorithm, layout), layout, NBYTES, PROFILE) == close(cost)


@pytest.mark.parametrize("p", [3, 5, 6, 7, 12, 31])
@pytest.mark.parametrize(
    ("algorithm", "formula"),
    [
        (
            "halving_doubling",
            lambda k, n: 2 * (k + 1) * A + n * (2 * B + G) + n * (1 - 1 / 2**k) * (2 * B + G),
        ),
        ("doubling", lambda k, n: (k + 2) * (A + n * B) + (k + 1) * n * G),
    ],
    ids=words,
)
def test_the_data_go_to_a_neighbour_and_back_where_ranks_are_no_power_of_two(
    algorithm: str, formula: Formula, p: int
) -> None:
    layout = block_layout(p)
    cost = formula(p.bit_length() - 1, NBYTES)
    assert price(build("all_reduce", algorithm, layout), layout, NBYTES, PROFILE) == close(cost)


@pytest.mark.parametrize(("rows", "columns"), [(1, 5), (2, 3), (3, 3), (4, 8)])
def test_a_torus_on_one_node(rows: int, columns: int) -> None:
    p, layout = rows * columns, block_layout(rows * columns)
    cost = 2 * (rows + columns - 2) * A + NBYTES * (p - 1) / p * (2 * B + G)
    assert price(build("all_reduce", "torus", layout), layout, NBYTES, PROFILE) == close(cost)


@pytest.mark.parametrize("s", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("nodes", [1, 2, 3, 5, 8])
def test_hierarchical_on_equal_nodes(nodes: int, s: int) -> None:
    """In the node, along the rails with the node's port shared by the s rails, in the node."""
    n, h, layout = NBYTES, nodes, block_layout(*[s] * nodes)
    in_node = 2 * (s - 1) * A + 2 * n * (s - 1) / s * B + n * (s - 1) / s * G
    rails = 2 * (h - 1) * NET_A + 2 * n * (h - 1) / h * NET_B + n / s * (h - 1) / h * G
    schedule = build("all_reduce", "hierarchical", layout)
    assert price(schedule, layout, n, PROFILE) == close(in_node + rails)


@pytest.mark.parametrize("s", [1, 2, 4])
@pytest.mark.parametrize("h", [1, 2, 4, 8])
def test_hierarchical_of_two_shot_and_halving_doubling(h: int, s: int) -> None:
    n, layout = NBYTES, block_layout(*[s] * h)
    in_node = 2 * (s > 1) * A + n * (s - 1) / s * (2 * B + G)
    rails = 2 * log2(h) * NET_A + n * (h - 1) / h * (2 * NET_B + G / s)
    schedule = build("all_reduce", "hierarchical(two_shot, halving_doubling)", layout)
    assert price(schedule, layout, n, PROFILE) == close(in_node + rails)


@pytest.mark.parametrize("workers", range(1, 9))
def test_one_parameter_server(workers: int) -> None:
    ranks = range(1, workers + 1)
    text = f"rank 0\n {' '.join(f'<{rank}:0+' for rank in ranks)}\n"
    text += f" {' '.join(f'>{rank}:0' for rank in ranks)}\n"
    text += "".join(f"rank {rank}\n >0:0\n <0:0\n" for rank in ranks)
    cost = 2 * A + 2 * workers * NBYTES * B + workers * NBYTES * G
    assert seconds(text, block_layout(workers + 1)) == close(cost)


def test_the_example_in_the_docstring_is_true() -> None:
    assert doctest.testmod(importlib.import_module("ringreduce.schedules.cost")).failed == 0


# --- ports ----------------------------------------------------------------------------------------

TWO_TO_TWO = "rank 0\n >2:0\nrank 1\n >3:0\nrank 2\n <0:0\nrank 3\n <1:0"
TRANSFER, NET_TRANSFER = NBYTES * B, NBYTES * NET_B


def test_two_pairs_of_a_node_do_not_disturb_each_other() -> None:
    assert seconds(TWO_TO_TWO, [[0, 1, 2, 3]]) == close(TRANSFER + A)


def test_ranks_of_a_node_share_its_port_out() -> None:
    assert seconds(TWO_TO_TWO, [[0, 1], [2], [3]]) == close(2 * NET_TRANSFER + NET_A)


def test_ranks_of_a_node_share_its_port_in() -> None:
    assert seconds(TWO_TO_TWO, [[0], [1], [2, 3]]) == close(2 * NET_TRANSFER + NET_A)


def test_separate_nodes_share_nothing() -> None:
    assert seconds(TWO_TO_TWO, [[0], [1], [2], [3]]) == close(NET_TRANSFER + NET_A)


def test_in_and_out_are_two_ports() -> None:
    text = "rank 0\n >1:0 <1:1\nrank 1\n <0:0 >0:1"
    assert seconds(text, [[0], [1]], chunks=2) == close(NET_TRANSFER / 2 + NET_A)


def test_messages_in_the_node_leave_the_nodes_port_alone() -> None:
    text = "rank 0\n >1:0 >2:0\nrank 1\n <0:0\nrank 2\n <0:0"
    assert seconds(text, [[0, 1], [2]]) == close(NET_TRANSFER + NET_A)


THREE_AND_ONE = "rank 0\n >1:0,1,2 >2:3\nrank 1\n <0:0,1,2\nrank 2\n <0:3\n"
HOPS = " >3:3\nrank 3\n <2:3\n >4:3\nrank 4\n <3:3\n >5:3\nrank 5\n <4:3"


READ = Profile(in_node=Link(A, B, receiver_copies=True))


@pytest.mark.parametrize("ranks", [2, 3, 32])
def test_many_read_from_one_in_the_time_of_one_if_the_receiver_copies(ranks: int) -> None:
    nodes = [list(range(ranks))]
    assert price(build("broadcast", "star", nodes), nodes, NBYTES, READ) == close(A + NBYTES * B)


def test_one_that_reads_from_many_reads_for_as_long_as_their_bytes_take() -> None:
    nodes = [list(range(4))]
    gather = build("gather", "star", nodes)
    assert price(gather, nodes, NBYTES, READ) == close(A + NBYTES * 3 / 4 * B)


def test_two_messages_share_a_port_equally() -> None:
    """The short message ends after 2 of its chunks' time; three more hops take 3."""
    cost = 5 * TRANSFER / 4 + 4 * A
    assert seconds(THREE_AND_ONE + HOPS, block_layout(6), chunks=4) == close(cost)


def test_what_one_message_leaves_of_a_port_the_other_takes() -> None:
    assert seconds(THREE_AND_ONE, block_layout(3), chunks=4) == close(TRANSFER + A)


def test_chunks_cost_by_their_weights() -> None:
    schedule = replace(written("rank 0\n >1:1\nrank 1\n <0:1", chunks=2), weights=(3, 1))
    assert price(schedule, [[0, 1]], NBYTES, PROFILE) == close(TRANSFER / 4 + A)


# --- steps, folds, slices -------------------------------------------------------------------------


def test_a_message_waits_until_both_its_ranks_are_there() -> None:
    late_receiver = "rank 0\n <1:0\n <2:0\nrank 1\n >0:0\nrank 2\n >0:0"
    late_sender = "rank 0\n <1:0\n >2:0\nrank 1\n >0:0\nrank 2\n <0:0"
    for text in (late_receiver, late_sender):
        assert seconds(text, [[0, 1, 2]]) == close(2 * (TRANSFER + A))


def test_a_sender_is_free_before_its_message_arrives() -> None:
    text = "rank 0\n >1:0\n >2:0\nrank 1\n <0:0\nrank 2\n <0:0"
    assert seconds(text, [[0, 1, 2]]) == close(2 * TRANSFER + A)


def test_a_fold_waits_for_all_messages_of_its_step() -> None:
    text = "rank 0\n <1:0+ <2:0+\nrank 1\n >0:0\nrank 2\n >0:0"
    assert seconds(text, [[0, 1], [2]]) == close(NET_TRANSFER + NET_A + 2 * NBYTES * G)


def test_a_rank_folds_for_one_flow_at_a_time() -> None:
    slow_folds = Profile(Link(A, B), Link(NET_A, NET_B), 1e-6)
    layout = block_layout(2)
    ring = build("reduce_scatter", "ring", layout)
    first = A + NBYTES / 2 / 8 * B
    sliced = price(ring, layout, NBYTES, slow_folds, slices=8, in_flight=8)
    assert sliced == close(first + NBYTES / 2 * 1e-6)


@pytest.mark.parametrize("collective", ["broadcast", "reduce"])
@pytest.mark.parametrize("p", [3, 4, 8, 15, 16, 31])
def test_sliced_double_trees_move_the_data_in_the_time_of_one_message(
    collective: str, p: int
) -> None:
    layout, free = block_layout(p), Profile(Link(0, B), Link(0, B), 0)
    trees = build(collective, "double_tree", layout)
    cost = price(trees, layout, NBYTES, free, slices=200, in_flight=20)
    assert TRANSFER * (1 - 1e-9) < cost < 1.05 * TRANSFER


@pytest.mark.parametrize("p", [2, 3, 5, 9])
@pytest.mark.parametrize("slices", [1, 2, 7, 32])
def test_a_sliced_chain_is_a_pipeline(p: int, slices: int) -> None:
    layout = block_layout(p)
    chain = build("broadcast", "ring", layout)
    cost = (p - 1) * A + (p - 2 + slices) * NBYTES / slices * B
    assert price(chain, layout, NBYTES, PROFILE, slices=slices, in_flight=99) == close(cost)


def test_one_slice_in_flight_is_one_after_the_other() -> None:
    layout = block_layout(2)
    ring = build("all_reduce", "ring", layout)
    alone = price(ring, layout, NBYTES / 5, PROFILE)
    assert price(ring, layout, NBYTES, PROFILE, slices=5, in_flight=1) == close(5 * alone)


@pytest.mark.parametrize("sizes", [(2, 2), (3, 1, 2), (2, 2, 2, 2)])
def test_slices_bring_hierarchical_to_the_bound_of_the_link(sizes: tuple[int, ...]) -> None:
    """H nodes send and receive 2(H-1)/H of the data each; slicing hides nearly all else."""
    layout, h = block_layout(*sizes), len(sizes)
    ethernet = Profile(Link(1e-6, 1 / 8e9), Link(30e-6, 8 / 1e9), 1 / 8e9)
    schedule = build("all_reduce", "hierarchical", layout)
    bound = 2 * (h - 1) / h * 16 * NBYTES * 8 / 1e9
    assert bound < price(schedule, layout, 16 * NBYTES, ethernet, slices=32) < 1.05 * bound


@given(
    nodes=layouts(max_nodes=4, max_ranks=12), slices=st.integers(1, 6), in_flight=st.integers(1, 4)
)
@settings(max_examples=40)
def test_no_layout_and_slicing_beats_the_bound(
    nodes: list[list[int]], slices: int, in_flight: int
) -> None:
    """Each node sends 2(H-1)/H of the data through its one port out, so time has a lower bound."""
    schedule = build("all_reduce", "hierarchical", nodes)
    seconds = price(schedule, nodes, NBYTES, PROFILE, slices=slices, in_flight=in_flight)
    bound = 2 * (len(nodes) - 1) / len(nodes) * NBYTES * NET_B
    assert seconds >= bound * (1 - 1e-9)


# --- edges ----------------------------------------------------------------------------------------


def test_one_rank_pays_nothing_however_many_slices() -> None:
    ring = build("all_reduce", "ring", [[0]])
    assert price(ring, [[0]], NBYTES, PROFILE, slices=5000) == 0.0


def test_no_bytes_cost_the_steps_alone() -> None:
    ring = build("all_reduce", "ring", block_layout(4))
    assert price(ring, block_layout(4), 0, PROFILE) == close(6 * A)


def test_a_schedule_that_cannot_finish_is_an_error() -> None:
    with pytest.raises(ScheduleError, match="cannot finish"):
        seconds("rank 0\n >1:0 \n <1:0 \nrank 1\n >0:0 \n <0:0", [[0, 1]])


@pytest.mark.parametrize("nodes", [[[0]], [[0, 1, 2]], [[0], [0, 1]]])
def test_nodes_must_list_every_rank_once(nodes: list[list[int]]) -> None:
    with pytest.raises(ValueError, match="do not list ranks 0 to 1 once"):
        price(build("all_reduce", "ring", block_layout(2)), nodes, NBYTES, PROFILE)


@pytest.mark.parametrize(("slices", "in_flight"), [(0, 4), (1, 0)])
def test_slices_and_in_flight_are_at_least_one(slices: int, in_flight: int) -> None:
    ring = build("all_reduce", "ring", [[0]])
    with pytest.raises(ValueError, match=f"slices {slices} and in_flight {in_flight}"):
        price(ring, [[0]], NBYTES, PROFILE, slices=slices, in_flight=in_flight)
