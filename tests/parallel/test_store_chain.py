"""Every order of messages and crashes in a chain of servers: no acknowledged push is lost."""

from __future__ import annotations

import pytest

from tests.support.chain_walk import MISTAKES, WalkError, World


@pytest.mark.parametrize(
    ("replicas", "crashes"),
    [(2, 1), *(pytest.param(3, crashes, marks=pytest.mark.long) for crashes in (1, 2))],
)
def test_each_push_counts_once_and_living_replicas_are_equal(replicas, crashes):
    assert sum(1 for _ in World(replicas, crashes).states()) > 5_000


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_found(mistake):
    with pytest.raises(WalkError, match=MISTAKES[mistake]):
        for _ in World(3, 1, mistake, pushes=1).states():
            pass
