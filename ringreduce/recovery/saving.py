"""Where and how the launcher saves a state that no rank can continue."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ringreduce.checkpoint import Checkpoint, CheckpointError, Folder
from ringreduce.recovery.slots import Slots


@dataclass(frozen=True)
class Saving:
    """A folder, and the facts for the manifest of a checkpoint."""

    folder: str
    facts: Mapping[str, Any]

    def save(self, slots: Slots, generation: int) -> None:
        """Write the committed arrays, after the last step of a generation.

        All older checkpoints are kept.  One of the same step is not written again.  Raises OSError
        or ValueError if they cannot be written.
        """
        arrays = {name: slots.committed(name) for name in slots.entries}
        facts = {**self.facts, "generation": generation}
        with _opened(Path(self.folder)) as folder:
            if _last_step(folder) != slots.step:
                folder.save(Checkpoint(slots.step, arrays, facts))


def _last_step(folder: Folder) -> int | None:
    """Return the step of the last usable checkpoint; None if there is none."""
    try:
        found = folder.last(lambda _: None, lambda _: None)
    except CheckpointError:  # none can be used
        found = None
    return None if found is None else found.step


def last_saved(folder: Path, complain: Callable[[str], None]) -> Slots | None:
    """Return the state of the last usable checkpoint, or None if the folder has none.

    `complain` is called with the reason for each that is passed over.  Raises OSError or ValueError
    if there are checkpoints, but none can be used.
    """
    with _opened(folder) as opened:
        found = opened.last(lambda _: None, lambda why: complain(f"passed over: {why}"))
    return None if found is None else Slots.new(found.arrays, found.step)


def check_new(folder: Path) -> None:
    """Make the folder.  Raises OSError or ValueError if it has checkpoints, or cannot be used."""
    with _opened(folder) as opened:
        opened.check_new()


def _opened(folder: Path) -> AbstractContextManager[Folder]:
    """Return the folder, which keeps all checkpoints; the end of the block closes it."""
    return closing(Folder(folder, keep=sys.maxsize))
