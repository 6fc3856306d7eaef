"""Where and how states are saved: while ranks train, and when no rank can go on."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ringreduce.recovery.checkpoint import Checkpoint, CheckpointError, Folder, Writer
from ringreduce.recovery.slots import Slots

_CALL = "call"
"""The fact of a checkpoint that names the call of `elastic` which saved it."""
_KEPT = 3


@dataclass(frozen=True)
class Saving:
    """A folder, and the facts for the manifest of a checkpoint."""

    folder: str
    facts: Mapping[str, Any]

    def save(self, slots: Slots, generation: int, call: int) -> None:
        """Write the committed arrays, after the last step of a generation in a call of `elastic`.

        Older checkpoints stay; one of the same step is not written again.  Raises OSError
        or ValueError.
        """
        arrays = {name: slots.committed(name) for name in slots.entries}
        facts = {**self.facts, "generation": generation, _CALL: call}
        with _opened(Path(self.folder)) as folder:
            if _last_step(folder) != slots.step:
                folder.save(Checkpoint(slots.step, arrays, facts))


class RegularSaver:
    """Saves the arrays of a rank every `every_s` seconds while it trains; keeps 3 checkpoints.

    Raises OSError or ValueError if the folder cannot be used.
    """

    def __init__(
        self, saving: Saving, every_s: float, generation: int, complain: Callable[[str], None]
    ) -> None:
        """Call `complain` with a text, once, if a checkpoint cannot be written."""
        self._facts = {**saving.facts, "generation": generation}
        self._every_s = every_s
        self._folder = Folder(Path(saving.folder), _KEPT)
        self._writer = Writer(self._folder, complain)
        self._at = time.monotonic() + every_s
        self._saved: int | None = None
        """The step of the latest checkpoint."""

    @property
    def is_due(self) -> bool:
        """Whether a checkpoint is due, and the one before is written."""
        return time.monotonic() >= self._at and self._writer.is_idle

    def save(self, step: int, arrays: Mapping[str, np.ndarray]) -> None:
        """Begin to write a checkpoint after `step` steps.  The arrays are copied first."""
        self._at = time.monotonic() + self._every_s
        if step != self._saved or self._writer.failed:
            self._writer.begin(Checkpoint(step, arrays, self._facts))
            self._saved = step

    def wait(self) -> None:
        self._writer.wait()

    def close(self) -> None:
        self._writer.wait()
        self._folder.close()


def _last_step(folder: Folder) -> int | None:
    try:
        found = folder.last(lambda _: None, lambda _: None)
    except CheckpointError:  # none can be used
        found = None
    return None if found is None else found.step


def last_saved(folder: Path, complain: Callable[[str], None]) -> Slots | None:
    """Return the state of the last usable checkpoint, or None if the folder has none.

    `complain` is called with the reason for each that is passed over.  Raises OSError or
    ValueError if no checkpoint can be used, or if the last is of another call of `elastic` than
    the first.
    """
    with _opened(folder) as opened:
        found = opened.last(lambda _: None, lambda why: complain(f"passed over: {why}"))
    if found is not None and (call := found.facts.get(_CALL, 1)) != 1:
        raise ValueError(
            f"step {found.step} was saved in call {call} of rr.elastic; --resume goes on with "
            "programs that call it once"
        )
    return None if found is None else Slots.new(found.arrays, found.step)


def check_new(folder: Path) -> None:
    """Make the folder.  Raises OSError or ValueError if it has checkpoints, or cannot be used."""
    with _opened(folder) as opened:
        opened.check_new()


def _opened(folder: Path) -> AbstractContextManager[Folder]:
    """Return the folder, which keeps all checkpoints; the end of the block closes it."""
    return closing(Folder(folder, keep=sys.maxsize))
