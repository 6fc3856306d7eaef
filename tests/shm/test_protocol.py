"""The protocol of slots: whatever the order of the ranks' accesses, each reads its own round."""

from __future__ import annotations

from unittest.mock import patch

import pytest

from ringreduce.shm import protocol
from tests.support.interleavings import MISTAKES, TornError, Walk, explore


@pytest.mark.parametrize("from_root", [False, True])
@pytest.mark.parametrize(
    ("ranks", "rounds", "in_ring"), [(2, 3, False), (2, 6, False), (2, 5, True), (3, 3, False)]
)
def test_in_every_interleaving_ranks_read_the_data_of_their_round(
    ranks, rounds, from_root, in_ring
):
    assert explore(Walk(ranks, rounds, from_root, in_ring)) > 50


@pytest.mark.parametrize("from_root", [False, True])
@pytest.mark.parametrize("mistaken", ["slot_of", "post"])
def test_a_mistake_is_found(mistaken, from_root):
    with patch.object(protocol, mistaken, MISTAKES[mistaken]), pytest.raises(AssertionError):
        explore(Walk(3, 3, from_root))


def test_a_root_that_reads_from_no_peer_has_to_wait_for_a_free_slot():
    with patch.object(protocol, "free_slot", MISTAKES["free_slot"]), pytest.raises(TornError):
        explore(Walk(2, 4, from_root=True))
