"""The algorithm that ``algorithm="auto"`` takes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ringreduce.algorithms import build
from ringreduce.algorithms.definition import REGISTERED
from ringreduce.algorithms.register import register_algorithm
from ringreduce.config import Config, Memory
from ringreduce.planning import select
from ringreduce.planning.select import (
    candidates,
    choose,
    is_single_copy,
    priced_bytes,
    pushed_part,
    resolve,
    segment_bytes,
    slice_count,
    slices_in_flight,
    staged_bytes,
)
from ringreduce.schedules.cost import price
from ringreduce.schedules.schedule import Recv, Send, Step
from tests.support.each import each
from tests.support.strategies import block_layout

BY_MESSAGES = Config()
OTHER_NUMBERS = Config(slice_bytes=1 << 20, in_flight=5, segment_bytes=7, staged_bytes=0)
IN_MEMORY = Config(memory=Memory(single_copy=True, crowded=False))
CROWDED = Config(memory=Memory(single_copy=True, crowded=True))
QUICK, QUICK_CROWDED, WRITTEN, WRITTEN_CROWDED = (
    Config(memory=Memory(single_copy=True, crowded=crowded, writes=True, quick=quick))
    for quick in (True, False)
    for crowded in (False, True)
)
COPIED_IN = Config(memory=Memory(single_copy=False, crowded=False))
MIB = 1 << 20


@pytest.mark.parametrize("nodes", [[[0, 1, 2]], [[0, 1], [2, 3]], [[0], [1], [2]]])
def test_a_barrier_by_messages_has_only_neighbours_that_pass_on_what_they_heard(nodes):
    """A direct one would let a rank leave although another rank is sent data of another call."""
    assert resolve("barrier", "auto", nodes, 0, BY_MESSAGES) == "dissemination"


def test_the_only_candidate_is_not_priced(monkeypatch):
    """Pricing takes long among many ranks, and every communicator begins with a barrier."""
    monkeypatch.setattr("ringreduce.planning.select.price", None)
    assert resolve("barrier", "auto", [[rank] for rank in range(100)], 0, BY_MESSAGES) == (
        "dissemination"
    )


@pytest.mark.parametrize("ranks", [2, 3, 4, 32])
def test_ranks_that_share_memory_wait_once_in_a_barrier(ranks):
    assert resolve("barrier", "auto", [list(range(ranks))], 0, IN_MEMORY) == "direct"


def test_among_many_ranks_direct_algorithms_are_not_priced():
    many = [list(range(33))]
    assert candidates("barrier", many, IN_MEMORY.memory) == ["dissemination"]
    assert candidates("all_to_all", many, IN_MEMORY.memory) == ["bruck"]
    assert {"two_shot", "one_shot", "star"}.isdisjoint(
        candidates("all_reduce", many, IN_MEMORY.memory)
    )
    assert "star" not in candidates("reduce", many, CROWDED.memory)


@pytest.mark.parametrize("collective", ["gather", "scatter"])
def test_a_star_of_few_messages_is_always_priced(collective):
    assert "star" in candidates(collective, [list(range(33))])


@pytest.mark.parametrize(
    ("collective", "algorithm", "config", "single_copy", "slices"),
    [
        ("broadcast", "star", IN_MEMORY, False, 32),
        ("broadcast", "star", CROWDED, True, 1),
        ("reduce", "star", IN_MEMORY, False, 64),
        ("reduce", "star", COPIED_IN, False, 64),
        ("reduce", "star", CROWDED, False, 8),
        ("reduce", "two_shot", CROWDED, False, 8),
        ("reduce", "star", replace(IN_MEMORY, pull_bytes=MIB), True, 1),
        ("reduce", "star", BY_MESSAGES, False, 1),
        ("reduce", "tree", IN_MEMORY, True, 1),
        ("gather", "star", IN_MEMORY, True, 1),
        ("all_reduce", "two_shot", IN_MEMORY, True, 1),
        ("all_reduce", "two_shot", COPIED_IN, False, 16),
        ("all_reduce", "two_shot", CROWDED, False, 8),
        ("all_reduce", "ring", COPIED_IN, False, 4),
    ],
)
def test_data_that_go_one_way_are_copied_in_while_others_copy_out(
    collective, algorithm, config, single_copy, slices
):
    nodes = [[0, 1]]
    schedule = build(collective, algorithm, nodes)
    assert is_single_copy(schedule, 16 * MIB, config) is single_copy
    assert slice_count(schedule, 16 * MIB, nodes, config) == slices


@pytest.mark.parametrize(
    ("nodes", "config", "numbers"),
    [
        ([[0, 1]], BY_MESSAGES, (1, 1, MIB, 16 << 10)),
        ([[0], [1]], BY_MESSAGES, (32, 2, 60 << 10, 128 << 10)),
        ([[0, 1, 2], [3]], BY_MESSAGES, (32, 2, 60 << 10, 128 << 10)),
        ([[0], [1]], OTHER_NUMBERS, (16, 5, 7, 0)),
    ],
)
def test_messages_between_hosts_are_short(nodes, config, numbers):
    schedule = build("all_reduce", "ring", nodes)
    chosen = slice_count(schedule, 16 * MIB, nodes, config), slices_in_flight(nodes, config)
    assert (*chosen, segment_bytes(nodes, config), staged_bytes(nodes, config)) == numbers


@pytest.mark.parametrize("config", [IN_MEMORY, CROWDED], ids=["a core each", "crowded"])
def test_a_short_gather_is_copied_in_while_the_root_copies_its_own_part(config):
    star, tree = (build("gather", name, [[0, 1]]) for name in ("star", "tree"))
    assert not is_single_copy(star, 8 * MIB - 1, config)
    assert is_single_copy(tree, 8 * MIB, config)
    assert is_single_copy(star, 8 * MIB, replace(config, pull_bytes=1))


@pytest.mark.parametrize(
    ("collective", "algorithm", "config", "least"),
    [
        ("all_reduce", "two_shot", QUICK, MIB // 8),
        ("all_reduce", "two_shot", QUICK_CROWDED, 4 * MIB),
        ("all_reduce", "two_shot", CROWDED, 32 * MIB),
        ("all_reduce", "ring", CROWDED, 8 * MIB),
        ("all_reduce", "two_shot", replace(QUICK, pull_bytes=MIB), MIB),
        ("all_reduce", "ring", QUICK, 4 * MIB),
        ("reduce_scatter", "direct", QUICK_CROWDED, 4 * MIB),
        ("gather", "star", QUICK_CROWDED, 192 << 10),
        ("broadcast", "star", WRITTEN_CROWDED, 8 * MIB),
        ("gather", "star", WRITTEN, 16 * MIB),
    ],
)
def test_where_the_kernel_is_quick_shorter_arrays_are_single_copy(
    collective, algorithm, config, least
):
    schedule = build(collective, algorithm, [[0, 1]])
    found = [is_single_copy(schedule, nbytes, config) for nbytes in (least - 1, least)]
    assert found == [False, True]


@pytest.mark.parametrize(
    ("collective", "config", "parts"),
    [
        ("broadcast", QUICK, [1 / 4] * 3),
        ("gather", QUICK_CROWDED, [1 / 2, 1, 1]),
        ("all_to_all", WRITTEN, [0, 0, 0]),
        ("broadcast", WRITTEN_CROWDED, [0, 0, 0]),
        ("gather", IN_MEMORY, [0, 0, 0]),
    ],
)
def test_all_ranks_copy_alike_or_as_was_faster(collective, config, parts):
    algorithm = "direct" if collective.startswith("all") else "star"
    schedule = build(collective, algorithm, [[0, 1, 2, 3]])
    assert [pushed_part(schedule, n, config) for n in (MIB - 1, MIB, 64 * MIB)] == parts


@pytest.mark.parametrize(
    ("collective", "nbytes", "slices"),
    [
        ("broadcast", MIB // 2, 8),
        ("broadcast", MIB, 2),
        ("broadcast", 1024 * MIB, 256),
        ("reduce", MIB // 2, 8),
        ("reduce", MIB, 4),
        ("reduce", 64 * MIB, 64),
    ],
)
def test_there_are_not_many_slices_to_plan(collective, nbytes, slices):
    schedule = build(collective, "star", [[0, 1]])
    assert slice_count(schedule, nbytes, [[0, 1]], IN_MEMORY) == slices


@pytest.mark.parametrize("ranks", [3, 4, 8, 32])
@pytest.mark.parametrize("nbytes", [8, MIB, 64 * MIB])
def test_ranks_that_share_cores_broadcast_in_one_step(ranks, nbytes):
    assert resolve("broadcast", "auto", [list(range(ranks))], nbytes, CROWDED) == "star"


@pytest.mark.parametrize("ranks", [2, 3, 4, 32])
@pytest.mark.parametrize(
    ("config", "least"),
    [(CROWDED, 2 * MIB), (QUICK_CROWDED, MIB // 4), (QUICK, 2 * MIB), (IN_MEMORY, None)],
)
def test_all_ranks_fold_in_a_long_reduce(ranks, config, least):
    nodes = [list(range(ranks))]
    if config in (CROWDED, QUICK_CROWDED) or ranks == 2:
        shorter = 64 * MIB if least is None else least - 1
        assert resolve("reduce", "auto", nodes, shorter, config) == "star"
    if least is not None:
        assert resolve("reduce", "auto", nodes, least, config) == "two_shot"


SEVERAL = [[1] * 17, [1] * 24, [6] * 4, [8] * 4, [12] * 2, [6] * 8, [3, 1, 2] * 3, [20, 10, 6]]
OF_MANY = ["all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "gather", "scatter"]


@pytest.mark.parametrize("collective", OF_MANY)
@each("sizes", SEVERAL)
def test_what_is_taken_among_many_ranks_is_near_the_best_in_the_simulation(collective, sizes):
    nodes = block_layout(*sizes)
    for nbytes in (8, 64 << 10, 4 * MIB):
        schedules = {name: build(collective, name, nodes) for name in candidates(collective, nodes)}
        call = nodes, nbytes, BY_MESSAGES
        times = {name: select._seconds(price, each, *call) for name, each in schedules.items()}
        taken = choose(collective, nodes, nbytes, BY_MESSAGES).algorithm
        assert times[taken] <= 1.25 * min(times.values())


@each("sizes", [[8] * 12, [1] * 100, [128]])
@pytest.mark.parametrize("nbytes", [8, MIB, 256 * MIB])
def test_what_need_not_be_priced_would_not_be_taken(monkeypatch, sizes, nbytes):
    nodes = block_layout(*sizes)
    choice = choose("all_reduce", nodes, nbytes, BY_MESSAGES)
    monkeypatch.setattr(select, "at_least", lambda *_, **__: 0.0)
    every = choose("all_reduce", nodes, nbytes, BY_MESSAGES)
    monkeypatch.undo()
    assert (choice.algorithm, every.more_than_s) == (every.algorithm, {})
    assert {name: every.predicted_s[name] for name in choice.predicted_s} == choice.predicted_s
    for name, bound in choice.more_than_s.items():
        assert min(choice.predicted_s.values()) * 1.02 < bound <= every.predicted_s[name]
    assert list(every.predicted_s) == candidates("all_reduce", nodes)


def test_a_ring_of_many_ranks_is_not_priced_for_a_short_array():
    choice = choose("all_reduce", block_layout(*[8] * 16), 8, BY_MESSAGES)
    assert {"ring", "hierarchical"} <= choice.more_than_s.keys()
    assert not choice.more_than_s.keys() & choice.predicted_s.keys()
    assert choice.reason == "the cheapest"


@pytest.mark.parametrize("ranks", [16, 17])
def test_among_many_ranks_algorithms_that_the_formula_does_not_fit_run_by_name_alone(ranks):
    unfit = {"tree", "double_tree", "torus", "star", "allgather_reduce"}
    assert unfit.isdisjoint(candidates("all_reduce", block_layout(ranks))) is (ranks == 17)
    assert ("ring" in candidates("broadcast", block_layout(ranks))) is (ranks == 16)


@pytest.mark.parametrize(
    ("collective", "algorithm", "ranks", "by_formula"),
    [
        ("all_reduce", "ring", 16, False),
        ("all_reduce", "ring", 17, True),
        ("all_reduce", "hierarchical(ring, doubling)", 18, True),
        ("all_reduce", "tree", 17, False),
        ("all_reduce", "star(4)", 17, False),
        ("all_reduce", "hierarchical(ring, star(4))", 18, False),
        ("broadcast", "tree", 256, False),
        ("broadcast", "tree", 257, True),
        ("broadcast", "scatter_all_gather", 17, True),
    ],
)
def test_the_formula_prices_what_it_fits_among_many_ranks(
    monkeypatch, collective, algorithm, ranks, by_formula
):
    monkeypatch.setattr(select, "estimate", lambda *_, **__: "by the formula")
    monkeypatch.setattr(select, "price", lambda *_, **__: "by simulation")
    nodes = block_layout(ranks // 2, ranks - ranks // 2)
    found = select.predict(collective, algorithm, nodes, 8, BY_MESSAGES)
    assert found == ("by the formula" if by_formula else "by simulation")


def test_a_users_algorithm_without_claims_is_simulated(monkeypatch):
    def chain(size, rank):
        down = [Step((Send(rank + 1, (0,)),))] if rank < size - 1 else []
        up = [Step((), (Recv(rank - 1, (0,), reduce=True),))] if rank else []
        back = [Step((), (Recv(size - 1, (0,)),))] if rank < size - 1 else []
        out = [Step((Send(peer, (0,)),)) for peer in range(size - 1)] if rank == size - 1 else []
        yield from up + down + out + back

    register_algorithm("a_chain", chain, chunks=lambda size: 1)
    try:
        monkeypatch.setattr(select, "estimate", None)
        assert select.predict("all_reduce", "a_chain", block_layout(17), 8, BY_MESSAGES) > 0
    finally:
        del REGISTERED["all_reduce", "a_chain"]


@pytest.mark.parametrize(
    ("predicted_s", "taken", "cheapest", "reason"),
    [
        ({"a": 2.0, "b": 1.0}, "b", "b", "the cheapest"),
        ({"a": 1.03, "b": 1.0}, "b", "b", "the cheapest"),
        ({"a": 1.01, "b": 1.0}, "a", "b", "the first in the list within 2 % of the cheapest"),
        ({"a": 1.0, "b": 1.0}, "a", "a", "the first in the list within 2 % of the cheapest"),
        (
            {"c": 3.0, "a": 1.01, "b": 1.0},
            "a",
            "b",
            "the first in the list within 2 % of the cheapest",
        ),
    ],
)
def test_the_first_of_equally_fast_algorithms_is_taken(
    monkeypatch, predicted_s, taken, cheapest, reason
):
    monkeypatch.setattr(select, "candidates", lambda *_: list(predicted_s))
    monkeypatch.setattr(select, "_prices", lambda *_: (predicted_s, {}))
    choice = choose("all_reduce", [[0, 1]], 8, BY_MESSAGES)
    assert (choice.algorithm, choice.cheapest, choice.reason) == (taken, cheapest, reason)


def test_the_only_candidate_is_taken_for_that_reason():
    choice = choose("barrier", [[0, 1]], 0, BY_MESSAGES)
    assert (choice.algorithm, choice.reason) == ("dissemination", "the only candidate")


@pytest.mark.parametrize(
    ("config", "transport", "words"),
    [
        (BY_MESSAGES, "mpi", "by messages: doubling"),
        (IN_MEMORY, "shm", "through shared memory: one_shot"),
    ],
)
def test_a_choice_says_how_ranks_exchange_data(config, transport, words):
    choice = choose("all_reduce", [[0, 1]], 64, config)
    assert choice.transport == transport
    assert str(choice).startswith(f"all_reduce of 64 bytes {words}, the first in the list")


@pytest.mark.parametrize(
    ("nbytes", "priced"), [(0, 1), (1, 1), (2, 2), (3, 4), (1000, 1024), (1024, 1024)]
)
def test_sizes_are_priced_as_the_next_power_of_two(nbytes, priced):
    assert priced_bytes(nbytes) == priced
    as_priced = choose("all_reduce", [[0, 1]], priced, BY_MESSAGES).predicted_s
    assert choose("all_reduce", [[0, 1]], nbytes, BY_MESSAGES).predicted_s == as_priced
