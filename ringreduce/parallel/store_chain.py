"""The chain of servers on which a shard of a parameter store lies, as a pure machine.

Source: van Renesse & Schneider, "Chain replication for supporting high throughput and
availability", OSDI 2004.

The head of the chain receives the pushes of the workers.  The order in which they arrive there is
the order on all servers.  Each server passes pushes on to the next one.  All living servers of the
chain have the pushes that the tail has.  So the tail acknowledges pushes and answers pulls.

A worker makes its next push after the tail has acknowledged the last one.  So a server lacks at
most the last push of each worker.  A server that gets a new successor sends it those pushes, in
their order.  The successor drops pushes that it has.  If a server is lost, a worker sends a push
without an acknowledgement to the new head.
"""

from __future__ import annotations

from collections.abc import Container


def chain_of(shard: int, servers: int, replicas: int, lost: Container[int] = ()) -> list[int]:
    """Return the living servers on which a shard lies, from the head to the tail."""
    chain = [(shard + place) % servers for place in range(replicas)]
    return [server for server in chain if server not in lost]


class Chain:
    """The chain of a shard, as one server knows it, and the pushes that this server has."""

    def __init__(self, server: int, shard: int, servers: int, replicas: int) -> None:
        self._server, self.replicas = server, replicas
        self._living = chain_of(shard, servers, replicas)
        self._last: dict[int, int] = {}
        """Worker -> id of its last push, in the order of the pushes."""

    @property
    def successor(self) -> int | None:
        """The server to which this one passes pushes on; None: this one is the tail."""
        behind = self._living[self._living.index(self._server) + 1 :]
        return behind[0] if behind else None

    def push(self, worker: int, id: int) -> bool:
        """Note a push; return whether it is new, so that it counts and goes to the successor."""
        if self.has(worker, id):
            return False
        self._last.pop(worker, None)
        self._last[worker] = id
        return True

    def has(self, worker: int, id: int) -> bool:
        """Return whether this server has a push."""
        return id <= self._last.get(worker, 0)

    def lose(self, server: int) -> list[int]:
        """Go on without a server.

        Returns:
            The workers whose last pushes go to the successor, which is a new one, in this order.
        """
        before = self.successor
        self._living = [each for each in self._living if each != server]
        return list(self._last) if before == server and self.successor is not None else []
