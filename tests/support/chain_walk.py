"""Walk a chain of servers and two workers through every order of messages and crashes.

The decisions are those of `ringreduce.parallel.store_replica`.  Messages of one sender and receiver
arrive in order.  Those of a crashed server may arrive until the receiver notices the crash; the
rest is lost.  In each state the walk proves that

- no server has a push twice,
- what a server has begins with what its successor has, in the same order,
- every living server has each push that is acknowledged, and each that a worker can read,
- somebody can go on, until all living servers have all pushes.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from ringreduce.parallel.store_replica import Chain, chain_of

WORKERS = ("v", "w")
MISTAKES = {
    "acknowledged by the head": "an acknowledged push is lost",
    "no test for doubles": "has a push twice",
    "read from the middle": "a push that was read may be lost",
    "resent in another order": "has another order",
}
"""Mistake -> what the walk says of it."""


class WalkError(AssertionError):
    """A state that must not be."""


def check(holds: bool, text: str) -> None:
    if not holds:
        raise WalkError(text)


@dataclass
class Server:
    chain: Chain
    pushes: tuple[tuple[str, int], ...] = ()
    """Worker and id of the pushes that it has applied."""
    asked: frozenset[str] = frozenset()
    """The workers that wait until it has their push."""
    lost: frozenset[int] = frozenset()

    def copy(self) -> Server:
        chain = copy.copy(self.chain)
        chain._living, chain._last = list(chain._living), dict(chain._last)
        return replace(self, chain=chain)


@dataclass(frozen=True)
class Worker:
    made: int = 0
    lost: frozenset[int] = frozenset()
    head: int | None = None
    tail: int | None = None
    """Where its push went, and the server whose answer it waits for; None: it waits for none."""
    is_again: bool = False
    """Whether it sends its push again when that answer has come."""


@dataclass
class World:
    """A state of the walk."""

    replicas: int
    crashes: int
    mistake: str = ""
    pushes: int = 2
    """The pushes of each worker."""
    servers: dict[int, Server] = field(default_factory=dict)
    """The living ones."""
    workers: dict[str, Worker] = field(default_factory=dict)
    channels: dict[tuple[Any, Any], tuple[Any, ...]] = field(default_factory=dict)
    """Sender and receiver -> messages under way."""

    def __post_init__(self) -> None:
        if not self.servers:
            size = self.replicas
            self.servers = {n: Server(Chain(n, 0, size, size)) for n in range(size)}
            self.workers = dict.fromkeys(WORKERS, Worker())

    def states(self) -> Iterator[World]:
        """Make every action in every state that can be reached."""
        seen, rest = set(), [self]
        while rest:
            world = rest.pop()
            yield world
            for name, *facts in world.actions():
                servers = {n: server.copy() for n, server in world.servers.items()}
                kept = {"workers": dict(world.workers), "channels": dict(world.channels)}
                after = replace(world, servers=servers, **kept)
                getattr(after, f"_{name}")(*facts)
                after._check()
                key = after._key()
                if key not in seen:
                    seen.add(key)
                    rest.append(after)

    def _key(self) -> Any:
        servers = [
            (n, s.pushes, s.asked, s.lost, *s.chain._last.items()) for n, s in self.servers.items()
        ]
        channels = frozenset(each for each in self.channels.items() if each[1])
        return tuple(servers), *self.workers.values(), channels

    def actions(self) -> list[tuple[Any, ...]]:
        """Return what may happen.  If nothing but crashes may, all must be done."""
        actions: list[tuple[Any, ...]] = []
        for name, worker in self.workers.items():
            if worker.tail is None:
                actions += [("push", name)] if worker.made < self.pushes else []
            else:
                for server in {worker.head, worker.tail} - self.servers.keys() - worker.lost:
                    actions.append(("miss", name, server))
        actions += [("receive", *pair) for pair, sent in self.channels.items() if sent]
        for number, server in self.servers.items():
            dead = set(range(self.replicas)) - self.servers.keys() - server.lost
            actions += [("lose", number, each) for each in dead]
        if not actions:
            self._check_end()
        return actions + [("crash", number) for number in self.servers if self.crashes]

    # --- actions ---

    def _push(self, name: str) -> None:
        self.workers[name] = replace(self.workers[name], made=self.workers[name].made + 1)
        self._send_push(name)

    def _send_push(self, name: str) -> None:
        worker = self.workers[name]
        chain = chain_of(0, self.replicas, self.replicas, worker.lost)
        tail = chain[0] if self.mistake == "acknowledged by the head" else chain[-1]
        self._send(name, chain[0], "push", name, worker.made, worker.lost)
        self._send(name, tail, "has", name, worker.made, worker.lost)
        self.workers[name] = replace(worker, head=chain[0], tail=tail, is_again=False)

    def _miss(self, name: str, server: int) -> None:
        """A worker notices that a server has crashed to which it has sent."""
        worker = self.workers[name]
        self.workers[name] = replace(worker, lost=worker.lost | {server}, is_again=True)
        self.channels.pop((server, name), None)
        if worker.tail == server:
            self._send_push(name)

    def _lose(self, number: int, lost: int) -> None:
        """A server notices that another one has crashed."""
        server = self.servers[number]
        server.lost |= {lost}
        self.channels.pop((lost, number), None)
        for name in server.asked:
            self._again(number, name)
        again = server.chain.lose(lost)
        for name in again[::-1] if self.mistake == "resent in another order" else again:
            self._pass_on(number, name, server.chain._last[name])

    def _receive(self, sender: Any, receiver: Any) -> None:
        (kind, *facts), *later = self.channels[sender, receiver]
        self.channels[sender, receiver] = tuple(later)
        if receiver in self.workers:
            self._hear(receiver, kind, *facts)
            return
        server, (name, id, lost) = self.servers[receiver], facts
        if kind == "has":
            server.asked |= {name}
            if server.lost - lost:
                self._again(receiver, name)
        elif server.chain.push(name, id) or self.mistake == "no test for doubles":
            server.pushes += ((name, id),)
            self._pass_on(receiver, name, id)
        if name in server.asked and server.chain.has(name, self.workers[name].made):
            server.asked -= {name}
            self._send(receiver, name, "done", frozenset())

    def _again(self, number: int, name: str) -> None:
        """Tell a worker to send its push again."""
        server = self.servers[number]
        server.asked -= {name}
        self._send(number, name, "again", server.lost)

    def _pass_on(self, number: int, name: str, id: int) -> None:
        server = self.servers[number]
        if server.chain.successor is not None:
            self._send(number, server.chain.successor, "push", name, id, frozenset())

    def _hear(self, name: str, kind: str, lost: frozenset[int]) -> None:
        """A worker hears whether its push is acknowledged."""
        worker = replace(self.workers[name], lost=self.workers[name].lost | lost)
        self.workers[name] = worker
        if kind == "again" or worker.is_again:
            self._send_push(name)
        else:
            self.workers[name] = replace(worker, head=None, tail=None)

    def _crash(self, number: int) -> None:
        del self.servers[number]
        self.crashes -= 1
        for pair in [pair for pair in self.channels if pair[1] == number]:
            del self.channels[pair]

    def _send(self, sender: Any, receiver: Any, *message: Any) -> None:
        if receiver in self.servers or receiver in self.workers:
            sent = self.channels.get((sender, receiver), ())
            self.channels[sender, receiver] = (*sent, message)

    # --- what must hold ---

    def _check(self) -> None:
        chain = [self.servers[n].pushes for n in range(self.replicas) if n in self.servers]
        acknowledged = {
            (name, id)
            for name, worker in self.workers.items()
            for id in range(1, worker.made + (worker.tail is None))
        }
        readable = chain[-2:][0] if self.mistake == "read from the middle" else chain[-1]
        for pushes in chain:
            check(len(pushes) == len(set(pushes)), f"a server has a push twice: {chain}")
            check(acknowledged <= set(pushes), f"an acknowledged push is lost: {chain}")
            check(set(readable) <= set(pushes), f"a push that was read may be lost: {chain}")
        for mine, behind in itertools.pairwise(chain):
            check(mine[: len(behind)] == behind, f"a server has another order: {chain}")

    def _check_end(self) -> None:
        for server in self.servers.values():
            check(len(server.pushes) == len(WORKERS) * self.pushes, "nobody can go on")
        check(all(worker.tail is None for worker in self.workers.values()), "nobody can go on")
