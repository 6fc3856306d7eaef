"""Train: ``python -m ringreduce.train``, alone or under mpirun."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import statistics
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import ModuleType
from typing import Any, TextIO

import numpy as np

import ringreduce as rr
from ringreduce.train import data, mlp, optimizers, plot
from ringreduce.train.checkpoint import Checkpoint, CheckpointError, Folder
from ringreduce.train.configuration import Given, from_plain, read, to_plain, to_toml
from ringreduce.train.loop import DriftError, Epoch, Result, State, Step, Trainer, Watcher
from ringreduce.train.metrics import History, JsonLines, TensorBoard
from ringreduce.train.settings import Outputs, Settings

_LINES = 10
"""So many lines a run at most, where the output is no terminal."""
_PROG = "python -m ringreduce.train"

_load = functools.cache(data.load)


def main(argv: Sequence[str] | None = None) -> int:
    """Train as the command line says.  Returns 0, 1 if training failed, 2 for a wrong option.

    Raises SystemExit with code 2 for what is wrong before there is a communicator.
    """
    given = read(sys.argv[1:] if argv is None else argv, _PROG)
    outputs = given.outputs
    try:
        if outputs.plot is not None:
            plot.check()
        if outputs.tensorboard is not None:
            TensorBoard.writer_type()
        if not outputs.resume:
            _load(given.settings())
    except (OSError, ValueError, ImportError) as error:
        print(f"{_PROG}: error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    with rr.init() as comm:
        try:
            return _train_all(comm, given, outputs)
        except (OSError, ValueError, ImportError) as error:
            return _failed(comm, error, 2)
        except (FloatingPointError, DriftError) as error:
            return _failed(comm, error, 1)


def _failed(comm: rr.Communicator, error: Exception, code: int) -> int:
    """Say why on rank 0: every rank has the same error, and ends in good order with `code`."""
    if comm.rank == 0:
        # The live line may not have ended.
        print(f"\n{_PROG}: error: {error}", file=sys.stderr, flush=True)
    return code


def _train_all(comm: rr.Communicator, given: Given, outputs: Outputs) -> int:
    """Train once for each seed; rank 0 prints how it goes, and last the mean accuracy."""
    accuracies = []
    for seed in range(outputs.seeds):
        with ExitStack() as stack:
            run = _Run(comm, given, outputs, stack, seed)
            accuracies.append(run.train().accuracy)
    if comm.rank == 0:
        print(f"accuracy {100 * statistics.fmean(accuracies):.1f} %", flush=True)
    return 0


class _Run:
    """One run: what it goes on from, what it writes."""

    def __init__(
        self, comm: rr.Communicator, given: Given, outputs: Outputs, stack: ExitStack, seed: int
    ) -> None:
        self._comm, self._given, self._outputs, self._stack = comm, given, outputs, stack
        self._speaks = comm.rank == 0
        self._folder: Folder | None = None
        self._before: Checkpoint | None = None
        """On rank 0, what the run goes on from."""
        facts = _from_rank_0(comm, self._open)
        settings = given.settings(_settings_in(facts) if facts is not None else None)
        self.settings = dataclasses.replace(settings, seed=settings.seed + seed)
        self._split = _load(self.settings)
        _check_same_data(comm, self._split)
        if self._speaks and not seed:
            print(_heading(comm, self._split, self.settings), flush=True)
        self._trainer = Trainer(comm, self._split, self.settings, _module(outputs.device, comm))
        if facts is not None:
            self._restore(facts)

    def train(self) -> Result:
        """Train to the end, and say what came of it."""
        start = time.perf_counter()
        history = History()
        watchers = self._watchers(history) if self._speaks else []
        save = self._save if self._outputs.checkpoint_dir is not None else None
        result = self._trainer.run(watchers, save, self._outputs.checkpoint_every)
        if self._speaks:
            elapsed_s = time.perf_counter() - start
            print(_summary(self._comm, self.settings.seed, result, elapsed_s), flush=True)
            if self._outputs.plot is not None and history.all_steps:
                self._draw(history, result)
        return result

    # --- what there was ---

    def _open(self) -> dict[str, Any] | None:
        """On rank 0: the facts of the checkpoint to go on from; None to begin anew."""
        outputs = self._outputs
        if outputs.checkpoint_dir is None:
            return None
        self._folder = Folder(outputs.checkpoint_dir, outputs.keep)
        self._stack.callback(self._folder.close)
        if not outputs.resume:
            if self._folder.manifests():
                raise CheckpointError(
                    f"{outputs.checkpoint_dir} has checkpoints already; go on from them with "
                    "--resume, or name another folder"
                )
            return None
        self._before = self._folder.last(
            self._fits, lambda why: print(f"passed over: {why}", file=sys.stderr, flush=True)
        )
        return None if self._before is None else dict(self._before.facts)

    def _fits(self, checkpoint: Checkpoint) -> None:
        try:
            settings = self._given.settings(_settings_in(checkpoint.facts))
            split = _load(settings)
        except (OSError, ValueError) as error:
            raise CheckpointError(str(error)) from None
        if split.digest() != checkpoint.facts["data_sha256"]:
            raise CheckpointError("it was made with other training data")
        sizes = (split.train_x.shape[1], *settings.hidden, split.classes)
        network = mlp.views(np.empty(mlp.parameter_count(sizes)), sizes)
        shapes = {name: array.shape for name, array in mlp.named(network).items()}
        slots = optimizers.SLOTS[settings.optimizer]
        shapes |= {f"{slot}/{name}": s for name, s in shapes.items() for slot in slots}
        found = {name: array.shape for name, array in checkpoint.arrays.items()}
        if found != shapes:
            raise CheckpointError(f"its arrays are not those of a network {sizes}")

    def _restore(self, facts: dict[str, Any]) -> None:
        last_loss = math.nan if facts["last_loss"] is None else facts["last_loss"]
        state = State(facts["step"], facts["epoch_loss"], last_loss)
        self._trainer.restore(None if self._before is None else self._before.arrays, state)
        if self._speaks:
            of, ranks = self._trainer.steps, facts["ranks"]
            print(f"goes on after step {state.step} of {of}, saved by {ranks} rank(s)", flush=True)

    # --- what there will be ---

    def _save(self, trainer: Trainer) -> None:
        if self._folder is None:
            return
        state = trainer.state
        facts = {
            "epoch_loss": state.epoch_loss,
            "last_loss": state.last_loss if math.isfinite(state.last_loss) else None,
            "settings": to_plain(self.settings),
            "data_sha256": self._data_sha256,
            "ranks": self._comm.size,
            "ringreduce": rr.__version__,
        }
        self._folder.save(Checkpoint(state.step, trainer.arrays(), facts))

    @functools.cached_property
    def _data_sha256(self) -> str:
        return self._split.digest()

    def _watchers(self, history: History) -> list[Watcher]:
        outputs, made = self._outputs, self._trainer.state.step
        watchers: list[Any] = [ProgressLine(self.settings.epochs, sys.stdout)]
        if outputs.metrics is not None:
            epochs = made // self._trainer.epoch_steps
            watchers.append(JsonLines(outputs.metrics, made, epochs))
        if outputs.tensorboard is not None:
            watchers.append(TensorBoard(outputs.tensorboard))
        if outputs.plot is not None:
            watchers.append(history)
        for watcher in watchers[1:]:
            self._stack.callback(watcher.close)
        return watchers

    def _draw(self, history: History, result: Result) -> None:
        assert self._outputs.plot is not None
        title = f"{self._split.name}: {100 * result.accuracy:.1f} % of those held out"
        facts = (
            f"{'-'.join(map(str, self._trainer.sizes))} on {self._comm.size} rank(s), global batch "
            f"{self.settings.batch}, {self.settings.optimizer}, all-reduce "
            f"{self.settings.algorithm}; a step takes {1e3 * result.step_s:.2f} ms, scaling "
            f"efficiency {100 * result.efficiency:.0f} %"
        )
        plot.draw(self._outputs.plot, title, facts, history)


class ProgressLine:
    """How training goes: on a terminal one line that lives, elsewhere up to ten lines a run."""

    def __init__(self, epochs: int, out: TextIO) -> None:
        self._epochs = epochs
        self._out = out
        self._terminal = out.isatty()

    def steps(self, steps: Sequence[Step]) -> None:
        """Nothing is shown of them."""

    def epoch(self, epoch: Epoch) -> None:
        """Show it."""
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
            # Return and clear to the end of the line: what comes may be shorter than what was.
            self._out.write(f"\r{text}\x1b[K" + "\n" * last)
        else:
            self._out.write(f"{text}\n")
        self._out.flush()


def _settings_in(facts: Any) -> dict[str, Any]:
    """Raises ValueError for a setting that there is no more."""
    return {name: from_plain(name, value) for name, value in facts["settings"].items()}


def _from_rank_0(comm: rr.Communicator, ask: Callable[[], Any]) -> Any:
    """What `ask` gives on rank 0, on all ranks; or, on all ranks, a ValueError with its error."""
    answer: dict[str, Any] = {}
    if comm.rank == 0:
        try:
            answer = {"value": ask()}
        except (OSError, ValueError) as error:
            answer = {"error": str(error)}
    text = np.frombuffer(json.dumps(answer).encode(), np.uint8)
    length = int(comm.broadcast(np.array(len(text))))
    if comm.rank != 0:
        text = np.zeros(length, np.uint8)
    answer = json.loads(comm.broadcast(text).tobytes())
    if "error" in answer:
        raise ValueError(answer["error"])
    return answer["value"]


def _check_same_data(comm: rr.Communicator, split: data.Split) -> None:
    digest = np.frombuffer(bytes.fromhex(split.digest()), np.uint8)
    digests = comm.all_gather(digest.reshape(1, -1))
    others = [str(r) for r in range(comm.size) if not np.array_equal(digests[r], digests[0])]
    if others:
        raise ValueError(
            f"the training data of rank {', '.join(others)} are not those of rank 0; all hosts "
            "need the same files"
        )


def _module(device: str, comm: rr.Communicator) -> ModuleType:
    """The array module, with a card chosen for this rank where there are some."""
    if device == "cpu":
        return np
    import cupy

    cupy.cuda.Device(comm.local_rank % cupy.cuda.runtime.getDeviceCount()).use()
    module: ModuleType = cupy
    return module


def _heading(comm: rr.Communicator, split: data.Split, settings: Settings) -> str:
    sizes = (split.train_x.shape[1], *settings.hidden, split.classes)
    written = ", ".join(to_toml(to_plain(settings)))
    return (
        f"{split.name}: {len(split.train_labels):,} to train, {len(split.held_out_labels):,} held "
        f"out; {'-'.join(map(str, sizes))}, {mlp.parameter_count(sizes):,} parameters, "
        f"{settings.dtype}; {comm.size} rank{'s' * (comm.size > 1)}, "
        f"global batch {settings.batch}, all-reduce {settings.algorithm}\n"
        + textwrap.fill(written, 100, initial_indent="  ", subsequent_indent="  ")
    )


def _summary(comm: rr.Communicator, seed: int, result: Result, elapsed_s: float) -> str:
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


if __name__ == "__main__":
    sys.exit(main())
