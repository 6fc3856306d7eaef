"""Asynchronous, planned and fused calls, and communicators made by `split`."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

import ringreduce as rr
from ringreduce.calls.queue import CallQueue
from ringreduce.devices.cpu import CpuDevice
from ringreduce.system.topology import Topology
from ringreduce.transports.thread import Switchboard, ThreadTransport
from ringreduce.transports.yielding import Yielding
from tests.support.cases import CONFIG
from tests.support.works import NEEDS_THREADS, PROGRAMS


def test_the_timeout_of_a_call_begins_anew_in_the_thread_that_goes_on_with_it():
    """`Agreement.wait` counts from the first idle poll; short waits must not add up."""
    polls = []
    queue = CallQueue(
        lambda idle, ahead: polls.append((threading.current_thread().name, idle)),
        Yielding(crowded=False),
        threads=True,
    )
    queue.begins_here_s = 1e-3
    over = threading.Event()

    def program():
        while not over.is_set():
            yield False

    with queue.lock:
        work = queue.submit(program())
    while not any(name == "ringreduce progress" for name, _ in polls):
        time.sleep(0.01)
    over.set()
    work.wait()
    queue.close()
    assert next(idle for name, idle in polls if name == "ringreduce progress") == 1


class LonelyTransport(ThreadTransport):
    """A transport for the main thread alone, like an MPI without MPI_THREAD_MULTIPLE."""

    threads = False

    def split(self, members, number, timeout_s):
        part = self._switchboard.part(number, members)
        return LonelyTransport(part, members.index(self.rank))


def on_lonely_threads(program, ranks):
    switchboard, errors = Switchboard(ranks), []

    def run(rank):
        topology = Topology((tuple(range(ranks)),), rank)
        transport = LonelyTransport(switchboard, rank)
        try:
            with rr.Communicator(transport, topology, CpuDevice(), CONFIG, 20) as comm:
                program(comm)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(40)
        assert not thread.is_alive()
    if errors:
        raise errors[0]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, pytest.param(5, marks=pytest.mark.long)])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_on_threads(program, ranks):
    rr.spawn(program, ranks, timeout_s=120, config=CONFIG)


@pytest.mark.slow
@pytest.mark.parametrize(
    "program", [p for p in PROGRAMS if p not in NEEDS_THREADS], ids=lambda p: p.__name__
)
def test_without_a_thread_calls_advance_when_somebody_waits_or_asks(program):
    on_lonely_threads(program, 3)


@pytest.mark.few(1)
@pytest.mark.mpi
@pytest.mark.parametrize("level", ["multiple", "serialized"])
def test_over_mpi(mpi, level):
    assert mpi.run_ok("works", 3, level) == ["done"] * 3


def test_an_error_in_a_callback_is_reported_and_no_more(monkeypatch):
    reports = []
    monkeypatch.setattr(threading, "excepthook", reports.append)

    def program(comm):
        work, seen = comm.all_reduce(1, async_op=True), []
        work.then(lambda work: 1 // 0)
        work.then(lambda work: seen.append(work.wait()))
        assert comm.all_reduce(1) == 2
        return seen

    assert rr.spawn(program, 2, timeout_s=120) == [[2], [2]]
    assert [report.exc_type for report in reports] == [ZeroDivisionError] * 2


@pytest.mark.parametrize("ends", ["before `then`", "after it"])
@pytest.mark.parametrize("kind", ["a collective", "a message"])
def test_wait_raises_what_a_callback_raises(monkeypatch, kind, ends):
    reports = []
    monkeypatch.setattr(threading, "excepthook", reports.append)

    def look_up(work):
        work.wait()
        return {}["loss"]

    def program(comm):
        if kind == "a collective":
            work = comm.all_reduce(1, async_op=True)
        elif comm.rank == 0:
            comm.send(1, 1)
            return
        else:
            work = comm.recv(np.empty((), int), 0, async_op=True)
        if ends == "before `then`":
            work.wait()
        work.then(look_up)
        for _ in range(2):
            with pytest.raises(KeyError, match="loss") as raised:
                work.wait(60)
            assert "look_up, which `then` of an asynchronous call" in raised.value.__notes__[0]

    rr.spawn(program, 2, timeout_s=120, config=CONFIG)
    assert {report.exc_type for report in reports} == {KeyError}


def test_wait_raises_the_error_of_the_call_before_that_of_a_callback(monkeypatch):
    monkeypatch.setattr(threading, "excepthook", lambda _: None)

    def program(comm):
        work = comm.all_reduce(np.ones(1 + comm.rank), async_op=True)
        work.then(lambda work: 1 // 0)
        work.then(lambda work: work.wait())
        with pytest.raises(rr.MismatchError):
            work.wait()

    rr.spawn(program, 2, timeout_s=120)


def test_close_waits_for_the_calls_of_callbacks():
    def program(comm):
        seen = []
        with comm.split(0) as part:
            work = part.all_reduce(np.ones(10_000), async_op=True)
            work.then(lambda work: seen.append(part.all_reduce(work.wait(), "max")[0]))
        return seen

    assert rr.spawn(program, 3, timeout_s=120) == [[3]] * 3


def test_leaving_breaks_off_what_is_in_line():
    def program(comm):
        if comm.rank == 0:
            comm.all_reduce(1, async_op=True)
            comm.all_reduce(2, async_op=True)
            raise KeyError("mine")
        works = [comm.all_reduce(number, async_op=True) for number in (1, 2, 3)]
        with pytest.raises(rr.PeerLostError, match=r"rank 0 has left.*KeyError: 'mine'"):
            works[-1].wait()

    with pytest.raises(KeyError, match="mine"):
        rr.spawn(program, 3, timeout_s=120)


def test_who_leaves_waits_for_nothing_that_is_in_line():
    left = threading.Event()

    def program(comm):
        if comm.rank == 0:
            work = comm.all_reduce(1, async_op=True)
            comm.leave("enough")
            left.set()
            with pytest.raises(rr.PeerLostError, match="enough"):
                work.wait(timeout_s=5)
            with pytest.raises(rr.PeerLostError) as later:
                comm.barrier()
            assert str(later.value) == "this rank has left the communicator: enough"
        else:
            left.wait()
            with pytest.raises(rr.PeerLostError, match="rank 0 has left the communicator: enough"):
                comm.all_reduce(1)

    rr.spawn(program, 2, timeout_s=120)


@pytest.mark.slow
def test_a_broken_communicator_ends_what_is_in_line():
    over = threading.Event()

    def program(comm):
        if comm.rank == 1:
            over.wait(120)
            return []
        works = [comm.all_reduce(n, async_op=True, timeout_s=0.2) for n in range(3)]
        errors = []
        for work in works:
            with pytest.raises(rr.PeerTimeoutError) as caught:
                work.wait()
            errors.append(str(caught.value))
        over.set()
        return errors

    with pytest.raises(rr.PeerTimeoutError, match="rank 1 stopped answering"):
        rr.spawn(program, 2)
