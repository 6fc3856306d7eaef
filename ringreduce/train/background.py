"""Write checkpoints while training goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable

from ringreduce.checkpoint import Checkpoint, Folder


class Writer:
    """Writes checkpoints in a thread of its own, one after another.

    A checkpoint that cannot be written, as on a full disk, does not end the run: `complain` is
    called for the first one, and the checkpoints before it stay.
    """

    def __init__(self, folder: Folder, complain: Callable[[str], None]) -> None:
        self._folder, self._complain = folder, complain
        self._thread: threading.Thread | None = None
        self.failed = False
        """Whether a checkpoint could not be written."""

    def begin(self, checkpoint: Checkpoint) -> None:
        """Wait until the checkpoint before is written, and begin to write copies of the arrays."""
        self.wait()
        arrays = {name: array.copy() for name, array in checkpoint.arrays.items()}
        copy = Checkpoint(checkpoint.step, arrays, checkpoint.facts)
        self._thread = threading.Thread(target=self._write, args=(copy,), name="checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Wait until the last checkpoint is written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _write(self, checkpoint: Checkpoint) -> None:
        try:
            self._folder.save(checkpoint)
        except (OSError, ValueError, MemoryError) as error:
            if not self.failed:
                self._complain(f"no checkpoint after step {checkpoint.step}: {error}")
            self.failed = True
