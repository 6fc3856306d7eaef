"""Train on the handwritten digits: ``python -m ringreduce.train``, alone or under mpirun."""

from __future__ import annotations

import argparse
import dataclasses
import math
import statistics
import sys
import time
from collections.abc import Sequence
from typing import TextIO

import ringreduce as rr
from ringreduce.train import data, mlp
from ringreduce.train.loop import DTYPES, DriftError, Epoch, Result, Settings, train

_LINES = 10
"""So many lines a run at most, where the output is no terminal."""


def main(argv: Sequence[str] | None = None) -> int:
    """Train as the command line says.  Returns 0, 1 if training failed, 2 for a wrong option.

    Raises SystemExit with code 2 for what is wrong before there is a communicator.
    """
    parser = _parser()
    options = parser.parse_args(argv)
    values = {field.name: getattr(options, field.name) for field in dataclasses.fields(Settings)}
    values["hidden"] = tuple(values["hidden"])
    try:
        if options.seeds < 1:
            raise ValueError(f"seeds is {options.seeds}; wanted at least 1")
        settings = Settings(**values)
        split = data.load_split(settings.dtype)
        settings.check(split)
    except ValueError as error:
        parser.error(str(error))
    with rr.init() as comm:
        try:
            # Which algorithms there are, only the communicator knows: it is asked before the work.
            comm.all_reduce(0, algorithm=settings.algorithm)
        except ValueError as error:
            return _failed(comm, error, 2)
        try:
            _train_seeds(comm, split, settings, options.seeds)
        except (FloatingPointError, DriftError) as error:
            return _failed(comm, error, 1)
    return 0


def _failed(comm: rr.Communicator, error: Exception, code: int) -> int:
    """Say why on rank 0: every rank has the same error, and ends in good order with `code`."""
    if comm.rank == 0:
        # The live line may not have ended.
        print(f"\npython -m ringreduce.train: error: {error}", file=sys.stderr, flush=True)
    return code


def _train_seeds(comm: rr.Communicator, split: data.Split, settings: Settings, seeds: int) -> None:
    """Train once for each seed; rank 0 prints how it goes, and last the mean accuracy."""
    speaks = comm.rank == 0
    if speaks:
        print(_heading(comm, split, settings), flush=True)
    accuracies = []
    for seed in range(settings.seed, settings.seed + seeds):
        line = ProgressLine(settings.epochs, sys.stdout) if speaks else None
        start = time.perf_counter()
        result = train(comm, split, dataclasses.replace(settings, seed=seed), report=line)
        accuracies.append(result.accuracy)
        if speaks:
            print(_summary(comm, seed, result, time.perf_counter() - start), flush=True)
    if speaks:
        print(f"accuracy {100 * statistics.fmean(accuracies):.1f} %", flush=True)


class ProgressLine:
    """How training goes: on a terminal one line that lives, elsewhere up to ten lines a run."""

    def __init__(self, epochs: int, out: TextIO) -> None:
        self._epochs = epochs
        self._out = out
        self._terminal = out.isatty()

    def __call__(self, epoch: Epoch, accuracy: float) -> None:
        """Show an epoch and the held-out accuracy (0 to 1) after it."""
        last = epoch.number == self._epochs
        every = math.ceil(self._epochs / _LINES)
        if not (self._terminal or last or epoch.number % every == 0):
            return
        text = (
            f"epoch {epoch.number:{len(str(self._epochs))}}/{self._epochs}"
            f"  loss {epoch.loss:.4f}  held-out {100 * accuracy:.1f} %"
            f"  {epoch.samples_per_s:,.0f} samples/s"
            f"  communication {100 * epoch.communication:.0f} %"
        )
        if self._terminal:
            # Return and clear to the end of the line: what comes may be shorter than what was.
            self._out.write(f"\r{text}\x1b[K" + "\n" * last)
        else:
            self._out.write(f"{text}\n")
        self._out.flush()


def _heading(comm: rr.Communicator, split: data.Split, settings: Settings) -> str:
    sizes = (data.PIXELS, *settings.hidden, data.CLASSES)
    return (
        f"digits: {len(split.train_labels):,} to train, {len(split.held_out_labels):,} held out; "
        f"{'-'.join(map(str, sizes))}, {mlp.parameter_count(sizes):,} parameters, "
        f"{settings.dtype}; {comm.size} rank{'s' * (comm.size > 1)}, "
        f"global batch {settings.batch}, all-reduce {settings.algorithm}"
    )


def _summary(comm: rr.Communicator, seed: int, result: Result, elapsed_s: float) -> str:
    return (
        f"seed {seed}: held-out {100 * result.accuracy:.1f} % in {elapsed_s:.2f} s; parameters "
        f"{result.digest[:16]}…, equal on {comm.size} rank{'s' * (comm.size > 1)}"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m ringreduce.train",
        description="Train a small network on handwritten digits, data-parallel over all ranks.",
        epilog="The last line says the accuracy on a fixed fifth of the digits that is held out.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    option = parser.add_argument
    option("--epochs", type=int, default=Settings.epochs, help="passes over the training digits")
    option("--batch", type=int, default=Settings.batch, help="samples a step, over all ranks")
    option("--lr", type=float, default=Settings.lr, help="first learning rate; it falls to 0")
    option("--momentum", type=float, default=Settings.momentum, help="from 0 to below 1")
    option("--noise", type=float, default=Settings.noise, help="on the pixels, which are 0 to 1")
    option(
        "--hidden",
        type=int,
        nargs="+",
        default=list(Settings.hidden),
        metavar="WIDTH",
        help="width of each hidden layer",
    )
    option("--seed", type=int, default=Settings.seed, help="of first parameters and shuffling")
    option("--seeds", type=int, default=1, help="train with so many seeds, counting from --seed")
    option("--dtype", choices=DTYPES, default=Settings.dtype, help="of parameters and gradients")
    option(
        "--algorithm",
        default=Settings.algorithm,
        help="of the all-reduce; auto lets the library choose",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
