"""A shard of a `ParameterStore` on one server: its arrays, and the last push of each worker."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

import ringreduce as rr
from ringreduce.parallel.store_chain import Chain
from ringreduce.parallel.store_messages import DATA, Shard, Views

Update = Callable[[np.ndarray, tuple[np.ndarray, ...], np.ndarray, int, int], None]


class Replica:
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
        self.head = shard.head_in(self.answer)
        self.pushed: dict[int, np.ndarray] = {}
        """Worker -> the message with its last gradients."""
        self.waiting = set[int]()
        """The workers whose last pushes are neither applied nor dropped."""
        self.fate = Counter[int]()
        """Worker -> staleness of its last push here; -1: it was dropped."""
        self.updates = 0
        self.meeting = 0
        """Number of loops of `steps` that have begun."""
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

    def push_of(self, worker: int) -> np.void:
        """Return the head of the last push of a worker."""
        head: np.void = self.shard.head_in(self.pushed[worker])[0]
        return head

    def receive(self, peer: int) -> int | None:
        """Receive a push from a worker or a server; return its worker, None if it came before."""
        message = self.pushed.get(peer) if self.chain.replicas == 1 else None
        if message is None:  # an old message may still be on its way to the next server
            message = self._comm.empty((self.shard.nbytes,), np.uint8)
        self._comm.recv(message, peer, DATA)
        head = self.shard.head_in(message)[0]
        worker = int(head["rank"])
        if not self.chain.push(worker, int(head["push"])):
            return None
        message.flags.writeable = self.chain.replicas == 1
        self.pushed[worker] = message
        self.waiting.add(worker)
        self.begin(int(head["meeting"]))
        return worker

    def apply(self, workers: Sequence[int]) -> None:
        """Make one update of the last pushes of some workers, in the order of their ranks."""
        heads = {}
        for worker in sorted(workers):
            head = self.push_of(worker)
            self.waiting.discard(worker)
            self.fate[worker] = self.updates - int(head["count"])
            number = int(head["number"])
            # The number of a lost worker was dealt again, in this loop or in one that is over.
            if number < 0 or (head["meeting"] == self.meeting and number not in self.applied):
                heads[worker] = head
                self.applied.add(number)
        if not heads:
            return
        numbers = [int(head["number"]) for head in heads.values()]
        self.share += sum(float(head["share"]) for head in heads.values())
        self.pushes += len(heads)
        self.staleness.update(self.fate[worker] for worker in heads)
        staleness = max(self.fate[worker] for worker in heads)
        number = max(numbers) if max(numbers) >= 0 else self.updates
        weights = [float(head["samples"]) for head in heads.values()]
        gradients = [self.shard.views(self.pushed[worker]) for worker in heads]
        with rr.span("update"):
            for name, parameters in self._parameters.items():
                gradient = _mean([each[name] for each in gradients], weights)
                slots = tuple([views[name] for views in self._slot_views.values()])
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
