"""Unix sockets between ranks: losses, foreign bytes, forks, and exceptions at any moment."""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import signal
import socket
import struct
import time
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ringreduce as rr
from ringreduce.transports import sockets, streams
from ringreduce.transports.mesh import SocketMesh, connect
from ringreduce.transports.sockets import SocketTransport
from ringreduce.transports.streams import FrameStream, FrameType
from tests.support.messages import complete, receive, send, until
from tests.support.threads import Exchange, on_threads


def two_ranks(timeout_s=1.0):
    ends = socket.socketpair(socket.AF_UNIX)
    for end in ends:
        end.setblocking(False)
    return (
        SocketTransport(SocketMesh(0, [None, ends[0]], 2, ((0, 1),)), timeout_s),
        SocketTransport(SocketMesh(1, [ends[1], None], 2, ((0, 1),)), timeout_s),
    )


@pytest.fixture
def pair():
    """Two ranks in one thread."""
    ranks = two_ranks()
    yield ranks
    for rank in ranks:
        rank.release()


def files():
    return len(os.listdir("/proc/self/fd"))


# --- losses ---


def test_a_lost_peer_is_named_by_every_wait(pair):
    here, there = pair
    receiver, _ = receive(here, 1, 0)
    there.release()
    for wait in (
        receiver.Test,
        here.poll_control,
        lambda: send(here, 1, 0, b"x"),
        lambda: here.collect(b"x"),
        lambda: here.channel().poll(1),
        lambda: here.channel().post(1, b"x"),
    ):
        with pytest.raises(rr.PeerLostError, match="rank 1 is lost") as caught:
            wait()
        assert caught.value.ranks == (1,)


def test_a_lost_peer_ends_a_send_that_waits_for_room(pair):
    here, there = pair
    sender = send(here, 1, 0, bytes(8 << 20))
    assert not sender.Test()
    there.release()
    with pytest.raises(rr.PeerLostError, match="rank 1 is lost"):
        until(here, sender.Test)


def test_all_that_a_lost_peer_has_sent_arrives_first(pair):
    here, there = pair
    there.send_control(0, b"the last words")
    send(there, 0, 0, b"data")
    there.release()
    receiver, buffer = receive(here, 1, 0)
    complete(here, receiver)
    assert bytes(buffer).startswith(b"data")
    waiting, _ = receive(here, 1, 0)
    assert not waiting.Test()  # nobody has heard the last words yet
    assert here.poll_control() == [(1, b"the last words")]
    with pytest.raises(rr.PeerLostError):
        waiting.Test()


def test_the_last_words_arrive_although_a_message_to_the_peer_is_under_way(pair):
    here, there = pair
    sender = send(here, 1, 0, bytes(8 << 20))
    assert not sender.Test()
    there.send_control(0, b"the last words")
    there._streams[0].connection.close()
    here._streams[1].write()  # finds out that the peer has closed the connection
    assert not sender.Test()
    assert here.poll_control() == [(1, b"the last words")]
    with pytest.raises(rr.PeerLostError):
        sender.Test()


def test_control_messages_to_a_lost_peer_are_dropped(pair):
    here, there = pair
    there.release()
    for _ in range(3):
        here.send_control(1, b"x")
    assert here.control_sent([1])


def test_a_peer_that_closes_is_not_lost():
    exchange = Exchange(3)

    def run(rank):
        transport = SocketTransport(connect(exchange.of(rank), None, None, 5.0), 5.0)
        if rank == 0:
            time.sleep(0.2)
            assert transport.poll_control() == []
        transport.close()

    before = files()
    on_threads(run, 3)
    assert files() == before


def test_a_close_without_the_others_names_them():
    pair = two_ranks(timeout_s=0.1)
    with pytest.raises(rr.PeerTimeoutError, match=r"close: waited 0.1 s .* not there: 1") as caught:
        pair[0].close()
    assert caught.value.ranks == (1,)


def test_a_collection_without_the_others_names_them():
    pair = two_ranks(timeout_s=0.1)
    with pytest.raises(rr.PeerTimeoutError, match=r"init: waited 0.1 s .* not there: 1"):
        pair[0].collect(b"x")


# --- small messages ---


@pytest.mark.parametrize("nbytes", [0, 8, 4096])
def test_a_small_message_takes_one_call_of_the_kernel_on_each_side(pair, nbytes):
    here, there = pair
    receiver, buffer = receive(here, 1, 0, nbytes)
    make, calls = FrameStream._call, []

    def count(stream, note, function, *args):
        calls.append((stream.peer, function.__name__))
        make(stream, note, function, *args)

    with mock.patch.object(FrameStream, "_call", count):
        assert send(there, 0, 0, b"x" * nbytes).Test()
        assert receiver.Test()
    assert calls == [(0, "send"), (1, "recvmsg_into")]
    assert bytes(buffer[:nbytes]) == b"x" * nbytes


@settings(max_examples=100)
@given(
    sent=st.lists(
        st.tuples(st.integers(0, 2), st.sampled_from([0, 1, 13, 4096, 4097, 9000, 70000]))
    ),
    cuts=st.lists(st.integers(1, 20_000)),
)
def test_messages_arrive_whole_wherever_the_stream_is_cut(sent, cuts):
    """The kernel may pass any part of the stream at a time."""
    here, there = two_ranks()
    ours, theirs = socket.socketpair()
    stream = here._streams[1]
    stream.connection.close()
    stream.connection = ours
    ours.setblocking(False)
    bodies = [bytes([index % 251]) * nbytes for index, (_, nbytes) in enumerate(sent)]
    whole = b"".join(
        struct.pack("<BIQ", FrameType.DATA, flow, len(body)) + body
        for (flow, _), body in zip(sent, bodies, strict=True)
    )
    early = len(sent) // 2
    receives = [receive(here, 1, flow, nbytes) for flow, nbytes in sent[:early]]
    cut = itertools.cycle(cuts or [1 << 16])
    while whole:
        part = whole[: next(cut)]
        theirs.sendall(part)
        whole = whole[len(part) :]
        while select.select([ours], (), (), 0)[0]:
            stream.read()
    receives += [receive(here, 1, flow, nbytes) for flow, nbytes in sent[early:]]
    for (receiver, buffer), body in zip(receives, bodies, strict=True):
        assert receiver.complete
        assert bytes(buffer[: len(body)]) == body
    theirs.close()
    here.release()
    there.release()


# --- bytes of something else ---


@pytest.mark.parametrize(
    "frame",
    [
        struct.pack("<BIQ", 99, 0, 0),
        struct.pack("<BIQ", FrameType.DATA, 0, 1 << 62) + b"x",
    ],
)
def test_what_is_no_frame_or_too_long_ends_the_connection(pair, frame):
    here, there = pair
    receive(here, 1, 0)
    there._streams[0].connection.send(frame)
    with pytest.raises(ValueError, match=r"99|a message of 4611686018427387904 bytes came"):
        until(here, lambda: here.poll_control())
    with pytest.raises(rr.PeerLostError):
        here.poll_control()
    with pytest.raises(rr.PeerLostError):
        until(there, lambda: there.poll_control())


def test_a_length_alone_takes_no_memory(pair):
    here, there = pair
    there._streams[0].connection.send(struct.pack("<BIQ", FrameType.CONTROL, 0, 1 << 62) + b"x")
    for _ in range(10):
        assert here.poll_control() == []


def test_many_descriptors_are_watched_without_select(pair, monkeypatch):
    monkeypatch.setattr(streams, "_SELECTABLE", 0)
    here, there = pair
    sender = send(there, 0, 0, b"x")
    receiver, _ = receive(here, 1, 0)
    complete(here, receiver)
    assert sender.Test()


# --- forks and signals ---


def test_a_forked_child_does_not_keep_a_lost_rank_alive(pair):
    here, there = pair
    child = os.fork()
    if child == 0:
        for rank in pair:
            rank.forked()
        time.sleep(30)
        os._exit(0)
    try:
        send(there, 0, 0, b"x")  # the parent's connections go on
        receiver, _ = receive(here, 1, 0)
        complete(here, receiver)
        there.release()
        with pytest.raises(rr.PeerLostError):
            until(here, lambda: here.poll_control())
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


class HandlerError(Exception):
    """Of a signal's handler."""


@pytest.mark.parametrize("nbytes", [0, 8, 300_000])
def test_an_exception_right_after_a_call_of_the_kernel_does_no_harm(pair, nbytes):
    here, there = pair
    data, make, calls = os.urandom(nbytes), FrameStream._call, []

    def raise_often(stream, note, function, *args):
        make(stream, note, function, *args)
        calls.append(function)
        if len(calls) % 2:
            raise HandlerError

    with mock.patch.object(FrameStream, "_call", raise_often):
        with contextlib.suppress(HandlerError):
            send(there, 0, 0, data)
        for poll in [here.poll_control, there.poll_control] * 40:
            with contextlib.suppress(HandlerError):
                poll()
    assert len(calls) >= 2
    receiver, buffer = receive(here, 1, 0, nbytes)
    until(here, lambda: there.poll_control() or receiver.Test())
    assert bytes(buffer[:nbytes]) == data


def crosses(here, there, flow, data):
    """Send data from one rank to the other; return whether all of it has arrived."""
    send(there, 0, flow, data)
    receiver, buffer = receive(here, 1, flow, len(data))
    until(here, lambda: there.poll_control() or receiver.Test())
    return buffer == data


def test_an_exception_of_a_signal_ends_the_connection_or_leaves_it_whole():
    """Wherever it comes: no byte is lost unnoticed."""
    ends = []

    def interrupt(*_):
        raise HandlerError

    before = signal.signal(signal.SIGALRM, interrupt)
    data = bytes(range(256)) * 400
    here, there = two_ranks()
    try:
        for turn in range(300):
            with contextlib.suppress(HandlerError, rr.PeerLostError):
                signal.setitimer(signal.ITIMER_REAL, 1e-5 + turn * 2e-6)
                crosses(here, there, turn, data)
                time.sleep(0.01)
            try:
                assert crosses(here, there, 1000 + turn, data)
            except rr.PeerLostError:
                ends.append(turn)
                here, there = two_ranks()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert len(ends) < 300


# --- splits, shared memory ---


def test_splits_in_any_mixture_are_connected():
    exchange = Exchange(5)

    def run(rank):
        transport = SocketTransport(connect(exchange.of(rank), None, None, 5.0), 5.0)
        found = []
        for number, groups in enumerate([[(0, 1, 2, 3, 4)], [(1, 0), (2, 4, 3)], [(4, 0), (1,)]]):
            for members in groups:
                if rank in members:
                    part = transport.split(members, number, 5.0)
                    found.append((part.rank, part.collect(b"%d" % rank)))
                    part.close()
        transport.close()
        return found

    assert on_threads(run, 5)[4] == [(4, b"01234"), (1, b"243"), (0, b"40")]


@pytest.mark.parametrize(
    ("memory_files", "way"), [(True, "over shared memory"), (False, "over Unix sockets")]
)
def test_ranks_that_may_not_look_into_proc(monkeypatch, memory_files, way):
    """They send the descriptor of a memory file, or messages where there are no memory files."""
    monkeypatch.setattr("ringreduce.shm.segments.map_files", lambda *_: None)
    if not memory_files:
        monkeypatch.setattr(sockets, "_new_file", lambda nbytes: None)
    exchange = Exchange(3)

    def run(rank):
        with rr.init(rendezvous=exchange.of(rank)) as comm:
            assert way in repr(comm)
            return comm.all_reduce(rank).item()

    assert on_threads(run, 3) == [3] * 3


def test_a_rank_cannot_go_on_after_a_loss(pair):
    with pytest.raises(NotImplementedError, match=r"shrink: .* use Open MPI 5"):
        pair[0].shrunk(1.0)
