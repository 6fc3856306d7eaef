"""The protocol of slots: whatever the order of the ranks' accesses, each reads its own round."""

from __future__ import annotations

from unittest.mock import patch

import numpy as np
import pytest

from ringreduce.compiler.memory import load, store
from ringreduce.compiler.records import address_of
from ringreduce.shm import executor, protocol
from ringreduce.shm.layout import Buffer, Program, PushRecord, ReduceRecord
from tests.support import late_writes
from tests.support.interleavings import MISTAKES, TornError, Walk, explore, zero


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


# --- writes to arrays of peers that leave ---------------------------------------------------------


@pytest.mark.parametrize(
    "ranks",
    [(["leave"], ["write", "write"]), (["write", "leave"],) * 2, (["leave"], ["write"], ["write"])],
)
def test_in_every_order_an_array_that_was_given_back_is_not_written(ranks):
    assert late_writes.explore(late_writes.Walk(*ranks)) > 50


def test_a_part_that_could_not_be_written_to_a_peer_is_not_reduced_again(monkeypatch):
    """In place it is its own source: here two parts of two words, of which the first waits."""
    walk = late_writes.Walk(["write"], [])
    team, program, instruction = walk.teams[0], zero(Program), zero(ReduceRecord)
    own, other = np.array([1, 2, 3, 4]), np.array([10, 20, 30, 40])
    buffers, sources = [zero(Buffer) for _ in range(2)], np.zeros(4 + 2, np.int64)
    for index, array in enumerate((own, other)):
        buffers[index].address = array.ctypes.data
        sources[2 * index] = address_of(buffers[index])
    instruction.target.buffer, instruction.nbytes = address_of(buffers[0]), own.nbytes
    instruction.source_count, instruction.sources = 2, sources.ctypes.data
    instruction.destinations = walk.wanted[0]
    program.item_bytes, team.read_bytes, team.sources = 8, 16, sources[4:].ctypes.data

    def fold(_, into, sources, __, count, *___):
        for at in range(0, 8 * count, 8):
            store(into + at, sum(load(load(sources + 8 * i) + at) for i in range(2)))

    answers = [False, True, False, True]
    monkeypatch.setattr(executor, "call_fold", fold)
    monkeypatch.setattr(executor, "distribute", lambda *_: answers.pop(0))
    done = [executor.reduce(program, team, instruction) for _ in range(3)]
    assert (done, own.tolist()) == ([False, False, True], [11, 22, 33, 44])


def test_a_push_goes_on_with_the_piece_that_could_not_be_written(monkeypatch):
    """Of three pieces, the last one shorter, the second waits."""
    program, push, source, written = zero(Program), zero(PushRecord), zero(Buffer), []
    piece = executor._PUSHED_BYTES
    push.source.buffer, push.source.offset, push.nbytes = address_of(source), 5, 2 * piece + 7

    def distribute(_, __, address, begin, nbytes):
        written.append((address, begin, nbytes))
        return len(written) != 2

    monkeypatch.setattr(executor, "distribute", distribute)
    assert [executor.deliver(program, None, push) for _ in range(2)] == [False, True]
    wanted = [(0, piece), (piece, piece), (piece, piece), (2 * piece, 7)]
    assert written == [(5 + begin, begin, nbytes) for begin, nbytes in wanted]
