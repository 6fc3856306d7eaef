"""The algorithm that ``algorithm="auto"`` takes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ringreduce.algorithms import build
from ringreduce.config import Config, Memory
from ringreduce.planning.select import candidates, is_single_copy, resolve, slice_count

BY_MESSAGES = Config()
IN_MEMORY = Config(memory=Memory(single_copy=True, crowded=False))
CROWDED = Config(memory=Memory(single_copy=True, crowded=True))
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
        ("broadcast", "star", IN_MEMORY, False, 16),
        ("reduce", "star", IN_MEMORY, False, 32),
        ("reduce", "star", COPIED_IN, False, 32),
        ("reduce", "star", CROWDED, True, 1),
        ("reduce", "star", replace(IN_MEMORY, pull_bytes=MIB), True, 1),
        ("reduce", "star", BY_MESSAGES, False, 1),
        ("reduce", "tree", IN_MEMORY, True, 1),
        ("gather", "star", IN_MEMORY, True, 1),
        ("all_reduce", "two_shot", IN_MEMORY, True, 1),
        ("all_reduce", "two_shot", COPIED_IN, False, 4),
    ],
)
def test_data_that_go_one_way_are_copied_in_while_others_copy_out(
    collective, algorithm, config, single_copy, slices
):
    nodes = [[0, 1]]
    schedule = build(collective, algorithm, nodes)
    assert is_single_copy(schedule, 16 * MIB, config) is single_copy
    assert slice_count(schedule, 16 * MIB, nodes, config) == slices


@pytest.mark.parametrize("config", [IN_MEMORY, CROWDED], ids=["a core each", "crowded"])
def test_a_short_gather_is_copied_in_while_the_root_copies_its_own_part(config):
    star, tree = (build("gather", name, [[0, 1]]) for name in ("star", "tree"))
    assert not is_single_copy(star, 8 * MIB, config)
    assert is_single_copy(tree, 8 * MIB, config)
    assert is_single_copy(star, 8 * MIB, replace(config, pull_bytes=1))


@pytest.mark.parametrize(
    ("collective", "nbytes", "slices"),
    [
        ("broadcast", MIB // 2, 8),
        ("broadcast", MIB, 1),
        ("broadcast", 1024 * MIB, 256),
        ("reduce", MIB // 2, 1),
        ("reduce", MIB, 2),
        ("reduce", 64 * MIB, 64),
    ],
)
def test_there_are_not_many_slices_to_plan(collective, nbytes, slices):
    schedule = build(collective, "star", [[0, 1]])
    assert slice_count(schedule, nbytes, [[0, 1]], IN_MEMORY) == slices


@pytest.mark.parametrize("ranks", [3, 4, 8, 32])
@pytest.mark.parametrize("nbytes", [8, MIB, 64 * MIB])
def test_ranks_that_share_cores_broadcast_and_reduce_in_one_step(ranks, nbytes):
    for collective in ("broadcast", "reduce"):
        assert resolve(collective, "auto", [list(range(ranks))], nbytes, CROWDED) == "star"
