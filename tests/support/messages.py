"""Send, receive and withdraw messages in checks of a transport, with a deadline."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

from ringreduce.transports.base import Request, Transport

DEADLINE_S = 300.0


def until(transport: Transport, ready: Callable[[], Any]) -> None:
    """Poll until `ready`; raise AssertionError after the deadline."""
    end, idle = time.monotonic() + DEADLINE_S, 0
    while not ready():
        idle += 1
        assert time.monotonic() < end, "nothing came in time"
        transport.pause(idle)


def complete(transport: Transport, *requests: Request) -> None:
    until(transport, lambda: all(request.Test() for request in requests))


class Ear:
    """The control messages of each peer that have not been taken yet."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.heard: dict[int, deque[bytes]] = defaultdict(deque)

    def next_from(self, peer: int) -> bytes:
        def listen() -> bool:
            for source, message in self.transport.poll_control():
                self.heard[source].append(message)
            return bool(self.heard[peer])

        until(self.transport, listen)
        return self.heard[peer].popleft()

    def meet(self) -> None:
        """Wait until every rank is here."""
        for peer in peers_of(self.transport):
            self.transport.send_control(peer, b"here")
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


def withdrawn(transport: Transport, receiver: Request) -> bool:
    """Take a receive back; whether that was before a message came."""
    outcomes: list[bool] = []

    def ask() -> bool:
        outcome = transport.withdraw(receiver)
        outcomes.extend([] if outcome is None else [outcome])
        return bool(outcomes)

    until(transport, ask)
    return outcomes[0]
