"""The contract of a transport, one check a sentence; every rank of a group runs each check.

The same functions hold every transport to it, on threads and under MPI.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy as np

from ringreduce.transports.base import Request, Transport

DEADLINE_S = 20.0
LARGE = 8 << 20


# --- what checks are made of ---


def until(transport: Transport, ready: Callable[[], Any]) -> None:
    """Poll until something is so; an AssertionError after the deadline."""
    end, idle = time.monotonic() + DEADLINE_S, 0
    while not ready():
        idle += 1
        assert time.monotonic() < end, "nothing came in time"
        transport.pause(idle)


def complete(transport: Transport, *requests: Request) -> None:
    until(transport, lambda: all(request.Test() for request in requests))


class Ear:
    """What has been heard from each peer and not been taken yet."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.heard: dict[int, deque[bytes]] = defaultdict(deque)

    def next_from(self, peer: int) -> bytes:
        def listen() -> bool:
            for source, message in self.transport.hear():
                self.heard[source].append(message)
            return bool(self.heard[peer])

        until(self.transport, listen)
        return self.heard[peer].popleft()

    def meet(self) -> None:
        """Wait until every rank is here."""
        for peer in peers_of(self.transport):
            self.transport.tell(peer, b"here")
        for peer in peers_of(self.transport):
            assert self.next_from(peer) == b"here"


def peers_of(transport: Transport) -> list[int]:
    return [peer for peer in range(transport.size) if peer != transport.rank]


def neighbours(transport: Transport) -> tuple[int, int]:
    return (transport.rank - 1) % transport.size, (transport.rank + 1) % transport.size


def text(*words: Any) -> bytearray:
    return bytearray(" ".join(map(str, words)).encode())


def send(transport: Transport, peer: int, flow: int, data: bytes | bytearray) -> Request:
    request = transport.sender(peer, flow, memoryview(bytearray(data)))
    request.Start()
    return request


def receive(
    transport: Transport, peer: int, flow: int, room: int = 64
) -> tuple[Request, bytearray]:
    buffer = bytearray(room)
    request = transport.receiver(peer, flow, memoryview(buffer))
    request.Start()
    return request, buffer


def received(transport: Transport, peer: int, flow: int, room: int = 64) -> bytes:
    """The next message, without the zeros that its buffer had behind it."""
    request, buffer = receive(transport, peer, flow, room)
    complete(transport, request)
    request.Free()
    return bytes(buffer).rstrip(b"\0")


def freed(transport: Transport, *requests: Request) -> None:
    complete(transport, *requests)
    for request in requests:
        request.Free()


# --- a group of any size ---


def ranks_and_size_are_those_of_the_group(transport: Transport) -> None:
    assert 0 <= transport.rank < transport.size
    assert transport.name
    assert transport.spins >= 0


def nodes_hold_every_rank_once_in_the_order_of_their_lowest(transport: Transport) -> None:
    nodes = transport.nodes()
    assert sorted(rank for node in nodes for rank in node) == list(range(transport.size))
    assert all(list(node) == sorted(node) for node in nodes)
    assert [node[0] for node in nodes] == sorted(node[0] for node in nodes)


def nothing_is_heard_before_anything_was_told(transport: Transport) -> None:
    assert transport.hear() == []


def pausing_ends_soon(transport: Transport) -> None:
    start = time.monotonic()
    for idle in (1, 100, 10_000):
        transport.pause(idle)
    assert time.monotonic() - start < 1


def errors_of_others_stay_what_they_are(transport: Transport) -> None:
    error = KeyError("mine")
    assert transport.translate(error) is error


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
    assert _withdrawn(transport, receiver)
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
    assert not _withdrawn(transport, receiver)
    assert buffer.startswith(b"came")
    freed(transport, sender, receiver)


def no_message_is_lost_or_doubled_when_taking_back_races(transport: Transport) -> None:
    left, right = neighbours(transport)
    ear = Ear(transport)
    for turn in range(40):
        receiver, buffer = receive(transport, left, turn)
        sender = send(transport, right, turn, text("turn", turn))
        if _withdrawn(transport, receiver):
            until(transport, lambda: transport.discard(left))
        else:
            assert buffer.rstrip(b"\0") == text("turn", turn)
        freed(transport, sender, receiver)
        ear.meet()
        assert not transport.discard(left)
        ear.meet()


def _withdrawn(transport: Transport, receiver: Request) -> bool:
    outcomes: list[bool] = []

    def ask() -> bool:
        outcome = transport.withdraw(receiver)
        outcomes.extend([] if outcome is None else [outcome])
        return bool(outcomes)

    until(transport, ask)
    return outcomes[0]


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
            transport.tell(peer, text(transport.rank, number))
    for peer in peers_of(transport):
        for number in range(200):
            assert ear.next_from(peer) == text(peer, number)
    ear.meet()
    assert transport.hear() == []


def long_control_messages_arrive_whole_and_in_order(transport: Transport) -> None:
    ear = Ear(transport)
    lengths = (3, 100_000, 0, 70_000, 1)
    for length in lengths:
        for peer in peers_of(transport):
            transport.tell(peer, bytes([transport.rank]) * length)
    for peer in peers_of(transport):
        for length in lengths:
            assert ear.next_from(peer) == bytes([peer]) * length


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
    nothing_is_heard_before_anything_was_told,
    pausing_ends_soon,
    errors_of_others_stay_what_they_are,
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
    large_messages_can_be_discarded,
    control_messages_arrive_once_and_in_order_from_every_peer,
    long_control_messages_arrive_whole_and_in_order,
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


def over_mpi(sends: str) -> dict[str, str]:
    """On each of 3 ranks of an MPI job: what every check came to, ``"ok"`` or a traceback."""
    import traceback

    from mpi4py import MPI

    from ringreduce.transports.mpi import MpiTransport

    world, outcomes = MPI.COMM_WORLD, {}
    for check, ranks in CHECKS:
        outcome = ""
        if world.rank < ranks and (sends == "synchronous" or check not in STRICT):
            sub = world.Create_group(world.Get_group().Incl(range(ranks)))
            transport = MpiTransport(sub, DEADLINE_S, sends == "synchronous")
            try:
                check(transport)
                outcome = "ok"
            except Exception:
                outcome = traceback.format_exc()
            everywhere = sub.allgather(outcome)
            transport.close(broken=set(everywhere) != {"ok"})
            sub.Free()
        outcomes[name_of(check, ranks)] = outcome
        world.Barrier()
    return outcomes


def name_of(check: Callable[[Transport], None], ranks: int) -> str:
    return f"{check.__name__} {ranks}"
