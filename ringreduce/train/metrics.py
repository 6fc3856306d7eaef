"""Watchers that record a run: as lines of JSON, as TensorBoard's files, for a picture.

They are made on rank 0 alone.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ringreduce.recovery.checkpoint import _FAILURES
from ringreduce.train.results import Epoch, Step, Watcher


class Sink(Watcher, Protocol):
    """A watcher that must be closed."""

    def close(self) -> None: ...


class Careful:
    """Passes steps and epochs on to watchers; one that fails, as on a full disk, is dropped."""

    def __init__(self, sinks: Iterable[Sink], complain: Callable[[str], None]) -> None:
        self._sinks, self._complain = sinks, complain  # a generator opens them when it is asked
        self.failed: list[str] = []

    def steps(self, steps: Sequence[Step]) -> None:
        self._each(lambda sink: sink.steps(steps))

    def epoch(self, epoch: Epoch) -> None:
        self._each(lambda sink: sink.epoch(epoch))

    def close(self) -> None:
        """Close all watchers; they receive nothing more."""
        if isinstance(self._sinks, list):
            self._each(lambda sink: sink.close())
        self._sinks = []

    def _each(self, pass_on: Callable[[Sink], None]) -> None:
        self._sinks = sinks = list(self._sinks)
        for sink in list(sinks):
            try:
                pass_on(sink)
            except OSError as error:
                sinks.remove(sink)
                self.failed.append(type(sink).__name__)
                self._complain(f"{self.failed[-1]} cannot go on: {error}")


class JsonLines:
    """A file with a line for each step, ``{"step": 1, "epoch": 1, "loss": ...}``, and each epoch.

    A line of an epoch has an "accuracy" and no "step".  Raises OSError if it cannot be written.
    """

    def __init__(
        self, path: Path, steps_made: int, epochs_made: int, *, goes_on: bool = False
    ) -> None:
        """Begin a new file; if `steps_made` is not 0 or `goes_on`, continue the file that is there.

        Lines of later steps and epochs are removed: the run makes these again.  Lines of other
        programs are kept.
        """
        path = path.resolve()
        path.parent.mkdir(parents=True, exist_ok=True)
        self.kept: list[Step | Epoch] = []
        """Steps and epochs in the lines that are kept."""
        goes_on = (goes_on or steps_made > 0) and path.is_file()
        if goes_on:
            self._keep(path, steps_made, epochs_made)
        self._file = open(path, "a" if goes_on else "w", encoding="utf-8")  # noqa: SIM115  # held until close

    def _keep(self, path: Path, steps_made: int, epochs_made: int) -> None:
        lines = []
        for line in path.read_text("utf-8", "surrogateescape").splitlines(keepends=True):
            record = _record(line)
            stands = line.endswith("\n")
            if isinstance(record, Step):
                stands &= record.step <= steps_made
            elif isinstance(record, Epoch):
                stands &= record.epoch <= epochs_made
            if stands:
                lines.append(line)
                self.kept += [record] if record is not None else []
        unfinished = path.with_name(f"{path.name}.unfinished")
        try:
            unfinished.write_text("".join(lines), "utf-8", "surrogateescape")
            os.replace(unfinished, path)
        except OSError as error:
            unfinished.unlink(missing_ok=True)
            if error.errno in _FAILURES:
                raise
            path.write_text("".join(lines), "utf-8", "surrogateescape")  # there are no renames

    def steps(self, steps: Sequence[Step]) -> None:
        self._file.writelines(_line(step) for step in steps)
        self._file.flush()

    def epoch(self, epoch: Epoch) -> None:
        self._file.write(_line(epoch))
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class Parameters:
    """Keeps the parameters of the last epoch.  Every rank has one: `gather` may be collective."""

    def __init__(self, gather: Callable[[], Mapping[str, Any]]) -> None:
        self._gather, self.arrays = gather, dict[str, Any]()

    def steps(self, steps: Sequence[Step]) -> None:
        """Do nothing."""

    def epoch(self, epoch: Epoch) -> None:
        self.arrays = {name: each for name, each in self._gather().items() if "/" not in name}


class TensorBoard:
    """Event files in a folder: scalars by step, those of an epoch by its last step.

    Also histograms of `parameters`, if given, once an epoch.

    Raises ImportError, saying what to install, without tensorboard.
    """

    def __init__(
        self, folder: Path, steps_made: int = 0, parameters: Parameters | None = None
    ) -> None:
        """Begin after `steps_made` steps.  TensorBoard drops later steps of files in the folder."""
        writer_type = self.writer_type()
        _write_start(folder, steps_made + 1)
        self._writer = writer_type(str(folder))
        self._step, self._parameters = steps_made, parameters or Parameters(dict)

    @staticmethod
    def writer_type() -> Any:
        """Return the class that writes event files.  Raises ImportError without tensorboard."""
        try:
            from tensorboard.summary import Writer
        except ImportError:
            raise ImportError(
                "TensorBoard's files need: pip install 'ringreduce[tensorboard]'"
            ) from None
        return Writer

    def steps(self, steps: Sequence[Step]) -> None:
        for step in steps:
            self._step = step.step
            for name in ("loss", "lr", "step_s", "compute_s", "communication_s", "exposed_s"):
                group = "time" if name.endswith("_s") else "train"
                self._writer.add_scalar(f"{group}/{name}", getattr(step, name), step.step)
        self._writer.flush()

    def epoch(self, epoch: Epoch) -> None:
        for name in ("loss", "accuracy", "samples_per_s", "staleness_mean", "staleness_max"):
            if (value := getattr(epoch, name)) is not None:
                self._writer.add_scalar(f"epoch/{name}", value, self._step)
        for name, array in self._parameters.arrays.items():
            self._add_histogram(f"parameters/{name}", array[np.isfinite(array)])
        self._writer.flush()

    def _add_histogram(self, tag: str, array: Any) -> None:
        """Write a histogram.  tensorboard's own function takes 30 booleans for each number."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.plugins.histogram.metadata import create_summary_metadata
        from tensorboard.util.tensor_util import make_tensor_proto

        counts, edges = np.histogram(array.astype(np.float64), bins=30)
        event = Event(wall_time=time.time(), step=self._step)
        rows = make_tensor_proto(np.column_stack([edges[:-1], edges[1:], counts]))
        event.summary.value.add(tag=tag, tensor=rows, metadata=create_summary_metadata(None, None))
        # Into the same file: TensorBoard reads one after another.
        self._writer._output._ev_writer.add_event(event)

    def close(self) -> None:
        self._writer.close()


def _write_start(folder: Path, step: int) -> None:
    """Write an event after which TensorBoard forgets all from `step` on that it has read.

    It does so from the second of these events on.
    """
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    start = SessionLog(status=SessionLog.START)
    writer = EventFileWriter(str(folder))
    writer.add_event(Event(wall_time=time.time(), step=step, session_log=start))
    writer.close()


class History:
    """Keeps all steps and epochs, for a picture at the end."""

    def __init__(self) -> None:
        self.all_steps: list[Step] = []
        self.all_epochs: list[tuple[int, Epoch]] = []
        """(the number of its last step, epoch)"""

    def steps(self, steps: Sequence[Step]) -> None:
        self.all_steps += steps

    def epoch(self, epoch: Epoch) -> None:
        self.all_epochs.append((self.all_steps[-1].step, epoch))

    def again(self, kept: Sequence[Step | Epoch]) -> None:
        """Keep the steps and epochs that were recorded before this run continued."""
        for record in kept:
            if isinstance(record, Step):
                self.steps([record])
            elif self.all_steps:
                self.epoch(record)

    def close(self) -> None:
        """Do nothing: no file is open."""


def _line(record: Step | Epoch) -> str:
    fields = dataclasses.asdict(record).items()
    return json.dumps({name: value for name, value in fields if value is not None}) + "\n"


def _record(line: str) -> Step | Epoch | None:
    """Return the step or epoch of a line; None for a line of another program."""
    try:
        fields = json.loads(line)
        return Step(**fields) if "step" in fields else Epoch(**fields)
    except (TypeError, ValueError):
        return None
