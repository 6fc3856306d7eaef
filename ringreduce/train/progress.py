"""Texts of a run for its user: heading, progress, and the results."""

from __future__ import annotations

import itertools
import math
import statistics
import textwrap
from collections.abc import Sequence
from typing import TextIO

import ringreduce as rr
from ringreduce.console.terminal import LiveLine
from ringreduce.errors import counted
from ringreduce.train import data, mlp
from ringreduce.train.configuration import to_toml
from ringreduce.train.results import Epoch, Result, Step
from ringreduce.train.settings import Settings
from ringreduce.train.strategies import Mirrored, Strategy, options, to_plain

_LINES = 10
"""The most lines of a run, if the output is no terminal."""


class Progress:
    """Shows the progress: on a terminal as a live line, elsewhere as up to ten lines."""

    def __init__(self, epochs: int, epoch_steps: int, out: TextIO) -> None:
        self._epochs, self._epoch_steps = epochs, epoch_steps
        self._live = LiveLine(out)
        self._live.show(f"{counted(epochs, 'epoch')} of {counted(epoch_steps, 'step')}")
        self._measured = ""

    def steps(self, steps: Sequence[Step]) -> None:
        if steps:
            made = steps[-1].step - (steps[-1].epoch - 1) * self._epoch_steps
            made = min(max(made, 0), self._epoch_steps)  # epochs before may have had other steps
            self._show(steps[-1].epoch, made, steps[-1].loss)

    def epoch(self, epoch: Epoch) -> None:
        self._measured = (
            f"  held-out {100 * epoch.accuracy:.1f} %  {epoch.samples_per_s:,.0f} samples/s"
            f"  exposed {100 * epoch.exposed:.0f} %"
        )
        every = math.ceil(self._epochs / _LINES)
        is_last = epoch.epoch == self._epochs
        if self._live.is_shown and not is_last:
            self._show(epoch.epoch, self._epoch_steps, epoch.loss)
        elif is_last or epoch.epoch % every == 0:
            self.close()
            self._live.print(f"{self._number(epoch.epoch)}  loss {epoch.loss:.4f}{self._measured}")

    def close(self) -> None:
        """Remove the live line."""
        self._live.show("")

    def _show(self, epoch: int, step: int, loss: float) -> None:
        made = f"step {step:{len(str(self._epoch_steps))}}/{self._epoch_steps}"
        self._live.show(f"{self._number(epoch)}  {made}  loss {loss:.4f}{self._measured}")

    def _number(self, epoch: int) -> str:
        return f"epoch {epoch:{len(str(self._epochs))}}/{self._epochs}"


def heading(
    comm: rr.Communicator,
    split: data.Split,
    settings: Settings,
    strategy: Strategy,
    verbose: bool,
) -> str:
    """Return the data, the network, the ranks, the strategy, and the settings as TOML.

    The settings are those that are not the defaults; all if `verbose`.
    """
    sizes = split.widths(settings.hidden)
    parameters = mlp.parameter_count(sizes, settings.batch_norm)
    defaults, values = to_plain(Settings()), to_plain(settings)
    shown = {name: value for name, value in values.items() if verbose or value != defaults[name]}
    facts = [
        f"{split.name}: {len(split.train_labels):,} to train, {len(split.held_out_labels):,} held "
        f"out; {'-'.join(map(str, sizes))}, {parameters:,} parameters, "
        f"{settings.dtype}",
        f"{ranks_text(comm)}, global batch {settings.batch}, {described(strategy, settings)}",
    ]
    lines = [textwrap.fill(fact, 80, subsequent_indent="    ") for fact in facts]
    return "\n".join([*lines, *(f"  {line}" for line in to_toml(shown))])


def described(strategy: Strategy, settings: Settings) -> str:
    """Return the algorithm of replicas, or the strategy with its options."""
    if strategy == Mirrored("nccl"):
        return "all-reduce by NCCL"
    if any("is_all_reduce" in each.metadata for each in options(type(strategy)).values()):
        return f"all-reduce {strategy.algorithm(settings)}"
    words = to_plain(strategy).items()
    return ", ".join(f"{option} {value}" for option, value in words)


def results(result: Result, verbose: bool, computing: int) -> str:
    """Return the digest of a run's parameters, and the time of its steps if it made any.

    If `verbose`, the parts of that time too.  The last lines name lost ranks: the first `computing`
    ranks are workers, the others servers.
    """
    lines = [f"parameters {result.digest[:16]}…"]
    step, under_way, exposed = (
        1e3 * s for s in (result.step_s, result.communication_s, result.exposed_s)
    )
    if result.step_s:
        lines.append(f"a step: {step:.2f} ms")
    if result.step_s and verbose:
        lines.append(
            f"  {step - exposed:.2f} ms of computation, {exposed:.2f} ms of exposed communication"
        )
        lines.append(f"  communication is under way for {under_way:.2f} ms")
        first = next(rank for rank in itertools.count() if rank not in dict(result.lost))
        lines.append(
            f"  rank {first} sends {result.sent_bytes:,} bytes a step, holds at most "
            f"{result.held_bytes:,} bytes"
        )
    for rank, epoch in result.lost:
        kind = "worker" if rank < computing else "server"
        lines.append(f"rank {rank}, a {kind}, was lost in epoch {epoch}")
    return "\n".join(lines)


def last_line(comm: rr.Communicator, runs: Sequence[Result], elapsed_s: float) -> str:
    """Return the mean accuracy of `runs`, the time, the ranks, and the steps' efficiency."""
    accuracy = 100 * statistics.fmean(run.accuracy for run in runs)
    line = f"accuracy {accuracy:.1f} % in {elapsed_s:.2f} s on {ranks_text(comm)}"
    step_s = sum(run.step_s for run in runs)
    if step_s:
        line += f", efficiency {100 * (1 - sum(run.exposed_s for run in runs) / step_s):.0f} %"
    return line + f", mean of {len(runs)} seeds" * (len(runs) > 1)


def ranks_text(comm: rr.Communicator) -> str:
    return counted(comm.size, "rank")
