"""Messages between ranks that are threads: by messages of the transport, and by mailboxes."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ringreduce as rr
from tests.support.point_to_point import CHECKS, RANKS

BY_MESSAGES, BY_MAILBOX = rr.Config(shared_memory=False), rr.Config(shared_memory=True)
ROADS = pytest.mark.parametrize("config", [BY_MESSAGES, BY_MAILBOX], ids=["messages", "mailbox"])


@ROADS
@pytest.mark.parametrize("name", CHECKS)
def test_a_fact_of_messages(config, name):
    rr.spawn(CHECKS[name], RANKS, config=config, timeout_s=60)


def alone(program, config=BY_MESSAGES):
    """Run a program on two ranks; return what rank 0 returns."""
    return rr.spawn(lambda comm: program(comm) if comm.rank == 0 else None, 2, config=config)[0]


@ROADS
def test_a_receive_from_any_rank_ends_with_the_communicator(config):
    def program(comm):
        if comm.rank:
            comm.leave("the disk is full")
        else:
            with pytest.raises(rr.PeerLostError, match="the disk is full"):
                comm.recv(np.zeros(1), None, async_op=True).wait()
            comm.leave("rank 1 has left")

    rr.spawn(program, 2, config=config)


@ROADS
def test_a_receive_from_any_rank_takes_no_message_of_a_rank_that_is_lost(config):
    def program(comm):
        if comm.rank:
            work = comm.send(np.zeros(5000), 0, async_op=True)
            with pytest.raises(rr.PeerLostError):
                work.wait()
        else:
            with pytest.raises(rr.PeerTimeoutError):
                comm.send(np.zeros(3), 1, timeout_s=0.1)
            with pytest.raises(rr.PeerTimeoutError, match="send: waited"):
                comm.recv(np.zeros(5000), None, timeout_s=120)
        comm.leave("no more messages")

    rr.spawn(program, 2, config=config)


@ROADS
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_receive_from_any_rank_ends_after_an_exception_in_the_middle(config, monkeypatch):
    def program(comm):
        if comm.rank:
            comm.barrier()
            with pytest.raises(rr.PeerLostError):
                comm.send(np.zeros(2), 0, 1)
        else:

            def answer(*_):
                raise KeyError("in the middle")

            work = comm.recv(np.zeros(3), None, 1, async_op=True, timeout_s=120)
            monkeypatch.setattr(comm._engine.endpoint.road, "answer", answer)
            comm.barrier()
            with contextlib.suppress(KeyError, rr.PeerLostError):  # this thread was in the middle
                work.wait(120)
            with pytest.raises(rr.PeerLostError, match="in the middle"):
                work.wait(120)
        comm.leave("no more messages")

    rr.spawn(program, 2, config=config)


def test_a_communicator_of_one_rank_receives_from_no_rank():
    def program(comm):
        with pytest.raises(ValueError, match="recv: there is no other rank that could send"):
            comm.recv(np.zeros(1), None)

    rr.spawn(program, 1)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (
            lambda c: c.send(1, 0),
            ValueError,
            "send: peer is 0, this rank itself; pass another rank",
        ),
        (lambda c: c.recv(np.zeros(1), 2), ValueError, "recv: peer is 2; ranks are 0 to 1"),
        (lambda c: c.send(1, -1), ValueError, "send: peer is -1; ranks are 0 to 1"),
        (lambda c: c.send(1, None), TypeError, "send: peer is None; pass a rank, a whole number"),
        (lambda c: c.send(1, True), TypeError, "send: peer is True; pass a rank, a whole number"),
        (lambda c: c.send(1, 1, -1), ValueError, "send: tag is -1; pass an int of at least 0"),
        (lambda c: c.send(1, 1, 0.5), ValueError, "send: tag is 0.5; pass an int of at least 0"),
        (
            lambda c: c.recv(np.zeros(1), 1, 1 << 63),
            ValueError,
            "recv: tag is 9223372036854775808; pass an int of at least 0",
        ),
        (lambda c: c.send("x", 1), TypeError, "send: got 'x'; pass an array or a number"),
        (
            lambda c: c.send(np.array([None]), 1),
            TypeError,
            "send: dtype object cannot be sent",
        ),
        (lambda c: c.recv(1, 1), TypeError, "recv: out is 1; pass a NumPy array"),
        (
            lambda c: c.recv(np.broadcast_to(1.0, 3), 1),
            ValueError,
            "recv: out is read-only; pass an array that can be written",
        ),
        (
            lambda c: c.send(1, 1, timeout_s=0),
            ValueError,
            "send: timeout_s is 0; pass seconds, above 0",
        ),
        (
            lambda c: c.exchange([1], {}),
            TypeError,
            "exchange: sends is list; pass a dict, peer -> array",
        ),
        (
            lambda c: c.exchange({1: 1}, {0: np.zeros(1)}),
            ValueError,
            "exchange: peer is 0, this rank itself; pass another rank",
        ),
        (lambda c: rr.wait_any([]), ValueError, "wait_any: works is empty; pass at least one Work"),
    ],
)
def test_a_wrong_argument_is_refused_before_anything_is_sent(call, error, text):
    with pytest.raises(error) as raised:
        alone(call)
    assert str(raised.value).startswith(text)


def test_receives_into_the_same_memory_are_refused():
    def program(comm):
        x, peers = np.zeros(10), [peer for peer in range(3) if peer != comm.rank]
        outs = dict(zip(peers, (x[1:3], x[2:5]), strict=True))
        with pytest.raises(ValueError, match="exchange: out shares memory with an array that an"):
            comm.exchange({}, outs)
        with pytest.raises(ValueError, match="exchange: out shares memory with an array that is"):
            comm.exchange({peers[0]: x[:2]}, {peers[1]: x[1:3]})
        return comm.all_reduce(1).item()

    assert rr.spawn(program, 3) == [3] * 3


def test_a_receive_into_the_memory_of_another_receive_under_way_is_refused():
    def program(comm):
        x, peer = np.zeros(10), 1 - comm.rank
        work = comm.recv(x, peer, async_op=True)
        with pytest.raises(ValueError, match="recv: out shares memory with an array that another"):
            comm.recv(x[5:], peer, tag=1)
        comm.barrier()  # Until here the peer sends nothing, so the first receive is under way.
        comm.send(np.ones(10), peer)
        return work.wait().sum()

    assert rr.spawn(program, 2) == [10] * 2


@pytest.mark.parametrize("asynchronous", [False, True])
def test_answers_that_found_no_place_are_written_while_their_rank_makes_other_calls(asynchronous):
    count = 40  # more than a mailbox has places for answers

    def program(comm):
        road = comm._engine.endpoint.road
        if comm.rank == 0:
            take, road.answers = road.answers, lambda peer: iter(())
            works = [comm.send(i, 1, async_op=True) for i in range(count)]
            time.sleep(0.2)
            road.answers = take
            for work in works:
                work.wait(timeout_s=120)
        else:
            outs = [np.empty((), int) for _ in range(count)]
            received = [comm.recv(out, 0, async_op=asynchronous) for out in outs]
            if asynchronous:
                for work in received:
                    work.wait()
        comm.barrier()

    rr.spawn(program, 2, config=BY_MAILBOX)


def test_disjoint_parts_of_one_array_can_be_received():
    def program(comm):
        x, peer = np.zeros(10), 1 - comm.rank
        works = [comm.recv(x[i::2], peer, i, async_op=True) for i in range(2)]
        for i in range(2):
            comm.send(np.full(5, i + 1.0), peer, i)
        for work in works:
            work.wait()
        return x.tolist()

    assert rr.spawn(program, 2) == [[1, 2] * 5] * 2


@ROADS
def test_a_peer_that_raised_fails_messages_with_its_reason(config):
    def program(comm):
        if comm.rank == 1:
            time.sleep(0.1)
            comm.leave("the disk is full")
            return
        with pytest.raises(rr.PeerLostError, match=r"rank 1 takes part in no more .* disk is full"):
            comm.recv(np.empty(3), 1)

    with pytest.raises(rr.PeerLostError, match="left the communicator: the disk is full"):
        rr.spawn(program, 2, config=config)


@ROADS
def test_a_rank_whose_communicator_is_broken_fails_messages_with_it(config):
    waited = []

    def program(comm):
        if comm.rank == 2:
            comm.leave("the disk is full")
        elif comm.rank == 1:
            time.sleep(0.1)
            comm.barrier()
        else:
            begin = time.monotonic()
            with pytest.raises(rr.PeerLostError, match=r"rank 1 takes part in no more .* is full"):
                comm.recv(np.empty(3), 1)
            waited.append(time.monotonic() - begin)

    with pytest.raises(rr.PeerLostError):
        rr.spawn(program, 3, timeout_s=120, config=config)
    assert waited[0] < 60  # not the timeout


@ROADS
def test_calls_on_a_closed_communicator_raise(config):
    def program(comm):
        part = comm.split(0)
        if comm.rank == 0:
            part.send(1, 1)
        elif comm.rank == 1:
            part.recv(np.empty((), int), 0)
        part.close()
        with pytest.raises(ValueError, match="the communicator is closed"):
            part.send(1, (comm.rank + 1) % 3)

    rr.spawn(program, 3, config=config)


def test_a_forked_child_cannot_send():
    def program(comm):
        if comm.rank:
            return
        process = os.fork()
        if process == 0:
            try:
                comm.send(1, 1)
            except ValueError as error:
                os._exit(0 if "forked" in str(error) else 1)
            os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0

    rr.spawn(program, 2, config=BY_MESSAGES)


def test_a_child_that_is_forked_while_a_thread_sends_does_not_wait_for_it():
    def program(comm):
        if comm.rank == 0:
            endpoint = comm._engine.endpoint
            endpoint.road.channels[1].busy = True  # as the child sees it
            child = threading.Thread(target=endpoint.forked, args=(None,), daemon=True)
            child.start()
            child.join(5)
            assert not child.is_alive()

    rr.spawn(program, 2, config=BY_MAILBOX)


def make_quiet(comm):
    """Send two ints from each other rank to rank 0, so that compiled code knows them."""
    for _ in range(2):
        if comm.rank:
            comm.send(np.full((), 0), 0)
    for _ in range(2 * comm.size - 2 if comm.rank == 0 else 0):
        comm.recv(np.zeros((), int), None)
    comm.barrier()


@pytest.mark.parametrize("tag", [(5,), ()], ids=["tag 5", "no tag"])
def test_waiting_messages_of_any_rank_are_received_without_python(monkeypatch, tag):
    def program(comm):
        make_quiet(comm)
        if comm.rank:
            sent = [10 * comm.rank + i for i in range(3)]
            works = [comm.send(np.full((), each), 0, *tag, async_op=True) for each in sent]
            comm.barrier()
            for work in works:
                work.wait()
            comm.barrier()  # the pairs of a rank that closes are not quiet
            return None
        comm.barrier()
        with monkeypatch.context() as patch:
            for name in ("run", "find_arrival"):
                patch.setattr(comm._engine.endpoint, name, lambda *_: pytest.fail("in Python"))
            refusals = comm._engine.refusals
            refusals.refuse("not now")
            with pytest.raises(ValueError, match="not now"):
                comm.probe(*tag)
            refusals.allow()
            got, out = [], np.zeros((), int)
            for _ in range(2):
                got += [comm.recv(out, None, *tag).item(), comm.probe(*tag)]
                got += [comm.recv(out, comm.probe(*tag), *tag).item()]
                got += [comm.recv(out, None, *tag).item()]
        comm.barrier()
        return got

    assert rr.spawn(program, 3, config=BY_MAILBOX)[0] == [10, 1, 11, 12, 20, 2, 21, 22]


def test_pairs_are_quiet_after_a_wait_for_a_late_sender():
    quiet = []

    def program(comm):
        make_quiet(comm)
        for call in (comm.probe, lambda tag: None):
            if comm.rank == 0:
                out = np.zeros((), int)
                assert comm.recv(out, call(7), 7) == 2
                quiet.append([bool(each.quiet) for each in comm._engine.endpoint.road.channels])
            elif comm.rank == 2:
                time.sleep(0.05)
                comm.send(np.full((), 2), 0, 7)
            comm.barrier()

    rr.spawn(program, 4, config=BY_MAILBOX)
    assert quiet == [[False, True, True, True]] * 2


@pytest.mark.parametrize("taken", [1, 2, 3])
def test_the_lowest_rank_is_found_whose_message_waits_in_python_or_in_a_mailbox(taken):
    """The messages of rank `taken` wait in Python, as one of them has another tag."""

    def program(comm):
        make_quiet(comm)
        if comm.rank:
            tags = [9] * (comm.rank == taken) + [5]
            works = [comm.send(np.full((), 0), 0, tag, async_op=True) for tag in tags]
            comm.barrier()
            return [work.wait() for work in works]
        comm.barrier()
        out = np.zeros((), int)
        assert comm.probe(9) == taken
        found = []
        for _ in range(3):
            found.append(comm.probe(5))
            comm.recv(out, None, 5)
        comm.recv(out, taken, 9)
        return found

    assert rr.spawn(program, 4, config=BY_MAILBOX)[0] == [1, 2, 3]


@ROADS
@pytest.mark.parametrize("name", ["find_arrival", "run"])
def test_a_message_that_arrives_between_look_and_wait_is_received(config, name, monkeypatch):
    waits, sent = threading.Event(), threading.Event()

    def program(comm):
        make_quiet(comm)
        if comm.rank == 1:
            waits.wait(120)
            work = comm.send(np.full((), 8), 0, 5, async_op=True)
            sent.set()
            return work.wait()
        endpoint = comm._engine.endpoint
        call = getattr(endpoint, name)

        def late(argument):
            waits.set()
            sent.wait(120)
            return call(argument)

        monkeypatch.setattr(endpoint, name, late)
        return comm.recv(np.zeros((), int), comm.probe(5) if name == "find_arrival" else None, 5)

    assert rr.spawn(program, 2, config=config)[0] == 8


@ROADS
def test_a_probe_finds_no_message_of_a_rank_that_has_left(config):
    left = threading.Event()

    def program(comm):
        make_quiet(comm)
        if comm.rank:
            work = comm.send(np.full((), 8), 0, 5, async_op=True)
            comm.leave("the disk is full")
            left.set()
            with pytest.raises(rr.RingReduceError, match="has left"):
                work.wait()
        else:
            left.wait(120)
            with pytest.raises(rr.PeerLostError, match="the disk is full"):
                comm.probe(5)
            comm.leave("rank 1 has left")

    rr.spawn(program, 2, config=config)


def test_a_probe_ends_when_the_processes_of_all_quiet_peers_have_ended(monkeypatch):
    raised = threading.Event()

    def program(comm):
        make_quiet(comm)
        if comm.rank == 0:
            road = comm._engine.endpoint.road
            monkeypatch.setattr(road, "lost", lambda peer: "its process has ended")
            with pytest.raises(rr.PeerLostError, match=r"rank 1 .* its process has ended"):
                comm.probe(5)
            raised.set()
        raised.wait(120)
        comm.leave("no more messages")

    rr.spawn(program, 3, config=BY_MAILBOX)


@ROADS
@given(
    sent=st.lists(st.tuples(st.integers(1, 2), st.integers(0, 2), st.booleans()), max_size=40),
    random=st.randoms(use_true_random=False),
)
@settings(max_examples=20)
def test_any_program_of_probes_and_receives_from_any_rank_gets_each_message_once(
    config, sent, random
):
    """Each message: sender, tag, whether its sender sleeps before."""
    counts = (0, 3, 700)  # by tag: numbers of a message
    tags = [tag for _, tag, _ in sent]
    random.shuffle(tags)
    calls = [(tag, random.choice(["probe", "any", "posted"])) for tag in tags]

    def program(comm):
        if comm.rank:
            mine = [(number, *each[1:]) for number, each in enumerate(sent) if each[0] == comm.rank]
            works = []
            for number, tag, sleeps in mine:
                time.sleep(0.001 * sleeps)
                x = np.full(counts[tag] + 1, number)
                works.append(comm.send(x, 0, tag, async_op=True))
            return [work.wait() for work in works]
        got = []
        for tag, call in calls:
            out = np.zeros(counts[tag] + 1, int)
            if call == "posted":
                comm.recv(out, None, tag, async_op=True).wait()
            else:
                comm.recv(out, comm.probe(tag) if call == "probe" else None, tag)
            assert (out == out[0]).all()
            got.append(int(out[0]))
        return got

    got = rr.spawn(program, 3, config=config)[0]
    for wanted in {each[:2] for each in sent}:
        numbers = [number for number, each in enumerate(sent) if each[:2] == wanted]
        assert [number for number in got if sent[number][:2] == wanted] == numbers
    assert [sent[number][1] for number in got] == tags


messages = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.integers(1, 2),
        st.integers(0, 2),
        st.sampled_from([0, 1, 700, 2049]),
        st.booleans(),
    ),
    max_size=60,
)


@ROADS
@given(messages=messages, seed=st.integers(0, 99), posted=st.floats(0, 1))
@settings(max_examples=40)
def test_any_messages_arrive_in_order(config, messages, seed, posted):
    """Each message: sender, distance to the receiver, tag, count, whether the sender waits."""

    def program(comm):
        mine, received = [], []
        for number, (sender, distance, tag, count, waits) in enumerate(messages):
            receiver = (sender + distance) % 3
            if comm.rank == receiver:
                out = np.empty(count, int)
                received.append((number, comm.recv(out, sender, tag, async_op=True)))
            if comm.rank == sender:
                work = comm.send(np.full(count, number), receiver, tag, async_op=True)
                mine.append(work)
                if waits and number < posted * len(messages):
                    rr.wait_any(mine)
        Random(seed).shuffle(received)
        for number, work in received:
            assert (work.wait() == number).all()
        for work in mine:
            work.wait()

    rr.spawn(program, 3, config=config)
