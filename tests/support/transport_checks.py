"""The contract of a transport, one check a sentence; every rank of a group runs each check.

The same functions hold every transport to it, on threads and under MPI.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from itertools import product

import numpy as np

from ringreduce.transports.base import Transport
from tests.support.messages import (
    DEADLINE_S,
    Ear,
    complete,
    freed,
    neighbours,
    peers_of,
    receive,
    received,
    send,
    text,
    until,
    withdrawn,
)

LARGE = 8 << 20


# --- a group of any size ---


def ranks_and_size_are_those_of_the_group(transport: Transport) -> None:
    assert 0 <= transport.rank < transport.size
    assert transport.name
    assert transport.yielding.spins >= 0


def nodes_hold_every_rank_once_in_the_order_of_their_lowest(transport: Transport) -> None:
    nodes = transport.nodes()
    assert sorted(rank for node in nodes for rank in node) == list(range(transport.size))
    assert all(list(node) == sorted(node) for node in nodes)
    assert [node[0] for node in nodes] == sorted(node[0] for node in nodes)


def no_control_message_arrives_before_one_was_sent(transport: Transport) -> None:
    assert transport.poll_control() == []


def pausing_ends(transport: Transport) -> None:
    for idle in (1, 100, 10_000):
        transport.pause(idle)


def errors_of_others_stay_what_they_are(transport: Transport) -> None:
    error = KeyError("mine")
    assert transport.translate(error) is error


# --- before the first call ---


def collect_returns_the_bytes_of_all_ranks_in_rank_order(transport: Transport) -> None:
    for turn in range(3):
        everybody = transport.collect(text(transport.rank, turn))
        assert everybody == b"".join(text(rank, turn) for rank in range(transport.size))


def all_ranks_map_the_memory_that_is_allocated_for_each(transport: Transport) -> None:
    found = transport.allocate_shared(1 << 12)
    if len(transport.nodes()) > 1:
        assert found is None
        return
    assert found is not None
    segments = [np.frombuffer(each, np.uint8) for each in found]
    segments[transport.rank][:] = transport.rank + 1
    transport.collect(b"written")
    assert [segment.size for segment in segments] == [1 << 12] * transport.size
    for rank, segment in enumerate(segments):
        assert (segment == rank + 1).all()
    transport.collect(b"read")


# --- data between neighbours ---


def messages_of_one_flow_arrive_in_order(transport: Transport) -> None:
    left, right = neighbours(transport)
    sends = [send(transport, right, 3, text("x" * i, i)) for i in range(20)]
    came = [received(transport, left, 3) for _ in range(20)]
    freed(transport, *sends)
    assert came == [text("x" * i, i) for i in range(20)]


def receives_posted_together_fill_in_order(transport: Transport) -> None:
    left, right = neighbours(transport)
    posted = [receive(transport, left, 1) for _ in range(8)]
    sends = [send(transport, right, 1, text(i)) for i in range(8)]
    freed(transport, *sends, *(request for request, _ in posted))
    assert [buffer.rstrip(b"\0") for _, buffer in posted] == [text(i) for i in range(8)]


def flows_do_not_wait_for_each_other(transport: Transport) -> None:
    left, right = neighbours(transport)
    sends = [send(transport, right, flow, text("flow", flow)) for flow in range(4)]
    for flow in (3, 1, 2, 0):
        assert received(transport, left, flow) == text("flow", flow)
    freed(transport, *sends)


def what_one_peer_sends_does_not_stand_in_for_anothers(transport: Transport) -> None:
    sends = [send(transport, p, 0, text(transport.rank, "to", p)) for p in peers_of(transport)]
    for peer in reversed(peers_of(transport)):
        assert received(transport, peer, 0) == text(peer, "to", transport.rank)
    freed(transport, *sends)


def requests_start_again_and_again(transport: Transport) -> None:
    left, right = neighbours(transport)
    out, into = np.zeros(100, np.int64), np.zeros(100, np.int64)
    sender = transport.sender(right, 0, memoryview(out).cast("B"))
    receiver = transport.receiver(left, 0, memoryview(into).cast("B"))
    for turn in range(200):
        out[:] = turn * transport.size + transport.rank
        receiver.Start()
        sender.Start()
        complete(transport, receiver, sender)
        assert (into == turn * transport.size + left).all()
    freed(transport, sender, receiver)


def requests_work_in_the_memory_they_were_given(transport: Transport) -> None:
    left, right = neighbours(transport)
    memory = np.zeros(30, np.uint8)
    memory[:10] = transport.rank + 1
    view = memoryview(memory)
    receiver = transport.receiver(left, 0, view[12:22])
    sender = transport.sender(right, 0, view[:10])
    receiver.Start()
    sender.Start()
    freed(transport, receiver, sender)
    assert memory.tolist() == [transport.rank + 1] * 10 + [0] * 2 + [left + 1] * 10 + [0] * 8


def messages_without_bytes_arrive(transport: Transport) -> None:
    left, right = neighbours(transport)
    for _ in range(3):
        sender = send(transport, right, 0, b"")
        receiver, _ = receive(transport, left, 0, room=0)
        freed(transport, sender, receiver)


def a_message_may_be_shorter_than_its_buffer(transport: Transport) -> None:
    left, right = neighbours(transport)
    sender = send(transport, right, 0, b"short")
    buffer = bytearray(b"-" * 5000)
    receiver = transport.receiver(left, 0, memoryview(buffer))
    receiver.Start()
    freed(transport, sender, receiver)
    assert buffer == b"short" + b"-" * 4995


def large_messages_cross_in_both_directions_at_once(transport: Transport) -> None:
    rng = np.random.default_rng(3)
    data = rng.integers(0, 255, LARGE, np.uint8)
    receives, sends = {}, []
    for peer in peers_of(transport):
        receives[peer] = receive(transport, peer, 0, room=LARGE)
    for peer in peers_of(transport):
        sends.append(transport.sender(peer, 0, memoryview(data + np.uint8(transport.rank))))
        sends[-1].Start()
    freed(transport, *sends, *(request for request, _ in receives.values()))
    for peer, (_, buffer) in receives.items():
        assert np.array_equal(np.frombuffer(buffer, np.uint8), data + np.uint8(peer))


def tests_before_the_start_say_complete(transport: Transport) -> None:
    left, right = neighbours(transport)
    sender = transport.sender(right, 0, memoryview(text("never")))
    receiver = transport.receiver(left, 0, memoryview(bytearray(8)))
    assert sender.Test()
    assert receiver.Test()
    sender.Free()
    receiver.Free()


def tests_after_the_end_still_say_complete(transport: Transport) -> None:
    left, right = neighbours(transport)
    sender = send(transport, right, 0, b"once")
    receiver, _ = receive(transport, left, 0)
    complete(transport, sender, receiver)
    assert sender.Test()
    assert receiver.Test()
    freed(transport, sender, receiver)


def a_receive_is_not_complete_before_its_message(transport: Transport) -> None:
    left, right = neighbours(transport)
    ear = Ear(transport)
    receiver, buffer = receive(transport, left, 0)
    for _ in range(50):
        assert not receiver.Test()
    ear.meet()
    sender = send(transport, right, 0, b"now")
    freed(transport, sender, receiver)
    assert buffer.startswith(b"now")


def a_send_that_waits_completes_only_with_its_receive(transport: Transport) -> None:
    left, right = neighbours(transport)
    ear = Ear(transport)
    sender = send(transport, right, 0, b"patient")
    for _ in range(50):
        assert not sender.Test()
    ear.meet()
    assert received(transport, left, 0) == b"patient"
    freed(transport, sender)


# --- taking back ---


def a_receive_is_taken_back_when_nothing_came(transport: Transport) -> None:
    left, right = neighbours(transport)
    ear = Ear(transport)
    receiver, buffer = receive(transport, left, 0)
    assert withdrawn(transport, receiver)
    ear.meet()
    receiver.Start()
    sender = send(transport, right, 0, b"later")
    freed(transport, receiver, sender)
    assert buffer.startswith(b"later")


def a_receive_whose_message_came_is_not_taken_back(transport: Transport) -> None:
    left, right = neighbours(transport)
    sender = send(transport, right, 0, b"came")
    receiver, buffer = receive(transport, left, 0)
    complete(transport, receiver)
    assert not withdrawn(transport, receiver)
    assert buffer.startswith(b"came")
    freed(transport, sender, receiver)


def no_message_is_lost_or_doubled_when_taking_back_races(transport: Transport) -> None:
    left, right = neighbours(transport)
    ear = Ear(transport)
    for turn in range(40):
        receiver, buffer = receive(transport, left, turn)
        sender = send(transport, right, turn, text("turn", turn))
        if withdrawn(transport, receiver):
            until(transport, lambda: transport.discard(left))
        else:
            assert buffer.rstrip(b"\0") == text("turn", turn)
        freed(transport, sender, receiver)
        ear.meet()
        assert not transport.discard(left)
        ear.meet()


def discarding_takes_the_earliest_message_of_any_flow(transport: Transport) -> None:
    left, right = neighbours(transport)
    ear = Ear(transport)
    assert not transport.discard(left)
    ear.meet()
    flows = (5, 0, 5, 2)
    sends = [send(transport, right, flow, text(i)) for i, flow in enumerate(flows)]
    for _ in range(2):
        until(transport, lambda: transport.discard(left))
    assert received(transport, left, 5) == b"2"
    assert received(transport, left, 2) == b"3"
    freed(transport, *sends)
    ear.meet()
    assert not transport.discard(left)


def discarding_leaves_the_messages_of_other_peers(transport: Transport) -> None:
    ear = Ear(transport)
    sends = [
        send(transport, peer, 0, text(i, "from", transport.rank))
        for i in range(2)
        for peer in peers_of(transport)
    ]
    ear.meet()
    for peer in reversed(peers_of(transport)):
        until(transport, lambda peer=peer: transport.discard(peer))
        assert received(transport, peer, 0) == text(1, "from", peer)
        assert not transport.discard(peer)
    freed(transport, *sends)


def large_messages_can_be_discarded(transport: Transport) -> None:
    left, right = neighbours(transport)
    sends = [send(transport, right, 0, bytes(1 << 20)) for _ in range(3)]
    sends.append(send(transport, right, 0, b"after"))
    for _ in range(3):
        until(transport, lambda: transport.discard(left))
    assert received(transport, left, 0) == b"after"
    freed(transport, *sends)


# --- control messages ---


def control_messages_arrive_once_and_in_order_from_every_peer(transport: Transport) -> None:
    ear = Ear(transport)
    for number in range(200):
        for peer in peers_of(transport):
            transport.send_control(peer, text(transport.rank, number))
    for peer in peers_of(transport):
        for number in range(200):
            assert ear.next_from(peer) == text(peer, number)
    ear.meet()
    assert transport.poll_control() == []


def long_control_messages_arrive_whole_and_in_order(transport: Transport) -> None:
    ear = Ear(transport)
    lengths = (3, 100_000, 0, 70_000, 1)
    for length in lengths:
        for peer in peers_of(transport):
            transport.send_control(peer, bytes([transport.rank]) * length)
    for peer in peers_of(transport):
        for length in lengths:
            assert ear.next_from(peer) == bytes([peer]) * length


def control_messages_are_sent_once_they_have_arrived(transport: Transport) -> None:
    peers = peers_of(transport)
    assert transport.control_sent(range(transport.size))
    ear = Ear(transport)
    for peer in peers:
        transport.send_control(peer, bytes(100_000))
    for peer in peers:
        assert ear.next_from(peer) == bytes(100_000)
    until(transport, lambda: transport.control_sent(peers))


def control_messages_pass_data_that_waits(transport: Transport) -> None:
    left, right = neighbours(transport)
    ear = Ear(transport)
    sender = send(transport, right, 0, b"data")
    ear.meet()
    assert received(transport, left, 0) == b"data"
    freed(transport, sender)


ALONE = [
    ranks_and_size_are_those_of_the_group,
    nodes_hold_every_rank_once_in_the_order_of_their_lowest,
    no_control_message_arrives_before_one_was_sent,
    pausing_ends,
    errors_of_others_stay_what_they_are,
    collect_returns_the_bytes_of_all_ranks_in_rank_order,
    all_ranks_map_the_memory_that_is_allocated_for_each,
]
TOGETHER = [
    messages_of_one_flow_arrive_in_order,
    receives_posted_together_fill_in_order,
    flows_do_not_wait_for_each_other,
    what_one_peer_sends_does_not_stand_in_for_anothers,
    requests_start_again_and_again,
    requests_work_in_the_memory_they_were_given,
    messages_without_bytes_arrive,
    a_message_may_be_shorter_than_its_buffer,
    large_messages_cross_in_both_directions_at_once,
    tests_before_the_start_say_complete,
    tests_after_the_end_still_say_complete,
    a_receive_is_not_complete_before_its_message,
    a_receive_is_taken_back_when_nothing_came,
    a_receive_whose_message_came_is_not_taken_back,
    no_message_is_lost_or_doubled_when_taking_back_races,
    discarding_takes_the_earliest_message_of_any_flow,
    discarding_leaves_the_messages_of_other_peers,
    large_messages_can_be_discarded,
    control_messages_arrive_once_and_in_order_from_every_peer,
    long_control_messages_arrive_whole_and_in_order,
    control_messages_are_sent_once_they_have_arrived,
    control_messages_pass_data_that_waits,
]
STRICT = [a_send_that_waits_completes_only_with_its_receive]
"""For transports whose sends wait for their receives."""

CHECKS: list[tuple[Callable[[Transport], None], int]] = [
    (check, ranks)
    for checks, sizes in ((ALONE, (1, 2, 3)), (TOGETHER, (2, 3)), (STRICT, (2, 3)))
    for check in checks
    for ranks in sizes
]
"""Each check with each number of ranks that it is made with."""


_ENOUGH = 3
"""After so many checks have failed the others are not made: each may wait for its deadline."""


def over_mpi() -> dict[str, str]:
    """Return the outcome of every check on this rank of 3, ``"ok"`` or a traceback.

    With standard sends, and then with synchronous ones.
    """
    from mpi4py import MPI

    from ringreduce.transports.mpi import MpiTransport

    world, outcomes, failed = MPI.COMM_WORLD, {}, 0
    for sends, (check, ranks) in product(("standard", "synchronous"), CHECKS):
        outcome = "not made"
        if failed < _ENOUGH and (sends == "synchronous" or check not in STRICT):
            group = world.Split(world.rank < ranks)
            if world.rank < ranks:
                transport = MpiTransport(group, DEADLINE_S, sends == "synchronous")
                outcome = _made(check, transport)
                everywhere = group.allgather(outcome)
                if set(everywhere) == {"ok"}:
                    transport.close()
            group.Free()
        outcomes[f"{sends} {name_of(check, ranks)}"] = outcome
        failed += any(words.startswith("Traceback") for words in world.allgather(outcome))
    return outcomes


def _made(check: Callable[[Transport], None], transport: Transport) -> str:
    try:
        check(transport)
    except Exception:
        return traceback.format_exc()
    return "ok"


def name_of(check: Callable[[Transport], None], ranks: int) -> str:
    return f"{check.__name__} {ranks}"
