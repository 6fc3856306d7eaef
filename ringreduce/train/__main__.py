"""Train: ``python -m ringreduce.train``, alone or under mpirun."""

from __future__ import annotations

import dataclasses
import math
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import ringreduce as rr
from ringreduce.console.terminal import print_error, replace_unencodable
from ringreduce.errors import AllRanksEnd, counted
from ringreduce.parallel.consensus import REFUSED, from_rank_0, nothing, said, together
from ringreduce.parallel.over_ranks import DriftError
from ringreduce.picture import output
from ringreduce.recovery.checkpoint import (
    Checkpoint,
    CheckpointError,
    Folder,
    Reader,
    Writer,
    interrupted_text,
)
from ringreduce.train import inputs, plot
from ringreduce.train.configuration import Given, check_elastic_run, from_plain, read
from ringreduce.train.loop import Trainer
from ringreduce.train.metrics import Careful, History, JsonLines, Parameters, Sink, TensorBoard
from ringreduce.train.parts import shapes
from ringreduce.train.progress import Progress, described, heading, last_line, ranks_text, results
from ringreduce.train.results import Result, Watcher
from ringreduce.train.served_part import lowest_says
from ringreduce.train.settings import Outputs
from ringreduce.train.steps import PROGRESS, ROWS, STRETCH, RunState
from ringreduce.train.strategies import to_plain

_PROG = "python -m ringreduce.train"
_SPEAKING_S = 0.5
"""Seconds that ranks leave to rank 0 to print a line before they end."""


def main(argv: Sequence[str] | None = None) -> int:
    """Train by the options `argv`.  Returns 0, 1 if training failed, 2 for a wrong option."""
    replace_unencodable()
    given = read(sys.argv[1:] if argv is None else argv, _PROG)
    outputs = given.outputs()
    try:
        if outputs.plot is not None:
            output.check(outputs.plot)
        if outputs.tensorboard is not None:
            TensorBoard.writer_type()
        if not outputs.resume:
            inputs.load(given.settings())
    except REFUSED as error:
        print(f"{_PROG}: error: {said(error)}", file=sys.stderr)
        raise SystemExit(2) from None
    if rr.is_elastic():
        return _train_elastic(given, outputs)
    with rr.init() as comm:
        try:
            _train_all(comm, given, outputs)
        except _FailedError as error:
            return error.code
        except KeyboardInterrupt:
            _end_interrupted(comm.rank, outputs)
    return 0


def _end_interrupted(rank: int, outputs: Outputs) -> None:
    """End this process by SIGINT; rank 0 says where training can go on."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # once is enough
    if rank == 0:
        print_error(f"{_PROG}: {interrupted_text(outputs.checkpoint_dir)}")
    else:
        time.sleep(_SPEAKING_S)  # the first rank that ends may stop the job
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.raise_signal(signal.SIGINT)


class _WriteError(Exception):
    """Outputs could not be written; all ranks raise it."""


class _FailedError(Exception):
    """The run has failed, and its error is printed; all ranks raise it."""

    def __init__(self, code: int) -> None:
        self.code = code


@contextmanager
def _reported(comm: rr.Communicator) -> Iterator[None]:
    """Print the user's errors on rank 0.  Raises _FailedError in place of them."""
    try:
        yield
    except ValueError as error:
        if isinstance(error, rr.RingReduceError):
            raise
        text, code = str(error), 2
    except (FloatingPointError, DriftError, _WriteError) as error:
        text, code = str(error), 1
    else:
        return
    if comm.rank == _lowest(comm):
        print_error(f"{_PROG}: error: {text}")
    try:
        comm.barrier()  # the first rank that ends with a code stops the job: wait for the text
    except rr.PeerLostError:
        time.sleep(_SPEAKING_S)
    raise _FailedError(code)


def _lowest(comm: rr.Communicator) -> int:
    lowest: int = min({*range(comm.size)} - comm.lost_peers())
    return lowest


def _train_all(comm: rr.Communicator, given: Given, outputs: Outputs) -> None:
    """Train once for each seed; rank 0 prints the progress, and last the mean accuracy."""
    runs: list[_CommandRun] = []
    for seed in range(outputs.seeds):
        with _reported(comm), ExitStack() as stack:
            run = _CommandRun(comm, given, outputs, stack, seed)
            run.train()
            runs.append(run)
    with _reported(comm):
        _conclude(comm, runs)


def _conclude(comm: rr.Communicator, runs: Sequence[_CommandRun]) -> None:
    """Print the last line.  Raises _WriteError on all ranks if an output was not written."""
    if runs[-1].speaks:
        seconds = sum(run.elapsed_s for run in runs)
        print(last_line(comm, [run.result for run in runs], seconds), flush=True)
    if unwritten := "; ".join(filter(None, (run.unwritten for run in runs))):
        raise _WriteError(f"not all was written that was asked for: {unwritten}")


def _train_elastic(given: Given, outputs: Outputs) -> int:
    """Train once, in a job that goes on after ranks are lost.  Returns the exit code."""
    runs: list[_CommandRun] = []

    def make(comm: rr.Communicator) -> rr.State:
        with _reported(comm):
            check_elastic_run(given, comm.nodes)
            run = _CommandRun(comm, given, outputs, stack)
        runs.append(run)
        return run.prepared_state()

    def train(comm: rr.Communicator, state: rr.State) -> None:
        (run,) = runs
        with _reported(comm):
            run.go_on(comm, state)
            run.train()
            _conclude(comm, [run])

    with ExitStack() as stack:
        try:
            rr.elastic(train, make)
        except _FailedError as error:
            return error.code
    return 0


class _CommandRun:
    """One run, with its checkpoint to continue from and its outputs."""

    def __init__(
        self,
        comm: rr.Communicator,
        given: Given,
        outputs: Outputs,
        stack: ExitStack,
        seed: int = 0,
    ) -> None:
        """Make a run, with the seed of the settings plus `seed`."""
        self._comm, self._given, self._outputs, self._stack = comm, given, outputs, stack
        self.speaks = comm.rank == 0
        """Whether this rank prints and writes."""
        self.elapsed_s = 0.0
        """Seconds of training: steps, accuracies, proofs and checkpoints."""
        self.unwritten = ""
        """Which outputs could not be written."""
        self._writer: Writer | None = None
        """On rank 0 with a folder for checkpoints."""
        self._before: Checkpoint | None = None
        """On rank 0, the checkpoint to continue from, if any."""
        self._change: rr.Change | None = None
        """How the ranks have changed before; None in the first generation."""
        self._is_first = not seed
        together(comm, self._find if self.speaks else nothing)
        facts = from_rank_0(comm, None if self._before is None else dict(self._before.facts))
        settings = given.settings(_plain_in(facts, "settings"))
        self.settings = dataclasses.replace(settings, seed=settings.seed + seed)
        self._split = together(comm, lambda: inputs.load(self.settings))
        inputs.check_same(comm, self._split)
        xp = self._xp = together(comm, lambda: inputs.module(outputs.device, comm))
        self._named = strategy = given.strategy(_plain_in(facts, "strategy"))
        """The strategy; None: the default, which depends on the number of nodes."""
        self._trainer = together(
            comm,
            lambda: Trainer(comm, self._split, self.settings, xp, strategy, rr.is_elastic()),
        )
        self._facts = facts
        if facts is not None:
            self._restore(facts)

    def prepared_state(self) -> rr.State:
        """Return the state of the run, which reports changes of the ranks and saves checkpoints."""
        state = self._trainer.store
        assert isinstance(state, rr.State)
        state.on_resize(self._resized)
        if self._outputs.checkpoint_dir is not None:
            state.save_to(self._outputs.checkpoint_dir, self._unchanging())
        return state

    def go_on(self, comm: rr.Communicator, state: rr.State) -> None:
        """Go on with the ranks that are left, if `comm` is another communicator than before."""
        if comm is self._comm:
            self._trainer.go_on_with_store()  # which may be that of other ranks now
            return
        self._stack.close()  # the outputs of this rank, if it has spoken before
        self._comm, self.speaks, self._writer = comm, comm.rank == 0, None
        how = self._split, self.settings, self._xp, self._named, state
        self._trainer = together(comm, lambda: Trainer(comm, *how))

    def _resized(self, change: rr.Change) -> None:
        self._change = change

    def _print_heading(self) -> None:
        """Print the settings of a new run, or the step after which the run goes on."""
        comm, trainer = self._comm, self._trainer
        after = f"goes on after step {trainer.store.step} of {trainer.steps}"
        if self._change is not None:
            print(f"{after}, on {ranks_text(comm)}", flush=True)
            return
        if self._is_first:
            chosen, verbose = trainer.strategy, self._outputs.verbose
            print(heading(comm, self._split, trainer.settings, chosen, verbose), flush=True)
        if self._facts is not None:
            print(f"{after}, saved by {counted(self._facts['ranks'], 'rank')}", flush=True)

    def train(self) -> None:
        """Train to the end, and print the `result`."""
        together(self._comm, self._open if self.speaks else nothing)
        if self.speaks:
            self._print_heading()
        history, parameters = History(), Parameters(lambda: self._trainer.arrays())
        careful = together(self._comm, partial(self._watchers, history, parameters))
        watchers: list[Watcher] = [*careful]
        if self._outputs.tensorboard is not None:
            watchers.insert(0, parameters)
        save = self._save if self._outputs.checkpoint_dir is not None else None
        begin = time.perf_counter()
        self.result = result = self._trainer.run(watchers, save, self._outputs.checkpoint_every)
        self.elapsed_s = time.perf_counter() - begin
        self._trainer.close()
        if watchers and self._comm.rank == _lowest(self._comm):
            watchers[0].steps([])  # opens the outputs, if the rank that had them is lost
        if self.speaks:
            if self._outputs.seeds > 1:
                print(f"seed {self.settings.seed}: accuracy {100 * result.accuracy:.1f} %")
            computing = self._comm.size - self._trainer.strategy.servers
            print(results(result, self._outputs.verbose, computing), flush=True)
        self._end(careful, history, result)

    def _end(self, watchers: Sequence[Careful], history: History, result: Result) -> None:
        """Draw and close; find out on all ranks what could not be written."""

        def end() -> None:
            (careful,) = watchers
            careful.close()
            failed = careful.failed
            if self._writer is not None:
                self._writer.wait()
                failed += self._writer.failed
            if self._outputs.plot is not None and history.all_steps:
                try:
                    self._draw(history, result)
                except REFUSED as error:
                    failed.append(said(error))
            elif self._outputs.plot is not None:
                print("nothing was trained: there is nothing to draw", flush=True)
            self.unwritten = "; ".join(failed)

        servers = self._trainer.strategy.servers
        if not servers:
            together(self._comm, end if self.speaks else nothing)
            self.unwritten = from_rank_0(self._comm, self.unwritten)
            return
        if self.speaks:
            end()
        workers = self._comm.size - servers
        self.unwritten = lowest_says(self._comm, workers, self.unwritten.encode).decode()

    # --- before the run ---

    def _find(self) -> None:
        """Find the checkpoint to continue from, if there is one; on rank 0 alone."""
        if self._outputs.checkpoint_dir is not None and self._outputs.resume:
            self._before = Reader(self._outputs.checkpoint_dir).last(
                self._fits, lambda why: _complain(f"passed over: {why}")
            )

    def _open(self, follows: bool = False) -> None:
        """Open the folder for checkpoints, if there is one; on the rank that speaks.

        The rank that spoke before has closed it, or is lost: then this one `follows`.  Raises
        CheckpointError if a new run would mix its checkpoints with those of another.
        """
        if self._outputs.checkpoint_dir is None:
            return
        folder = Folder(self._outputs.checkpoint_dir, self._outputs.keep)
        self._stack.callback(folder.close)
        if self._change is None and not (follows or self._outputs.resume):
            folder.check_new()
        self._writer = Writer(folder, self._complain)
        self._stack.callback(self._writer.wait)

    def _fits(self, checkpoint: Checkpoint) -> None:
        try:
            before, strategy = (_plain_in(checkpoint.facts, k) for k in ("settings", "strategy"))
        except ValueError as error:
            raise CheckpointError(str(error)) from None
        # An option that does not fit is the user's mistake, and no reason for an older checkpoint.
        self._given.strategy(strategy)
        settings = self._given.settings(before)
        split = inputs.load(settings)
        if split.digest != checkpoint.facts["data_sha256"]:
            raise CheckpointError("it was made with other data")
        sizes = split.widths(settings.hidden)
        progress = (PROGRESS, ROWS, STRETCH)  # in checkpoints of a launcher
        arrays = checkpoint.arrays.items()
        found = {name: array.shape for name, array in arrays if name not in progress}
        if found != shapes(sizes, settings):
            raise CheckpointError(f"its arrays are not those of a network {sizes}")

    def _restore(self, facts: dict[str, Any]) -> None:
        # Those of a launcher have the losses among the arrays.
        last_loss = math.nan if facts.get("last_loss") is None else facts["last_loss"]
        stretch = tuple(facts.get("stretch", ()))
        state = RunState(facts["step"], facts.get("epoch_loss", 0.0), last_loss, stretch)
        self._trainer.restore(None if self._before is None else self._before.arrays, state)

    # --- outputs ---

    def _save(self, trainer: Trainer) -> None:
        """Begin to write a checkpoint.  Collective."""
        state, arrays = trainer.state, trainer.arrays()
        if self._writer is None:
            return
        facts = {
            "epoch_loss": state.epoch_loss,
            "stretch": state.stretch,
            "last_loss": state.last_loss if math.isfinite(state.last_loss) else None,
            "generation": trainer.store.generation,
            **self._unchanging(),
        }
        self._writer.begin(Checkpoint(state.step, arrays, facts))

    def _unchanging(self) -> dict[str, Any]:
        """Return the facts of a checkpoint that steps do not change."""
        return {
            "settings": to_plain(self.settings),
            "strategy": {} if self._named is None else to_plain(self._named),
            "data_sha256": self._split.digest,
            "ranks": self._comm.size,
            "ringreduce": rr.__version__,
        }

    def _watchers(self, history: History, parameters: Parameters) -> list[Careful]:
        if not (self.speaks or self._trainer.strategy.servers):
            return []
        sinks = self._sinks(history, parameters)
        careful = Careful(list(sinks) if self.speaks else sinks, self._complain)
        self._stack.callback(careful.close)
        return [careful]

    def _sinks(self, history: History, parameters: Parameters) -> Iterator[Sink]:
        """Open the outputs; on another rank than 0, those of a rank that is lost."""
        follows, self.speaks = not self.speaks, True
        if follows:
            self._open(follows)
        outputs, reported = self._outputs, self._trainer.reported
        goes_on = follows or self._change is not None or self._facts is not None
        yield Progress(self.settings.epochs, self._trainer.epoch_steps, sys.stdout)
        if outputs.plot is not None:
            plot.check_place(outputs.plot)
            yield history
        if outputs.metrics is not None:
            lines = JsonLines(outputs.metrics, *reported, goes_on=goes_on)
            history.again(lines.kept)
            yield lines
        if outputs.tensorboard is not None:
            yield TensorBoard(outputs.tensorboard, reported[0], parameters)

    def _complain(self, text: str) -> None:
        store = self._trainer.store
        if isinstance(store, rr.State):
            store.report_unsaved(f"{_PROG}: {text}")
        else:
            _complain(text)

    def _draw(self, history: History, result: Result) -> None:
        assert self._outputs.plot is not None
        ranks = ranks_text(self._comm)
        title = f"{100 * result.accuracy:.1f} % accuracy on the held-out {self._split.name}"
        facts = (
            f"Layers of {', '.join(map(str, self._trainer.sizes))} on {ranks}, global batch "
            f"{self._trainer.settings.batch}, {self.settings.optimizer}, "
            f"{described(self._trainer.strategy, self.settings)}."
        )
        if result.step_s:
            exposed = f"{100 * result.exposed_s / result.step_s:.0f} %"
            title += f"; exposed communication is {exposed} of a step"
            facts += f" A step takes {1e3 * result.step_s:.3g} ms."
        plot.draw(self._outputs.plot, title, facts, history)


def _plain_in(facts: Any, kind: str) -> dict[str, Any] | None:
    """Return the settings, or the strategy, in a checkpoint's facts; old ones have no strategy."""
    if facts is None:
        return None
    return {name: from_plain(name, value) for name, value in facts.get(kind, {}).items()}


def _complain(text: str) -> None:
    print_error(f"{_PROG}: {text}")


if __name__ == "__main__":
    raise AllRanksEnd(main())
