"""Measure candidates: make their steps on the real data, and time them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from types import ModuleType

import numpy as np

import ringreduce as rr
from ringreduce.parallel.consensus import together
from ringreduce.train import data, mlp, optimizers
from ringreduce.train.loop import Trainer
from ringreduce.train.search.candidates import Candidate
from ringreduce.train.settings import Settings

_LR = 1e-20
"""Learning rate: parameters stay as they are, so all steps compute with the same numbers."""
_WARM_UP = 2
"""Steps of a new trainer that are not counted."""
_LEAST = 3
"""The fewest steps that are timed at once: one step may be interrupted."""
_SLOT_S = 0.1
"""Seconds of a turn of `Bench.in_turns`."""
_SHARE_OF_MEMORY = 0.5
"""Share of the free memory that the trainers of all candidates may take."""

Watch = Callable[[Candidate, float], None]


@dataclass
class _Open:
    trainer: Trainer
    step_s: float
    """Median seconds of the steps that were timed last."""


class Bench:
    """Trainers of candidates, whose steps are timed.  Every rank makes the same calls.

    `watch` is called with each candidate that is measured, and the seconds since the begin.

    Attributes:
        held_bytes: candidate -> the most bytes that a rank has held.
    """

    def __init__(
        self,
        comm: rr.Communicator,
        split: data.Split,
        xp: ModuleType,
        watch: Watch = lambda candidate, seconds: None,
    ) -> None:
        self._comm, self._split, self._xp, self._watch = comm, split, xp, watch
        self._open: dict[Candidate, _Open] = {}
        self._begin = time.perf_counter()
        self.held_bytes: dict[Candidate, int] = {}

    def clock(self) -> float:
        """Return the seconds since the begin, the same on all ranks.  Collective."""
        now = np.float64(time.perf_counter() - self._begin)
        return float(self._comm.broadcast(now, root=0).item())

    def measure(self, candidate: Candidate, seconds: float) -> list[float]:
        """Return the seconds of each step, for about `seconds`, at least of three.  Collective."""
        self._watch(candidate, time.perf_counter() - self._begin)
        if candidate not in self._open:
            begin = self.clock()
            self._open[candidate] = self._new(candidate)
            seconds -= self.clock() - begin
        found = self._open[candidate]
        times = self._time(found.trainer, max(_LEAST, int(seconds / found.step_s)))
        found.step_s = median(times)
        return times

    def in_turns(
        self, candidates: Sequence[Candidate], seconds: float, slot_s: float = _SLOT_S
    ) -> list[list[float]]:
        """Return the seconds of each candidate's later steps, in turns of `slot_s`.  Collective."""
        times: list[list[float]] = [[] for _ in candidates]
        for candidate in candidates:
            self.measure(candidate, 0.0)
        end = self.clock() + seconds
        while not times[0] or self.clock() < end:
            for candidate, of_candidate in zip(candidates, times, strict=True):
                of_candidate += self.measure(candidate, slot_s)
        return times

    def count_bytes(self, candidate: Candidate) -> None:
        """Make the first step of an unmeasured candidate: it holds as much as any.  Collective."""
        if candidate not in self._open and candidate not in self.held_bytes:
            self._watch(candidate, time.perf_counter() - self._begin)
            self._open[candidate] = self._new(candidate, steps=1)
            self.drop(candidate)

    def drop(self, candidate: Candidate) -> None:
        """Close a candidate's trainer, if it has one.  Collective."""
        if candidate in self._open:
            trainer = self._open.pop(candidate).trainer
            most = self._comm.all_reduce(np.array([trainer.held_bytes]), "max")
            self.held_bytes[candidate] = int(most[0])
            trainer.close()

    def close(self) -> None:
        for candidate in list(self._open):
            self.drop(candidate)

    def _new(self, candidate: Candidate, steps: int = _WARM_UP) -> _Open:
        steady = replace(candidate.settings, lr=_LR, lr_batch=0, lr_schedule="constant", warm_up=0)
        trainer = together(
            self._comm,
            lambda: Trainer(self._comm, self._split, steady, self._xp, candidate.strategy),
        )
        return _Open(trainer, self._time(trainer, steps)[-1])

    def _time(self, trainer: Trainer, count: int) -> list[float]:
        """Make steps; return the seconds of each, as the mean over all ranks.

        Ranks wait for each other in different places, but the sums of their steps are equal.
        """
        self._comm.barrier()
        own = np.array([trainer.time_steps(count)])
        every = self._comm.all_gather(own, counts=[1] * self._comm.size)
        seconds: list[float] = every.mean(axis=0).tolist()
        return seconds


def most_at_once(comm: rr.Communicator, sizes: Sequence[int], settings: Settings) -> int:
    """Return how many trainers fit into free memory on rank 0's node, at least 2.  Collective."""
    arrays = 3 + len(optimizers.SLOTS[settings.optimizer])
    parameters = mlp.parameter_count(sizes, settings.batch_norm)
    ranks = max(map(len, comm.nodes))
    nbytes = parameters * np.dtype(settings.dtype).itemsize * arrays * ranks
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    most = max(2, int(_SHARE_OF_MEMORY * free / nbytes))
    return int(comm.broadcast(np.int64(most), root=0).item())
