"""A job that goes on after losses, in one process: its ranks take turns.

The memory files, what the launcher holds of them, and its decisions are those of the library.  A
rank is a generator, which is killed by never being continued.  MPI and the processes are simulated:
an all-reduce waits for all ranks of the generation, and a killed rank leaves the others waiting.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from ringreduce.recovery.held import Held
from ringreduce.recovery.membership import Lost, Membership, Rules, Start, Stop
from ringreduce.recovery.state import State
from ringreduce.train import Sampler

SAMPLES, BATCH, EPOCHS = 11, 4, 3
_SAMPLER = Sampler(SAMPLES, BATCH, seed=3)
STEPS = _SAMPLER.steps(EPOCHS)


@dataclass(frozen=True)
class _Comm:
    rank: int
    size: int


def counts_after(steps: int) -> list[int]:
    """How often each sample is counted in so many steps."""
    found = Counter(i for step in range(steps) for i in _SAMPLER.batch_of(step).tolist())
    return [found[sample] for sample in range(SAMPLES)]


class RevokedError(Exception):
    """A rank ended itself, for its lease is revoked."""


@dataclass
class Job:
    """A job, and the faults that a seed draws."""

    seed: int
    generations: int = 0
    stop: Stop | None = None
    held: Held = field(default_factory=Held)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        ranks = self._random.randint(1, 4)
        replace = self._random.random() < 0.5
        self._members = Membership(Rules(ranks, 1, 4, 1000, wait_s=0.0, replace=replace))
        self._kill_share = self._random.choice([0.0, 0.01, 0.05])
        """How likely a rank is killed at any moment."""

    def run(self) -> int:
        """Run to the end, and return how many steps were made; prove each generation's begin."""
        action = self._members.begin()
        while isinstance(action, Start):
            self.generations += 1
            action = self._generation(action)
        self.stop = action
        if action is not None:
            assert isinstance(action, Stop)
        step = self.held.step
        self._prove_whole(step)
        return step

    def _generation(self, start: Start) -> Start | Stop | None:
        """Run a generation to its end.  None: it has trained to the end."""
        self._arrived: dict[int, dict[int, np.ndarray]] = {}
        self._size, self._states = start.size, {}
        self._restored: set[int] = set()
        ranks = {n: self._rank(_Comm(n, start.size), start.generation) for n in range(start.size)}
        lost: list[int] = []
        while ranks and not lost:
            number = self._random.choice(list(ranks))
            if self._random.random() < self._kill_share:
                lost = self._random.sample(list(ranks), self._random.randint(1, len(ranks)))
            else:
                self._turn(ranks, number)
        if not lost:
            return None
        now = float(self.generations)
        self._members.lost([Lost(n, 9) for n in lost], now, step=self.held.step)
        survivors = {n: rank for n, rank in ranks.items() if n not in lost}
        self._turns(survivors)  # they run on until the launcher knows of the loss
        self.held.revoke()
        step = self.held.step
        self._turns(survivors)  # and until it has killed them
        assert self.held.step == step, f"a rank has committed after it was revoked: {self.seed}"
        self._prove_whole(step)
        self.held.next_generation()
        self._prove_whole(step)
        return self._members.fenced(now)

    def _turns(self, ranks: dict[int, Iterator[None]]) -> None:
        for _ in range(self._random.randint(0, 12)):
            if ranks:
                self._turn(ranks, self._random.choice(list(ranks)))

    def _turn(self, ranks: dict[int, Iterator[None]], number: int) -> None:
        try:
            next(ranks[number])
        except (StopIteration, RevokedError):
            del ranks[number]

    def _rank(self, comm: _Comm, generation: int) -> Iterator[None]:
        """The life of a rank, as `elastic` and a program make it; it may end at every yield."""
        state = State({"counts": np.zeros(SAMPLES, np.int64), "untouched": np.arange(3.0)})
        yield
        source = self.held.source(1)
        if source is not None:
            state.restore({name: source.committed(name) for name in source.entries}, source.step)
        yield
        state.join(generation, lambda state, _: self._members.stepped(state.step), print)
        self._states[comm.rank] = state
        self.held.take(1, os.dup(state.file), comm.size)
        while len(self._states) < comm.size:  # the barrier
            yield
        if comm.rank == 0:
            self._members.started()
        assert len({each.step for each in self._states.values()} - {state.step}) <= 1
        yield
        while state.step < STEPS:
            mine = np.zeros(SAMPLES, np.int64)
            mine[_SAMPLER.indices(state.step, comm)] = 1
            arrived = self._arrived.setdefault(state.step, {})
            arrived[comm.rank] = mine
            while len(arrived) < comm.size:  # the all-reduce
                yield
            total = sum(arrived.values())
            with state.update():
                for sample in range(SAMPLES):
                    state["counts"][sample] += total[sample]
                    if sample % 4 == 0:
                        yield
            yield

    def _prove_whole(self, step: int) -> None:
        """Prove that the most advanced file has each sample of so many steps, counted once."""
        files = self.held._of(1)
        if not files:
            assert step == 0
            return
        best = max(files, key=lambda slots: slots.step)
        assert best.step == step, f"seed {self.seed}"
        assert best.committed("counts").tolist() == counts_after(step), f"seed {self.seed}"
        assert best.committed("untouched").tolist() == [0, 1, 2], f"seed {self.seed}"
