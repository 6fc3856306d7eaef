"""Segments over a transport: how they are shared, and when all ranks go without."""

from __future__ import annotations

import numpy as np
import pytest

from ringreduce.compiler.memory import load, store
from ringreduce.shm import layout, segments
from ringreduce.shm.segments import share_segments
from ringreduce.transports.thread import Switchboard, ThreadTransport
from tests.support.threads import on_threads

RANKS = 3
_WRITES = segments._writes


class OtherProcesses(ThreadTransport):
    """Threads that share memory as processes do."""

    one_process = False


class WithoutMemory(OtherProcesses):
    """Processes that share memory by files alone."""

    def allocate_shared(self, nbytes):
        return None


class OfTwoNodes(ThreadTransport):
    def nodes(self):
        return (0, 1), (2,)


def shared(transport=ThreadTransport):
    """What `share_segments` returns on each rank of a group of threads."""
    switchboard, found = Switchboard(RANKS), [None] * RANKS

    def run(rank):
        found[rank] = share_segments(transport(switchboard, rank, timeout_s=10))

    on_threads(run, RANKS)
    return found


@pytest.fixture
def compiled(monkeypatch):
    """Let every rank have the compiled functions."""
    monkeypatch.setattr(segments, "is_available", lambda: True)


@pytest.mark.parametrize("transport", [ThreadTransport, OtherProcesses])
@pytest.mark.usefixtures("compiled")
def test_every_rank_reads_what_the_owner_of_a_segment_writes(transport):
    found = shared(transport)
    for rank, mine in enumerate(found):
        store(mine.addresses[rank] + 16, rank + 1)
    for each in found:
        assert [load(address + 16) for address in each.addresses] == [1, 2, 3]


@pytest.mark.usefixtures("compiled")
def test_threads_of_one_process_read_all_memory_without_naming_a_process():
    assert [(each.processes, each.single_copy) for each in shared()] == [
        ([0] * RANKS, True)
    ] * RANKS


@pytest.mark.usefixtures("compiled")
def test_processes_without_memory_files_share_what_the_transport_allocates(monkeypatch):
    monkeypatch.setattr(segments, "map_files", lambda *arguments: None)
    assert [each.single_copy for each in shared(OtherProcesses)] == [False] * RANKS


@pytest.mark.usefixtures("compiled")
def test_the_transport_allocates_nothing_where_files_are_mapped():
    assert None not in shared(WithoutMemory)


@pytest.mark.usefixtures("compiled")
def test_no_memory_is_shared_where_neither_files_nor_the_transport_have_any(monkeypatch):
    monkeypatch.setattr(segments, "map_files", lambda *arguments: None)
    assert shared(WithoutMemory) == [None] * RANKS


@pytest.mark.usefixtures("compiled")
def test_slots_are_zero_in_memory_that_was_used_before(monkeypatch):
    used = [np.full(layout.SEGMENT_BYTES, 7, np.uint8) for _ in range(RANKS)]
    monkeypatch.setattr(ThreadTransport, "allocate_shared", lambda *arguments: used)
    for each in shared():
        for address in each.addresses:
            assert not any(load(address + at) for at in range(0, layout.RING_OFFSET, 8))


@pytest.mark.usefixtures("compiled")
def test_no_memory_is_shared_where_a_buffer_is_not_aligned(monkeypatch):
    bytes_of_all = np.zeros((RANKS, layout.SEGMENT_BYTES + 8), np.uint8)
    used = [row[rank == 1 :] for rank, row in enumerate(bytes_of_all)]
    monkeypatch.setattr(ThreadTransport, "allocate_shared", lambda *arguments: used)
    assert shared() == [None] * RANKS


@pytest.mark.usefixtures("compiled")
def test_no_memory_is_shared_between_nodes():
    assert shared(OfTwoNodes) == [None] * RANKS


def test_where_one_rank_lacks_the_compiled_functions_no_rank_shares(monkeypatch):
    answers = [True, False, True]
    monkeypatch.setattr(segments, "is_available", answers.pop)
    assert shared() == [None] * RANKS


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("yama", [True, False])
def test_ranks_allow_reads_where_the_kernel_asks_for_that(monkeypatch, yama):
    allowed = []
    monkeypatch.setattr(segments, "allow_reads", lambda: allowed.append(1))
    monkeypatch.setattr(segments, "_reads", lambda *place: yama and len(allowed) == RANKS)
    assert [each.single_copy for each in shared(OtherProcesses)] == [yama] * RANKS
    assert len(allowed) == RANKS


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("lacking", ["", "_writes", "the written bytes", "_is_quick"])
def test_where_one_rank_cannot_write_or_is_slow_all_read(monkeypatch, lacking):
    answers = [True] * 9 + [False] * (lacking == "_writes")
    if lacking != "the written bytes":
        monkeypatch.setattr(segments, "_writes", lambda *place: _WRITES(*place) and answers.pop())
    else:
        monkeypatch.setattr(segments, "_writes", lambda *place: True)
    slow = [lacking == "_is_quick", False, False]
    monkeypatch.setattr(segments, "_is_quick", lambda *place: not slow.pop())
    found = [(each.single_copy, each.writes, each.quick) for each in shared(OtherProcesses)]
    assert found == [(True, lacking in ("", "_is_quick"), lacking == "")] * RANKS


@pytest.mark.usefixtures("compiled")
def test_ranks_that_can_read_without_it_allow_nothing(monkeypatch):
    monkeypatch.setattr(segments, "allow_reads", pytest.fail)
    assert [each.single_copy for each in shared(OtherProcesses)] == [True] * RANKS
