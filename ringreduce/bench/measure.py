"""Times contenders against each other: interleaved, inputs rewritten, results verified.

A call lasts from when the last rank enters it until the last one leaves it.  Ranks of one host have
one clock, so that is known; on several, each rank's own time counts, and the longest is taken.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ringreduce import Communicator
from ringreduce.bench.collectives import COLLECTIVES, OURS
from ringreduce.bench.contenders import BenchArguments, Contender, contenders_of, wanted
from ringreduce.bench.gloo import Gloo
from ringreduce.bench.inputs import Inputs
from ringreduce.bench.options import Options
from ringreduce.bench.world import MPI
from ringreduce.planning.select import resolve

_SHORT_BYTES = 1 << 20


@dataclass(frozen=True)
class Timing:
    contender: str
    place: str
    count: int
    nbytes: int
    seconds: tuple[float, ...]
    wrong: int | None
    """Wrong elements on all ranks together; None if no result was verified."""

    @property
    def median_s(self) -> float:
        return float(np.median(self.seconds))

    @property
    def min_s(self) -> float:
        return min(self.seconds)

    @property
    def p99_s(self) -> float:
        return float(np.quantile(self.seconds, 0.99, method="higher"))

    def algbw(self) -> float:
        """Return bytes a second."""
        return self.nbytes / self.median_s

    def busbw(self, collective: str, ranks: int) -> float:
        """Bytes a second on each link, for the least bytes that any algorithm must move."""
        return self.algbw() * COLLECTIVES[collective].busbw(ranks)


class Measurement:
    def __init__(self, comm: Communicator, world: MPI.Intracomm, options: Options) -> None:
        self.comm, self.world, self.options = comm, world, options
        here = world.Split_type(MPI.COMM_TYPE_SHARED)
        self.one_clock = here.size == world.size
        here.Free()
        self.gloo = Gloo.start(world) if options.baselines else None

    def close(self) -> None:
        if self.gloo is not None:
            self.gloo.close()

    def run(self) -> Iterator[list[Timing]]:
        """Size by size, the timings of all contenders; the same on every rank."""
        for count in self.options.counts(self.world.size):
            yield self._size(count)

    def algorithm(self, nbytes: int) -> str:
        """Return the algorithm that our calls use at a size: "auto" is resolved, as a call does."""
        options = self.options
        moved = nbytes if COLLECTIVES[options.collective].moves else 0
        return resolve(
            options.collective, options.algorithm, self.comm.nodes, moved, self.comm.config
        )

    def _size(self, count: int) -> list[Timing]:
        options = self.options
        at = BenchArguments(
            self.comm, self.world, count, options.op, options.dtype, options.algorithm
        )
        collective = COLLECTIVES[options.collective]
        contenders = contenders_of(options.collective, at)
        if not options.baselines:
            contenders = [c for c in contenders if c.name == OURS]
        elif self.gloo is not None and options.collective == "all_reduce":
            contenders += self.gloo.contenders(at)
        inputs = Inputs(
            self.world.size, count, options.op if collective.reduces else "sum", at.dtype
        )
        spans = np.zeros((len(contenders), options.iterations, 2))
        wrong = [0] * len(contenders)
        turns = np.random.default_rng(count)
        first_checked = options.warmup + max(0, options.iterations - options.checks)
        for iteration in range(options.warmup + options.iterations):
            right = None
            # All ranks draw the same order.  A contender leaves its data in the caches, so the next
            # contender must not always be the same one.  An untimed call before a short timed one
            # removes that effect.
            for number in turns.permutation(len(contenders)):
                contender = contenders[number]
                if count * options.itemsize <= _SHORT_BYTES:
                    contender.call()
                inputs.fill(contender.source, self.world.rank, iteration)
                span = self._timed(contender)
                if iteration >= options.warmup:
                    spans[number, iteration - options.warmup] = span
                if iteration >= first_checked and contender.result is not None:
                    if right is None:
                        right = wanted(options.collective, inputs, at, iteration)
                    wrong[number] += int((contender.result != contender.wanted(right)).sum())
        totals = np.array(wrong, np.int64)
        self.world.Allreduce(MPI.IN_PLACE, totals)
        series = self._of_all_ranks(spans)
        return [
            Timing(
                contender.name,
                contender.place,
                count,
                count * options.itemsize,
                tuple(seconds.tolist()),
                int(total) if options.checks else None,
            )
            for contender, seconds, total in zip(contenders, series, totals, strict=True)
        ]

    def _of_all_ranks(self, spans: np.ndarray) -> np.ndarray:
        """(contender, call) -> seconds, of (contender, call, begin and end) on every rank."""
        if self.one_clock:
            self.world.Allreduce(MPI.IN_PLACE, spans, MPI.MAX)
        seconds: np.ndarray = spans[..., 1] - spans[..., 0]
        if not self.one_clock:
            self.world.Allreduce(MPI.IN_PLACE, seconds, MPI.MAX)
        return seconds

    def _timed(self, contender: Contender) -> tuple[float, float]:
        self.world.Barrier()
        begin = time.perf_counter()
        contender.call()
        end = time.perf_counter()
        self.world.Barrier()  # ranks on the same core have left the call, too
        return begin, end
