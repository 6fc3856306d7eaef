"""Where and how the launcher saves a state that no rank can continue."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
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
        folder = Folder(Path(self.folder), keep=sys.maxsize)
        try:
            if _last_step(folder) != slots.step:
                folder.save(Checkpoint(slots.step, arrays, facts))
        finally:
            folder.close()


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
    opened = Folder(folder, keep=sys.maxsize)
    try:
        found = opened.last(lambda _: None, lambda why: complain(f"passed over: {why}"))
    finally:
        opened.close()
    return None if found is None else Slots.new(found.arrays, found.step)


def check_new(folder: Path) -> None:
    """Make the folder.  Raises OSError or ValueError if it has checkpoints, or cannot be used."""
    opened = Folder(folder, keep=sys.maxsize)
    try:
        if opened.manifests():
            raise CheckpointError(
                f"{folder} has checkpoints already; go on from them with --resume, or name another "
                "folder"
            )
    finally:
        opened.close()
