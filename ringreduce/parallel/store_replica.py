"""A shard of a `ParameterStore` on one server: its chain, its arrays, each worker's last push.

Source of the chain: van Renesse & Schneider, "Chain replication for supporting high throughput and
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

from collections import Counter
from collections.abc import Callable, Container, Sequence

import numpy as np

import ringreduce as rr
from ringreduce.parallel.store_messages import DATA, MessageHead, Shard, Views


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
        return id <= self._last.get(worker, 0)

    def lose(self, server: int) -> list[int]:
        """Go on without a server.

        Returns:
            The workers whose last pushes go to the successor, which is a new one, in this order.
        """
        before = self.successor
        self._living = [each for each in self._living if each != server]
        return list(self._last) if before == server and self.successor is not None else []


Update = Callable[[np.ndarray, tuple[np.ndarray, ...], np.ndarray, int, int], None]


class ShardReplica:
    """A shard on one server.  All replicas of a shard apply the same pushes in the same order."""

    def __init__(
        self,
        comm: rr.Communicator,
        shard: Shard,
        update: Update,
        slots: Sequence[str],
        chain: Chain,
    ) -> None:
        self._comm, self._update, self.shard, self.chain = comm, update, shard, chain
        self.answer = comm.empty((shard.nbytes,), np.uint8)
        """The reply with parameters, which lie in it."""
        self.slots = comm.empty((len(slots), shard.nbytes), np.uint8)
        self.slots[...] = 0
        self._parameters = shard.views(self.answer)
        self._slot_views = dict(zip(slots, map(shard.views, self.slots), strict=True))
        self._variables = [
            (name, parameters, tuple([views[name] for views in self._slot_views.values()]))
            for name, parameters in self._parameters.items()
        ]
        self.pushed: dict[int, np.ndarray] = {}
        """Worker -> the message with its last gradients."""
        self.heads: dict[int, MessageHead] = {}
        self._gradients: dict[int, Views] = {}
        self.waiting = set[int]()
        """The workers whose last pushes are neither applied nor dropped."""
        self.fate = Counter[int]()
        """Worker -> staleness of its last push here; -1: it was dropped."""
        self.updates = 0
        self.meeting = 0
        self.applied = set[int]()
        """The numbers of this loop that were applied."""
        self.share = 0.0
        """The sum of `share` over the pushes that were applied in this loop."""
        self.pushes = self.discarded = 0
        self.staleness = Counter[int]()

    @property
    def nbytes(self) -> int:
        messages = (self.answer, self.slots, *self.pushed.values())
        return sum(message.nbytes for message in messages)

    def fill(self, slot: str, name: str, flat: np.ndarray) -> None:
        """Set the piece of a variable, or of one of its slots, from the flat variable."""
        views: Views = self._slot_views[slot] if slot else self._parameters
        if name in views:
            views[name][...] = flat[self.shard.pieces[name]]

    def begin(self, meeting: int) -> None:
        """Begin to count the numbers of a loop of `steps`, if it is a new one."""
        if meeting > self.meeting:
            self.meeting, self.share = meeting, 0.0
            self.applied.clear()

    def receive(self, peer: int) -> int | None:
        """Receive a push from a worker or a server; return its worker, None if it came before."""
        message = self.pushed.get(peer) if self.chain.replicas == 1 else None
        if message is None:  # an old message may still be on its way to the next server
            message = self._comm.empty((self.shard.nbytes,), np.uint8)
        self._comm.recv(message, peer, DATA)
        head = self.shard.heads.read(message)
        worker = head.rank
        if not self.chain.push(worker, head.push):
            return None
        if message is not self.pushed.get(worker):
            message.flags.writeable = self.chain.replicas == 1
            self.pushed[worker], self._gradients[worker] = message, self.shard.views(message)
        self.heads[worker] = head
        self.waiting.add(worker)
        self.begin(head.meeting)
        return worker

    def apply(self, workers: Sequence[int]) -> None:
        """Make one update of the last pushes of some workers, in the order of their ranks."""
        numbers, weights, gradients, stale = [], [], [], []
        for worker in sorted(workers):
            head = self.heads[worker]
            self.waiting.discard(worker)
            self.fate[worker] = fate = self.updates - head.total
            # The number of a lost worker was dealt again, in this loop or in one that is over.
            if head.number < 0 or (
                head.meeting == self.meeting and head.number not in self.applied
            ):
                self.applied.add(head.number)
                self.share += head.share
                self.pushes += 1
                self.staleness[fate] += 1
                numbers.append(head.number)
                weights.append(head.samples)
                gradients.append(self._gradients[worker])
                stale.append(fate)
        if not numbers:
            return
        staleness, number = max(stale), max(numbers)
        number = number if number >= 0 else self.updates
        with rr.span("update"):
            for name, parameters, slots in self._variables:
                gradient = _mean([each[name] for each in gradients], weights)
                self._update(parameters, slots, gradient, staleness, number)
        self.updates += 1

    def drop(self, worker: int) -> None:
        """Drop the last push of a worker, which came too late for its step."""
        self.waiting.discard(worker)
        self.fate[worker] = -1
        self.discarded += 1


def _mean(parts: Sequence[np.ndarray], weights: Sequence[float]) -> np.ndarray:
    """Return the weighted mean of gradients; 16-bit floats are added up in float32."""
    if len(parts) == 1:
        return parts[0]
    wide = np.promote_types(parts[0].dtype, np.float32)
    all_weights, mean = sum(weights) or 1.0, np.zeros(len(parts[0]), wide)
    for part, weight in zip(parts, weights, strict=True):
        mean += part.astype(wide, copy=False) * wide.type(weight / all_weights)
    rounded: np.ndarray = mean.astype(parts[0].dtype, copy=False)
    return rounded
