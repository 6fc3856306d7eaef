"""Blocks under locks: in every interleaving, and whoever dies, each block has whole adds."""

from __future__ import annotations

from unittest.mock import patch

import numpy as np
import pytest

from ringreduce.compiler.records import size_of
from ringreduce.shm import block_access
from ringreduce.shm.block_access import (
    ADD,
    CONTINUE,
    DONE,
    FOLDS,
    FREE,
    GIVE_UP,
    LOCK_BYTES,
    WAITS,
    Access,
    committing,
    held,
    holder_of,
    source_of,
)
from tests.support.lock_walks import MISTAKES, BrokenError, Walk, explore

ONE_EACH = ((1,), (10,), (100,))


@pytest.mark.parametrize(
    ("operations", "blocks", "deaths"),
    [
        (((1,), (10,)), 1, 0),
        (((1, 2), (10,)), 1, 1),
        (((1,), (10,)), 2, 2),
        pytest.param(((1, 2), (10, 20)), 1, 1, marks=pytest.mark.slow),
        pytest.param(((1, 2), (10,)), 2, 1, marks=pytest.mark.slow),
        pytest.param(((1,), (10,), (None,)), 1, 1, marks=pytest.mark.slow),
        pytest.param(((1, None), (10,)), 2, 1, marks=pytest.mark.slow),
        pytest.param(ONE_EACH, 1, 2, marks=pytest.mark.slow),
    ],
)
def test_in_every_interleaving_with_every_death_blocks_have_whole_adds(operations, blocks, deaths):
    assert explore(Walk(operations, blocks, deaths)) > 100


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_found(mistake):
    function, mistaken = MISTAKES[mistake]
    with patch.object(block_access, function, mistaken), pytest.raises(BrokenError):
        explore(Walk(ONE_EACH, deaths=2))


def test_a_lock_that_is_never_freed_is_found():
    kept = patch.object(block_access, "FREE", held(7))
    with kept, pytest.raises(AssertionError, match="no living rank can go on"):
        explore(Walk(((1,), (10,)), deaths=0))


@pytest.mark.parametrize("rank", [0, 1, 65_000])
@pytest.mark.parametrize("source", [0, 3, 65_000])
def test_the_word_of_a_lock_names_its_holder_and_the_source_of_the_result(rank, source):
    assert (holder_of(held(rank)), source_of(held(rank))) == (rank, -1)
    word = committing(rank, source)
    assert (holder_of(word), source_of(word)) == (rank, source)
    assert (holder_of(FREE), source_of(FREE)) == (-1, -1)


class OneRank:
    """A rank, and its array of three blocks of two words, which Python adds."""

    def __init__(self) -> None:
        self.version = np.zeros(1, np.int64)
        self.locks = np.zeros((3, LOCK_BYTES // 8), np.int64)
        self.blocks, self.result = np.zeros(5, np.int64), np.zeros(2, np.int64)
        self.own = np.arange(1, 6)
        self._words = np.zeros(size_of(Access) // 8, np.int64)
        access = self.access = Access(self._words.ctypes.data)
        access.version, access.locks = self.version.ctypes.data, self.locks.ctypes.data
        access.blocks, access.results = self.blocks.ctypes.data, self.result.ctypes.data
        access.nbytes, access.block_bytes, access.block_count = 40, 16, 3
        access.spins = 2

    def ask(self, request: int) -> int:
        return block_access.serve(self.access, request, self.own.ctypes.data)


def test_python_adds_each_block_while_its_lock_is_held():
    rank = OneRank()
    result = rank.ask(ADD)
    for block in range(3):
        assert result == FOLDS
        assert rank.locks[:, 0].tolist() == [held(0) * (block == each) for each in range(3)]
        here = slice(2 * block, 2 * block + 2)
        rank.result[: rank.own[here].size] = rank.blocks[here] + rank.own[here]
        result = rank.ask(CONTINUE)
    assert (result, rank.version[0]) == (DONE, 1)
    assert rank.blocks.tolist() == [1, 2, 3, 4, 5]
    assert not rank.locks.any()


def test_an_add_that_is_given_up_leaves_the_lock_free_and_the_block_unchanged():
    rank = OneRank()
    assert rank.ask(ADD) == FOLDS
    rank.result[:] = 7
    assert rank.ask(GIVE_UP) == DONE
    assert not rank.locks.any()
    assert not rank.blocks.any()
    assert rank.version[0] == 0


def test_an_operation_begins_anew_where_the_one_before_was_not_given_up():
    """A second exception may come before Python has given the operation up."""
    rank = OneRank()
    assert rank.ask(ADD) == FOLDS
    rank.result[:] = rank.own[:2]
    assert rank.ask(CONTINUE) == FOLDS  # of block 1
    assert rank.ask(ADD) == FOLDS
    assert rank.locks[:, 0].tolist() == [held(0), FREE, FREE]


def test_to_give_up_while_waiting_leaves_the_lock_of_the_other_rank():
    rank = OneRank()
    rank.locks[0, 0] = held(4)
    assert rank.ask(ADD) == WAITS
    assert rank.access.found == held(4)
    assert rank.ask(GIVE_UP) == DONE
    assert rank.locks[0, 0] == held(4)
