"""What a run leaves behind of how it went: lines of JSON, TensorBoard's files, a picture's numbers.

Each is a `Watcher`, made on rank 0 alone.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ringreduce.train.loop import Epoch, Step


class JsonLines:
    """A file with a line for each step, ``{"step": 1, "epoch": 1, "loss": ...}``, and each epoch.

    Lines of an epoch have an "accuracy" and no "step".  Raises OSError if it cannot be written.
    """

    def __init__(self, path: Path, steps_made: int, epochs_made: int) -> None:
        """Go on after so many steps; what is there of later ones was never saved, and will come."""
        kept = []
        if steps_made and path.exists():
            for line in path.read_text().splitlines(keepends=True):
                told = _parsed(line)
                made, whole = told.get("step"), line.endswith("\n")
                if whole and (
                    made <= steps_made if made is not None else told.get("epoch", 0) <= epochs_made
                ):
                    kept.append(line)
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f"{path.name}.unfinished")
        unfinished.write_text("".join(kept))
        os.replace(unfinished, path)
        self._file = open(path, "a")  # noqa: SIM115  # held until close

    def steps(self, steps: Sequence[Step]) -> None:
        """Write a line each."""
        self._file.writelines(_line(step) for step in steps)
        self._file.flush()

    def epoch(self, epoch: Epoch) -> None:
        """Write a line."""
        self._file.write(_line(epoch))
        self._file.flush()

    def close(self) -> None:
        """All is written."""
        self._file.close()


class TensorBoard:
    """Event files in a folder: scalars by step, and the accuracy by the step it was reached at.

    Raises ImportError, saying what to install, without tensorboard.
    """

    def __init__(self, folder: Path) -> None:
        self._writer = self.writer_type()(str(folder))
        self._step = 0

    @staticmethod
    def writer_type() -> Any:
        """What writes event files.  Raises ImportError as above."""
        try:
            from tensorboard.summary import Writer
        except ImportError:
            raise ImportError(
                "TensorBoard's files need: pip install 'ringreduce[tensorboard]'"
            ) from None
        return Writer

    def steps(self, steps: Sequence[Step]) -> None:
        """Write their scalars."""
        for step in steps:
            self._step = step.step
            for name in ("loss", "lr", "step_s", "compute_s", "communication_s", "exposed_s"):
                group = "time" if name.endswith("_s") else "train"
                self._writer.add_scalar(f"{group}/{name}", getattr(step, name), step.step)
        self._writer.flush()

    def epoch(self, epoch: Epoch) -> None:
        """Write its scalars."""
        for name in ("loss", "accuracy", "samples_per_s"):
            self._writer.add_scalar(f"epoch/{name}", getattr(epoch, name), self._step)
        self._writer.flush()

    def close(self) -> None:
        """All is written."""
        self._writer.close()


class History:
    """All that was told, for a picture at the end."""

    def __init__(self) -> None:
        self.all_steps: list[Step] = []
        self.all_epochs: list[tuple[int, Epoch]] = []
        """(steps made, epoch)"""

    def steps(self, steps: Sequence[Step]) -> None:
        """Keep them."""
        self.all_steps += steps

    def epoch(self, epoch: Epoch) -> None:
        """Keep it."""
        self.all_epochs.append((self.all_steps[-1].step, epoch))

    def close(self) -> None:
        """Nothing is held."""


def _line(told: Step | Epoch) -> str:
    return json.dumps(dataclasses.asdict(told)) + "\n"


def _parsed(line: str) -> dict[str, Any]:
    try:
        told = json.loads(line)
    except ValueError:
        return {"step": float("inf")}
    return told if isinstance(told, dict) else {"step": float("inf")}
