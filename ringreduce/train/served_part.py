"""The part of a rank where servers keep the parameters.  Only making the store is collective."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np

import ringreduce as rr
from ringreduce.parallel.parameter_store import ParameterStore
from ringreduce.train import mlp, optimizers
from ringreduce.train.parts import Run
from ringreduce.train.replicas import WholeModel
from ringreduce.train.steps import Course

_WORDS = (1 << 48) + 1000
"""Tag of the messages of `lowest_says`."""


class Served(WholeModel):
    """A worker, or a server.  It has the whole model before the run, and its parameters after."""

    group = None  # servers have the parameters once
    sent_bytes = 0

    def __init__(self, run: Run, **options: Any) -> None:
        super().__init__(run)
        self.replica, self.replicas = 0, 1  # a worker that evaluates has all held-out samples
        self._options, self._averages = options, options["staleness"] == 0
        self.lost: dict[int, int] = {}
        """Lost rank -> the epoch at whose end it was missing."""
        self._sent = 0
        """Bytes sent before the present step."""

    def open(self, course: Course, epochs: Sequence[Sequence[int]]) -> ParameterStore:
        """Make the store, from this part's arrays, for the steps of these epochs.  Collective."""
        self._course, self._epochs = course, epochs
        comm, params, found = self.run.comm, self.whole(), self.stored
        slots = {s: {n: found.get(f"{s}/{n}", params[n]) for n in params} for s in self.run.slots}
        self.store = ParameterStore(comm, params, self._change, slots=slots, **self._options)
        self.replicas = self.store.workers
        updates = 1 if self._averages else self.replicas  # of a batch; each has its share of decay
        decay = self.run.settings.weight_decay / updates
        self._update = optimizers.update(replace(self.run.settings, weight_decay=decay))
        self._updates, self._last = updates * epochs[0][0] - 1 if epochs else 0, (0, 0)
        """Number of the last update; its loop of `steps` and its number there."""
        self._before = Counter[int]()
        """Staleness -> pushes of the epochs before."""
        if self.store.is_server:
            self.stored, self._parameters, self._network = {}, {}, []
        else:
            self._reduced = {name: np.empty_like(array) for name, array in params.items()}
            self.pull(slots=True)
        return self.store

    def pull(self, slots: bool = False) -> None:
        """Compute with the servers' parameters; `slots`: have the optimizer's arrays, too."""
        self._take(self.store.pull(slots))

    def arrays(self) -> dict[str, np.ndarray]:
        return dict(self.stored)  # without the optimizer's, unless they were pulled

    def load(self, arrays: Mapping[str, np.ndarray] | None) -> dict[str, Any]:
        """Load as `Part.load` does.  The next store begins with these arrays: return none."""
        self._take(super().load(arrays))
        return {}

    def gradients(self, x: Any, labels: Any, count: int) -> float:
        """Pull, compute and push: a mean that servers average, or a share of the batch's mean."""
        if not self._reduced:
            raise ValueError("strategy parameter_server makes steps in Trainer.run alone")
        self._count_sent(begins=True)
        self.pull()
        divisor = max(1, len(x)) if self._averages else count
        loss, kept, computed = mlp.step(self._network, x, labels, divisor, self._reduced)
        for _ in computed:  # each gradient, into its array
            pass
        self._hold(len(x), kept)
        self.store.share = float(loss) * divisor
        if not math.isfinite(loss):
            self.blame = f" on worker {self.run.comm.rank}"
        self.store.push(self._reduced, samples=len(x))
        self._count_sent(begins=False)
        return self.store.share / count

    def reports(self, epoch: int) -> Iterator[bool]:
        """Yield whether this worker reports an epoch, and again if the one that did so is lost."""
        pushes = Counter(self.store.stats.staleness) - self._before
        self._before += pushes
        mean = sum(pushes.elements()) / max(1, pushes.total())
        facts = {"staleness_mean": mean, "staleness_max": max(pushes, default=0)}
        self.staleness = facts if pushes else {}
        speaks = self._is_lowest(epoch)
        yield speaks
        list(self.store.steps(0))  # all workers meet
        if self._is_lowest(epoch) and not speaks:
            yield True

    def _is_lowest(self, epoch: int) -> bool:
        """Note the lost ranks; return whether this worker is the lowest one that lives."""
        lost = {*self.store.stats.lost, *self.run.comm.lost_peers()}
        self.lost = dict.fromkeys(lost, epoch) | self.lost
        return bool(self.run.comm.rank == min({*range(self.replicas)} - lost))

    def _change(
        self, parameters: Any, slots: tuple[Any, ...], gradient: Any, staleness: int, number: int
    ) -> None:
        """Make the optimizer's step on a piece of a variable, on a server.

        Source of the learning rate: Zhang, Gupta, Lian & Liu, "Staleness-aware async-SGD for
        distributed deep learning", IJCAI 2016.
        """
        loop = self.store.meeting
        if (loop, number) != self._last:
            self._count_sent(begins=loop != self._last[0])
            self._last, self._updates = (loop, number), self._updates + 1
        step = self._epochs[loop // 2][number // self.replicas]  # each second loop is of `reports`
        lr = self._course.learning_rate(step) / (1 + staleness)
        optimizers.in_blocks(self._update, (parameters, *slots), gradient, lr, self._updates)

    def _count_sent(self, begins: bool) -> None:
        """Count the bytes sent since the last call, unless a step `begins`."""
        sent = self.store.stats.sent_bytes
        self.sent_bytes = max(self.sent_bytes, 0 if begins else sent - self._sent)
        self._sent = sent

    @property
    def state_bytes(self) -> int:
        gradients = sum(int(array.nbytes) for array in self._reduced.values())
        return gradients + self.store.stats.held_bytes

    def total(self, array: np.ndarray, op: str = "sum") -> Any:
        return array

    def all_finite(self) -> bool:
        return all(bool(np.isfinite(array).all()) for array in self.parameters())

    def agree(self, outcome: Callable[[], Any]) -> tuple[Any, np.ndarray]:
        """Return, on all ranks, the `outcome` and the parameters of the lowest worker that lives.

        All ranks raise FloatingPointError if the outcome is a text; None: another worker has it.
        """

        def words() -> bytes:
            found = outcome()
            if isinstance(found, tuple):
                return json.dumps(found).encode() + b"\n" + bytes(self.flat().data)
            return json.dumps(found).encode() if found else b""

        said, _, numbers = lowest_says(self.run.comm, self.replicas, words).partition(b"\n")
        found = json.loads(said or '"train: a loss is infinite; take a smaller lr"')
        if isinstance(found, str):
            raise FloatingPointError(found)
        flat = np.frombuffer(numbers, self.run.settings.dtype).copy()
        if self.store.is_server:
            self.stored = mlp.named(mlp.views(flat, self.run.sizes))
            self._network = mlp.layers(tuple(mlp.by_layer(self.stored).values()))
        return found, flat


def lowest_says(comm: rr.Communicator, speakers: int, words: Callable[[], bytes]) -> bytes:
    """Return, on all ranks, the `words` of the lowest rank that lives and has some.

    The first `speakers` ranks may have some.  It is not collective: ranks may be lost.
    """
    for speaker in range(speakers):
        said = np.empty(0, np.uint8)
        if speaker == comm.rank:
            said = np.frombuffer(words(), np.uint8)
            for peer in {*range(comm.size)} - {speaker}:
                with suppress(rr.PeerLostError):
                    comm.send(np.array([said.size]), peer, _WORDS)
                    comm.send(said, peer, _WORDS)
        else:
            with suppress(rr.PeerLostError):
                (size,) = comm.recv(np.empty(1, np.int64), speaker, _WORDS)
                said = comm.recv(np.empty(size, np.uint8), speaker, _WORDS)
        if said.size:
            return said.tobytes()
    return b""
