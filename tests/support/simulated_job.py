"""A job that goes on after losses and changes of the ranks, in one process: its ranks take turns.

The memory files, what the launcher holds of them, and its decisions are those of the library.  A
rank is a generator, which is killed by never being continued.  MPI and the processes are simulated:
an all-reduce waits for all ranks of the generation, and raises on all once a rank is lost and the
others go on in their processes.

A seed draws who is lost, when, how (killed or stopped), how many at once and how soon after each
other; which other numbers of ranks are wanted; and which ranks are told to leave.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Generator, Iterable
from dataclasses import dataclass, field

import numpy as np

from ringreduce.recovery.slots import Slots
from ringreduce.recovery.state import State
from ringreduce.supervisor.held import HeldFiles
from ringreduce.supervisor.membership import (
    Decision,
    Lost,
    Membership,
    Next,
    Phase,
    Rules,
)
from ringreduce.train import Sampler

SAMPLES, BATCH, EPOCHS = 11, 4, 3
_SAMPLER = Sampler(SAMPLES, BATCH, seed=3)
STEPS = _SAMPLER.steps(EPOCHS)
_MOST, _MOST_TURNS = 4, 50_000
EVENTS = (
    *("killed", "stopped", "lost while others shrink", "newcomers lost"),
    *("shrunk", "handed over", "only left", "generations"),
)
"""Names of the events of a job."""
BUSY, CALLS, PAUSED, FINISHED, SHRINKS = "busy", "calls", "paused", "finished", "shrinks"
"""States of a rank: it computes, waits in a call, or has asked the launcher."""


@dataclass(frozen=True)
class _Comm:
    rank: int
    size: int


class RevokedError(Exception):
    """A rank ended itself, for its lease is revoked."""


class _LostError(Exception):
    """A call raises, for a rank is lost."""


@dataclass(eq=False)
class _Rank:
    """A process; `turns` continues it."""

    comm: _Comm
    turns: Generator[str, None, None] = field(init=False)
    state: State = field(init=False)
    does: str = BUSY
    generation: int = 0
    """The generation that the launcher has told; 0: none yet."""
    ahead: Slots | None = None
    """The file of a lost rank that has made the most steps."""


def _processes(size: int) -> list[_Rank]:
    return [_Rank(_Comm(number, size)) for number in range(size)]


def counts_after(steps: int) -> list[int]:
    """How often each sample is counted in so many steps."""
    found = Counter(i for step in range(steps) for i in _SAMPLER.batch_of(step).tolist())
    return [found[sample] for sample in range(SAMPLES)]


class Job:
    """A job, and the faults and changes that a seed draws."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.events: Counter[str] = Counter()
        """Name of an event -> how often it has happened."""
        self.stop: Decision | None = None
        self.held = HeldFiles()
        chosen = self._random = random.Random(seed)
        rules = Rules(
            chosen.randint(1, _MOST), 1, _MOST, 1000, wait_s=0.0, replace=chosen.random() < 0.3
        )
        self._live = chosen.random() < 0.5
        self._members = Membership(rules, self._live)
        self._fault_share = chosen.choice([0.0, 0.01, 0.05])
        self._wish_share = chosen.choice([0.0, 0.01, 0.05])
        """How likely a fault is at any moment, and a wish for other ranks."""
        self._now = 0.0
        self._present: list[_Rank] = []
        """The ranks of the present generation that are not lost."""
        self._lost: list[_Rank] = []
        """Ranks that the generation has lost while it goes on."""
        self._stopped: list[_Rank] = []
        """Lost ranks that did not answer: they may run on until they are killed."""
        self._newcomers: list[_Rank] = []
        self._leaving: list[_Rank] = []
        self._arrived: dict[int, dict[int, np.ndarray]] = {}
        self._is_broken = False
        """Whether calls raise."""

    def run(self) -> int:
        """Run to the end, and return how many steps were made."""
        self._do(self._members.begin())
        turns = 0
        while self.stop is None and self._present:
            turns += 1
            assert turns < _MOST_TURNS, f"the job does not go on: seed {self.seed}"
            draw, fault_share = self._random.random(), self._fault_share
            if self._members.phase is Phase.SHRINKING:
                fault_share *= 8  # it does not take many turns
            if draw < fault_share:
                self._fault()
            elif draw < fault_share + self._wish_share:
                self._wish()
            else:
                self._turn(self._random.choice(self._present + self._newcomers))
            self._look()
        step = self.held.step
        self._prove_whole(step)
        return step

    # --- faults and wishes, drawn from the seed ---

    def _fault(self) -> None:
        victims = self._present + self._newcomers
        several = self._random.randint(1, len(victims)) if self._random.random() < 0.3 else 1
        chosen = self._random.sample(victims, several)
        if any(rank in self._newcomers for rank in chosen):
            self.events["newcomers lost"] += 1
            self._members.unprepared()
            self._do(Decision(Next.DROP))
        lost = [rank for rank in chosen if rank in self._present]
        if not lost:
            return
        stopped = self._random.random() < 0.3
        self.events["stopped" if stopped else "killed"] += len(lost)
        if self._members.phase is Phase.SHRINKING:
            self.events["lost while others shrink"] += 1
        self._now += self._random.choice([0.01, 1.0])
        for rank in lost:
            self._present.remove(rank)
        self._lost += lost
        self._stopped += lost * stopped
        self._do(
            self._members.lost(
                [Lost(rank.comm.rank, 0 if stopped else 9) for rank in lost],
                self._now,
                cause="stopped" if stopped else "killed",
                step=self.held.step,
            )
        )

    def _wish(self) -> None:
        if self._random.random() < 0.5:
            self._members.wish(self._random.randint(1, _MOST), "command")
        else:
            self._leaving.append(self._random.choice(self._present))
        self._pursue()

    def _pursue(self) -> None:
        leaving = {r.comm.rank: "notice" for r in self._leaving if r in self._present}
        self._do(self._members.pursue(leaving))
        self._look_at_newcomers()

    # --- the launcher ---

    def _look(self) -> None:
        """Answer the ranks, if all have asked."""
        self._look_at_newcomers()
        living, phase = self._present, self._members.phase
        for rank in living:
            if rank.does == PAUSED and (
                phase is Phase.RUNNING and self.held.is_early(1, rank.state.step)
            ):
                rank.does = BUSY
        does = {rank.does for rank in living}
        if phase is Phase.SHRINKING and does <= {SHRINKS, PAUSED, FINISHED}:
            self._shrunk()
        elif phase is Phase.RUNNING and does and does <= {PAUSED, FINISHED}:
            self._do(self._members.asked([(each, 0) for each in does], self._now, self._now))

    def _look_at_newcomers(self) -> None:
        ready = self._newcomers and all(rank.does == CALLS for rank in self._newcomers)
        if ready and not self.held.pauses:
            self._do(self._members.prepared())

    def _do(self, decision: Decision | None) -> None:
        match decision.kind if decision else None:
            case Next.START:
                self._begin(_processes(decision.size))
            case Next.FENCE:
                self._fence()
            case Next.SHRINK:
                self._stopped.clear()  # they are killed before the others go on
                self._shrink()
            case Next.PREPARE:
                self._go_on()
                self._newcomers = _processes(decision.size)
                for rank in self._newcomers:
                    rank.turns = self._life(rank)
            case Next.DROP:
                self._newcomers = []
                self._go_on()
            case Next.PAUSE:
                self._pause()
            case Next.RESUME:
                self._go_on()
            case Next.RETURN:
                self._present = []
            case Next.LEAVE:
                self.events["handed over"] += 1
                self._ended()
            case Next.PART:
                self.events["only left"] += 1
                leaving = [rank for rank in self._present if rank.comm.rank in decision.leaving]
                self._present = [rank for rank in self._present if rank not in leaving]
                self._lost += leaving
                self._shrink()
            case Next.TAKE_OVER:
                ranks, self._newcomers = self._newcomers, []
                self._begin(ranks)
            case Next.STOP:
                self.stop = decision
                self._present = []

    def _pause(self) -> None:
        wanted = self._members.wanted
        if self._newcomers and wanted is not None and not wanted.starts:
            self._do(Decision(Next.DROP))
        if not self.held.pauses:
            self.held.pause()

    def _begin(self, ranks: list[_Rank]) -> None:
        """Begin a generation of new processes."""
        self.events["generations"] += 1
        self._present, self._lost, self._stopped, self._leaving = ranks, [], [], []
        self._arrived, self._is_broken = {}, False
        for rank in ranks:
            rank.generation = self._members.generation
            if not hasattr(rank, "turns"):
                rank.turns = self._life(rank)

    def _go_on(self) -> None:
        """Have no rank pause."""
        self.held.go_on()
        for rank in self._present:
            if rank.does == PAUSED:
                rank.does = BUSY

    def _shrink(self) -> None:
        """Have calls raise, and those that wait for the launcher shrink."""
        self.held.go_on()
        self._is_broken = True
        for rank in self._present:
            if rank.does in (PAUSED, FINISHED):
                rank.does = SHRINKS

    def _shrunk(self) -> None:
        """The ranks that are left have a communicator."""
        self.events["shrunk"] += 1
        self._members.all_take_part(self._now)
        self._members.shrunk(self._now)
        self.held.begin_generation(self._members.generation, self._lost)
        ahead = self.held.ahead(self._lost)
        self._arrived, self._is_broken = {}, False
        self._present.sort(key=lambda rank: rank.comm.rank)
        for number, rank in enumerate(self._present):
            rank.comm = _Comm(number, len(self._present))
            rank.generation, rank.ahead, rank.does = self._members.generation, ahead, BUSY

    def _fence(self) -> None:
        """Kill all ranks; those that were stopped or run on meanwhile may not commit."""
        running = self._present + self._stopped
        self._turns(running)  # until the launcher knows of the loss
        self.held.revoke()
        step = self.held.step
        self._turns(running)  # and until it has killed them
        assert self.held.step == step, f"a rank has committed after it was revoked: {self.seed}"
        self._ended()

    def _ended(self) -> None:
        """The processes of the generation are gone."""
        self.held.revoke()
        step = self.held.step
        self._prove_whole(step)
        self.held.next_generation()
        self._prove_whole(step)
        self._present = []
        self._do(self._members.fenced(self._now))

    # --- ranks ---

    def _turns(self, ranks: Iterable[_Rank]) -> None:
        ranks = list(ranks)
        for _ in range(self._random.randint(0, 12)):
            if ranks:
                self._turn(self._random.choice(ranks))

    def _turn(self, rank: _Rank) -> None:
        if rank.does in (PAUSED, FINISHED, SHRINKS):
            return  # it waits for an answer
        try:
            rank.does = next(rank.turns)
        except (StopIteration, RevokedError):
            rank.does = FINISHED

    def _life(self, rank: _Rank) -> Generator[str, None, None]:
        """The life of a rank, as `elastic` and a program make it; it may end at every yield."""
        state = State({"counts": np.zeros(SAMPLES, np.int64), "untouched": np.arange(3.0)})
        rank.state = state
        yield BUSY
        while not rank.generation:
            yield CALLS
        if (source := self.held.source(1)) is not None:
            yield from self._restore(state, source)
        while self._members.phase is Phase.FENCING:  # the launcher hears it no more
            yield CALLS
        state.begin_generation(rank.generation)
        self.held.take(1, os.dup(state.file), rank.comm.size, rank)
        while True:
            generation = rank.generation
            try:
                yield from self._train(rank, generation)
            except _LostError:
                yield SHRINKS
            else:
                if rank.generation == generation:
                    yield FINISHED
            # The launcher answers that the ranks that are left have a communicator.
            yield from self._catch_up(rank)

    def _train(self, rank: _Rank, generation: int) -> Generator[str, None, None]:
        """Train to the end, or until it has paused and others have left."""
        state, comm, pauses = rank.state, rank.comm, [False]

        def after(_: State, due: bool) -> None:
            self._members.stepped(state.step)
            pauses[0] = due

        state.join(generation, after, print)
        arrived = self._arrived.setdefault(-1, {})  # the barrier
        arrived[comm.rank] = np.zeros(0)
        yield from self._wait(arrived, comm)
        assert len({each.state.step for each in self._present} - {state.step}) <= 1
        if comm.rank == 0 and self._members.phase is Phase.STARTING:
            self._members.started()
            self.held.drop(self._lost)
            self._lost = []
            self._pursue()
        while state.step < STEPS:
            mine = np.zeros(SAMPLES, np.int64)
            mine[_SAMPLER.indices(state.step, comm)] = 1
            arrived = self._arrived.setdefault(state.step, {})
            arrived[comm.rank] = mine
            yield from self._wait(arrived, comm)
            total = sum(arrived.values())
            with state.update():
                for sample in range(SAMPLES):
                    state["counts"][sample] += total[sample]
                    if sample % 4 == 0:
                        yield BUSY
            yield PAUSED if pauses[0] else BUSY
            if rank.generation != generation:
                return

    def _wait(self, arrived: dict[int, np.ndarray], comm: _Comm) -> Generator[str, None, None]:
        while len(arrived) < comm.size:
            if self._is_broken:
                raise _LostError
            yield CALLS

    def _catch_up(self, rank: _Rank) -> Generator[str, None, None]:
        """Take the arrays of the last step, as `elastic` does after a shrink."""
        if rank.ahead is not None:
            yield from self._restore(rank.state, rank.ahead)
        while rank not in self._present:  # it was stopped, and the others do not answer
            yield CALLS
        best = max((each.state for each in self._present), key=lambda state: state.step)
        if rank.state.step < best.step:
            yield from self._restore(rank.state, best._slots)

    def _restore(self, state: State, source: Slots) -> Generator[str, None, None]:
        yield BUSY
        state.restore({name: source.committed(name) for name in source.entries}, source.step)
        yield BUSY

    # --- the proof ---

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
