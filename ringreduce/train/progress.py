"""Texts of a run for its user: heading, progress and summary."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TextIO

import ringreduce as rr
from ringreduce.train import data, mlp
from ringreduce.train.configuration import to_plain, to_toml
from ringreduce.train.loop import Epoch, Result, Step
from ringreduce.train.settings import Settings

_LINES = 10
"""The most lines of a run, if the output is no terminal."""


class ProgressLine:
    """Shows progress: on a terminal one line that is rewritten, elsewhere up to ten lines."""

    def __init__(self, epochs: int, out: TextIO) -> None:
        self._epochs = epochs
        self._out = out
        self._terminal = out.isatty()

    def steps(self, steps: Sequence[Step]) -> None:
        """Show nothing."""

    def close(self) -> None:
        """Do nothing: no file is open."""

    def epoch(self, epoch: Epoch) -> None:
        """Show the epoch."""
        last = epoch.epoch == self._epochs
        every = math.ceil(self._epochs / _LINES)
        if not (self._terminal or last or epoch.epoch % every == 0):
            return
        text = (
            f"epoch {epoch.epoch:{len(str(self._epochs))}}/{self._epochs}"
            f"  loss {epoch.loss:.4f}  held-out {100 * epoch.accuracy:.1f} %"
            f"  {epoch.samples_per_s:,.0f} samples/s"
            f"  exposed communication {100 * epoch.exposed:.0f} %"
        )
        if self._terminal:
            # Return and clear to the end of the line: the new text may be shorter than the old.
            self._out.write(f"\r{text}\x1b[K" + "\n" * last)
        else:
            self._out.write(f"{text}\n")
        self._out.flush()


def heading(comm: rr.Communicator, split: data.Split, settings: Settings) -> str:
    """Return the data, the network, the ranks, and the settings as TOML."""
    sizes = split.widths(settings.hidden)
    written = to_toml(to_plain(settings))
    return (
        f"{split.name}: {len(split.train_labels):,} to train, {len(split.held_out_labels):,} held "
        f"out; {'-'.join(map(str, sizes))}, {mlp.parameter_count(sizes):,} parameters, "
        f"{settings.dtype}; {comm.size} rank{'s' * (comm.size > 1)}, "
        f"global batch {settings.batch}, all-reduce {settings.algorithm}\n"
        + "\n".join(f"  {line}" for line in written)
    )


def summary(comm: rr.Communicator, seed: int, result: Result, elapsed_s: float) -> str:
    """Return the accuracy of a run, and the times of its steps."""
    ranks = f"{comm.size} rank{'s' * (comm.size > 1)}"
    lines = [
        f"seed {seed}: held-out {100 * result.accuracy:.1f} % in {elapsed_s:.2f} s; parameters "
        f"{result.digest[:16]}…, equal on {ranks}"
    ]
    if result.step_s:
        step, under_way, exposed = (
            1e3 * s for s in (result.step_s, result.communication_s, result.exposed_s)
        )
        lines.append(
            f"a step: {step:.2f} ms, of which {step - exposed:.2f} compute and {exposed:.2f} "
            f"exposed communication ({under_way:.2f} under way); scaling efficiency "
            f"{100 * result.efficiency:.0f} % on {ranks}"
        )
    return "\n".join(lines)
