"""One copy of a shard of a `ParameterStore`: its arrays, and the pushes that have come for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

import ringreduce as rr
from ringreduce.parallel.store_chain import Chain
from ringreduce.parallel.store_messages import Shard, Views

Update = Callable[[np.ndarray, tuple[np.ndarray, ...], np.ndarray, int, int], None]


class Push:
    """A message with gradients of a worker."""

    def __init__(self, shard: Shard, message: np.ndarray, is_passed_on: bool) -> None:
        self.message, self.head = message, shard.head_in(message)
        self.gradients = shard.views(message)
        for gradient in self.gradients.values():
            gradient.flags.writeable = not is_passed_on
        self.sending = 0
        """Number of sends of this message that are under way."""


class Replica:
    """A shard on one server, and what its updates have made of it.

    All replicas of a shard apply the same pushes in the same order.
    """

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
        self.pushed: dict[int, Push] = {}
        """Worker -> its last push."""
        self.waiting: dict[int, Push] = {}
        """Worker -> its last push, which is neither applied nor dropped."""
        self._spare: list[Push] = []
        """Messages that may be overwritten once their sends are over."""
        self.fate = Counter[int]()
        """Worker -> staleness of its last push here; -1: it was dropped."""
        self.updates = 0
        self.meeting = 0
        """How many loops of `steps` have begun."""
        self.applied = set[int]()
        """The numbers of this loop that were applied."""
        self.share = 0.0
        """The sum of `share` over the pushes that were applied in this loop."""
        self.pushes = self.discarded = 0
        self.staleness = Counter[int]()

    @property
    def nbytes(self) -> int:
        messages = [push.message.nbytes for push in (*self.pushed.values(), *self._spare)]
        return self.answer.nbytes + self.slots.nbytes + sum(messages)

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

    def message_for(self, worker: int) -> Push:
        """Return the message in which to receive a push of a worker."""
        if self.chain.replicas == 1 and worker in self.pushed:
            return self.pushed[worker]
        for number, push in enumerate(self._spare):
            if not push.sending:
                return self._spare.pop(number)
        message = self._comm.empty((self.shard.nbytes,), np.uint8)
        return Push(self.shard, message, self.chain.replicas > 1)

    def add(self, worker: int, push: Push) -> bool:
        """Note a push that was received; return whether it is new."""
        if not self.chain.push(worker, int(push.head["push"][0])):
            self._spare.append(push)
            return False
        if (old := self.pushed.get(worker, push)) is not push:
            self._spare.append(old)
        self.pushed[worker] = self.waiting[worker] = push
        self.begin(int(push.head["meeting"][0]))
        return True

    def apply(self, workers: Sequence[int]) -> None:
        """Make one update of the pushes of some workers, in the order of their ranks."""
        pushes = {}
        for worker in sorted(workers):
            push = self.waiting.pop(worker)
            head = push.head[0]
            self.fate[worker] = self.updates - int(head["count"])
            number = int(head["number"])
            # The number of a lost worker was dealt again, in this loop or in one that is over.
            if number < 0 or (head["meeting"] == self.meeting and number not in self.applied):
                pushes[worker] = push
        if not pushes:
            return
        heads = [push.head[0] for push in pushes.values()]
        numbers = {int(head["number"]) for head in heads} - {-1}
        self.applied |= numbers
        self.share += sum(float(head["share"]) for head in heads)
        self.pushes += len(heads)
        self.staleness.update(self.fate[worker] for worker in pushes)
        staleness = max(self.fate[worker] for worker in pushes)
        number = max(numbers, default=self.updates)
        weights = [float(head["samples"]) for head in heads]
        for name, parameters in self._parameters.items():
            gradient = _mean([push.gradients[name] for push in pushes.values()], weights)
            slots = tuple([views[name] for views in self._slot_views.values()])
            self._update(parameters, slots, gradient, staleness, number)
        self.updates += 1

    def drop(self, worker: int) -> None:
        """Drop the push of a worker, which came too late for its step."""
        self.waiting.pop(worker)
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
